"""Operations that rearrange, join or sum entries of tensors: linear, so that tangents are moved as values are."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .. import _torch_compat
from .table import Linearization, Signal, rule, to_dtype_of

MOST = 64  # tensors that a rule joins at most; longer lists use the generic rule


@rule(
    torch.reshape, Tensor.reshape, Tensor.view, torch.flatten, Tensor.flatten, torch.squeeze, Tensor.squeeze,
    torch.unsqueeze, Tensor.unsqueeze, torch.unflatten, Tensor.unflatten, reads="shapes",
)  # fmt: skip
def reshape(u: Tensor, a: Tensor, *shape, **names) -> Linearization | None:
    """The same entries in another shape."""
    if u.dtype != a.dtype:  # Tensor.view to another dtype
        return None
    return Linearization(push=lambda t: t.reshape(u.shape), pull=lambda r: r.reshape(a.shape))


@rule(torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes, reads="shapes")
def transpose(u: Tensor, a: Tensor, dim0: int, dim1: int) -> Linearization:
    return Linearization(push=lambda t: t.transpose(dim0, dim1), pull=lambda r: r.transpose(dim0, dim1))


@rule(torch.permute, Tensor.permute, reads="shapes")
def permute(u: Tensor, a: Tensor, *places, dims=None) -> Linearization:
    given = dims or (places[0] if places and isinstance(places[0], (tuple, list)) else places)
    order = [i % a.dim() for i in given]
    back = sorted(range(len(order)), key=order.__getitem__)
    return Linearization(push=lambda t: t.permute(order), pull=lambda r: r.permute(back))


@rule(torch.diagonal, Tensor.diagonal, reads="shapes")
def diagonal(u: Tensor, a: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Linearization:
    def pull(r: Tensor) -> Tensor:
        return torch.diagonal_scatter(r.new_zeros(a.shape), r, offset, dim1, dim2)

    return Linearization(push=lambda t: t.diagonal(offset, dim1, dim2), pull=pull)


@rule(Tensor.expand, Tensor.expand_as, reads="shapes")
def expand(u: Tensor, a: Tensor, *shape) -> Linearization:
    return Linearization(push=lambda t: t.expand(u.shape), pull=lambda r: r.sum_to_size(a.shape))


@rule(Tensor.repeat, reads="shapes")
def repeat(u: Tensor, a: Tensor, *counts) -> Linearization:
    shape = [1] * (u.dim() - a.dim()) + list(a.shape)
    split = [n for size, whole in zip(shape, u.shape, strict=True) for n in (whole // max(size, 1), size)]

    def pull(r: Tensor) -> Tensor:
        return r.reshape(split).sum(list(range(0, len(split), 2))).reshape(a.shape)

    return Linearization(push=lambda t: t.repeat(*counts), pull=pull)


@rule(Tensor.contiguous, reads="shapes")
def contiguous(u: Tensor, a: Tensor, memory_format=torch.contiguous_format) -> Linearization:
    return Linearization(push=lambda t: t.contiguous(memory_format=memory_format), pull=_same)


@rule(torch.clone, Tensor.clone, reads="shapes")
def clone(u: Tensor, a: Tensor, *, memory_format=torch.preserve_format) -> Linearization:
    kept = memory_format is torch.preserve_format
    return Linearization(push=_same if kept else lambda t: t.contiguous(memory_format=memory_format), pull=_same)


def _same(z: Tensor) -> Tensor:
    return z


@rule(torch.neg, Tensor.neg, reads="shapes")
def neg(u: Tensor, a: Tensor) -> Linearization:
    return Linearization(push=torch.neg, pull=torch.neg)


@rule(torch.sum, Tensor.sum, reads="shapes")
def total(u: Tensor, a: Tensor, dim=None, keepdim: bool = False, *, dtype=None) -> Linearization:
    return _reduced(u, a, dim, 1.0)


@rule(torch.mean, Tensor.mean, reads="shapes")
def mean(u: Tensor, a: Tensor, dim=None, keepdim: bool = False, *, dtype=None) -> Linearization | None:
    return None if a.numel() == 0 else _reduced(u, a, dim, u.numel() / a.numel())


def _reduced(u: Tensor, a: Tensor, dim, factor: float) -> Linearization:
    """factor times the sum over `dim`."""
    dims = [dim] if isinstance(dim, int) else list(range(a.dim()) if dim is None or not dim else dim)
    summed = {i % a.dim() for i in dims} if a.dim() else set()
    kept = [1 if i in summed else size for i, size in enumerate(a.shape)]

    def push(t: Tensor) -> Tensor:
        t = t.sum(dims, dtype=u.dtype).reshape(u.shape)
        return t if factor == 1 else t * factor

    def pull(r: Tensor) -> Tensor:
        r = r if factor == 1 else r * factor
        return r.to(a.dtype).reshape(kept).expand(a.shape)

    return Linearization(push=push, pull=pull)


@rule(torch.cat, torch.concat, torch.concatenate, arity=MOST, reads="shapes")
def cat(u: Tensor, tensors: Sequence[Tensor], dim: int = 0, *, active: Sequence[int] = (0,)) -> Linearization | None:
    if any(z.dim() != u.dim() for z in tensors):  # empty ones are left out
        return None
    ends = [0]
    for z in tensors:
        ends.append(ends[-1] + z.shape[dim])
    pulls = [
        partial(torch.narrow, dim=dim, start=start, length=z.shape[dim])
        for start, z in zip(ends, tensors, strict=False)
    ]
    return _joined(u, tensors, lambda parts: torch.cat(parts, dim), pulls, active)


@rule(torch.unbind, Tensor.unbind, several=True, reads="shapes")
def unbind(u: Sequence[Tensor], a: Tensor, dim: int = 0) -> Linearization:
    return _divided(u, a, lambda t: t.unbind(dim), lambda parts: torch.stack(parts, dim))


@rule(torch.chunk, Tensor.chunk, several=True, reads="shapes")
def chunk(u: Sequence[Tensor], a: Tensor, chunks: int, dim: int = 0) -> Linearization:
    return _divided(u, a, lambda t: t.chunk(chunks, dim), lambda parts: torch.cat(parts, dim))


@rule(_torch_compat.split, torch.split_with_sizes, Tensor.split_with_sizes, several=True, reads="shapes")
def split(u: Sequence[Tensor], a: Tensor, split_size: int | Sequence[int], dim: int = 0) -> Linearization:
    return _divided(u, a, lambda t: t.split(split_size, dim), lambda parts: torch.cat(parts, dim))


def _divided(
    u: Sequence[Tensor], a: Tensor, push: Callable[[Tensor], Sequence[Tensor]], join: Callable[[list[Tensor]], Tensor]
) -> Linearization:
    """The parts u of a, which `join` puts together."""

    def bend(r: Signal, d: Signal, t: Signal) -> Signal:
        like = next((s for s in r if s is not None), None)
        if like is None:
            return [None]
        return [join([like.new_zeros(z.shape) if s is None else s for z, s in zip(u, r, strict=True)])]

    return Linearization(push=push, bend=bend)


@rule(torch.stack, arity=MOST, reads="shapes")
def stack(u: Tensor, tensors: Sequence[Tensor], dim: int = 0, *, active: Sequence[int] = (0,)) -> Linearization:
    pulls = [partial(torch.select, dim=dim, index=i) for i in range(len(tensors))]
    return _joined(u, tensors, lambda parts: torch.stack(parts, dim), pulls, active)


def _joined(
    u: Tensor,
    tensors: Sequence[Tensor],
    join: Callable[[list[Tensor]], Tensor],
    pulls: Sequence[Callable[[Tensor], Tensor]],
    active: Sequence[int],
) -> Linearization:
    """pulls: for each tensor, its part of the error of u."""

    def push(*t: Tensor | None) -> Tensor:
        given = next(s for s in t if s is not None)
        parts = [given.new_zeros(z.shape, dtype=z.dtype) if s is None else s for z, s in zip(tensors, t, strict=False)]
        return join(parts).to(u.dtype)

    return _linear(push, tensors, pulls, active)


@rule(torch.masked_fill, Tensor.masked_fill, reads="shapes")
def masked_fill(u: Tensor, a: Tensor, mask: Tensor, value: Tensor | float) -> Linearization:
    return Linearization(
        push=lambda t: t.masked_fill(mask, 0), pull=lambda r: r.masked_fill(mask, 0).sum_to_size(a.shape)
    )


@rule(torch.where, arity=3, reads="shapes")
def where(
    u: Tensor, condition: Tensor, a: Tensor | float, b: Tensor | float, *, active: Sequence[int] = (1,)
) -> Linearization:
    def push(_: None, t_a: Tensor | None, t_b: Tensor | None) -> Tensor:
        return torch.where(condition, 0 if t_a is None else t_a, 0 if t_b is None else t_b).to(u.dtype).expand(u.shape)

    return _linear(push, [condition, a, b], _pulls_of_choice(condition, a, b), active)


def _pulls_of_choice(condition: Tensor, a: Tensor | float, b: Tensor | float) -> list[Callable[[Tensor], Tensor]]:
    def to_a(r: Tensor) -> Tensor:
        assert isinstance(a, Tensor)
        return to_dtype_of(a, torch.where(condition, r, 0).sum_to_size(a.shape))

    def to_b(r: Tensor) -> Tensor:
        assert isinstance(b, Tensor)
        return to_dtype_of(b, torch.where(condition, 0, r).sum_to_size(b.shape))

    return [torch.zeros_like, to_a, to_b]


def _linear(
    push: Callable[..., Tensor],
    values: Sequence[Tensor | float],
    pulls: Sequence[Callable[[Tensor], Tensor]],
    active: Sequence[int],
) -> Linearization:
    """Linear in all arguments together; pulls: for each of them, its error from the error of u."""
    if len(active) == 1:
        rest = [(z, pull) for i, (z, pull) in enumerate(zip(values, pulls, strict=True)) if i != active[0]]
        return Linearization(
            push=push, pull=pulls[active[0]], add={z: pull for z, pull in rest if isinstance(z, Tensor)}
        )

    def bend(r: Signal, d: Signal, t: Signal) -> Signal:
        error = r[0]
        return [None if error is None or i not in active else pull(error) for i, pull in enumerate(pulls)]

    return Linearization(push=push, bend=bend)
