"""Rounding: up or down at random with the right mean and without moving a generator, and to TF32 the nearest number."""

import pytest
import torch

from threepass.numerics.rounding import round_stochastically, round_to_tf32, seed_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_has_the_right_mean_and_moves_no_generator(dtype):
    rng = torch.get_rng_state()
    z = torch.linspace(-3, 3, 400_001) * (1 + 1e-4)
    z = torch.cat([z, z * 1e-6])
    rounded = round_stochastically(z, dtype)
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.equal(rounded, round_stochastically(z, dtype))
    ulp = torch.finfo(dtype).eps * z.abs().double().clamp_min(torch.finfo(dtype).smallest_normal)
    off = (rounded.double() - z.double()) / ulp
    assert off.abs().max() <= 1
    assert off.mean().abs() < 4 * off.std() / len(z) ** 0.5
    on_grid = torch.randn(1000).to(dtype)
    assert torch.equal(round_stochastically(on_grid.float(), dtype), on_grid)
    assert round_stochastically(torch.tensor([float("inf"), float("nan")]), dtype).isfinite().sum() == 0


def test_seeds_of_steps_and_places_do_not_collide():
    assert len({seed_of(step, place) for step in range(200) for place in range(200)}) > 0.9999 * 40_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_same_gradient_is_not_rounded_the_same_way_at_every_step(dtype):
    """Over steps the mean of one number's roundings is the number: no standing bias."""
    z = torch.rand(64, generator=torch.Generator().manual_seed(0)) + 1
    rounded = torch.stack([round_stochastically(z, dtype, seed_of(step, 0)).double() for step in range(2000)])
    spacing = torch.finfo(dtype).eps
    assert (rounded.mean(0) - z).abs().max() < 5 * 0.5 * spacing / 2000**0.5
    assert (rounded - z).abs().max() < spacing


def test_tf32_is_the_nearest_of_its_numbers():
    z = torch.cat([torch.randn(4000), torch.randn(4000) * 1e-30, torch.tensor([1 + 2**-11, -(1 + 2**-11), 0.0, -0.0])])
    rounded = round_to_tf32(z)
    assert torch.equal(rounded.view(torch.int32) & 0x1FFF, torch.zeros_like(z, dtype=torch.int32))
    mantissa, exponent = torch.frexp(z.double())  # 0.5 <= |mantissa| < 1, and TF32 has 11 bits of it
    nearest = torch.ldexp(torch.trunc(mantissa * 2**11 + 0.5 * mantissa.sign()) / 2**11, exponent)
    assert torch.equal(rounded.double(), nearest)
    assert torch.equal(torch.signbit(rounded), torch.signbit(z))
    not_finite = torch.tensor([0x7FFFFFFF, 0x7F800000, -0x800000], dtype=torch.int32).view(torch.float32)
    assert torch.equal(round_to_tf32(not_finite).view(torch.int32), not_finite.view(torch.int32))
