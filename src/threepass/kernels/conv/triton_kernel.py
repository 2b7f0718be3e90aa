"""The Triton kernels of this package's operations: 3 x 3 convolutions of few channels as implicit matrix products.

Memory is NHWC. A program owns a tile of output pixels, in flattened (n, y, x) order, and all output channels. The
products run along k = (3 ky + kx) C + c, the memory order of a patch's rows; accumulation is in float32. Sizes, strides
of the weights and block sizes are compile-time constants: few shapes occur in a net, and divisions by constants are
cheap. Offsets are 32-bit (`conv.fits` sees to that).
"""

# ruff: noqa: N803 -- constants are in capitals, as Triton's are
# mypy: disable-error-code="import-not-found, import-untyped"

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics.precision import tf32_convolutions
from ..launch import multiprocessors, on_its_device
from ..product_triton import nearest_tf32, padded, product
from ..rounding_triton import rounded_randomly


@dataclass(frozen=True)
class Blocks:
    """How a product is cut: tiles of `pixels` x `k`.

    Weight gradients have `tiles` of k in each part of the pixels, and `splits` parts for each multiprocessor.
    """

    pixels: int
    k: int
    warps: int = 4
    stages: int = 1
    tiles: int = 1
    splits: float = 1.0


# Each is the fastest of a few that were timed on an H200 by `benchmarks/kernels_conv.py` for the layers of plain-20.
# By bytes of a number and the channels that the product sums over, padded to a power of two. The tiles of all stages
# take at most 96 KiB of shared memory, and every GPU that `runs_on` accepts has 99 KiB at least.
FORWARD = {
    (4, 4): Blocks(128, 32), (4, 16): Blocks(256, 16, 8, 3), (4, 32): Blocks(128, 32, 4, 3),
    (4, 64): Blocks(64, 64, 8, 3),
    (2, 4): Blocks(256, 32), (2, 16): Blocks(128, 16, 4, 3), (2, 32): Blocks(128, 32, 8, 4),
    (2, 64): Blocks(64, 64, 4, 3),
}  # fmt: skip
INPUT = FORWARD | {(4, 32): Blocks(64, 32, 2), (4, 64): Blocks(32, 64, 4, 3)}
# The same, for the error of an image, which has few channels.
THIN_INPUT = INPUT | {(2, 64): Blocks(128, 64, 4, 3), (4, 64): Blocks(128, 64, 4, 2)}

# By bytes and the input channels: tiles x k covers the 9 C rows of the gradient, or a part of them, and the grid the
# rest.
WEIGHT = {
    (4, 4): Blocks(128, 32, splits=2), (4, 16): Blocks(64, 16, tiles=3, splits=1),
    (4, 32): Blocks(64, 32, tiles=3, splits=2 / 3), (4, 64): Blocks(64, 64, tiles=3, splits=1 / 3),
    (2, 4): Blocks(64, 32, splits=2), (2, 16): Blocks(64, 64, 4, 2, splits=1),
    (2, 32): Blocks(64, 64, 4, 2, splits=1), (2, 64): Blocks(64, 64, 4, 2, splits=1 / 3),
}  # fmt: skip
NARROW_WEIGHT = Blocks(64, 64, tiles=3, splits=2)
SCRATCH = 5 * 2**19  # for the parts' sums, times the bytes of a number: with few images, the peak of a step's memory


def blocks_for(table: dict[tuple[int, int], Blocks], z: Tensor) -> Blocks:
    return table[z.element_size(), 4 if z.shape[1] < 16 else triton.next_power_of_2(z.shape[1])]


def blocks_for_weight(d: Tensor, m: Tensor) -> Blocks:
    """With 16 output channels in a half dtype Triton's pipeline (two stages) has a race: some runs differ in bits."""
    narrow = d.element_size() == 2 and d.shape[1] <= 16 <= m.shape[1]
    return NARROW_WEIGHT if narrow else blocks_for(WEIGHT, m)


@triton.jit
def _taps(k0, line, C: tl.constexpr, BK: tl.constexpr):
    """Tap, channel and "there is one" of k0 + line, where line counts to BK."""
    if C % BK == 0:  # a single tap: what depends on it is a scalar
        return k0 // C, tl.multiple_of(k0 % C, BK) + line, k0 < 9 * C
    else:
        return (k0 + line) // C, (k0 + line) % C, k0 + line < 9 * C


