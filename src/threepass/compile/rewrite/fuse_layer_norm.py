"""Puts the layer norm's kernels into a captured step's graph, in place of the formulas that `rules/norm.py` calls.

    pass 3       t̂ = J t, w t̂, its mix, and the gradients of scale and shift       `layer_norm_tangent`
    exact mode   J (w r) + the curvature, and R{d}'s gradients of scale and shift   `layer_norm_bend`

The sums over a residual connection, t_1 + t_2 in pass 3 and that of R{d} in exact mode, are fused into them.

Their parts are found here, because a rule cannot offer them as one operation each. The gradients of scale and shift are
in them, and those are taken by the engine, for all rules in one place (`core/gradients.py`): the plan decides whether
the error is multiplied by x̂, t̂ or a mix of them, and exact mode takes this product only in its backward pass, beside
that of R{d}. The mix and the sums belong to the operations upstream and downstream.

The kernels need signals that are contiguous by rows. Signals with other strides are computed that way from the start;
but not in a graph that depends on strides itself (`as_strided`, from in-place operations).
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..._torch_compat import to_copy
from ...kernels import layer_norm
from ...kernels import norm as formulas
from .graph import insert_call, only_reader, value_of
from .readers import column_sums, is_fused_into_its_reader, source, widen

_aten = torch.ops.aten
_add, _sum, _view, _clone = _aten.add.Tensor, _aten.sum.dim_IntList, _aten.view.default, _aten.clone.default
_copy, _mix = to_copy.default, torch.ops.threepass.mix.default


class _Norm(NamedTuple):
    """A layer norm over rows. placed: a signal as it may be given to the kernels."""

    a: Any
    eps: float
    placed: Callable[[Any], Tensor]

    def fits(self, *signals: Any) -> bool:
        return layer_norm.fits(*(self.placed(z) for z in (self.a, *signals) if z is not None))

    def gives(self, node: Any) -> bool:
        """Whether the kernels may write a node's value."""
        return self.placed(node).is_contiguous() and value_of(node).dtype in (torch.float32, torch.bfloat16)


def fuse_layer_norms(graph: Graph) -> None:
    fixed = any(node.target is _aten.as_strided.default for node in graph.nodes)
    for target, fuse in ((formulas.jacobian.op, _fuse_tangent), (formulas.curved.op, _fuse_bend)):
        for node in [n for n in graph.nodes if n.target is target]:
            x_hat, _, dims, _ = node.args[-4:]
            statistics, last = x_hat.args[0], value_of(node).dim() - 1
            if statistics.target is formulas.normalized.op and list(dims) == [last] and last > 0:
                a, _, eps = statistics.args
                fuse(graph, node, x_hat, _Norm(a, eps, value_of if fixed else _row_major))


@dataclass
class _Tangent:
    """Pass 3 through a layer norm: w t̂ in the dtype in which it is read, its mixes, and gradients; what they need."""

    t_u: list[Any]
    weight: Any = None
    bias: Any = None
    d: Any = None
    ratio: Any = None
    m: list[Any] = field(default_factory=list)
    g_w: list[Any] = field(default_factory=list)
    g_b: list[Any] = field(default_factory=list)

    def agrees(self, ratio: Any) -> bool:
        """Whether a mix with this ratio is the kernel's."""
        self.ratio = ratio if self.ratio is None else self.ratio
        return self.ratio is ratio


