"""Batch norm's sums against plain PyTorch in float64."""

import os

import pytest
import torch
from interpreter import interpreted, needs_triton
from torch import nn

from threepass.kernels import moments, pointwise

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def images(dtype, *shape, count=4):
    return [torch.randn(shape).to(dtype).to(memory_format=torch.channels_last) for _ in range(count)]


def expected(z, a, mean, rstd, d, w):
    z, d, x_hat = z.double(), d.double(), (a.double() - mean.double().view(1, -1, 1, 1)) * rstd.view(1, -1, 1, 1)
    rows = [(product * z).sum((0, 2, 3)) for product in (torch.ones(()), x_hat, d)]
    return torch.stack([*rows, rows[-1] / w.double()])


def close(found, sums):
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), sums, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 5, 7, 9), (3, 16, 40, 40), (2, 130, 4, 4), (1, 1, 1, 1)])
def test_moments(shape, dtype):
    z, a, d, _ = images(dtype, *shape)
    mean, rstd, w = torch.randn(shape[1]), torch.rand(shape[1]) + 0.5, (torch.rand(shape[1]) + 0.5).to(dtype)
    assert moments.fits(z, a, d) == INTERPRETED
    sums = expected(z, a, mean, rstd, d, w)
    close(torch.ops.threepass.moments(z, a, mean, rstd, d, w), sums)
    close(torch.ops.threepass.moments(z, a, mean, rstd, d), sums[:3])
    close(torch.ops.threepass.moments(z, a, mean.view(1, -1, 1, 1), rstd), sums[:2])
    close(torch.ops.threepass.moments(z.contiguous(), a, mean, rstd, d), sums[:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_behind_a_rectifier(dtype):
    z, a, d, _ = images(dtype, 3, 24, 11, 13)
    mean, rstd, w, numbers = torch.randn(24), torch.rand(24), torch.rand(24) + 0.5, torch.randn(2, 24)
    opened = torch.where(pointwise.rectified(a, numbers) > 0, z, 0.0)
    sums = expected(opened, a, mean, rstd, d, w)
    close(torch.ops.threepass.moments(z, a, mean, rstd, d, w, numbers), sums)
    close(torch.ops.threepass.moments(z, a, mean, rstd, None, None, numbers), sums[:2])


def test_a_scale_of_zero_counts_as_a_tiny_one():
    z, a, d, _ = images(torch.float32, 2, 3, 4, 4)
    rows = torch.ops.threepass.moments(z, a, torch.zeros(3), torch.ones(3), d, torch.zeros(3))
    torch.testing.assert_close(rows[3], rows[2] / 1e-20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_a_norm", [False, True])
def test_gated_moments(by_a_norm, dtype):
    g, h, u, a = images(dtype, 3, 24, 11, 13)
    mean, rstd, numbers = torch.randn(24), torch.rand(24), torch.randn(2, 24) if by_a_norm else None
    z, sums = torch.ops.threepass.gated_moments(g, h, u, numbers, a, mean, rstd)
    torch.testing.assert_close(z, torch.ops.threepass.gated_sum(g, h, u, numbers), rtol=0, atol=0)
    close(sums, expected(z, a, mean, rstd, a, mean)[:2])


def test_the_compiler_may_take_them_as_they_are():
    g, h, u, a = images(torch.float32, 2, 5, 3, 3)
    mean, rstd, w = (torch.rand(5) + 0.5 for _ in range(3))
    torch.library.opcheck(torch.ops.threepass.moments.default, (g, a, mean, rstd, u, w))
    torch.library.opcheck(torch.ops.threepass.gated_moments.default, (g, h, u, None, a, mean, rstd))


def test_error_of_the_norms_input():
    a, z = (torch.randn(6, 5, 4, 4, dtype=torch.float64) for _ in range(2))
    norm = nn.BatchNorm2d(5).double()
    nn.init.normal_(norm.weight)
    a.requires_grad_()
    (oracle,) = torch.autograd.grad(norm(a), a, z)
    with torch.no_grad():
        var, mean = torch.var_mean(a, (0, 2, 3), correction=0)
        rstd = (var + norm.eps).rsqrt()
        sums = torch.ops.threepass.moments(z, a, mean, rstd)
        found = moments.error(z, a, norm.weight, mean, rstd, sums)
    torch.testing.assert_close(found, oracle)


@needs_triton
def test_kernels_in_the_interpreter():
    interpreted("test_kernels_moments", "-k", "not interpreter")
