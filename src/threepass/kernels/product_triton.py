"""A matrix product inside a kernel, in TF32 with operands that are rounded to nearest.

Tensor cores read float32 as TF32 by cutting off its last 13 bits, so every product comes out smaller, by 3.5e-4 for
each operand on average. Through the three passes of plain-20 that adds up to 3 % of the third term.
"""

# ruff: noqa: N803 -- constants are in capitals, as Triton's are
# mypy: disable-error-code="import-not-found, import-untyped"

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # its products are in float32, and it knows no assembler


@triton.jit
def product(x, y, acc, PRECISION: tl.constexpr):
    """acc + x y in float32; PRECISION: what `tl.dot` does with operands in float32."""
    return tl.dot(_operand(x, PRECISION), _operand(y, PRECISION), acc, input_precision=PRECISION)


@triton.jit
def _operand(x, PRECISION: tl.constexpr):
    if PRECISION == "tf32" and x.dtype == tl.float32 and not INTERPRETED:
        x = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    return x