def _fuse_tangent(graph: Graph, t_hat: Any, x_hat: Any, norm: _Norm) -> None:
    """Puts the call before t̂."""
    t = t_hat.args[0]
    found = _Tangent([t_hat])
    others = _find_gradients(found, x_hat, t_hat)
    _find_scaled(found, others)
    _find_mix(found, norm)
    seed = found.m[0].args[3] if found.m else None
    operands = (norm.a, t, found.d, found.weight, found.bias, found.ratio, seed)
    early = all(z < t_hat for z in operands if z is not None)
    exact = found.ratio is None or value_of(found.ratio).dtype == torch.float32
    if not early or not exact or not norm.fits(t, found.d) or not all(map(norm.gives, found.t_u)):
        return
    parts, later = _parts(t, t_hat, norm)
    signals = [None if z is None else _dense(graph, z) for z in (*parts, norm.a, found.d)]
    options = (norm.eps, value_of(found.t_u[0]).dtype, seed, bool(found.m), bool(later))
    with graph.inserting_before(t_hat):
        arguments = (*signals, found.weight, found.bias, found.ratio, *options)
        norms = insert_call(graph, torch.ops.threepass.layer_norm_tangent.default, arguments)
        t_u, m, g, t_sum = (insert_call(graph, operator.getitem, (norms, i)) for i in range(4))
    for new, nodes in ((t_u, found.t_u), (m, found.m)):
        for node in nodes:
            _pass_on(node, new, list(node.users))
    _pass_on_sums(graph, g, found.g_w, found.g_b)
    _pass_on(t, t_sum, later)


def _find_gradients(found: _Tangent, x_hat: Any, t_hat: Any) -> list[Any]:
    """sum d mix(x̂, t̂) and sum d, over rows, as rows of C; or sum d t̂. Returns the other readers of t̂."""
    others = []
    for n in t_hat.users:
        mixes = n.target is _mix and n.args[:2] == (x_hat, t_hat)
        g_w = only_reader(n, formulas.scale_gradient.op) if mixes else n
        fits = g_w is not None and g_w.target is formulas.scale_gradient.op and found.d is None
        if fits and (not mixes or found.agrees(n.args[2])):
            found.d, found.g_w = g_w.args[0], [g_w]
            found.g_b = _sums_of(found.d, t_hat) if mixes else []
        else:
            others.append(n)
    return others


def _sums_of(z: Any, place: Any) -> list[Any]:
    """z summed over rows after a node, as rows of C."""
    rows = list(range(value_of(z).dim() - 1))
    totals = [n for n in z.users if n.target is _sum and list(n.args[1:]) == [rows, True]]
    views = [only_reader(total, _view) for total in totals]
    return [out for out in views if out is not None and value_of(out).dim() == 1 and place < out]


def _find_scaled(found: _Tangent, readers: list[Any]) -> None:
    """w t̂, in the dtype in which it is read."""
    if len(readers) == 1 and readers[0].target is formulas.scaled.op:
        found.weight, found.t_u = _vector(readers[0].args[1]), readers
    found.t_u = _as_read(found.t_u[0], readers if found.weight is None else list(found.t_u[0].users))


def _as_read(node: Any, readers: list[Any]) -> list[Any]:
    """What a node's readers read: its bfloat16 copies, if they are nothing else."""
    narrow = readers and all(n.target is _copy and n.kwargs == {"dtype": torch.bfloat16} for n in readers)
    return readers if narrow else [node]


def _vector(weight: Any) -> Any:
    """The scale that the rule has viewed in the shape of a row."""
    return None if weight is None else weight.args[0]


def _find_mix(found: _Tangent, norm: _Norm) -> None:
    """mix(u, t_u), where u is the norm's own output, in t_u's dtype. With a mix, the kernel sums d mix(x̂, t̂)."""
    if found.g_w and found.ratio is None:
        return
    for mix in [n for t_u in found.t_u for n in t_u.users if n.target is _mix and n.args[1] is t_u]:
        u = mix.args[0]
        if u.target is _copy and value_of(u).dtype == value_of(found.t_u[0]).dtype:
            u = u.args[0]
        forward = u.args[0] if u.target is operator.getitem and u.args[1] == 0 else u
        if forward.target is not _aten.native_layer_norm.default or value_of(mix).dtype != value_of(found.t_u[0]).dtype:
            continue
        a, shape, weight, bias, eps = forward.args
        same = (source(a), len(shape), source(weight), eps) == (norm.a, 1, source(found.weight), norm.eps)
        if same and found.agrees(mix.args[2]) and (not found.m or bias is found.bias):
            found.bias = bias
            found.m.append(mix)


