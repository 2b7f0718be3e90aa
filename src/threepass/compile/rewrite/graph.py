"""Nodes of a captured step's graph: creating one, replacing one, and its properties."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..._torch_compat import FakeTensor, FakeTensorMode, to_copy, tree_leaves, tree_map
from ...kernels.fusible import FORMULAS


def is_elementwise(node: Any) -> bool:
    """Whether the compiler would fuse a node into its readers: an elementwise function, a cast or a view."""
    known = node.target is to_copy.default or getattr(node.target, "is_view", False)
    return known or is_pointwise(node)


def is_pointwise(node: Any) -> bool:
    """Whether a node is an elementwise function of its operands; the last operation of every formula is one."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in FORMULAS


def is_ours(node: Node) -> bool:
    """Whether a node calls an operation of this library, which the compiler takes as it is."""
    return getattr(node.target, "namespace", "") == "threepass"


def insert_call(graph: Graph, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> Node:
    """A new node, with an example of its value: rewrites read shapes and strides from it."""
    node = graph.call_function(target, args, kwargs or {})
    with _fake_mode_of(node), torch.no_grad():
        node.meta["val"] = target(*map_arg(args, _image), **map_arg(kwargs or {}, _image))
    return node


def _fake_mode_of(node: Node) -> Any:
    """The fake mode of a node's arguments: with dynamic shapes, the one that knows their symbols."""
    values = (z for n in node.all_input_nodes for z in tree_leaves(n.meta["val"]))
    return next((z.fake_mode for z in values if isinstance(z, FakeTensor)), None) or FakeTensorMode()


def _image(node: Node) -> Any:
    """A tensor with the metadata of a node's value, created under the active fake mode."""

    def like(z: Any) -> Any:
        return torch.empty_strided(z.shape, z.stride(), dtype=z.dtype, device=z.device) if isinstance(z, Tensor) else z

    return tree_map(like, node.meta["val"])


def replace_call(node: Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> None:
    """Replaces a node's call by another one; a Python function of tensors is traced by the compiler."""
    node.target, node.args, node.kwargs = target, args, kwargs or {}


def value_of(node: Any) -> Tensor:
    return node.meta["val"]


def only_reader(node: Any, target: Any) -> Any:
    """The one reader of a node, if it calls the target."""
    readers = [] if node is None else list(node.users)
    return readers[0] if len(readers) == 1 and readers[0].target is target else None


def write_out_formulas(graph: Graph) -> None:
    """Replaces the formulas that no kernel took by their PyTorch operations, which the compiler fuses."""
    for node in graph.nodes:
        node.target = FORMULAS.get(node.target, node.target)
