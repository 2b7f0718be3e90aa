"""The Triton kernels of this package's operations. An image in NHWC is a matrix of pixels x channels.

A program takes the sums of some channels over a part of the pixels; a second kernel adds the parts in a fixed order.
"""

# ruff: noqa: N803 -- constants are in capitals, as Triton's are
# mypy: disable-error-code="import-not-found, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import multiprocessors, on_its_device
from ..load_triton import load
from ..norm import TINY

PROGRAMS = 2  # on each multiprocessor
CHANNELS, BYTES = 64, 8192  # of a tile, at most
STAGES = 3  # tiles that are on their way


@triton.jit
def _moments_kernel(z, h, u, numbers, out, a, mean, d, work, pixels, part, C: tl.constexpr, BP: tl.constexpr,
                    BC: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    mu = tl.load(mean + c, mask=c < C, other=0.0)
    total = tl.zeros((BP, BC), tl.float32)
    along = tl.zeros((BP, BC), tl.float32)
    third = tl.zeros((BP, BC), tl.float32)
    if numbers is not None:
        scale = tl.load(numbers + c, mask=c < C, other=0.0)
        shift = tl.load(numbers + C + c, mask=c < C, other=0.0)
    first = tl.program_id(0) * part
    for start in tl.range(first, min(pixels, first + part), BP, num_stages=STAGES):
        p = start + tl.arange(0, BP)[:, None]
        inside = (p < pixels) & (c < C)
        here = p * C + c
        v, signal = load(z, here, inside), load(a, here, inside)
        if h is not None:
            v += load(h, here, inside)
        if u is not None or numbers is not None:
            opened = signal if u is None else load(u, here, inside)
            if numbers is not None:
                opened = (opened * scale + shift).to(a.dtype.element_ty).to(tl.float32)
            v = tl.where(opened > 0, v, 0.0)
        if out is not None:
            rounded = v.to(out.dtype.element_ty)
            tl.store(out + here, rounded, mask=inside)
            v = rounded.to(tl.float32)
        total += v
        along += v * (signal - mu)
        if d is not None:
            third += v * load(d, here, inside)
    rows = 2 if d is None else 3
    place = work + tl.program_id(0) * (rows * C) + tl.program_id(1) * BC + tl.arange(0, BC)
    known = tl.program_id(1) * BC + tl.arange(0, BC) < C
    tl.store(place, tl.sum(total, 0), mask=known)
    tl.store(place + C, tl.sum(along, 0), mask=known)
    if d is not None:
        tl.store(place + 2 * C, tl.sum(third, 0), mask=known)


@triton.jit
def _finish_kernel(work, rstd, w, sums, parts, ROWS: tl.constexpr, C: tl.constexpr, BS: tl.constexpr,
                   BC: tl.constexpr, TINY: tl.constexpr):  # fmt: skip
    """Sums [parts, ROWS, C] over the parts, in a fixed order."""
    row = tl.program_id(1)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    s = tl.arange(0, BS)[:, None]
    known = c < C
    values = tl.load(work + (s * ROWS + row) * C + c[None, :], mask=(s < parts) & known[None, :], other=0.0)
    total = tl.sum(values, 0)
    if row == 1:
        total *= tl.load(rstd + c, mask=known, other=0.0)
    tl.store(sums + row * C + c, total, mask=known)
    if w is not None:  # noqa: SIM102 -- this one is settled when the kernel is compiled
        if row == 2:
            scale = tl.load(w + c, mask=known, other=1.0).to(tl.float32)
            tl.store(sums + 3 * C + c, total / tl.where(tl.abs(scale) < TINY, TINY, scale), mask=known)


def moments(
    z: Tensor, a: Tensor, mean: Tensor, rstd: Tensor, d: Tensor | None, w: Tensor | None, numbers: Tensor | None
) -> Tensor:
    return _run(z, None, None, numbers, None, a, mean, rstd, d, w)


def gated_moments(
    g: Tensor, h: Tensor, u: Tensor, numbers: Tensor | None, a: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    z = torch.empty_like(g)
    return z, _run(g, h, u, numbers, z, a, mean, rstd, None, None)


@on_its_device
def _run(z, h, u, numbers, out, a, mean, rstd, d, w) -> Tensor:
    channels = z.shape[1]
    pixels, rows = z.numel() // channels, 2 if d is None else 3
    columns = min(CHANNELS, triton.next_power_of_2(channels))
    lines = max(1, BYTES // (z.element_size() * columns))
    tiles = triton.cdiv(channels, columns)
    part = triton.cdiv(triton.cdiv(pixels, max(1, PROGRAMS * multiprocessors(z.device) // tiles)), lines) * lines
    parts = triton.cdiv(pixels, part)
    work = torch.empty((parts, rows, channels), dtype=torch.float32, device=z.device)
    mean, rstd, w = (None if v is None else v.contiguous() for v in (mean, rstd, w))
    _moments_kernel[(parts, tiles)](
        z, h, u, numbers, out, a, mean, d, work, pixels, part, C=channels, BP=lines, BC=columns, STAGES=STAGES
    )
    sums = torch.empty((rows + (w is not None), channels), dtype=torch.float32, device=z.device)
    _finish_kernel[(triton.cdiv(channels, 8), rows)](
        work, rstd, w, sums, parts, ROWS=rows, C=channels, BS=triton.next_power_of_2(parts), BC=8, TINY=TINY,
        num_warps=8,
    )  # fmt: skip
    return sums


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
