"""Gathers and scatters: linear in the tensors that they move, so that tangents are moved as values are.

gather   u = a[index]                       pull adds what was read several times
scatter  u = a + sum of source at index     pull reads where the sum was added
"""

import torch
from torch import Tensor

from .table import Linearization, Signal, rule, times


@rule(Tensor.__getitem__, reads="shapes")
def getitem(u: Tensor, a: Tensor, index) -> Linearization | None:
    """u = a[index] for one vector of integers (the ends of edges, say), or for slices, numbers, None and ... ."""
    if _is_basic(index):
        return Linearization(push=lambda t: t[index], pull=lambda r: _placed(a, index, r))
    if not isinstance(index, Tensor) or index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        return None
    return _selected(a, 0, torch.remainder(index, a.shape[0]))


def _is_basic(index) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(i is None or i is Ellipsis or (isinstance(i, (int, slice)) and not isinstance(i, bool)) for i in parts)


def _placed(a: Tensor, index, r: Tensor) -> Tensor:
    whole = r.new_zeros(a.shape)
    whole[index] = r
    return whole


@rule(torch.index_select, Tensor.index_select, reads="shapes")
def index_select(u: Tensor, a: Tensor, dim: int, index: Tensor) -> Linearization | None:
    return _selected(a, dim, index)


def _selected(a: Tensor, dim: int, index: Tensor) -> Linearization | None:
    if a.dim() == 0:
        return None
    return Linearization(
        push=lambda t: t.index_select(dim, index.to(t.device)),  # a[index] takes indices on the CPU too
        pull=lambda r: r.new_zeros(a.shape).index_add_(dim, index.to(r.device), r),
    )


@rule(torch.gather, Tensor.gather, reads="shapes")
def gather(u: Tensor, a: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> Linearization:
    return Linearization(
        push=lambda t: t.gather(dim, index),
        pull=lambda r: r.new_zeros(a.shape).scatter_add_(dim, index, r),
    )


@rule(torch.index_add, Tensor.index_add, Tensor.index_add_, arity=4, reads="shapes")
def index_add(u: Tensor, a: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float = 1) -> Linearization | None:
    if a.dim() == 0:
        return None

    def push(t_a: Tensor | None, _dim: None, _index: None, t_source: Tensor | None) -> Tensor:
        base = index.new_zeros(u.shape, dtype=source.dtype) if t_a is None else t_a
        return base if t_source is None else base.index_add(dim, index, t_source, alpha=alpha)

    def pull(r: Signal, d: Signal, t: Signal) -> Signal:
        return [None] * 4 if r[0] is None else [r[0], None, None, times(alpha, r[0].index_select(dim, index))]

    return Linearization(push=push, bend=pull)


@rule(torch.scatter_add, Tensor.scatter_add, Tensor.scatter_add_, arity=4, reads="shapes")
def scatter_add(u: Tensor, a: Tensor, dim: int, index: Tensor, src: Tensor) -> Linearization | None:
    if src.shape != index.shape:  # only a part of src is read
        return None

    def push(t_a: Tensor | None, _dim: None, _index: None, t_src: Tensor | None) -> Tensor:
        base = index.new_zeros(u.shape, dtype=src.dtype) if t_a is None else t_a
        return base if t_src is None else base.scatter_add(dim, index, t_src)

    def pull(r: Signal, d: Signal, t: Signal) -> Signal:
        return [None] * 4 if r[0] is None else [r[0], None, None, r[0].gather(dim, index)]

    return Linearization(push=push, bend=pull)


@rule(torch.scatter_reduce, Tensor.scatter_reduce, Tensor.scatter_reduce_, arity=4, reads="shapes")
def scatter_reduce(
    u: Tensor, a: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Linearization | None:
    return scatter_add(u, a, dim, index, src) if reduce == "sum" and include_self else None
