"""Operations that rearrange or sum the entries of one tensor: linear, so that a signal takes the way of the values."""

import torch
from torch import Tensor

from .table import Linearization, rule


@rule(
    torch.reshape, Tensor.reshape, Tensor.view, torch.flatten, Tensor.flatten, torch.squeeze, Tensor.squeeze,
    torch.unsqueeze, Tensor.unsqueeze, flat=True,
)  # fmt: skip
def reshape(u: Tensor, a: Tensor, *shape, **names) -> Linearization | None:
    """The same entries in another shape."""
    if u.dtype != a.dtype:  # Tensor.view to another format
        return None
    return Linearization(push=lambda t: t.reshape(u.shape), pull=lambda r: r.reshape(a.shape))


@rule(torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes, flat=True)
def transpose(u: Tensor, a: Tensor, dim0: int, dim1: int) -> Linearization:
    return Linearization(push=lambda t: t.transpose(dim0, dim1), pull=lambda r: r.transpose(dim0, dim1))


@rule(torch.permute, Tensor.permute, flat=True)
def permute(u: Tensor, a: Tensor, *places, dims=None) -> Linearization:
    given = dims or (places[0] if places and isinstance(places[0], (tuple, list)) else places)
    order = [i % a.dim() for i in given]
    back = sorted(range(len(order)), key=order.__getitem__)
    return Linearization(push=lambda t: t.permute(order), pull=lambda r: r.permute(back))


@rule(torch.diagonal, Tensor.diagonal, flat=True)
def diagonal(u: Tensor, a: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Linearization:
    def pull(r: Tensor) -> Tensor:
        return torch.diagonal_scatter(r.new_zeros(a.shape), r, offset, dim1, dim2)

    return Linearization(push=lambda t: t.diagonal(offset, dim1, dim2), pull=pull)


@rule(Tensor.expand, Tensor.expand_as, flat=True)
def expand(u: Tensor, a: Tensor, *shape) -> Linearization:
    return Linearization(push=lambda t: t.expand(u.shape), pull=lambda r: r.sum_to_size(a.shape))


@rule(torch.neg, Tensor.neg, flat=True)
def neg(u: Tensor, a: Tensor) -> Linearization:
    return Linearization(push=torch.neg, pull=torch.neg)


@rule(torch.sum, Tensor.sum, flat=True)
def total(u: Tensor, a: Tensor, dim=None, keepdim: bool = False, *, dtype=None) -> Linearization:
    return _reduced(u, a, dim, 1.0)


@rule(torch.mean, Tensor.mean, flat=True)
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
