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
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

_aten = torch.ops.aten


def apply(graph: GraphModule) -> None:
    write_out_alphas(graph.graph)
    mark_gates(graph.graph)
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
        if node.op != "call_function" or node.is_impure() or _is_random(node):
            continue
        key = (node.target, map_aggregate((node.args, node.kwargs), known))
        same[node] = twin = first.setdefault(_hashable(key), node)
        if twin is not node and node.target in _SUMS:
            node.replace_all_uses_with(twin)
            graph.erase_node(node)


def _is_random(node: Node) -> bool:
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


def mark_gates(graph: Graph) -> None:
    """Reads pass 3's gates off pass 2's errors, wherever pass 3 needs nothing else of the rectifier's output."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    gates: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.target is _aten.threshold_backward.default and node.args[2] == 0:
            gates.setdefault(node.args[1], []).append(node)
    for u, (first, *later) in gates.items():
        others = [order[user] for user in u.users if user not in gates[u]]
        if later and max(others, default=0) < order[later[0]]:
            marked = _marked(graph, first)
            for gate in later:
                _gated(graph, gate, marked)


def _marked(graph: Graph, gate: Node) -> Node:
    """In place of a gate of g by u: g where u > 0, with no zero that is negative; minus zero elsewhere."""
    g, u, _ = gate.args
    with graph.inserting_before(gate):
        positive = graph.call_function(_aten.where.ScalarSelf, (graph.call_function(_aten.eq.Scalar, (g, 0)), 0.0, g))
        is_open = graph.call_function(_aten.gt.Scalar, (u, 0))
        marked = graph.call_function(_aten.where.ScalarOther, (is_open, positive, -0.0))
    return _put(graph, gate, marked)


def _gated(graph: Graph, gate: Node, marked: Node) -> None:
    """In place of a gate of s: s where the mark is not minus zero, whose bits are the least whole number's."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[marked.meta["val"].dtype.itemsize]
    with graph.inserting_before(gate):
        seen = graph.call_function(_aten.view.dtype, (marked, bits))
        is_closed = graph.call_function(_aten.eq.Scalar, (seen, torch.iinfo(bits).min))
        gated = graph.call_function(_aten.where.ScalarSelf, (is_closed, 0.0, gate.args[0]))
    _put(graph, gate, gated)


def _put(graph: Graph, old: Node, new: Node) -> Node:
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    graph.erase_node(old)
    return new