@triton.jit
def _patches(a, p, pixels, k0, C: tl.constexpr, BK: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
             OH: tl.constexpr, OW: tl.constexpr, STRIDE: tl.constexpr):  # fmt: skip
    """[p, BK]: a[n, S y - 1 + ky, S x - 1 + kx, c] for k0 <= k < k0 + BK; 0 outside the image."""
    tap, c, known = _taps(k0, tl.arange(0, BK)[None, :], C, BK)
    y = (p // OW % OH * STRIDE - 1)[:, None] + tap // 3
    x = (p % OW * STRIDE - 1)[:, None] + tap % 3
    inside = (p < pixels)[:, None] & known & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    return tl.load(a + (((p // (OH * OW))[:, None] * H + y) * W + x) * C + c, mask=inside, other=0.0)


@triton.jit
def _weights(w, k0, C: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
             SC: tl.constexpr, SN: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr):  # fmt: skip
    """[BK, BN]: the weight from channel c to channel n at tap (ky, kx)."""
    tap, c, known = _taps(k0, tl.arange(0, BK)[:, None], C, BK)
    n = tl.arange(0, BN)[None, :]
    return tl.load(w + (tap // 3 * SY + tap % 3 * SX) + c * SC + n * SN, mask=known & (n < N), other=0.0)


@triton.jit
def _product(a, w, p, pixels, C: tl.constexpr, N: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr,
             OW: tl.constexpr, STRIDE: tl.constexpr, SC: tl.constexpr, SN: tl.constexpr, SY: tl.constexpr,
             SX: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
             PRECISION: tl.constexpr, ROUNDED: tl.constexpr):  # fmt: skip
    """[p, BN] in float32: the correlation of a with w at the pixels p."""
    z = tl.zeros((BP, BN), tl.float32)
    for k in range(0, 9 * C, BK):
        patches = _patches(a, p, pixels, k, C, BK, H, W, OH, OW, STRIDE)
        z = product(patches, _weights(w, k, C, N, BK, BN, SC, SN, SY, SX), z, PRECISION, ROUNDED)
    return z


@triton.jit
def _closed(d):
    """Whether d is minus zero, the mark of a closed ReLU."""
    if d.dtype == tl.float32:
        return d.to(tl.int32, bitcast=True) == -2147483648
    else:
        return d.to(tl.int16, bitcast=True) == -32768


@triton.jit
def _forward_kernel(a, w, bias, gate, relu_output, out, pixels, RELU: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
                    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, STRIDE: tl.constexpr,
                    SC: tl.constexpr, SN: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, BP: tl.constexpr,
                    BK: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, ROUNDED: tl.constexpr,
                    ROUND: tl.constexpr):  # fmt: skip
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    n = tl.arange(0, BN)[None, :]
    z = _product(a, w, p, pixels, C, N, H, W, OH, OW, STRIDE, SC, SN, SY, SX, BP, BK, BN, PRECISION, ROUNDED)
    here = p[:, None] * N + n
    inside = (p < pixels)[:, None] & (n < N)
    if bias is not None:
        z += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if RELU:
        z = tl.where(z <= 0, 0.0, z)  # and NaN stays
    if gate is not None:
        z = tl.where(_closed(tl.load(gate + here, mask=inside, other=0.0)), 0.0, z)
    if relu_output is not None:
        z = tl.where(tl.load(relu_output + here, mask=inside, other=0.0) > 0, z, 0.0)
    if ROUND:
        z = nearest_tf32(z)
    tl.store(out + here, z.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _tangent_kernel(t, w, a, ratio, t_out, mix, pixels, seed, C: tl.constexpr, N: tl.constexpr, H: tl.constexpr,
                    W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, STRIDE: tl.constexpr, SC: tl.constexpr,
                    SN: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
                    BN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    n = tl.arange(0, BN)[None, :]
    z = _product(t, w, p, pixels, C, N, H, W, OH, OW, STRIDE, SC, SN, SY, SX, BP, BK, BN, PRECISION, False)
    here = p[:, None] * N + n
    inside = (p < pixels)[:, None] & (n < N)
    u = tl.load(a + here, mask=inside, other=0.0).to(tl.float32)
    z = tl.where(u > 0, z, 0.0)
    m = u + tl.load(ratio) * z
    tl.store(t_out + here, z.to(t_out.dtype.element_ty), mask=inside)
    if mix.dtype.element_ty == tl.bfloat16:
        tl.store(mix + here, rounded_randomly(m, here, tl.load(seed)), mask=inside)
    else:
        tl.store(mix + here, m, mask=inside)


@triton.jit
def _store_error(g, to, relu_output, here, inside, ROUND: tl.constexpr):
    """Stores g where relu_output > 0, its zeros as plus zero, and minus zero elsewhere."""
    g = g.to(to.dtype.element_ty).to(tl.float32)  # what rounds to zero is zero
    if ROUND:
        g = nearest_tf32(g)
    if relu_output is not None:
        g = tl.where(g == 0, 0.0, g)
        mark = tl.full((1, 1), -2147483648, tl.int32).to(tl.float32, bitcast=True)  # Triton reads a literal -0.0 as 0.0
        g = tl.where(tl.load(relu_output + here, mask=inside, other=0.0) > 0, g, mark)
    tl.store(to + here, g.to(to.dtype.element_ty), mask=inside)


@triton.jit
def _input_kernel(d, w, relu_output, g, pixels, C: tl.constexpr, N: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
                  SC: tl.constexpr, SN: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, BP: tl.constexpr,
                  BK: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, ROUNDED: tl.constexpr,
                  ROUND: tl.constexpr):  # fmt: skip
    """Stride 1: the correlation of d with the weights turned around."""
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    n = tl.arange(0, BN)[None, :]
    turned = w + 2 * (SY + SX)
    z = _product(d, turned, p, pixels, C, N, H, W, H, W, 1, SC, SN, -SY, -SX, BP, BK, BN, PRECISION, ROUNDED)
    _store_error(z, g, relu_output, p[:, None] * N + n, (p < pixels)[:, None] & (n < N), ROUND)


@triton.jit
def _input_kernel_2(d, w, relu_output, g, pixels, C: tl.constexpr, N: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
                    OH: tl.constexpr, OW: tl.constexpr, SC: tl.constexpr, SN: tl.constexpr, SY: tl.constexpr,
                    SX: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
                    PRECISION: tl.constexpr, ROUNDED: tl.constexpr, ROUND: tl.constexpr):  # fmt: skip
    """Stride 2: the pixels (2 i + py, 2 j + px) get 1 or 2 taps a direction, so each of the four parities has its own
    programs. An even row y = 2 i reads row i of d at ky = 1; an odd one rows i + 1 and i at ky = 0 and 2."""
    py = tl.program_id(1) // 2
    px = tl.program_id(1) % 2
    depth = (1 + py) * (1 + px) * C
    p = tl.program_id(0) * BP + tl.arange(0, BP)  # of the (n, i, j), which are the pixels of d
    n = tl.arange(0, BN)[None, :]
    b = (p // (OH * OW))[:, None]
    i = (p // OW % OH)[:, None]
    j = (p % OW)[:, None]
    z = tl.zeros((BP, BN), tl.float32)
    for k0 in range(0, depth, BK):
        k = k0 + tl.arange(0, BK)[None, :]
        tap = k0 // C if C % BK == 0 else k // C  # of 1 + py rows, 1 + px columns
        y = i + py * (1 - (tap >> px))
        x = j + px * (1 - (tap & px))
        inside = (p < pixels)[:, None] & (y < OH) & (x < OW) & (k < depth)
        e = tl.load(d + ((b * OH + y) * OW + x) * C + k % C, mask=inside, other=0.0)
        k = k0 + tl.arange(0, BK)[:, None]
        ky = 1 - py + 2 * (k // C >> px)
        kx = 1 - px + 2 * (k // C & px)
        v = tl.load(w + k % C * SC + n * SN + ky * SY + kx * SX, mask=(k < depth) & (n < N), other=0.0)
        z = product(e, v, z, PRECISION, ROUNDED)
    y = 2 * i + py
    x = 2 * j + px
    inside = (p < pixels)[:, None] & (y < H) & (x < W) & (n < N)
    _store_error(z, g, relu_output, ((b * H + y) * W + x) * N + n, inside, ROUND)


@triton.jit
def _store_rows(work, acc, k0, C: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    k = k0 + tl.arange(0, BK)[:, None]
    n = tl.arange(0, BN)[None, :]
    tl.store(work + k * N + n, acc, mask=(k < 9 * C) & (n < N))


@triton.jit
def _weight_kernel(d, m, work, pixels, part, C: tl.constexpr, N: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
                   OH: tl.constexpr, OW: tl.constexpr, STRIDE: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
                   BN: tl.constexpr, TILES: tl.constexpr, PRECISION: tl.constexpr,
                   ROUNDED: tl.constexpr):  # fmt: skip
    """Of `part` pixels: rows k of the weight gradient, [9 C, N], and as one row more the sum of d."""
    split = tl.program_id(0)
    k0 = tl.program_id(1) * (TILES * BK)
    n = tl.arange(0, BN)[None, :]
    acc0 = tl.zeros((BK, BN), tl.float32)
    acc1 = tl.zeros((BK, BN), tl.float32)
    acc2 = tl.zeros((BK, BN), tl.float32)
    total = tl.zeros((BP, BN), tl.float32)
    for start in range(split * part, min(pixels, (split + 1) * part), BP):
        p = start + tl.arange(0, BP)
        e = tl.load(d + p[:, None] * N + n, mask=(p < pixels)[:, None] & (n < N), other=0.0)
        total += e.to(tl.float32)
        s = _patches(m, p, pixels, k0, C, BK, H, W, OH, OW, STRIDE)
        acc0 = product(tl.trans(s), e, acc0, PRECISION, ROUNDED)
        if TILES == 3:
            s = _patches(m, p, pixels, k0 + BK, C, BK, H, W, OH, OW, STRIDE)
            acc1 = product(tl.trans(s), e, acc1, PRECISION, ROUNDED)
            s = _patches(m, p, pixels, k0 + 2 * BK, C, BK, H, W, OH, OW, STRIDE)
            acc2 = product(tl.trans(s), e, acc2, PRECISION, ROUNDED)
    work += split * ((9 * C + 1) * N)
    _store_rows(work, acc0, k0, C, N, BK, BN)
    if TILES == 3:
        _store_rows(work, acc1, k0 + BK, C, N, BK, BN)
        _store_rows(work, acc2, k0 + 2 * BK, C, N, BK, BN)
    if k0 == 0:
        column = tl.arange(0, BN)
        tl.store(work + 9 * C * N + column, tl.sum(total, 0), mask=column < N)


@triton.jit
def _sum_kernel(work, g_w, g_b, splits, C: tl.constexpr, N: tl.constexpr, SC: tl.constexpr, SN: tl.constexpr,
                ST: tl.constexpr, BS: tl.constexpr, BE: tl.constexpr):  # fmt: skip
    """Sums [splits, 9 C + 1, N] over the splits, in a fixed order, into the weight's layout and the bias's."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    inside = e < (9 * C + 1) * N
    acc = tl.zeros((BS, BE), tl.float32)
    for start in range(0, splits, BS):
        s = start + tl.arange(0, BS)[:, None]
        acc += tl.load(work + s * ((9 * C + 1) * N) + e[None, :], mask=(s < splits) & inside[None, :], other=0.0)
    total = tl.sum(acc, 0)
    k = e // N
    tl.store(g_w + k % C * SC + e % N * SN + k // C * ST, total, mask=k < 9 * C)
    tl.store(g_b + e % N, total, mask=inside & (k == 9 * C))


def _precision() -> str:
    return "tf32" if tf32_convolutions() else "ieee"


def _of_rounding(rounded: bool, round_result: bool, z: Tensor) -> dict[str, bool]:
    """The constants that say what is rounded to TF32: only float32 is, and only where TF32 is allowed."""
    tf32 = z.dtype == torch.float32 and tf32_convolutions()
    return {"ROUNDED": tf32 and rounded, "ROUND": tf32 and round_result}


def _nhwc(z: Tensor | None) -> Tensor | None:
    return None if z is None else z.contiguous(memory_format=torch.channels_last)


def _empty(like: Tensor, channels: int, size: tuple[int, int]) -> Tensor:
    shape = (like.shape[0], channels, *size)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _of_forward(a: Tensor, w: Tensor, out: Tensor, stride: int, blocks: Blocks) -> dict[str, Any]:
    """The constants of a kernel that goes forward."""
    return {
        "C": a.shape[1], "N": w.shape[0], "H": a.shape[2], "W": a.shape[3], "OH": out.shape[2], "OW": out.shape[3],
        "STRIDE": stride, "SC": w.stride(1), "SN": w.stride(0), "SY": w.stride(2), "SX": w.stride(3),
        "BP": blocks.pixels, "BK": blocks.k, "BN": padded(w.shape[0]), "PRECISION": _precision(),
        "num_warps": blocks.warps, "num_stages": blocks.stages,
    }  # fmt: skip


def _forward_output(a: Tensor, w: Tensor, stride: int) -> tuple[Tensor, int]:
    """An empty output, and its pixels."""
    height, width = ((s - 1) // stride + 1 for s in a.shape[2:])
    return _empty(a, w.shape[0], (height, width)), a.shape[0] * height * width


@on_its_device
def forward(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: int,
    relu: bool,
    gate: Tensor | None = None,
    relu_output: Tensor | None = None,
    rounded: bool = False,
    round_result: bool = False,
    blocks: Blocks | None = None,
) -> Tensor:
    blocks = blocks or blocks_for(FORWARD, a)
    bias = None if bias is None else bias.contiguous()
    out, pixels = _forward_output(a, w, stride)
    _forward_kernel[(triton.cdiv(pixels, blocks.pixels),)](
        a,
        w,
        bias,
        _nhwc(gate),
        _nhwc(relu_output),
        out,
        pixels,
        RELU=relu,
        **_of_forward(a, w, out, stride, blocks),
        **_of_rounding(rounded, round_result, a),
    )
    return out


@on_its_device
def forward_tangent(
    t: Tensor, w: Tensor, stride: int, a: Tensor, ratio: Tensor, seed: Tensor, blocks: Blocks | None = None
) -> tuple[Tensor, Tensor]:
    blocks = blocks or blocks_for(FORWARD, t)
    t_out, pixels = _forward_output(t, w, stride)
    mix = torch.empty_like(t_out)
    _tangent_kernel[(triton.cdiv(pixels, blocks.pixels),)](
        t, w, _nhwc(a), ratio, t_out, mix, pixels, seed, **_of_forward(t, w, t_out, stride, blocks)
    )
    return t_out, mix


@on_its_device
def backward_input(
    d: Tensor,
    w: Tensor,
    stride: int,
    size: tuple[int, int],
    relu_output: Tensor | None,
    rounded: bool = False,
    round_result: bool = False,
    blocks: Blocks | None = None,
) -> Tensor:
    blocks = blocks or blocks_for(THIN_INPUT if w.shape[1] < 16 else INPUT, d)
    g = _empty(d, w.shape[1], size)
    constants = {
        "C": w.shape[0], "N": w.shape[1], "H": size[0], "W": size[1], "SC": w.stride(0), "SN": w.stride(1),
        "SY": w.stride(2), "SX": w.stride(3), "BP": blocks.pixels, "BK": blocks.k, "BN": padded(w.shape[1]),
        "PRECISION": _precision(), "num_warps": blocks.warps, "num_stages": blocks.stages,
    } | _of_rounding(rounded, round_result, d)  # fmt: skip
    pixels = d.shape[0] * d.shape[2] * d.shape[3]
    tiles = triton.cdiv(pixels, blocks.pixels)
    if stride == 1:
        _input_kernel[(tiles,)](d, w, _nhwc(relu_output), g, pixels, **constants)
    else:
        constants |= {"OH": d.shape[2], "OW": d.shape[3]}
        _input_kernel_2[(tiles, 4)](d, w, _nhwc(relu_output), g, pixels, **constants)
    return g


@on_its_device
def backward_weight(
    d: Tensor, m: Tensor, stride: int, channels_last: bool, rounded: bool = False, blocks: Blocks | None = None
) -> tuple[Tensor, Tensor]:
    blocks = blocks or blocks_for_weight(d, m)
    (batch, o, height, width), i = d.shape, m.shape[1]
    pixels = batch * height * width
    rows = 9 * i + 1  # the last is the bias's
    splits = max(1, min(round(blocks.splits * multiprocessors(d.device)), SCRATCH * d.element_size() // (4 * rows * o)))
    part = triton.cdiv(triton.cdiv(pixels, splits), blocks.pixels) * blocks.pixels
    splits = triton.cdiv(pixels, part)
    work = torch.empty((splits, rows, o), dtype=torch.float32, device=d.device)
    _weight_kernel[(splits, triton.cdiv(9 * i, blocks.k * blocks.tiles))](
        d, m, work, pixels, part, C=i, N=o, H=m.shape[2], W=m.shape[3], OH=height, OW=width, STRIDE=stride,
        BP=blocks.pixels, BK=blocks.k, BN=padded(o), TILES=blocks.tiles, PRECISION=_precision(),
        ROUNDED=_of_rounding(rounded, False, d)["ROUNDED"], num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    layout = torch.channels_last if channels_last else torch.contiguous_format
    g_w = torch.empty((o, i, 3, 3), dtype=torch.float32, device=d.device, memory_format=layout)
    g_b = torch.empty((o,), dtype=torch.float32, device=d.device)
    _sum_kernel[(triton.cdiv(rows * o, 32),)](
        work, g_w, g_b, splits, C=i, N=o, SC=g_w.stride(1), SN=g_w.stride(0), ST=g_w.stride(3), BS=64, BE=32
    )
    return g_w, g_b
