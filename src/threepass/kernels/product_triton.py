"""Products in TF32 inside a kernel, whose operands are rounded to nearest.

Tensor cores read float32 as TF32 by cutting off its last 13 bits, so every product comes out smaller, by 3.5e-4 for
each operand on average. Through the three passes of plain-20 that adds up to 3 % of the third term.

Rounding inside the product is slow: operands that were copied to shared memory are read into registers, rounded and
written back, before the tensor cores can read them. Where operands are known to be rounded (the kernel that computed
them did it, in registers, before it stored them), `ROUNDED` leaves it out.
"""

# ruff: noqa: N803 -- constants are in capitals, as Triton's are
# mypy: disable-error-code="import-not-found, import-untyped"

import triton
import triton.language as tl
from triton import knobs


def padded(size: int) -> int:
    """The size of a product's block that holds so many numbers: a power of two, and no less than `tl.dot` takes."""
    return max(16, triton.next_power_of_2(size))


INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # its products are in float32, and it knows no assembler


@triton.jit
def product(x, y, acc, PRECISION: tl.constexpr, ROUNDED: tl.constexpr = False):
    """acc + x y in float32; PRECISION: what `tl.dot` does with operands in float32; ROUNDED: they are TF32 already."""
    return tl.dot(_operand(x, PRECISION, ROUNDED), _operand(y, PRECISION, ROUNDED), acc, input_precision=PRECISION)


@triton.jit
def _operand(x, PRECISION: tl.constexpr, ROUNDED: tl.constexpr):
    if PRECISION == "tf32" and x.dtype == tl.float32 and not ROUNDED and not INTERPRETED:
        x = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    return x


@triton.jit
def nearest_tf32(x):
    """float32 x rounded to TF32, ties away from zero; `numerics/rounding.py` is the same in plain PyTorch.

    The addition changes nothing but minus zero. Without it ptxas 12.8 removes the product whose sum is rounded: where
    integer operations, or `cvt.rna.tf32.f32`, are the first to read the sum of a pipelined product, ptxas takes it for
    the zeros that it began with (`tests/kernels/test_machine_code.py`).
    """
    x += 0.0
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
