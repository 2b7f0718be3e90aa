"""The 3 x 3 convolutions with their neighbours: plain PyTorch against autograd, the kernels against plain PyTorch.

The kernels run in Triton's interpreter, in a process of its own.
"""

import functools

import pytest
import torch
from interpreter import interpreted, needs_triton
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from threepass.kernels import conv
from threepass.numerics.rounding import round_to_tf32

# batch, channels in and out, height, width, stride
CASES = [(2, 3, 16, 6, 5, 1), (1, 16, 5, 7, 8, 2), (2, 32, 16, 4, 4, 1), (3, 17, 33, 5, 3, 2)]
RATIO = torch.tensor(0.03)
SEED = torch.tensor(5, dtype=torch.int32)


def signals(case, dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a, W, b, and d with the marks of closed ReLUs; channels last."""
    n, i, o, height, width, stride = case
    torch.manual_seed(sum(case))
    a = torch.randn(n, i, height, width).to(dtype, memory_format=torch.channels_last)
    w = torch.randn(o, i, 3, 3).to(dtype, memory_format=torch.channels_last)
    d = torch.randn(n, o, (height - 1) // stride + 1, (width - 1) // stride + 1)
    d = torch.where(torch.rand_like(d) < 0.3, -0.0, d)
    return a, w, torch.randn(o).to(dtype), d.to(dtype, memory_format=torch.channels_last)


def minus_zero(z: Tensor) -> Tensor:
    return (z == 0) & torch.signbit(z)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_against_autograd(case):
    a, w, b, d = signals(case)
    stride = case[-1]
    leaves = [z.requires_grad_() for z in (a, w, b)]
    u = F.conv2d(a, w, b, stride, 1)
    g_a, g_w, g_b = torch.autograd.grad(u, leaves, d)
    a, w, b, u = (z.detach() for z in (a, w, b, u))

    torch.testing.assert_close(conv.forward(a, w, b, stride, False, None), u)
    torch.testing.assert_close(conv.forward(a, w, b, stride, True, None), u.relu())
    torch.testing.assert_close(conv.forward(a, w, b, stride, False, d), u * ~minus_zero(d))
    torch.testing.assert_close(conv.forward(a, w, b, stride, False, relu_output=d), u * (d > 0))
    torch.testing.assert_close(conv.backward_input(d, w, stride, a.shape[2:], None), g_a)
    for channels_last in (False, True):
        grads = conv.backward_weight(d, a, stride, channels_last)
        torch.testing.assert_close(grads, (g_w, g_b))
        assert grads[0].is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    t, mix = conv.forward_tangent(a, w, stride, u.relu(), RATIO.double(), SEED)
    torch.testing.assert_close(t, F.conv2d(a, w, None, stride, 1) * (u > 0))
    torch.testing.assert_close(mix, u.relu() + 0.03 * t, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_minus_zero_marks_the_closed_and_them_alone(dtype):
    a, w, _, d = signals(CASES[0], dtype)
    w[:8] = 0  # a zero error through an open ReLU
    d[:, 8:] = 0
    g = conv.backward_input(d, w, 1, a.shape[2:], a)
    assert (g == 0).all()
    assert torch.equal(minus_zero(g), a <= 0)
    kept = conv.forward(a, w + 1, None, 1, False, d)
    assert torch.equal(kept == 0, minus_zero(d))  # the zeros that are no marks let through


def test_random_rounding_is_unbiased_and_keeps_what_is_not_finite():
    z = torch.linspace(-4, 4, 64)[:, None].expand(64, 40000) * (1 + 1e-3)
    rounded = conv._rounded_randomly(z.reshape(64, 100, 20, 20), SEED, torch.bfloat16).float().view(64, -1)
    step = z.abs() * 2**-7
    assert ((rounded - z).abs() <= step).all()
    assert ((rounded - z).mean(1).abs() < 4 * step[:, 0] / 40000**0.5).all()
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0]).view(1, 4, 1, 1)
    torch.testing.assert_close(
        conv._rounded_randomly(odd, SEED, torch.bfloat16), odd.to(torch.bfloat16), equal_nan=True, rtol=0, atol=0
    )


def test_the_seed_moves_the_rounding_and_nothing_else_does():
    a, w, _, d = signals(CASES[0], torch.bfloat16)
    first, again, other = (
        conv.forward_tangent(a, w, 1, d.abs(), RATIO, torch.tensor(seed, dtype=torch.int32))[1] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_operations_can_be_traced():
    a, w, b, d = signals(CASES[0], torch.float32)
    calls = [
        (torch.ops.threepass.conv3x3.default, (a, w, b, 1, True, d, d.abs())),
        (torch.ops.threepass.conv3x3_input.default, (d, w, 1, a.shape[2:], a)),
        (torch.ops.threepass.conv3x3_weight.default, (d, a, 1, True)),
        (torch.ops.threepass.conv3x3_tangent.default, (a, w, 1, d, RATIO, SEED)),
    ]
    for op, args in calls:
        torch.library.opcheck(op, args)
        graph = make_fx(lambda *z, op=op: op(*z), tracing_mode="fake")(*args).graph
        assert op in [node.target for node in graph.nodes]


@needs_triton
def test_kernels_in_the_interpreter():
    interpreted("test_conv", "check_kernels")


def check_kernels() -> None:
    """Kernels against plain PyTorch in float64; runs under TRITON_INTERPRET=1."""
    for case in CASES:
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
            _check_case(case, dtype, tolerance)
    _check_rounding()
    _check_results_in_tf32()
    _check_shared_memory()


def _check_shared_memory() -> None:
    """A GPU of compute capability 8.6 has the least of those that the kernels run on: 99 KiB for a block."""
    from threepass.kernels.conv import triton_kernel as conv_triton

    for table in (conv_triton.FORWARD, conv_triton.INPUT, conv_triton.THIN_INPUT):
        for (size, _), b in table.items():
            assert b.stages * b.k * (b.pixels + conv.FEW) * size <= 96 * 2**10
    for size, b in ((4, conv_triton.NARROW_WEIGHT), *((size, b) for (size, _), b in conv_triton.WEIGHT.items())):
        assert b.stages * b.pixels * (b.tiles * b.k + conv.FEW) * size <= 96 * 2**10


def _check_case(case, dtype: torch.dtype, tolerance: float) -> None:
    a, w, b, d = signals(case, dtype)
    *_, height, width, stride = case
    assert conv.fits(stride, a, weight=w.shape)
    assert not conv.fits(stride, a.double(), weight=w.shape)
    calls = [
        (conv.forward, (a, w, b.float(), stride, True, None)),
        (conv.forward, (a, w.contiguous(), None, stride, False, d)),
        (conv.forward, (a, w, None, stride, False, None, d)),
        (conv.backward_input, (d, w, stride, (height, width), None)),
        (conv.backward_input, (d, w.contiguous(), stride, (height, width), a)),
        (conv.backward_weight, (d, a, stride, False)),
        (conv.backward_weight, (d, a, stride, True)),
        (conv.forward_tangent, (a, w, stride, d, RATIO, SEED)),
    ]
    for function, args in calls:
        got = function(*args)
        expected = function(*(z.double() if isinstance(z, Tensor) else z for z in args))
        for z, reference in zip(*map(_as_tuple, (got, expected)), strict=True):
            assert z.shape == reference.shape
            error = (z.double() - reference).norm() / reference.norm()
            assert error < tolerance, (function, case, dtype, error)
    marked = conv.backward_input(d, w, stride, (height, width), a)
    assert torch.equal(minus_zero(marked), a <= 0)


def _check_rounding() -> None:
    """With the identity for a weight the sums are the same, so the kernel rounds as plain PyTorch, bit for bit."""
    t = torch.randn(2, 16, 4, 4).to(torch.bfloat16, memory_format=torch.channels_last)
    a = torch.randn(2, 16, 4, 4).abs().to(torch.bfloat16, memory_format=torch.channels_last)
    a[0, 0, 0, 0], a[1, 3, 2, 1] = torch.inf, torch.nan
    w = torch.zeros(16, 16, 3, 3, dtype=torch.bfloat16)
    w[:, :, 1, 1] = torch.eye(16)
    _, mix = conv.forward_tangent(t, w, 1, a, RATIO, SEED)
    expected = conv._rounded_randomly(a.float() + RATIO * torch.where(a > 0, t, 0).float(), SEED, torch.bfloat16)
    torch.testing.assert_close(mix, expected, rtol=0, atol=0, equal_nan=True)


def _check_results_in_tf32() -> None:
    """A result that is rounded to TF32 is the other one, rounded; the marks of closed ReLUs stay."""
    for case in CASES:
        a, w, b, d = signals(case, torch.float32)
        *_, height, width, stride = case
        for relu_output in (None, a):
            call = functools.partial(conv.backward_input, d, w, stride, (height, width), relu_output)
            assert torch.equal(call(round_result=True), round_to_tf32(call()))
            assert relu_output is None or torch.equal(minus_zero(call(round_result=True)), a <= 0)
        call = functools.partial(conv.forward, a, w, b, stride, True, d)
        assert torch.equal(call(round_result=True, rounded=True), round_to_tf32(call()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_results_in_tf32(case):
    a, w, b, d = signals(case, torch.float32)
    assert torch.equal(
        conv.forward(a, w, b, case[-1], False, round_result=True), round_to_tf32(conv.forward(a, w, b, case[-1], False))
    )
    g = conv.backward_input(d * 1e-44, w, case[-1], a.shape[2:], a, round_result=True)
    assert torch.equal(minus_zero(g), a <= 0)  # what rounds to zero is no mark


def _as_tuple(z: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return z if isinstance(z, tuple) else (z,)
