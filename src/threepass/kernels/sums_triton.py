"""The second kernel of sums over rows: programs have added up a part each."""

# ruff: noqa: N803 -- constants are in capitals, as Triton's are
# mypy: disable-error-code="import-not-found, import-untyped"

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum_kernel(work, out, parts, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    """Sums [parts, C] over the parts, in a fixed order."""
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    acc = tl.zeros((BP, BC), tl.float32)
    for start in range(0, parts, BP):
        p = start + tl.arange(0, BP)[:, None]
        acc += tl.load(work + p * C + column[None, :], mask=(p < parts) & (column < C)[None, :], other=0.0)
    tl.store(out + column, tl.sum(acc, 0), mask=column < C)


def add_up(work: Tensor | None, out: Tensor | None) -> None:
    """work, (parts, ...), summed over the parts, into out."""
    if work is not None and out is not None:
        parts, columns = work.shape
        _sum_kernel[(triton.cdiv(columns, 8),)](work, out, parts, C=columns, BP=512, BC=8, num_warps=8)
