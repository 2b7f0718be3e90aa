"""The generic rule: any operation that PyTorch can differentiate twice.

Everything a pass needs of `u = op(a; p)` is a derivative of one scalar, phi = < d , J_a op(a; p) t > = < J_aᵀ d , t >:

    d phi / dd   the tangent of u (pass 3)
    d phi / dp   pass 3's gradient of a weight
    d phi / da   the curvature, which exact mode adds to R{d}

phi is built as a backward pass through this one operation, and differentiated by PyTorch's double backward. Where
forward-mode AD supports the operation, it gives the tangent, at a lower cost. A user-defined operation whose backward
is not differentiable would silently give zeros: the checks below raise an error instead.
"""

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._torch_compat import has_dispatch_modes
from ..errors import CaptureError
from ..numerics.precision import as_dtype
from .linearity import is_affine, is_linear
from .names import is_user_defined, key_of
from .table import has_symbolic_shape

_no_forward_ad: set[Any] = set()
_no_forward_ad_of_users: weakref.WeakSet[type] = weakref.WeakSet()  # a forward may define functions anew in each call
_one_level = threading.RLock()  # forward-mode AD has one level for all threads

Signal = list[Tensor | None]


def push(op, t: Signal) -> Signal:
    """The tangents of the outputs, from those of the active arguments."""
    if not op.weights and not op.written and _takes_signals_alone(op) and is_linear(op.func):
        return _on_tangents(op, t)
    key = key_of(op.func)
    known: Any = _no_forward_ad_of_users if isinstance(key, type) else _no_forward_ad
    if key not in known:
        try:
            tangents = _forward_ad(op, t)
        except (torch.OutOfMemoryError, CaptureError):
            raise
        except (NotImplementedError, RuntimeError) as error:
            unsupported = isinstance(error, NotImplementedError) or "forward AD" in str(error) or "jvp" in str(error)
        else:
            if all(s is not None for s in tangents):
                return tangents
            unsupported = True
        if unsupported:  # for every call; other errors may concern this call only
            known.add(key)
    return _double_backward_push(op, t)


def _takes_signals_alone(op) -> bool:
    """Whether no tensor among the arguments is a position or a mask."""
    return all(v.is_floating_point() or v.is_complex() for v in op.values if isinstance(v, Tensor))


def _on_tangents(op, t: Signal) -> Signal:
    """The operation on the tangents in place of the arguments; of a tensor that has none, on zeros."""
    values = list(op.values)
    given = {i: s for (i, _), s in zip(op.active, t, strict=True) if s is not None}
    for i, v in enumerate(values):
        if isinstance(v, Tensor):
            values[i] = as_dtype(given[i], v.dtype) if i in given else torch.zeros_like(v)
    with torch.no_grad():
        return list(op.call(values))


def _forward_ad(op, t: Signal) -> Signal:
    values = list(op.values)
    tangents = {i: s for (i, _), s in zip(op.active, t, strict=True) if s is not None}
    with _one_level, torch.no_grad(), forward_ad.dual_level():
        if any(isinstance(z, Tensor) and has_symbolic_shape(z) for z in values):
            _prepare_symbolic(op, values, tangents)
        elif has_dispatch_modes() and any(isinstance(v, (int, float, complex)) for v in values):
            _complete_tangents(values, tangents)
        for i, s in tangents.items():
            values[i] = forward_ad.make_dual(values[i].detach(), s.to(values[i].dtype))
        return [forward_ad.unpack_dual(u).tangent for u in op.call(values)]


def _complete_tangents(values: list[Any], tangents: dict[int, Tensor]) -> None:
    """Adds zero tangents for the arguments that have none.

    PyTorch would create them itself, but under a dispatch mode, which a trace is, the process crashes when it
    multiplies them by a number (`alpha` of an addition, `beta` of addmm).
    """
    for i, z in enumerate(values):
        if i not in tangents and isinstance(z, Tensor) and (z.is_floating_point() or z.is_complex()):
            tangents[i] = torch.zeros_like(z)


def _prepare_symbolic(op, values: list[Any], tangents: dict[int, Tensor]) -> None:
    """In a trace with dynamic shapes: a tangent for every argument, in that argument's layout.

    The zeros that forward-mode AD makes for arguments without a tangent would fix the symbolic sizes, and it cannot
    copy a tangent of another layout.
    """
    if op.func in (torch.as_strided, Tensor.as_strided):
        raise CaptureError("as_strided depends on its argument's memory layout, which dynamic shapes do not keep")
    for i, z in enumerate(values):
        if isinstance(z, Tensor) and (z.is_floating_point() or z.is_complex()):
            values[i] = z.detach().clone()
            same = torch.zeros_like(values[i])
            tangents[i] = same.copy_(tangents[i]) if i in tangents else same


