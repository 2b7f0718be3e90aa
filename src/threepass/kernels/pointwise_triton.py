"""The Triton kernels behind `pointwise.py`."""

# ruff: noqa: N803 -- constants are in capitals, as Triton's are
# mypy: disable-error-code="import-not-found, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import on_its_device


@triton.jit
def _numbers_kernel(mean, rstd, weight, bias, out, channels, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    scale = tl.load(rstd + c, mask=inside, other=0.0)
    if weight is not None:
        scale *= tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    shift = -tl.load(mean + c, mask=inside, other=0.0) * scale
    if bias is not None:
        shift += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + c, scale, mask=inside)
    tl.store(out + channels + c, shift, mask=inside)


@on_its_device
def norm_numbers(mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    channels = len(mean)
    out = torch.empty((2, channels), dtype=mean.dtype, device=mean.device)
    _numbers_kernel[(triton.cdiv(channels, 256),)](mean, rstd, weight, bias, out, channels, BLOCK=256)
    return out


@triton.jit
def _gated_sum_kernel(g, h, u, numbers, out, count, C: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    total = tl.load(g + i, mask=inside, other=0.0).to(tl.float32) + tl.load(h + i, mask=inside, other=0.0).to(
        tl.float32
    )
    z = tl.load(u + i, mask=inside, other=0.0)
    if numbers is not None:
        scale, shift = tl.load(numbers + i % C), tl.load(numbers + C + i % C)
        z = (z.to(tl.float32) * scale + shift).to(u.dtype.element_ty)
    tl.store(out + i, tl.where(z > 0, total, 0.0).to(out.dtype.element_ty), mask=inside)


@on_its_device
def gated_sum(g: Tensor, h: Tensor, u: Tensor, numbers: Tensor | None) -> Tensor:
    out, count = torch.empty_like(g), g.numel()
    channels = 1 if numbers is None else numbers.shape[1]
    _gated_sum_kernel[(triton.cdiv(count, 1024),)](g, h, u, numbers, out, count, C=channels, BLOCK=1024, num_warps=4)
    return out