def _fuse_bend(graph: Graph, curve: Any, x_hat: Any, norm: _Norm) -> None:
    """Puts exact mode's call before all that it stands for: J (w r) + the curvature, or that alone."""
    d, t, weight, *group = curve.args
    total = only_reader(curve, _add)
    pull = None if total is None or total.kwargs else total.args[0]
    if pull is not None and (pull.target is not formulas.pulled.op or list(pull.args[1:]) != [weight, *group]):
        pull = None
    node, r = (curve, None) if pull is None else (total, pull.args[0])
    bent = _as_read(node, list(node.users))
    g_w = [n for n in x_hat.users if n.target is formulas.scale_gradient.op and n.args[:2] == (r, x_hat)][:1]
    place = min(n for n in (curve, pull, *g_w) if n is not None)
    g_b = [n for _ in g_w for n in _sums_of(r, place)]
    operands = (norm.a, t, d, r, _vector(weight))
    early = all(z < place for z in operands if z is not None)
    if not early or not norm.fits(t, d, r) or not all(map(norm.gives, (node, *bent))):
        return
    other, bent = _sum_after(bent, place, norm) or (None, bent)
    totals = [n for e in bent for n in column_sums(e)] if r is not None else []
    signals = [None if z is None else _dense(graph, z) for z in (norm.a, t, d, r, other)]
    with graph.inserting_before(place):
        arguments = (*signals, _vector(weight), norm.eps, value_of(bent[0]).dtype, bool(totals))
        both = insert_call(graph, torch.ops.threepass.layer_norm_bend.default, arguments)
        result, g = (insert_call(graph, operator.getitem, (both, i)) for i in range(2))
    _pass_on_sums(graph, g, g_w, g_b, totals)
    for e in bent:
        _pass_on(e, result, list(e.users))


def _sum_after(bent: list[Any], place: Any, norm: _Norm) -> tuple[Any, list[Any]] | None:
    """The residual branch's R{d} and the sum, if all that is done with the norm's is to add it to that."""
    total = only_reader(bent[0], _add) if len(bent) == 1 else None
    if total is None or total.kwargs or not all(isinstance(z, Node) for z in total.args):
        return None
    if total.args[0] is total.args[1] or value_of(total).dtype != value_of(bent[0]).dtype:
        return None
    (other,) = (z for z in total.args if z is not bent[0])
    fits = norm.fits(other) and norm.gives(total) and other < place
    return (other, [total]) if fits and not is_fused_into_its_reader(other) else None


def _pass_on_sums(graph: Graph, g: Node, *gradients: list[Any]) -> None:
    """The rows of g in the gradients' places."""
    for i, nodes in enumerate(gradients):
        for node in nodes:
            with graph.inserting_after(g):
                row = insert_call(graph, _aten.select.int, (g, 0, i))
            widen(graph, node, row)


def _pass_on(node: Any, new: Node, readers: list[Any]) -> None:
    new.meta = {**node.meta, "val": _row_major(node)}
    for reader in readers:
        reader.replace_input_with(node, new)


def _parts(t: Any, t_hat: Any, norm: _Norm) -> tuple[list[Any], list[Any]]:
    """The two tangents whose sum is t, and t's other users, which then follow the call. Or t, and None."""
    if t.target is not _aten.add.Tensor or t.kwargs or not all(isinstance(z, Node) for z in t.args):
        return [t, None], []
    others = [n for n in t.users if n is not t_hat]
    if norm.fits(*t.args) and all(t_hat < n for n in others) and not any(map(is_fused_into_its_reader, t.args)):
        return list(t.args), others
    return [t, None], []


def _dense(graph: Graph, z: Any) -> Any:
    """z with its rows one after another in memory, from the place on where it is made."""
    if value_of(z).is_contiguous():
        return z
    with graph.inserting_after(z):
        dense = insert_call(graph, _clone, (z,), {"memory_format": torch.contiguous_format})
    _pass_on(z, dense, [n for n in z.users if n is not dense])
    return dense


def _row_major(z: Any) -> Tensor:
    return torch.empty_like(value_of(z), memory_format=torch.contiguous_format)
