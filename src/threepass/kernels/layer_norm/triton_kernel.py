"""The Triton kernels of this package's operations: pass 3 through a layer norm, and exact mode's last backward pass.

Each signal is read or written once.

Memory is (rows, C). A program takes several blocks of whole rows, and holds in registers what it adds up over them for
the scale's and the shift's gradient; a second kernel adds up the programs' sums in a fixed order. Offsets are 32-bit
(`layer_norm.fits` sees to that).
"""

# ruff: noqa: N803 -- constants are in capitals, as Triton's are
# mypy: disable-error-code="import-not-found, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import on_its_device, resident_warps
from ..load_triton import load
from ..rounding_triton import rounded_randomly
from ..sums_triton import add_up

REGISTERS = 128  # of a thread
BLOCK = 512  # numbers of a program of one warp, if they are whole rows
ROW = 256  # numbers of a row for a warp: a row in several warps meets in shared memory, and its sums wait there


@triton.jit
def _mean(z, C: tl.constexpr):
    return (tl.sum(z, 1) / C)[:, None]


@triton.jit
def _normalised(x, known, eps, C: tl.constexpr):
    """x̂ and 1 / std of whole rows."""
    x = tl.where(known, x - _mean(x, C), 0.0)
    rstd = tl.rsqrt(_mean(x * x, C) + eps)
    return x * rstd, rstd


@triton.jit
def _store_row(work, count, i, values, C: tl.constexpr, BC: tl.constexpr):
    """Row i of a program's `count` rows of column sums."""
    column = tl.arange(0, BC)
    tl.store(work + (tl.program_id(0) * count + i) * C + column, tl.sum(values, 0), mask=column < C)


