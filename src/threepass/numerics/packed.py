"""Elementwise functions of many small tensors, in one kernel: for hundreds of gradients, instead of a kernel each.

On a GPU even the smallest kernel takes a microsecond or two. `together` copies the tensors into one flat tensor, by a
custom op of few launches, which the compiler leaves as it is, applies the function, and returns parts of the result.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._torch_compat import foreach_copy_

FEW = 4  # up to this many tensors, copying them does not pay
LARGE = 2**19  # numbers: to copy these takes longer than a kernel of their own does


def together(f: Callable[..., Tensor], *terms: Sequence[Tensor]) -> list[Tensor]:
    """[f(a, b, ...) for a, b, ... in zip(*terms)], f elementwise; on a GPU, one call of f for many small tensors."""
    rows = list(zip(*terms, strict=True))
    groups: dict[tuple[torch.dtype, ...], list[int]] = {}
    for i, row in enumerate(rows):
        if all(map(pays, row)) and row[0].numel() <= LARGE:
            groups.setdefault(tuple(z.dtype for z in row), []).append(i)
    results: dict[int, Tensor] = {}
    for indices in groups.values():
        if len(indices) > FEW:
            first = [rows[i][0] for i in indices]
            packed = [torch.ops.threepass.pack(_flat([rows[i][k] for i in indices], first)) for k in range(len(terms))]
            results |= zip(indices, _split_like(f(*packed), first), strict=True)
    return [results[i] if i in results else f(*row) for i, row in enumerate(rows)]


def pays(z: Tensor) -> bool:
    return z.is_cuda and z.layout == torch.strided


@torch.library.custom_op("threepass::pack", mutates_args=())
def _pack(flat: Sequence[Tensor]) -> Tensor:
    """One flat tensor, in the widest dtype (our kernels give gradients in float32); a launch for each dtype."""
    whole = _whole(flat)
    rows: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for part, z in zip(whole.split([z.numel() for z in flat]), flat, strict=True):
        rows.setdefault(z.dtype, []).append((part, z))
    for pairs in rows.values():
        parts, values = zip(*pairs, strict=True)
        foreach_copy_(parts, values)
    return whole


@_pack.register_fake
def _whole(flat: Sequence[Tensor]) -> Tensor:
    widest = functools.reduce(torch.promote_types, (z.dtype for z in flat))
    return flat[0].new_empty(sum(z.numel() for z in flat), dtype=widest)


def _flat(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Each as a row, in the order of memory of its like where that is contiguous or channels_last."""
    pairs = zip(tensors, like, strict=True)
    return [(z.permute(0, 2, 3, 1) if is_nhwc(order) else z).reshape(-1) for z, order in pairs]


def _split_like(whole: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat tensor, in the shapes that were flattened."""
    parts = []
    for z, part in zip(like, whole.split([math.prod(z.shape) for z in like]), strict=True):
        if is_nhwc(z):
            o, i, height, width = z.shape
            parts.append(part.view(o, height, width, i).permute(0, 3, 1, 2))
        else:
            parts.append(part.view(z.shape))
    return parts


def is_nhwc(z: Tensor) -> bool:
    return z.dim() == 4 and not z.is_contiguous() and z.is_contiguous(memory_format=torch.channels_last)
