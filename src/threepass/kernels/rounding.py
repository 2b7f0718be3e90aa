"""Rounding to bfloat16 at random, in plain PyTorch bit for bit as in the kernels (`rounding_triton.py`)."""

import torch
from torch import Tensor

from ..precision import round_stochastically


def rounded_randomly(z: Tensor, position: Tensor, seed: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 z in a half format: up or down, each as likely as it is near.

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
