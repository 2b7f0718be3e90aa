"""Rounding in plain PyTorch: to TF32, and stochastic, up or down at random, so that the mean over seeds is exact.

The random bits are a hash of the value, its position and a seed: no generator moves, and the same seed gives the same
result. `rounded_randomly` is bit for bit what the Triton kernels compute (`kernels/rounding_triton.py`).
"""

import torch
from torch import Tensor

from .packed import is_nhwc


def round_stochastically(z: Tensor, dtype: torch.dtype, seed: Tensor | int = 0) -> Tensor:
    """z in a half-precision dtype: to the neighbour above or below, each as likely as it is near; seed: 32 bits."""
    z = z.float()
    if dtype == torch.bfloat16:  # float32 without its last 16 bits: a random number below 2^16 carries into the rest
        bits = z.view(torch.int32)
        up = ((bits + ((_hash(z, seed) >> 16) & 0xFFFF)) & -0x10000).view(torch.float32)
        return torch.where(bits & 0x7F800000 == 0x7F800000, z, up).to(dtype)  # infinite, or not a number
    info = torch.finfo(dtype)
    step = torch.ldexp(torch.full_like(z, info.eps), torch.frexp(z).exponent - 1).clamp_min(
        info.smallest_normal * info.eps
    )
    below = torch.floor(z / step)
    rounded = (below + (_noise(z, seed) < z / step - below)) * step
    return torch.where(torch.isfinite(z), rounded, z).to(dtype)


def round_to_tf32(z: Tensor) -> Tensor:
    """float32 z rounded to the nearest number of TF32's 10 bits, ties away from zero; NaN stays what it is."""
    rounded = ((z.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return torch.where(torch.isnan(z), z, rounded)


def seed_of(step: int, index: int) -> int:
    """A seed for the rounding of one tensor at one step: 32 bits, as a signed number."""
    h = (step * 0x9E3779B1 + (index + 1) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    h ^= h >> 15
    return h - 2**32 if h >= 2**31 else h


def _noise(z: Tensor, seed: Tensor | int) -> Tensor:
    """Uniform in [0, 1): 24 bits of the hash."""
    return ((_hash(z, seed) >> 8) & 0xFFFFFF).to(torch.float32) / 2**24


def _hash(z: Tensor, seed: Tensor | int) -> Tensor:
    """A 32-bit hash of each value's bits, its position in memory and the seed; the high bits are the most random."""
    h = ((z.view(torch.int32) ^ _positions(z)) + seed) * 0x7FEB352D  # int32 products wrap, shifts fill with the sign
    return (h ^ ((h >> 15) & 0x1FFFF)) * -2073254261


def _positions(z: Tensor) -> Tensor:
    """Along memory where z is contiguous or channels_last: there a kernel has them without divisions."""
    positions = torch.arange(z.numel(), device=z.device).to(torch.int32)
    if is_nhwc(z):
        images, channels, height, width = z.shape
        return positions.view(images, height, width, channels).permute(0, 3, 1, 2)
    return positions.view(z.shape)


def rounded_randomly(z: Tensor, position: Tensor, seed: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 z in a half-precision dtype: up or down, each as likely as it is near.

    The random bits are a hash of z's own bits, its position and the seed.
    """
    if dtype != torch.bfloat16:
        return round_stochastically(z, dtype, seed)
    bits = z.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    h = (bits * 0x9E3779B1 + position * 0x85EBCA6B + seed.to(torch.int64) * 0xC2B2AE35) & 0xFFFFFFFF
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0xD35A2D97) & 0xFFFFFFFF
    up = (h ^ (h >> 15)) >> 16
    rounded = ((bits + up) & 0xFFFF0000).to(torch.int32).view(torch.float32)
    return torch.where(torch.isfinite(z), rounded, z).to(dtype)