@triton.jit
def _tangent_kernel(t_1, t_2, a, d, w, b, ratio, t_sum, t_u, m, work, rows, part, eps, seed,
                    HALF_SUM: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """t_u, m and t_1 + t_2 of `part` rows, and into work, [programs, 2, C], their sums of d (x̂ + k t̂) and of d.

    Without a ratio k no m, and the sums of d t̂.
    """
    column = tl.arange(0, BC)[None, :]
    known = column < C
    scale = tl.full((1, BC), 1.0, tl.float32)
    shift = tl.zeros((1, BC), tl.float32)
    if w is not None:
        scale = load(w, column, known)
    if b is not None:
        shift = load(b, column, known)
    if ratio is not None:
        k = tl.load(ratio)
    for_scale = tl.zeros((BR, BC), tl.float32)
    for_shift = tl.zeros((BR, BC), tl.float32)
    first = tl.program_id(0) * part
    for start in range(first, min(rows, first + part), BR):
        row = start + tl.arange(0, BR)[:, None]
        here = row * C + column
        inside = (row < rows) & known
        x = load(a, here, inside)
        t = load(t_1, here, inside)
        e = tl.zeros((BR, BC), tl.float32)
        if t_2 is not None:
            t += load(t_2, here, inside)
        if d is not None:  # loaded here, because after a store it would wait for the store
            e = load(d, here, inside)
        if HALF_SUM:
            t = t.to(tl.bfloat16).to(tl.float32)
        if t_sum is not None:
            tl.store(t_sum + here, t.to(t_sum.dtype.element_ty), mask=inside)
        x, rstd = _normalised(x, known, eps, C)
        t = tl.where(known, rstd * (t - _mean(t, C) - x * _mean(x * t, C)), 0.0)
        pushed = (t * scale).to(t_u.dtype.element_ty)
        tl.store(t_u + here, pushed, mask=inside)
        if m is not None:
            u = (x * scale + shift).to(t_u.dtype.element_ty).to(tl.float32)
            mix = u + k * pushed.to(tl.float32)
            if m.dtype.element_ty == tl.bfloat16:
                mix = rounded_randomly(mix, here, tl.load(seed))
            tl.store(m + here, mix, mask=inside)
        if ratio is not None:
            for_scale += tl.where(inside, e * (x + k * t), 0.0)  # with eps = 0, x̂ is no number outside
        else:
            for_scale += tl.where(inside, e * t, 0.0)
        for_shift += e
    if d is not None:
        _store_row(work, 2, 0, for_scale, C, BC)
        _store_row(work, 2, 1, for_shift, C, BC)


@triton.jit
def _bend_kernel(a, t, d, r, r_2, w, bent, work, rows, part, eps,
                 SUMS: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """R{d_a} of `part` rows, and into work, [programs, 2 or 3, C], their sums of r x̂, of r, and with SUMS of R{d_a}.

    J is linear: R{d_a} = J z - x̂ mean(g J t) / std(a) + r_2, z = w r - (mean(x̂ t) g + mean(x̂ g) t) / std(a).
    """
    column = tl.arange(0, BC)[None, :]
    known = column < C
    scale = tl.full((1, BC), 1.0, tl.float32)
    if w is not None:
        scale = load(w, column, known)
    for_scale = tl.zeros((BR, BC), tl.float32)
    for_shift = tl.zeros((BR, BC), tl.float32)
    before = tl.zeros((BR, BC), tl.float32)
    first = tl.program_id(0) * part
    for start in range(first, min(rows, first + part), BR):
        row = start + tl.arange(0, BR)[:, None]
        here = row * C + column
        inside = (row < rows) & known
        x = load(a, here, inside)
        s = load(t, here, inside)
        g = load(d, here, inside) * scale
        e = tl.zeros((BR, BC), tl.float32)
        if r is not None:
            e = load(r, here, inside)
        other = tl.zeros((BR, BC), tl.float32)
        if r_2 is not None:
            other = load(r_2, here, inside)
        x, rstd = _normalised(x, known, eps, C)
        s = tl.where(known, s - _mean(s, C), 0.0)  # J t is the same
        along_t = _mean(x * s, C)
        z = e * scale - rstd * (along_t * g + _mean(x * g, C) * s)
        along = _mean(x * z, C) + rstd * _mean(g * (s - x * along_t), C)
        z = rstd * (z - _mean(z, C) - x * along)
        z = (z.to(bent.dtype.element_ty).to(tl.float32) + other).to(bent.dtype.element_ty)
        tl.store(bent + here, z, mask=inside)
        for_scale += tl.where(inside, e * x, 0.0)  # with eps = 0, x̂ is no number outside
        for_shift += e
        if SUMS:
            before += tl.where(inside, z.to(tl.float32), 0.0)
    if r is not None:
        count: tl.constexpr = 3 if SUMS else 2
        _store_row(work, count, 0, for_scale, C, BC)
        _store_row(work, count, 1, for_shift, C, BC)
        if SUMS:
            _store_row(work, count, 2, before, C, BC)


@on_its_device
def tangent(
    t: Tensor, t_2: Tensor | None, a: Tensor, d: Tensor | None, w: Tensor | None, b: Tensor | None,
    ratio: Tensor | None,
    eps: float, seed: Tensor | None, t_sum: Tensor | None, t_u: Tensor, m: Tensor | None, g: Tensor | None,
) -> None:  # fmt: skip
    """Into t_sum, t_u and m, (..., C), and g, (2, C): the gradients of scale and shift."""
    rows, part, shape = _blocks(a)
    programs = triton.cdiv(rows, part)
    work = None if g is None else a.new_empty((programs, g.numel()), dtype=torch.float32)
    _tangent_kernel[(programs,)](
        t, t_2, a, d, w, b, ratio, t_sum, t_u, m, work, rows, part, eps, seed,
        HALF_SUM=t_2 is not None and t.dtype == t_2.dtype == torch.bfloat16, **shape,
    )  # fmt: skip
    add_up(work, g)


@on_its_device
def bend(
    a: Tensor, t: Tensor, d: Tensor, r: Tensor | None, r_2: Tensor | None, w: Tensor | None, eps: float,
    bent: Tensor, g: Tensor | None,
) -> None:  # fmt: skip
    """Into bent, (..., C), and g, (2 or 3, C): the sums of r x̂, of r and, in a third row, of bent."""
    rows, part, shape = _blocks(a)
    programs = triton.cdiv(rows, part)
    work = None if g is None else a.new_empty((programs, g.numel()), dtype=torch.float32)
    _bend_kernel[(programs,)](
        a, t, d, r, r_2, w, bent, work, rows, part, eps, SUMS=g is not None and len(g) == 3, **shape
    )
    add_up(work, g)


def _blocks(a: Tensor) -> tuple[int, int, dict[str, int]]:
    """The rows of a, how many of them a program takes, and a block's shape."""
    columns = a.shape[-1]
    rows, width = a.numel() // columns, triton.next_power_of_2(columns)
    block, warps = max(1, BLOCK // width), min(8, max(1, width // ROW))
    part = triton.cdiv(triton.cdiv(rows, block), max(1, resident_warps(a.device, REGISTERS) // warps)) * block
    return rows, part, {"C": columns, "BR": block, "BC": width, "num_warps": warps}
