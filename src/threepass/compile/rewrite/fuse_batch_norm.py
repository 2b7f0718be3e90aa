"""Puts `moments` into a captured step's graph: the sums that batch norm's rule takes of a tangent or an error.

    pass 3            sum t,  sum x̂ t  and, for the scale's gradient,  sum d t
    pass 2            sum d,  sum x̂ d
    exact mode        the same sums of R{d}, in its last backward pass

The error of a residual block's output is computed in the same kernel. The error of a rectifier's input is a tensor in
memory with a gate: there the kernel applies the gate, and Inductor recomputes the error where it is used.
"""

import operator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch.fx import Graph, Node

from ..._torch_compat import to_copy
from ...kernels import batch_norm as moments
from ...kernels.batch_norm import rectified
from ...kernels.batch_norm.scale import TINY
from ...numerics.precision import accumulate_dtype
from .graph import call, is_elementwise, put, value_of
from .match import match, may_be_wide, source

_aten, _ours = torch.ops.aten, torch.ops.threepass
_sum, _mul, _copy, _view = _aten.sum.dim_IntList, _aten.mul.Tensor, to_copy.default, _aten.view.default

_STATISTICS = (_aten.var_mean.correction, "a", moments.DIMS)
_RSTD = (_aten.rsqrt.default, (_aten.add.Tensor, (operator.getitem, _STATISTICS, 0), "eps"))
_X_HAT = (_mul, (_aten.sub.Tensor, "a", (operator.getitem, _STATISTICS, 1)), _RSTD)
_TINY = (_aten.lt.Scalar, (_aten.abs.default, "w"), TINY)
_OVER_SCALE = (
    _aten.div.Tensor,
    (_view, "sum", "shape"),
    (_aten.where.self, _TINY, (_aten.full_like.default, "w", TINY), "w"),
)


@dataclass
class _Found:
    """Nodes that are sums of z, of x̂ z, and of d z for each d."""

    z: Any
    x_hat: Any
    totals: list[Any] = field(default_factory=list)
    along: list[Any] = field(default_factory=list)
    products: dict[Any, list[Any]] = field(default_factory=dict)


def fuse_batch_norms(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.target is _aten.native_batch_norm_backward.default:
            _fuse_backward(graph, node)
    for sums in _find_sums(graph):
        _fuse_sums(graph, sums)


def _fuse_backward(graph: Graph, node: Any) -> None:
    z, a, weight, _, _, mean, rstd, training, _, _ = node.args
    if weight is None or not training:
        return
    sums = _take_moments(graph, node, z, a, mean, rstd)
    if sums is None:
        return
    for part in list(node.users):
        if part.args[1] == 0:
            put(part, moments.error, (z, a, weight, mean, rstd, sums))
        else:
            _pass_on(graph, part, sums, 2 - part.args[1])


def _take_moments(
    graph: Graph, place: Any, z: Any, a: Any, mean: Any, rstd: Any, d: Any = None, w: Any = None
) -> Node | None:
    """Takes the moments of z: with the making of z if that is a gated sum, else in a given place; None: not at all."""
    numbers = None
    if z.target is _aten.threshold_backward.default and z.args[2] == 0:
        (z, u, _) = z.args
        if u.target is not rectified or u.args[0] is not a:
            return None
        numbers = u.args[1]
    made = not is_elementwise(z) and not isinstance(z.target, FunctionType)  # `gated` and its like
    if not made or not _fits(z, a, mean):
        return None
    if z.target is _ours.gated_sum.default and mean < z and rstd < z and d is None and numbers is None:
        with graph.inserting_before(z):
            both = call(graph, _ours.gated_moments.default, (*z.args, a, mean, rstd))
        put(z, operator.getitem, (both, 0))
        with graph.inserting_after(z):
            return call(graph, operator.getitem, (both, 1))
    with graph.inserting_before(place):
        return call(graph, _ours.moments.default, (z, a, mean, rstd, d, w, numbers))


def _pass_on(graph: Graph, node: Any, sums: Node, row: int) -> None:
    """Gives a node's readers a row of the sums: in float32 those that would take it so."""
    with graph.inserting_before(node):
        new = call(graph, _aten.select.int, (sums, 0, row))
        if value_of(node).dim() == 4:
            new = call(graph, _view, (new, [1, -1, 1, 1]))
    for reader in list(node.users):
        if value_of(node).dtype == value_of(new).dtype or may_be_wide(reader):
            reader.replace_input_with(node, new)
    put(node, _copy, (new,), {"dtype": value_of(node).dtype})


def _fits(z: Any, a: Any, mean: Any) -> bool:
    exact = accumulate_dtype(value_of(z).dtype)  # a CPU's batch norm rounds its mean
    return value_of(mean).dtype == exact and moments.fits(value_of(z), value_of(a))


def _find_sums(graph: Graph) -> list[_Found]:
    found: dict[tuple[Any, Any], _Found] = {}
    others: list[tuple[Any, tuple[Any, ...]]] = []  # sums without x̂, and what they are sums of
    for node in graph.nodes:
        if node.target is not _sum or node.args[1:] != (moments.DIMS, True) or node.kwargs:
            continue
        z = node.args[0]
        factors = z.args if z.target is _mul and all(_is_image(f, z) for f in z.args) else (z,)
        x_hat = next((f for f in factors if match(_X_HAT, f, {}, {})), None)
        if len(factors) == 2 and x_hat is not None:
            z = source(factors[factors[0] is x_hat])
            found.setdefault((z, x_hat), _Found(z, x_hat)).along.append(node)
        else:
            others.append((node, tuple(map(source, factors))))
    for node, factors in others:
        for sums in found.values():
            if factors == (sums.z,):
                sums.totals.append(node)
            elif sums.z in factors and factors[0] is not factors[1]:
                d = factors[1] if factors[0] is sums.z else factors[0]
                sums.products.setdefault(d, []).append(node)
    return list(found.values())


def _is_image(f: Any, z: Any) -> bool:
    return isinstance(f, Node) and value_of(f).shape == value_of(z).shape


def _fuse_sums(graph: Graph, sums: _Found) -> None:
    names: dict[str, Any] = {}
    inner: dict[Any, Any] = {}
    match(_X_HAT, sums.x_hat, names, inner)
    mean = next(n for n, pattern in inner.items() if pattern is _X_HAT[1][2])
    rstd = next(n for n, pattern in inner.items() if pattern is _RSTD)
    z, a = sums.z, source(names["a"])
    totals = [n for n in sums.totals if mean < n and rstd < n]
    first = min((*totals, *sums.along))
    d = next((d for d in sums.products if d < first and _fits(z, d, mean)), None)
    if not z < first:
        return
    products = [] if d is None else [n for n in sums.products[d] if first < n]
    weight, quotients = _over_scale(products, first)
    whole = _take_moments(graph, first, z, a, mean, rstd, d, weight)
    if whole is None:
        return
    for row, nodes in enumerate((totals, sums.along, products, quotients)):
        for node in nodes:
            _pass_on(graph, node, whole, row)


def _over_scale(products: list[Any], first: Any) -> tuple[Any, list[Any]]:
    """The scale's gradients among the readers of sum d z: sum d z / w; and w."""
    for n in (n for product in products for view in product.users for n in view.users):
        names: dict[str, Any] = {}
        if match(_OVER_SCALE, n, names, {}) and names["w"] < first:
            return names["w"], [n]
    return None, []