def _double_backward_push(op, t: Signal) -> Signal:
    a, _, u = _run(op)
    with torch.enable_grad():
        d = [torch.ones_like(z).requires_grad_() for z in u]
        phi = _inner(torch.autograd.grad(u, a, d, create_graph=True, allow_unused=True), t)
        tangents: Signal = [None] * len(u)
        if phi is not None:
            _refuse_error_nodes(phi)
            tangents = list(torch.autograd.grad(phi, d, allow_unused=True))
    if is_user_defined(op.func) and any(s is None for s in tangents):
        raise RuntimeError("autograd does not see how its backward depends on the incoming gradient (is it detached?)")
    return [torch.zeros_like(z) if s is None else s for z, s in zip(u, tangents, strict=True)]


def derive(op, d: Signal, t: Signal | None, r: Signal | None = None, *, curvature: bool = False, back: bool = True):
    """The weights' gradients of pass 2, unless back=False, and of pass 3, and R{d} of the active arguments.

    d, r: the errors d and R{d} of the outputs; t: the tangents of the active arguments. Without r and curvature these
    are the paper's; with them R{d} = J_aᵀ r + d phi / da, and J_pᵀ r is part of the third pass's gradient.
    """
    a, p, u = _run(op)
    used = [(z, e) for z, e in zip(u, d, strict=True) if e is not None]
    outs, errors = [z for z, _ in used], [e.to(z.dtype) for z, e in used]
    nothing: Signal = [None] * (len(a) + len(p))
    with torch.enable_grad():
        backprop = nothing
        if back and p and outs:
            backprop = list(torch.autograd.grad(outs, p, errors, retain_graph=True, allow_unused=True))
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        if t is not None and outs and not is_affine(op.func):
            phi = _inner(torch.autograd.grad(outs, a, errors, create_graph=True, allow_unused=True), t)
            if phi is not None:
                _refuse_error_nodes(phi)
                roots, seeds = [phi], [torch.ones_like(phi)]
        for z, s in zip(u, r or [None] * len(u), strict=True):
            if s is not None:
                roots.append(z)
                seeds.append(s.to(z.dtype))
        wanted = [*p, *a] if curvature else p
        third = torch.autograd.grad(roots, wanted, seeds, allow_unused=True) if roots and wanted else nothing
    if is_user_defined(op.func) and t is not None and outs:
        _refuse_hidden_weights(op, d, [i for (i, _), g in zip(op.weights, third, strict=False) if g is None])
    return backprop[: len(p)], list(third[: len(p)]), list(third[len(p) : len(p) + len(a)])


def _refuse_error_nodes(phi: Tensor) -> None:
    """Raises if the graph of phi contains the error node of a once-differentiable backward, which might never run."""
    for node in nodes_of(phi):
        if "Error" in node.name() or "NotImplemented" in node.name():
            raise RuntimeError("its backward cannot be differentiated (it may be marked once_differentiable)")


def nodes_of(z: Tensor) -> Iterator[Any]:
    """The nodes of the autograd graph that z was computed by, each once."""
    seen, todo = set(), [z.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo.extend(child for child, _ in node.next_functions)


def leaf_tensors_of(z: Tensor) -> Iterator[Tensor]:
    """The leaf tensors that z was computed from."""
    return (node.variable for node in nodes_of(z) if hasattr(node, "variable"))


def _refuse_hidden_weights(op, d: Signal, without: list[int]) -> None:
    """Raises if J_aᵀ d changes with a weight that it does not depend on by double backward."""
    before = _errors(op, d, op.values)
    for i in without:
        value = op.values[i]
        step = torch.finfo(value.dtype).eps ** 0.5
        moved = list(op.values)
        moved[i] = value + step * value.abs().max().clamp_min(step)
        for e, f in zip(before, _errors(op, d, moved), strict=True):
            if e is not None and f is not None and (e - f).abs().max() > 0.01 * step * e.abs().max():
                raise RuntimeError(
                    "its backward depends on a weight, and autograd does not see it (is it marked "
                    "once_differentiable, or the weight detached?)"
                )


def _errors(op, d: Signal, values: list) -> Signal:
    values = list(values)
    with torch.enable_grad():
        a = [values[i].detach().requires_grad_() for i, _ in op.active]
        for (i, _), z in zip(op.active, a, strict=True):
            values[i] = z
        used = [(u, e) for u, e in zip(op.call(values), d, strict=True) if e is not None]
        return list(torch.autograd.grad([u for u, _ in used], a, [e for _, e in used], allow_unused=True))


def _run(op) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Runs the operation again on new leaves; returns those of its active arguments and weights, and its outputs."""
    values = list(op.values)
    with torch.enable_grad():
        for i, _ in (*op.active, *op.weights):
            values[i] = values[i].detach().requires_grad_()
        u = op.call(values)
    return [values[i] for i, _ in op.active], [values[i] for i, _ in op.weights], u


def _inner(errors, t: Signal) -> Tensor | None:
    """< e , t > over all pairs that require grad; of complex ones the real part, as in autograd."""
    pairs = [(e, s) for e, s in zip(errors, t, strict=True) if e is not None and s is not None and e.requires_grad]
    terms = [(e.conj() * s).real.sum() if e.is_complex() else (e * s).sum() for e, s in pairs]
    return sum(terms[1:], terms[0]) if terms else None
