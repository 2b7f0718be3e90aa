"""Rounding to bfloat16 at random, inside a kernel; `numerics/rounding.py` is the same in plain PyTorch."""

# mypy: disable-error-code="import-not-found, import-untyped"

import triton
import triton.language as tl


@triton.jit
def _noise(bits, position, seed):
    """32 hashed bits; bits and position: uint32."""
    h = bits * 0x9E3779B1 + position * 0x85EBCA6B + seed.to(tl.uint32) * 0xC2B2AE35
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0xD35A2D97
    return h ^ (h >> 15)


@triton.jit
def rounded_randomly(z, position, seed):
    """float32 z as bfloat16: up or down, each as likely as it is near."""
    bits = z.to(tl.uint32, bitcast=True)
    up = _noise(bits, position.to(tl.uint32), seed) >> 16
    rounded = ((bits + up) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.where((bits & 0x7F800000) == 0x7F800000, z.to(tl.bfloat16), rounded)
