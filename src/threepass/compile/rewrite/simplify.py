"""Rewrites of a graph that runs operation by operation: fewer calls, which a compiler would find by itself.

A trace has every view that the engine and PyTorch's own functions made: a matrix product of four dimensions is recorded
as `expand`, `reshape`, `bmm` and `reshape`, most of which return their argument as it is.
"""

import operator

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..._torch_compat import aten_foreach_copy
from .graph import is_pointwise, replace_call, value_of
from .mixes import open_mixes, share_mixes

_aten = torch.ops.aten

_SHAPES = {_aten.reshape.default, _aten.expand.default}
_BY_A_NUMBER = {_aten.mul.Tensor, _aten.div.Tensor, _aten.mul.Scalar, _aten.div.Scalar}


def simplify(graph: Graph) -> None:
    """In place."""
    share_mixes(graph)
    add_mixes_in_one_call(graph)
    open_mixes(graph)
    drop_shapes_without_effect(graph)
    drop_factors_of_one(graph)
    share_views_and_numbers(graph)
    write_in_one_call(graph)
    graph.eliminate_dead_code()


def add_mixes_in_one_call(graph: Graph) -> None:
    """a + ratio * t of one dtype, in one call instead of two."""
    for node in graph.nodes:
        if node.target is torch.ops.threepass.mix.default:
            a, t, ratio = node.args[:3]
            if (
                value_of(a).dtype
                == value_of(t).dtype
                == value_of(ratio).dtype
                == torch.promote_types(value_of(a).dtype, torch.float32)
            ):
                replace_call(node, _aten.addcmul.default, (a, t, ratio))


def drop_shapes_without_effect(graph: Graph) -> None:
    """Of reshapes in a row the last remains; a reshape or expand to the shape that a value has is dropped."""
    for node in list(graph.nodes):
        if node.target not in _SHAPES:
            continue
        source = node.args[0]
        if node.target is _aten.reshape.default:
            while source.target is _aten.reshape.default:
                source = source.args[0]
            node.replace_input_with(node.args[0], source)
        if _shape(node) is not None and _shape(node) == _shape(source):
            node.replace_all_uses_with(source)


def drop_factors_of_one(graph: Graph) -> None:
    """z * 1 and z / 1 are z, unless they or views of them are returned: results are tensors of their own."""
    for node in list(graph.nodes):
        if node.target not in _BY_A_NUMBER or isinstance(node.args[1], Node) or node.args[1] != 1:
            continue
        if not _is_returned(node) and value_of(node).dtype == value_of(node.args[0]).dtype:
            node.replace_all_uses_with(node.args[0])


def share_views_and_numbers(graph: Graph) -> None:
    """Computes each view and each single number once. A larger value would be kept in memory until its last reader."""
    first: dict[tuple[str, str, str], Node] = {}
    for node in list(graph.nodes):
        if getattr(node.target, "is_view", False) or _is_number(node):
            twin = first.setdefault((str(node.target), str(node.args), str(node.kwargs)), node)
            if twin is not node:
                node.replace_all_uses_with(twin)


def write_in_one_call(graph: Graph) -> None:
    """The writes to buffers of one dtype, which a functional graph has at its end."""
    writes: dict[tuple[torch.dtype, torch.device], list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        if not node.users and len(node.args) == 2:
            value = value_of(node.args[0])
            writes.setdefault((value.dtype, value.device), []).append(node)
    for nodes in writes.values():
        with graph.inserting_before(graph.output_node()):
            graph.call_function(aten_foreach_copy, tuple(map(list, zip(*(n.args for n in nodes), strict=True))))
        for node in nodes:
            graph.erase_node(node)


def _is_returned(node: Node) -> bool:
    """Whether a node's value, or a view of it, is a result of the graph."""
    return any(user.op == "output" or (_is_view(user) and _is_returned(user)) for user in node.users)


def _is_view(node: Node) -> bool:
    return getattr(node.target, "is_view", False) or node.target is operator.getitem


def _is_number(node: Node) -> bool:
    """Whether a node is a function of numbers, of which one is left."""
    value = node.meta.get("val")
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return isinstance(value, Tensor) and value.dim() == 0 and is_pointwise(node) and not is_random


def _shape(node: Node) -> tuple[int, ...] | None:
    """The shape of a node's value, if it has one without symbols."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or any(isinstance(size, torch.SymInt) for size in value.shape):
        return None
    return tuple(value.shape)
