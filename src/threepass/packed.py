"""Many small tensors as one: what would be a kernel each for hundreds of gradients is one kernel.

On a GPU a kernel takes a microsecond or two however little it does. `together` copies the tensors into one flat tensor,
by an operation that a compiler takes as it is and that needs few launches, and gives parts of the result.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FEW = 4  # so many are not worth a copy


def together(f: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """f of each, where f goes element by element; on a GPU those of a format at once."""
    results: list[Tensor | None] = [None if pays(z) else f(z) for z in tensors]
    for dtype in {z.dtype for z, done in zip(tensors, results, strict=True) if done is None}:
        places = [i for i, z in enumerate(tensors) if results[i] is None and z.dtype == dtype]
        some = [tensors[i] for i in places]
        made = [f(z) for z in some] if len(some) <= FEW else _apart(f(torch.ops.threepass.pack(_flat(some))), some)
        for i, z in zip(places, made, strict=True):
            results[i] = z
    return [z for z in results if z is not None]


def pays(z: Tensor) -> bool:
    return z.is_cuda and z.layout == torch.strided


@torch.library.custom_op("threepass::pack", mutates_args=())
def _pack(flat: Sequence[Tensor]) -> Tensor:
    whole = flat[0].new_empty(sum(z.numel() for z in flat))
    torch._foreach_copy_(list(whole.split([z.numel() for z in flat])), list(flat))
    return whole


@_pack.register_fake
def _(flat):
    return flat[0].new_empty(sum(z.numel() for z in flat))


def _flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each as a row, in the order of its memory where that is contiguous or channels_last."""
    return [(z.permute(0, 2, 3, 1) if _nhwc(z) else z).reshape(-1) for z in tensors]


def _apart(whole: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat tensor, in the shapes that were flattened."""
    parts = []
    for z, part in zip(like, whole.split([math.prod(z.shape) for z in like]), strict=True):
        if _nhwc(z):
            o, i, height, width = z.shape
            parts.append(part.view(o, height, width, i).permute(0, 3, 1, 2))
        else:
            parts.append(part.view(z.shape))
    return parts


def _nhwc(z: Tensor) -> bool:
    return z.dim() == 4 and not z.is_contiguous() and z.is_contiguous(memory_format=torch.channels_last)
