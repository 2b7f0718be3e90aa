"""Puts `moments` into a captured step's graph: the sums that batch norm's formulas take of a tangent or an error.

    pass 3            sum t,  sum x̂ t  and, for the scale's gradient,  sum d t
    pass 2            sum d,  sum x̂ d
    exact mode        the same sums of R{d}, in its last backward pass

The error of a residual block's output is computed in the same kernel. The error of a rectifier's input is a tensor in
memory with a gate: there the kernel applies the gate, and Inductor recomputes the error where it is used.

The rule cannot call `moments` itself: the kernel pays only where the signal is in memory, which depends on the
operation that computes it and on the rewrites before this one. Where it is not, the sums have to be in the formulas,
for Inductor to fuse.
"""

import operator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ..._torch_compat import to_copy
from ...kernels import batch_norm as moments
from ...kernels import norm as formulas
from ...kernels.batch_norm import rectified
from ...numerics.precision import accumulate_dtype
from .graph import insert_call, is_elementwise, replace_call, value_of
from .readers import may_be_wide

_aten, _ours = torch.ops.aten, torch.ops.threepass
_sum, _copy, _view = _aten.sum.dim_IntList, to_copy.default, _aten.view.default

# Formulas that take sums of z beside x̂: where z, x̂ and the dimensions are among their arguments.
_PLACES = {
    formulas.jacobian.op: (0, 1, 3),
    formulas.curved_at_input.op: (1, 3, 5),
    formulas.scale_gradient.op: (0, 1, 2),
}


def fuse_batch_norms(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.target is _aten.native_batch_norm_backward.default:
            _fuse_backward(graph, node)
    for (z, x_hat), nodes in _find_formulas(graph).items():
        _fuse_formulas(graph, z, x_hat, nodes)


def _fuse_backward(graph: Graph, node: Any) -> None:
    z, a, weight, _, _, mean, rstd, training, _, _ = node.args
    if weight is None or not training:
        return
    sums = _take_moments(graph, node, z, _Norm(a, mean, rstd))
    if sums is None:
        return
    for part in list(node.users):
        if part.args[1] == 0:
            replace_call(part, moments.error, (z, a, weight, mean, rstd, sums))
        else:
            _pass_on(graph, part, sums, 2 - part.args[1])


class _Norm(NamedTuple):
    """A batch norm in training mode: its input and the statistics of that."""

    a: Any
    mean: Any
    rstd: Any


def _take_moments(graph: Graph, place: Any, z: Any, norm: _Norm, d: Any = None, w: Any = None) -> Node | None:
    """Takes the moments of z: with the making of z if that is a gated sum, else in a given place; None: not at all."""
    numbers = None
    if z.target is _aten.threshold_backward.default and z.args[2] == 0:
        (z, u, _) = z.args
        if u.target is not rectified or u.args[0] is not norm.a:
            return None
        numbers = u.args[1]
    made = not is_elementwise(z) and not isinstance(z.target, FunctionType)  # `gated` and its like
    if not made or not _fits(z, norm.a, norm):
        return None
    if z.target is _ours.gated_sum.default and norm.mean < z and norm.rstd < z and d is None and numbers is None:
        with graph.inserting_before(z):
            both = insert_call(graph, _ours.gated_moments.default, (*z.args, *norm))
        replace_call(z, operator.getitem, (both, 0))
        with graph.inserting_after(z):
            return insert_call(graph, operator.getitem, (both, 1))
    with graph.inserting_before(place):
        return insert_call(graph, _ours.moments.default, (z, *norm, d, w, numbers))


def _pass_on(graph: Graph, node: Any, sums: Node, row: int) -> None:
    """Gives a node's readers a row of the sums: in float32 those that would take it so."""
    with graph.inserting_before(node):
        new = insert_call(graph, _aten.select.int, (sums, 0, row))
        if value_of(node).dim() == 4:
            new = insert_call(graph, _view, (new, [1, -1, 1, 1]))
    for reader in list(node.users):
        if value_of(node).dtype == value_of(new).dtype or may_be_wide(reader):
            reader.replace_input_with(node, new)
    replace_call(node, _copy, (new,), {"dtype": value_of(node).dtype})


def _fits(z: Any, other: Any, norm: _Norm) -> bool:
    exact = accumulate_dtype(value_of(z).dtype)  # a CPU's batch norm rounds its mean
    return value_of(norm.mean).dtype == exact and moments.fits(value_of(z), value_of(other))


def _find_formulas(graph: Graph) -> dict[tuple[Any, Any], list[Any]]:
    """The formulas that take sums of z over images beside x̂, by z and x̂."""
    found: dict[tuple[Any, Any], list[Any]] = {}
    for node in graph.nodes:
        if node.target in _PLACES:
            z, x_hat, dims = (node.args[i] for i in _PLACES[node.target])
            is_normalized = x_hat.target is operator.getitem and x_hat.args[0].target is formulas.normalized.op
            if is_normalized and list(dims) == moments.DIMS and value_of(z).dim() == 4:
                found.setdefault((z, x_hat), []).append(node)
    return found


def _fuse_formulas(graph: Graph, z: Any, x_hat: Any, nodes: list[Any]) -> None:
    """Takes all sums of z at once, and puts them into the formulas."""
    statistics = x_hat.args[0]
    with graph.inserting_after(x_hat):
        rstd, mean = (insert_call(graph, operator.getitem, (statistics, i)) for i in (1, 2))
    norm = _Norm(statistics.args[0], mean, rstd)
    totals = [n for n in z.users if n.target is _sum and n.args[1:] == (moments.DIMS, True) and mean < n]
    first = min((*totals, *nodes))
    if not z < first:
        return
    d, thirds = _products(z, nodes, first, norm)
    w = thirds[0].args[2] if thirds else None
    sums = _take_moments(graph, first, z, norm, d, w)
    if sums is None:
        return
    for node in totals:
        _pass_on(graph, node, sums, 0)
    for node in nodes:
        if node.target is formulas.scale_gradient.op:
            replace_call(node, _aten.select.int, (sums, 0, 1))
        elif node.target is formulas.jacobian.op or d is None or node.args[0] is d:
            node.args = (*node.args, sums)
    for node in thirds:
        replace_call(node, _aten.select.int, (sums, 0, 3))


def _products(z: Any, nodes: list[Any], first: Any, norm: _Norm) -> tuple[Any, list[Any]]:
    """An error d whose product with z is summed too, and the gradients of one scale that take this sum."""
    curves = [n for n in nodes if n.target is formulas.curved_at_input.op]
    thirds = [n for n in z.users if n.target is formulas.scale_gradient_at_input.op and n.args[1] is z and first < n]
    d = next((n.args[0] for n in (*curves, *thirds) if n.args[0] < first and _fits(z, n.args[0], norm)), None)
    of_d = [n for n in thirds if n.args[0] is d and n.args[2] < first]
    return d, [n for n in of_d if n.args[2] is of_d[0].args[2]]
