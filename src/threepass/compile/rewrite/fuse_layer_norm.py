"""Puts the layer norm's kernels into a captured step's graph, in place of what `rules/norm.py` writes in pass 3.

The sum t_1 + t_2 of a residual connection is fused into it. In exact mode the last backward pass is fused too, into the
second kernel, with the sum of R{d} over a residual connection. Where x̂, 1 / std or t̂ has a user that neither kernel
replaces, the graph stays as it is.

The kernels need signals that are contiguous by rows. Signals with other strides are computed that way from the start;
but not in a graph that depends on strides itself (`as_strided`, from in-place operations).
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..._torch_compat import to_copy
from ...kernels import layer_norm
from .graph import call, value_of
from .match import column_sums, is_made_where_read, match, source, widen

_aten = torch.ops.aten
_add, _mul, _sub, _neg = _aten.add.Tensor, _aten.mul.Tensor, _aten.sub.Tensor, _aten.neg.default
_sum, _view = _aten.sum.dim_IntList, _aten.view.default
_copy, _mix, _clone = to_copy.default, torch.ops.threepass.mix.default, _aten.clone.default

_STATISTICS = (_aten.var_mean.correction, "a", ["last"])
_RSTD = (_aten.rsqrt.default, (_add, (operator.getitem, _STATISTICS, 0), "eps"))
_X_HAT = (_mul, (_sub, "a", (operator.getitem, _STATISTICS, 1)), _RSTD)


def _mean(z: Any) -> tuple[Any, ...]:
    return (_aten.div.Tensor, (_sum, z, ["last"], True), "count")


def _jacobian(z: Any, x: Any = "x", rstd: Any = "rstd") -> tuple[Any, ...]:
    return (_mul, rstd, (_sub, (_sub, z, _mean(z)), (_mul, x, _mean((_mul, x, z)))))


def _curvature(g: Any) -> tuple[Any, ...]:
    first, second = (_mul, "x", _mean((_mul, _jacobian(g), "t"))), (_mul, _mean((_mul, "x", "t")), _jacobian(g))
    third = (_mul, _mean((_mul, "x", g)), _jacobian("t"))
    return (_mul, (_neg, "rstd"), (_add, (_add, first, second), third))


def _scaled(z: Any) -> tuple[Any, ...]:
    return (_mul, z, (_view, "weight", "shape"))


_T_HAT = _jacobian("t", _X_HAT, _RSTD)
_CURVED = (_curvature(_scaled("d")), _curvature("d"))
_BENT = ((_add, _jacobian(_scaled("r")), _CURVED[0]), (_add, _jacobian("r"), _CURVED[1]))


@dataclass
class _Bend:
    """Exact mode's last backward pass through a layer norm."""

    d: Any
    r: Any
    weight: Any
    inner: set[Any]
    bent: list[Any]
    other: Any = None  # what is added to the result
    g_w: list[Any] = field(default_factory=list)
    g_b: list[Any] = field(default_factory=list)

    @property
    def place(self) -> Any:
        """The first of its nodes."""
        return min(self.inner)


@dataclass
class _Norm:
    """Pass 3 through a layer norm: what goes in, the nodes inside, and those whose values come out."""

    a: Any
    t: Any
    eps: float
    inner: set[Any]
    placed: Callable[[Any], Tensor]  # a signal as it may be given to the kernel
    weight: Any = None
    bias: Any = None
    d: Any = None
    ratio: Any = None
    bend: _Bend | None = None
    t_u: list[Any] = field(default_factory=list)
    m: list[Any] = field(default_factory=list)
    g_w: list[Any] = field(default_factory=list)
    g_b: list[Any] = field(default_factory=list)

    def agrees(self, ratio: Any) -> bool:
        """Whether a mix with this ratio is the kernel's."""
        self.ratio = ratio if self.ratio is None else self.ratio
        return self.ratio is ratio


def fuse_layer_norms(graph: Graph) -> None:
    fixed = any(node.target is _aten.as_strided.default for node in graph.nodes)
    for node in list(graph.nodes):
        if node.target is _mul and (norm := _norm_at(node, fixed)) is not None:
            _fuse(graph, norm, node)


