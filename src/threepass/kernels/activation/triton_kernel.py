"""The Triton kernel of this package's operation. Memory is a matrix of rows x columns.

A program takes some columns of a part of the rows; a second kernel adds up the parts' sums in a fixed order.
"""

# ruff: noqa: N803 -- constants are in capitals, as Triton's are
# mypy: disable-error-code="import-not-found, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import on_its_device, resident_warps
from ..load_triton import load
from ..sums_triton import add_up
from . import half_gelu

WARPS, REGISTERS = 4, 64  # of a program, and of a thread
COLUMNS, BYTES = 128, 4096  # of a tile, at most

P, DENSITY = tl.constexpr(half_gelu.P), tl.constexpr(half_gelu.DENSITY)
Q5, Q4, Q3, Q2, Q1 = map(tl.constexpr, half_gelu.Q)


@triton.jit
def _parts(a, KIND: tl.constexpr, HALF: tl.constexpr):
    """f, f' and f'' at a, by the place of f in `KINDS`; HALF: to 1e-7, for what is then rounded (`half_gelu.py`)."""
    if KIND == 0:
        bell = tl.exp2(a * a * -0.7213475204444817)
        if HALF:
            s = 1.0 / (1.0 + P * tl.abs(a))
            tail = ((((Q5 * s + Q4) * s + Q3) * s + Q2) * s + Q1) * s * bell
            below = tl.where(a < 0, tail, 1.0 - tail)
        else:
            below = 0.5 + 0.5 * tl.erf(a * 0.7071067811865476)
        density = bell * DENSITY
        return a * below, below + a * density, density * (2.0 - a * a)
    elif KIND == 1:
        twice = 2.0 * 0.7978845608028654 * (a + 0.044715 * a * a * a)
        p, q = tl.sigmoid(twice), tl.sigmoid(-twice)  # (1 + h) / 2 and (1 - h) / 2
        g = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * a * a)
        bend = 4.0 * p * q * (g + a * (3.0 * 0.7978845608028654 * 0.044715 * a - (p - q) * g * g))
        return a * p, p + 2.0 * a * p * q * g, bend
    else:
        p = tl.sigmoid(a)
        q = 1.0 - p
        return a * p, p * (1.0 + a * q), p * q * (2.0 + a * (1.0 - 2.0 * p))


@triton.jit
def _error_kernel(r, a, d, t, e, u, work, rows, part, KIND: tl.constexpr, C: tl.constexpr, BR: tl.constexpr,
                  BC: tl.constexpr):  # fmt: skip
    """e and u of `part` rows, and into work, [programs, C], their sums of e."""
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros((BR, BC), tl.float32)
    first = tl.program_id(0) * part
    for start in range(first, min(rows, first + part), BR):
        row = start + tl.arange(0, BR)[:, None]
        here = row * C + column[None, :]
        inside = (row < rows) & (column < C)[None, :]
        value, slope, bend = _parts(load(a, here, inside), KIND, a.dtype.element_ty == tl.bfloat16)
        z = load(r, here, inside) * slope
        if d is not None:
            z += bend * load(t, here, inside) * load(d, here, inside)
        tl.store(e + here, z.to(e.dtype.element_ty), mask=inside)
        if u is not None:
            tl.store(u + here, value.to(u.dtype.element_ty), mask=inside)
        total += z
    tl.store(work + tl.program_id(0) * C + column, tl.sum(total, 0), mask=column < C)


@on_its_device
def error(
    r: Tensor, a: Tensor, kind: int, d: Tensor | None, t: Tensor | None, e: Tensor, sums: Tensor, u: Tensor | None
) -> None:
    """Into e and u, (..., C), and sums, (C)."""
    columns = a.shape[-1]
    rows, width = a.numel() // columns, min(COLUMNS, triton.next_power_of_2(columns))
    block, tiles = BYTES // a.element_size() // width, triton.cdiv(columns, width)
    programs = resident_warps(a.device, REGISTERS) // WARPS
    part = triton.cdiv(triton.cdiv(rows, block), max(1, programs // tiles)) * block
    parts = triton.cdiv(rows, part)
    work = torch.empty((parts, columns), dtype=torch.float32, device=a.device)
    _error_kernel[(parts, tiles)](r, a, d, t, e, u, work, rows, part, KIND=kind, C=columns, BR=block, BC=width)
    add_up(work, sums)
