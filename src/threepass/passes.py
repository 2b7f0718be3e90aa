"""Passes over a captured step's graph: what one compiler's view of all three passes makes possible.

Gates. In pass 2 a rectifier's backward closes gates by the sign of its output u, in pass 3 its tangent does so again,
and u has to be kept for that. But the error that comes out of pass 2's gate is kept anyway, for the weight before it.
So pass 2 marks a closed gate in it by minus zero, and pass 3 reads the mark there: u is free as soon as pass 2 is past
it, and a net of rectifiers needs no more memory than in plain training.

Alphas. Inductor folds the sum of two matrix products into one call and forgets the factor of `add(a, b, alpha=c)` on
the way (seen in torch 2.13), so that the factor becomes a product of its own.

Sharing. Pass 3 needs statistics that pass 1 took; once the compiler has written both out as sums, one of the two goes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from .precision import mix_of

_aten = torch.ops.aten


def apply(graph: GraphModule, kernels: bool) -> None:
    """Alphas, gates, and, with `kernels`, our own kernels where they are faster."""
    write_out_alphas(graph.graph)
    mark_gates(graph.graph)
    if kernels:
        from .kernels.fuse import fuse

        fuse(graph.graph)
    open_mixes(graph.graph)
    graph.graph.eliminate_dead_code()


_SUMS = {_aten.var_mean.correction, _aten.var.correction, _aten.sum.dim_IntList, _aten.sum.default, _aten.mean.dim,
         _aten.amax.default, _aten.mm.default, _aten.bmm.default, _aten.convolution.default}  # fmt: skip


def share_sums(graph: Graph) -> None:
    """Takes equal reductions and products once. The graph must be functional: no operation in it writes to a tensor."""
    first: dict[Any, Node] = {}
    same: dict[Node, Node] = {}

    def known(value: Any) -> Any:
        return same.get(value, value) if isinstance(value, Node) else repr(value)  # 0.0, -0.0 and False are not equal

    for node in list(graph.nodes):
        if node.op != "call_function" or node.is_impure() or is_random(node):
            continue
        key = (node.target, map_aggregate((node.args, node.kwargs), known))
        same[node] = twin = first.setdefault(_hashable(key), node)
        is_output = any(user.op == "output" for user in node.users)  # two gradients are to be two tensors
        if twin is not node and node.target in _SUMS and not is_output:
            node.replace_all_uses_with(twin)
            graph.erase_node(node)


def is_random(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _hashable(key: Any) -> Any:
    if isinstance(key, (tuple, list)):
        return tuple(map(_hashable, key))
    return tuple((k, _hashable(v)) for k, v in key.items()) if isinstance(key, dict) else key


def write_out_alphas(graph: Graph) -> None:
    for node in graph.nodes:
        if node.target in (_aten.add.Tensor, _aten.sub.Tensor) and node.kwargs.get("alpha", 1) != 1:
            a, b = node.args
            with graph.inserting_before(node):
                scaled = graph.call_function(_aten.mul.Tensor, (b, node.kwargs["alpha"]))
            node.args, node.kwargs = (a, scaled), {}


_RECTIFIERS = (_aten.relu.default, _aten.relu_.default)


def mark_gates(graph: Graph) -> None:
    """Reads pass 3's gates off pass 2's errors, wherever pass 3 needs nothing else of the rectifier's output."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    gates: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.target is _aten.threshold_backward.default and node.args[2] == 0 and node.args[1].target in _RECTIFIERS:
            gates.setdefault(node.args[1], []).append(node)
    for u, (first, *later) in gates.items():
        others = [order[user] for user in u.users if user not in gates[u]]
        if later and max(others, default=0) < order[later[0]] and not _is_written(first):
            put(first, marked, (first.args[0], u))
            for gate in later:
                put(gate, gated, (gate.args[0], first))


def _is_written(node: Node) -> bool:
    """Whether something writes to a node's result, as a hook may."""
    for user in node.users:
        schema = getattr(user.target, "_schema", None)
        if schema is not None and (schema.is_mutable or (getattr(user.target, "is_view", False) and _is_written(user))):
            return True
    return False


def marked(g: Tensor, u: Tensor) -> Tensor:
    """A gate of g by a rectifier's output u that leaves its mark: g, with no negative zero, or minus zero where u is 0.

    Minus zero is computed, because Triton reads a literal -0.0 as 0.0; by a product, because Triton negates by
    subtracting from 0.0; and not by its bits, because the compiler looks through views of bits, and would keep u and g
    in place of the mark.
    """
    return torch.where(u > 0, torch.where(g == 0, 0.0, g), u.abs() * -2.0)


def gated(s: Tensor, mark: Tensor) -> Tensor:
    """s where the mark is not minus zero, whose bits are the least whole number's."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[mark.dtype.itemsize]
    return torch.where(mark.view(bits) == torch.iinfo(bits).min, 0.0, s)


def open_mixes(graph: Graph) -> None:
    """The compiler is to see what a mix is made of."""
    for node in graph.nodes:
        if node.target is torch.ops.threepass.mix.default:
            node.target = mix_of


def put(node: Node, target: Any, args: tuple[Any, ...]) -> None:
    """Another call in a node's place; it may be any function of tensors, which the compiler looks into."""
    node.target, node.args, node.kwargs = target, args, {}