def _norm_at(t_hat: Any, fixed: bool) -> _Norm | None:
    """The layer norm whose t̂ the node is, if the kernel can stand for all of it, with `fixed` strides as they are."""
    found: dict[str, Any] = {}
    inner: dict[Any, Any] = {}
    if not match(_T_HAT, t_hat, found, inner):
        return None
    a, value = source(found["a"]), value_of(found["a"])
    over_rows = found["last"] == value.dim() - 1 > 0 and found["count"] == value.shape[-1]
    statistics = next(n for n, pattern in inner.items() if pattern is _STATISTICS)
    if not over_rows or statistics.kwargs != {"correction": 0, "keepdim": True}:
        return None
    norm = _Norm(a, source(found["t"]), found["eps"], set(inner), value_of if fixed else _row_major)
    x_hat, rstd = (next(n for n, pattern in inner.items() if pattern is kind) for kind in (_X_HAT, _RSTD))
    norm.bend = _bend_at({"x": x_hat, "rstd": rstd, "last": found["last"], "count": found["count"]}, norm)
    _find_gradients(norm, x_hat, t_hat)
    _find_tangent(norm, t_hat)
    _find_mix(norm)
    outside = {*norm.t_u, *norm.g_w}
    signals = [z for z in (norm.a, norm.t, norm.d) if z is not None]
    seeds = [mix.args[3] for mix in norm.m[:1]]
    operands = [z for z in (*signals, norm.weight, norm.bias, norm.ratio, *seeds) if z is not None]
    if norm.bend is not None:
        norm.inner |= norm.bend.inner
        outside |= {*norm.bend.bent, *norm.bend.g_w}
    served = all(user in norm.inner or user in outside for n in norm.inner for user in n.users)
    if not served or not all(z < t_hat for z in operands):
        return None
    fits = layer_norm.fits(*map(norm.placed, signals)) and all(norm.placed(z).is_contiguous() for z in norm.t_u)
    return norm if fits and (norm.ratio is None or value_of(norm.ratio).dtype == torch.float32) else None


def _bend_at(known: dict[str, Any], norm: _Norm) -> _Bend | None:
    """The last backward pass through the norm with x̂ and 1 / std as `known`, if the kernel can replace it."""
    curved = next((n for m in known["rstd"].users if m.target is _neg for n in m.users), None)
    total = None if curved is None else _only(curved, _add, lambda n: not n.kwargs)
    for pattern, node in zip((*_BENT, *_CURVED), (total, total, curved, curved), strict=True):
        found, inner = dict(known), dict[Any, Any]()
        if node is not None and match(pattern, node, found, inner) and source(found["t"]) is norm.t:
            break
    else:
        return None
    r, weight = found.get("r"), found.get("weight")
    readers = list(node.users)
    narrow = readers and all(n.target is _copy and n.kwargs == {"dtype": torch.bfloat16} for n in readers)
    bend = _Bend(source(found["d"]), source(r), weight, set(inner), readers if narrow else [node])
    bend.inner -= set(bend.bent)
    _find_pulled_gradients(bend, known["x"])
    signals = [z for z in (norm.a, norm.t, bend.d, bend.r) if z is not None]
    if weight is not None and value_of(weight).shape != value_of(norm.a).shape[-1:]:
        return None
    early = all(z < bend.place for z in (*signals, *(() if weight is None else (weight,))))
    fits = layer_norm.fits(*map(norm.placed, signals)) and norm.placed(node).is_contiguous()
    if not early or not fits:
        return None
    _find_sum(norm, bend)
    return bend


def _find_sum(norm: _Norm, bend: _Bend) -> None:
    """The residual branch's R{d}, if all that is done with the norm's is to add it to that."""
    (bent, *more) = bend.bent
    total = None if more else _only(bent, _add, lambda n: not n.kwargs and all(isinstance(z, Node) for z in n.args))
    if total is None or total.args[0] is total.args[1] or value_of(total).dtype != value_of(bent).dtype:
        return
    (other,) = (z for z in total.args if z is not bent)
    fits = layer_norm.fits(*map(norm.placed, (norm.a, other))) and norm.placed(total).is_contiguous()
    if fits and other < bend.place and not is_made_where_read(other):
        bend.inner.add(bent)
        bend.bent, bend.other = [total], other


