"""The small kernels against plain PyTorch."""

import os
import unittest.mock

import pytest
import torch
from interpreter import interpreted, needs_triton
from torch.fx.experimental.proxy_tensor import make_fx

from threepass.kernels import pointwise
from threepass.kernels.fuse import warm_up

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


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
    assert pointwise.can_gate(g, h, u) == INTERPRETED
    assert not pointwise.can_gate(g, h.contiguous(), u)
    for operands in ((g, h, u), (g, h.contiguous(), u)):
        torch.testing.assert_close(torch.ops.threepass.gated_sum(*operands), torch.where(u > 0, g + h, 0.0))
    torch.library.opcheck(torch.ops.threepass.gated_sum.default, (g, h, u))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_sum_by_a_norm(dtype):
    g, h, z = (torch.randn(2, 5, 7, 9).to(dtype).to(memory_format=torch.channels_last) for _ in range(3))
    numbers = torch.randn(2, 5)
    assert pointwise.can_gate(g, h, z, numbers=True) == INTERPRETED
    assert not pointwise.can_gate(g.contiguous(), h.contiguous(), z.contiguous(), numbers=True)
    opened = (z.float() * numbers[0].view(-1, 1, 1) + numbers[1].view(-1, 1, 1)).to(dtype) > 0
    found = torch.ops.threepass.gated_sum(g, h, z, numbers)
    torch.testing.assert_close(found, torch.where(opened, g + h, 0.0))


def test_warm_up_launches_on_the_tensors_device():
    """In the interpreter, which refuses a launch from a thread that has not made that device its current one."""
    g, h, u = (torch.randn(2, 5, 7, 9).to(memory_format=torch.channels_last) for _ in range(3))
    graph = make_fx(lambda *z: torch.ops.threepass.gated_sum(*z), tracing_mode="fake")(g, h, u).graph
    with unittest.mock.patch.object(pointwise, "can_gate", wraps=pointwise.can_gate) as asked:
        warm_up(graph)
    assert asked.called


@needs_triton
def test_kernels_in_the_interpreter():
    interpreted("test_kernels_pointwise", "-k", "not interpreter")
