"""Puts the layer norm's kernels into a captured step's graph, in place of the formulas that `rules/norm.py` calls.

    pass 3       t̂ = J t, w t̂, its mix, and the gradients of scale and shift       `layer_norm_tangent`
    exact mode   J (w r) + the curvature, and R{d}'s gradients of scale and shift   `layer_norm_bend`

The sums over a residual connection, t_1 + t_2 in pass 3 and that of R{d} in exact mode, are fused into them. Where x̂, 1
/ std or t̂ has a user that neither kernel replaces, the graph stays as it is.

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
from ...kernels import norm as formulas
from .graph import call, only_reader, value_of
from .match import column_sums, is_made_where_read, source, widen

_aten = torch.ops.aten
_add, _sum, _view, _clone = _aten.add.Tensor, _aten.sum.dim_IntList, _aten.view.default, _aten.clone.default
_copy, _mix = to_copy.default, torch.ops.threepass.mix.default


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
        return min({*self.inner, *self.bent, *self.g_w})


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
        if node.target is formulas.jacobian.op and (norm := _norm_at(node, fixed)) is not None:
            _fuse(graph, norm, node)


def _norm_at(t_hat: Any, fixed: bool) -> _Norm | None:
    """The layer norm whose t̂ the node is, if the kernel can stand for all of it, with `fixed` strides as they are."""
    t, x_hat, rstd, dims, _ = t_hat.args
    statistics = x_hat.args[0]
    if statistics.target is not formulas.normalized.op or list(dims) != [value_of(t_hat).dim() - 1] or dims[0] == 0:
        return None
    a, _, eps = statistics.args
    norm = _Norm(a, t, eps, {statistics, x_hat, rstd, t_hat}, value_of if fixed else _row_major)
    norm.bend = _bend_at(x_hat, norm)
    _find_gradients(norm, x_hat, t_hat)
    _find_tangent(norm, t_hat)
    _find_mix(norm)
    outside = {*norm.t_u, *norm.g_w}
    if norm.bend is not None:
        norm.inner |= norm.bend.inner
        outside |= {*norm.bend.bent, *norm.bend.g_w}
    served = all(user in norm.inner or user in outside for n in norm.inner for user in n.users)
    return norm if served and _is_early(norm, t_hat) and _fits(norm) else None


def _is_early(norm: _Norm, t_hat: Any) -> bool:
    """Whether all that the kernel reads is there at t̂."""
    seeds = [mix.args[3] for mix in norm.m[:1]]
    operands = (norm.a, norm.t, norm.d, norm.weight, norm.bias, norm.ratio, *seeds)
    return all(z < t_hat for z in operands if z is not None)


def _fits(norm: _Norm) -> bool:
    signals = [norm.placed(z) for z in (norm.a, norm.t, norm.d) if z is not None]
    results = [norm.placed(z) for z in norm.t_u]
    return (
        layer_norm.fits(*signals)
        and all(z.is_contiguous() and z.dtype in (torch.float32, torch.bfloat16) for z in results)
        and (norm.ratio is None or value_of(norm.ratio).dtype == torch.float32)
    )


def _bend_at(x_hat: Any, norm: _Norm) -> _Bend | None:
    """The last backward pass through the norm with this x̂, if the kernel can replace it."""
    curve = next((n for n in x_hat.users if n.target is formulas.curved.op and n.args[1] is norm.t), None)
    if curve is None:
        return None
    d, _, weight, *group = curve.args
    total = only_reader(curve, _add)
    pull = None if total is None or total.kwargs else total.args[0]
    if pull is not None and (pull.target is not formulas.pulled.op or list(pull.args[1:]) != [weight, *group]):
        pull = None
    r = None if pull is None else pull.args[0]
    node = curve if pull is None else total
    readers = list(node.users)
    narrow = readers and all(n.target is _copy and n.kwargs == {"dtype": torch.bfloat16} for n in readers)
    bent = readers if narrow else [node]
    inner = {n for n in (curve, pull, node) if n is not None and n not in bent}
    bend = _Bend(d, r, _vector(weight), inner, bent)
    _find_pulled_gradients(bend, x_hat)
    signals = [z for z in (norm.a, norm.t, bend.d, bend.r) if z is not None]
    early = all(z < bend.place for z in (*signals, *(() if weight is None else (bend.weight,))))
    fits = layer_norm.fits(*map(norm.placed, signals)) and norm.placed(node).is_contiguous()
    if not early or not fits:
        return None
    _find_sum(norm, bend)
    return bend


def _vector(weight: Any) -> Any:
    """The parameter that is scaled by: the rule views it in the shape of a row."""
    return None if weight is None else weight.args[0] if weight.target is _view else weight


def _find_sum(norm: _Norm, bend: _Bend) -> None:
    """The residual branch's R{d}, if all that is done with the norm's is to add it to that."""
    (bent, *more) = bend.bent
    total = None if more else only_reader(bent, _add)
    if total is None or total.kwargs or not all(isinstance(z, Node) for z in total.args):
        return
    if total.args[0] is total.args[1] or value_of(total).dtype != value_of(bent).dtype:
        return
    (other,) = (z for z in total.args if z is not bent)
    fits = layer_norm.fits(*map(norm.placed, (norm.a, other))) and norm.placed(total).is_contiguous()
    if fits and other < bend.place and not is_made_where_read(other):
        bend.inner.add(bent)
        bend.bent, bend.other = [total], other


def _find_pulled_gradients(bend: _Bend, x_hat: Any) -> None:
    """sum r x̂ and sum r, over rows, as rows of C."""
    for g_w in [n for n in x_hat.users if n.target is formulas.scale_gradient.op and n.args[:2] == (bend.r, x_hat)][:1]:
        bend.g_w = [g_w]
        bend.g_b = _sums_of(bend.r, bend.place)


def _find_gradients(norm: _Norm, x_hat: Any, t_hat: Any) -> None:
    """sum d mix(x̂, t̂) and sum d, over rows, as rows of C; or sum d t̂."""
    for mix in [n for n in t_hat.users if n.target is _mix and n.args[:2] == (x_hat, t_hat)]:
        g_w = only_reader(mix, formulas.scale_gradient.op)
        if g_w is not None and norm.d is None and norm.agrees(mix.args[2]):
            norm.d, norm.g_w = g_w.args[0], [g_w]
            norm.g_b = _sums_of(norm.d, t_hat)
            norm.inner.add(mix)
    for g_w in [n for n in t_hat.users if n.target is formulas.scale_gradient.op]:
        if norm.d is None:
            norm.d, norm.g_w = g_w.args[0], [g_w]


def _sums_of(z: Any, place: Any) -> list[Any]:
    """z summed over rows after a node, as rows of C."""
    rows = list(range(value_of(z).dim() - 1))
    totals = [n for n in z.users if n.target is _sum and list(n.args[1:]) == [rows, True]]
    views = [only_reader(total, _view) for total in totals]
    return [out for out in views if out is not None and value_of(out).dim() == 1 and place < out]


def _find_tangent(norm: _Norm, t_hat: Any) -> None:
    """w t̂, in the format in which it is read."""
    readers = [n for n in t_hat.users if n not in norm.inner and n not in norm.g_w]
    out = t_hat
    if len(readers) == 1 and readers[0].target is formulas.scaled.op:
        out = readers[0]
        norm.weight = _vector(out.args[1])
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
    others = [n for n in t.users if n is not t_hat and n not in norm.inner]
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