def _find_pulled_gradients(bend: _Bend, x_hat: Any) -> None:
    """sum r x̂ and sum r, over rows, as rows of C."""
    products = [n for n in x_hat.users if n.target is _mul and n not in bend.inner and source(n.args[1]) is bend.r]
    rows = list(range(value_of(x_hat).dim() - 1))
    for product in products[:1] if bend.r is not None else ():
        total, out = _sum_over_rows(product, rows)
        if out is not None:
            bend.g_w = [out]
            bend.inner |= {product, total}
            bend.g_b = _sums_of(product.args[1], rows, bend.place)


def _find_gradients(norm: _Norm, x_hat: Any, t_hat: Any) -> None:
    """sum d mix(x̂, t̂) and sum d, over rows, as rows of C; or sum d t̂."""
    rows = list(range(value_of(x_hat).dim() - 1))
    for mix in [n for n in t_hat.users if n.target is _mix and n.args[:2] == (x_hat, t_hat)]:
        product = _only(mix, _mul, lambda n, mix=mix: _is_weighted(n, mix))
        total, out = _sum_over_rows(product, rows)
        if out is not None and norm.d is None and norm.agrees(mix.args[2]):
            norm.d, norm.g_w = source(product.args[1]), [out]
            norm.inner |= {mix, product, total}
            norm.g_b = _sums_of(product.args[1], rows, t_hat)
    for product in [n for n in t_hat.users if n.target is _mul and _is_weighted(n, t_hat)]:
        total, out = _sum_over_rows(product, rows)
        if out is not None and norm.d is None:
            norm.d, norm.g_w = source(product.args[1]), [out]
            norm.inner |= {product, total}


def _is_weighted(product: Any, z: Any) -> bool:
    """Whether it is z times a signal."""
    return product.args[0] is z and value_of(product.args[1]).shape == value_of(product).shape


def _sum_over_rows(product: Any, rows: list[int]) -> tuple[Any, Any]:
    """The sum that alone reads a product, and what alone reads that, if it is a row of C."""
    total = _only(product, _sum, lambda n: list(n.args[1:]) == [rows, True] and not n.kwargs)
    return total, _only(total, _view, lambda n: value_of(n).dim() == 1)


def _sums_of(z: Any, rows: list[int], place: Any) -> list[Any]:
    """z summed over rows after a node, as rows of C."""
    totals = [n for n in z.users if n.target is _sum and list(n.args[1:]) == [rows, True]]
    sums = [_only(total, _view, lambda n: value_of(n).dim() == 1) for total in totals]
    return [out for out in sums if out is not None and place < out]


def _find_tangent(norm: _Norm, t_hat: Any) -> None:
    """w t̂, in the format in which it is read."""
    readers = [n for n in t_hat.users if n not in norm.inner]
    out = t_hat
    if len(readers) == 1 and readers[0].target is _mul and readers[0].args[0] is t_hat:
        w = readers[0].args[1]
        if isinstance(w, Node) and w.target is _view and value_of(w.args[0]).shape == value_of(t_hat).shape[-1:]:
            norm.weight, out = w.args[0], readers[0]
            norm.inner.add(out)
            readers = list(out.users)
    if readers and all(n.target is _copy and n.kwargs == {"dtype": torch.bfloat16} for n in readers):
        norm.t_u = readers
    else:
        norm.t_u = [out]
        norm.inner.discard(out)


def _find_mix(norm: _Norm) -> None:
    """mix(u, t_u), where u is the norm's own output, in t_u's format."""
    for mix in [n for t_u in norm.t_u for n in t_u.users if n.target is _mix and n.args[1] is t_u]:
        u = mix.args[0]
        if u.target is _copy and value_of(u).dtype == value_of(norm.t_u[0]).dtype:
            u = u.args[0]
        forward = u.args[0] if u.target is operator.getitem and u.args[1] == 0 else u
        if forward.target is not _aten.native_layer_norm.default or value_of(mix).dtype != value_of(norm.t_u[0]).dtype:
            continue
        a, shape, weight, bias, eps = forward.args
        same = (source(a), len(shape), source(weight), eps) == (norm.a, 1, source(norm.weight), norm.eps)
        if same and norm.agrees(mix.args[2]) and (not norm.m or bias is norm.bias):
            norm.bias = bias
            norm.m.append(mix)


