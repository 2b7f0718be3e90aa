"""Batch norm's operations against plain PyTorch, the sums in float64."""

import os
import unittest.mock

import pytest
import torch
from interpreter import interpreted, needs_triton
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from threepass.compile.inductor import warm_up
from threepass.kernels import batch_norm

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
    assert batch_norm.fits(z, a, d) == INTERPRETED
    sums = expected(z, a, mean, rstd, d, w)
    close(torch.ops.threepass.moments(z, a, mean, rstd, d, w), sums)
    close(torch.ops.threepass.moments(z, a, mean, rstd, d), sums[:3])
    close(torch.ops.threepass.moments(z, a, mean.view(1, -1, 1, 1), rstd), sums[:2])
    close(torch.ops.threepass.moments(z.contiguous(), a, mean, rstd, d), sums[:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_behind_a_rectifier(dtype):
    z, a, d, _ = images(dtype, 3, 24, 11, 13)
    mean, rstd, w, numbers = torch.randn(24), torch.rand(24), torch.rand(24) + 0.5, torch.randn(2, 24)
    opened = torch.where(batch_norm.rectified(a, numbers) > 0, z, 0.0)
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
        found = batch_norm.error(z, a, norm.weight, mean, rstd, sums)
    torch.testing.assert_close(found, oracle)


def numbers_of(mean, rstd, weight, bias):
    scale = rstd if weight is None else rstd * weight.float()
    return torch.stack([scale, (0 if bias is None else bias.float()) - mean * scale])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [3, 300])
def test_norm_numbers(channels, dtype):
    mean, rstd = torch.randn(channels), torch.rand(channels) + 0.1
    weight, bias = (torch.randn(channels).to(dtype) for _ in range(2))
    for given in ((weight, bias), (weight, None), (None, bias), (None, None)):
        found = torch.ops.threepass.norm_numbers(mean, rstd, *given)
        torch.testing.assert_close(found, numbers_of(mean, rstd, *given))
    torch.library.opcheck(torch.ops.threepass.norm_numbers.default, (mean, rstd, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_sum(dtype):
    g, h, u = (torch.randn(2, 5, 7, 9).to(dtype).to(memory_format=torch.channels_last) for _ in range(3))
    u = u.relu()
    assert batch_norm.can_gate(g, h, u) == INTERPRETED
    assert not batch_norm.can_gate(g, h.contiguous(), u)
    for operands in ((g, h, u), (g, h.contiguous(), u)):
        torch.testing.assert_close(torch.ops.threepass.gated_sum(*operands), torch.where(u > 0, g + h, 0.0))
    torch.library.opcheck(torch.ops.threepass.gated_sum.default, (g, h, u))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_sum_by_a_norm(dtype):
    g, h, z = (torch.randn(2, 5, 7, 9).to(dtype).to(memory_format=torch.channels_last) for _ in range(3))
    numbers = torch.randn(2, 5)
    assert batch_norm.can_gate(g, h, z, numbers=True) == INTERPRETED
    assert not batch_norm.can_gate(g.contiguous(), h.contiguous(), z.contiguous(), numbers=True)
    opened = (z.float() * numbers[0].view(-1, 1, 1) + numbers[1].view(-1, 1, 1)).to(dtype) > 0
    found = torch.ops.threepass.gated_sum(g, h, z, numbers)
    torch.testing.assert_close(found, torch.where(opened, g + h, 0.0))


def test_warm_up_launches_on_the_tensors_device():
    """In the interpreter, which refuses a launch from a thread that has not made that device its current one."""
    g, h, u = (torch.randn(2, 5, 7, 9).to(memory_format=torch.channels_last) for _ in range(3))
    graph = make_fx(lambda *z: torch.ops.threepass.gated_sum(*z), tracing_mode="fake")(g, h, u).graph
    with unittest.mock.patch.object(batch_norm, "can_gate", wraps=batch_norm.can_gate) as asked:
        warm_up(graph)
    assert asked.called


@needs_triton
def test_kernels_in_the_interpreter():
    interpreted("test_batch_norm", "-k", "not interpreter")