def _fuse(graph: Graph, norm: _Norm, t_hat: Any) -> None:
    """Puts the call before t̂, and exact mode's."""
    bend = None if norm.bend is None else _put_bend(graph, norm, norm.bend)
    parts, later = _parts(norm, t_hat)
    signals = [None if z is None else _dense(graph, z) for z in (*parts, norm.a, norm.d)]
    seed = norm.m[0].args[3] if norm.m else None
    options = (norm.eps, value_of(norm.t_u[0]).dtype, seed, bool(norm.m), bool(later))
    with graph.inserting_before(t_hat):
        arguments = (*signals, norm.weight, norm.bias, norm.ratio, *options)
        norms = call(graph, torch.ops.threepass.layer_norm_tangent.default, arguments)
        t_u, m, g, t = (call(graph, operator.getitem, (norms, i)) for i in range(4))
    for new, nodes in ((t_u, norm.t_u), (m, norm.m)):
        for node in nodes:
            _pass_on(node, new, list(node.users))
    _pass_on_sums(graph, g, norm.g_w, norm.g_b)
    _pass_on(norm.t, t, later)
    for z in () if bend is None else bend.args[:5]:
        if z is not None:
            _dense(graph, z)


def _put_bend(graph: Graph, norm: _Norm, bend: _Bend) -> Node:
    """Puts exact mode's call before all that it stands for."""
    totals = [n for node in bend.bent for n in column_sums(node)] if bend.r is not None else []
    with graph.inserting_before(bend.place):
        signals = (norm.a, norm.t, bend.d, bend.r, bend.other)
        arguments = (*signals, bend.weight, norm.eps, value_of(bend.bent[0]).dtype, bool(totals))
        both = call(graph, torch.ops.threepass.layer_norm_bend.default, arguments)
        bent, g = (call(graph, operator.getitem, (both, i)) for i in range(2))
    _pass_on_sums(graph, g, bend.g_w, bend.g_b, totals)
    for node in bend.bent:
        _pass_on(node, bent, list(node.users))
    return both


def _pass_on_sums(graph: Graph, g: Node, *gradients: list[Any]) -> None:
    """The rows of g in the gradients' places."""
    for i, nodes in enumerate(gradients):
        for node in nodes:
            with graph.inserting_after(g):
                row = call(graph, _aten.select.int, (g, 0, i))
            widen(graph, node, row)


def _pass_on(node: Any, new: Node, readers: list[Any]) -> None:
    new.meta = {**node.meta, "val": _row_major(node)}
    for reader in readers:
        reader.replace_input_with(node, new)


def _parts(norm: _Norm, t_hat: Any) -> tuple[list[Any], list[Any]]:
    """The two tangents whose sum is t, and t's other users, which then follow the call. Or t, and None."""
    t = norm.t
    if t.target is not _aten.add.Tensor or t.kwargs or not all(isinstance(z, Node) for z in t.args):
        return [t, None], []
    others = [n for n in t.users if n not in norm.inner and not (n.target is _copy and set(n.users) <= norm.inner)]
    fits = layer_norm.fits(*map(norm.placed, (norm.a, *t.args)))
    if fits and all(t_hat < n for n in others) and not any(map(is_made_where_read, t.args)):
        return list(t.args), others
    return [t, None], []


def _dense(graph: Graph, z: Any) -> Any:
    """z with its rows one after another in memory, from the place on where it is made."""
    if value_of(z).is_contiguous():
        return z
    with graph.inserting_after(z):
        dense = call(graph, _clone, (z,), {"memory_format": torch.contiguous_format})
    _pass_on(z, dense, [n for n in z.users if n is not dense])
    return dense


def _row_major(z: Any) -> Tensor:
    return torch.empty_like(value_of(z), memory_format=torch.contiguous_format)


def _only(node: Any, target: Any, fits: Any) -> Any:
    """The one reader of a node, if it is of this kind."""
    readers = [] if node is None else list(node.users)
    return readers[0] if len(readers) == 1 and readers[0].target is target and fits(readers[0]) else None
