"""The activations' operation: against autograd, the kernel against plain PyTorch, and in the graph.

The kernel runs in Triton's interpreter, in a process of its own, where Triton is there.
"""

from functools import partial

import pytest
import torch
from graphs import count, saved
from interpreter import check_results, interpreted, needs_triton
from torch import Tensor, nn
from torch.nn import functional as F

from threepass import models
from threepass.compile.capture import capture
from threepass.compile.trace import trace
from threepass.core.engine import Task, run
from threepass.core.options import Options
from threepass.kernels import activation
from threepass.kernels.activation import half_gelu

CASES = [(3, 5, 24), (7, 300), (70, 16)]  # rows that fill no block, columns that are no power of two
OP = torch.ops.threepass.activation_error.default
KIND = pytest.mark.parametrize("kind", activation.KINDS)
BACKWARD = torch.ops.aten.gelu_backward.default
BACKWARDS = (BACKWARD, torch.ops.aten.silu_backward.default)


def signals(shape, dtype=torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(sum(shape))
    return {name: torch.randn(shape).mul(1.5).to(dtype) for name in "radt"}


@KIND
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_plain_against_autograd(shape, kind):
    z = signals(shape)
    f = partial(activation.KINDS[kind].value, **activation.KINDS[kind].options)
    a = z["a"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(f(a).sum(), a, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), a)
    slope, rows = slope.detach(), list(range(len(shape) - 1))
    e, sums, u = activation.error(z["r"], z["a"], kind)
    torch.testing.assert_close(e, slope * z["r"])
    torch.testing.assert_close(sums, e.sum(rows))
    assert u.numel() == 0
    e, sums, u = activation.error(**z, kind=kind, with_u=True)
    torch.testing.assert_close(e, slope * z["r"] + bend * z["d"] * z["t"])
    torch.testing.assert_close(sums, e.sum(rows))
    torch.testing.assert_close(u, f(z["a"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operation_can_be_traced(dtype):
    r, a, d, t = signals(CASES[0], dtype).values()
    torch.library.opcheck(OP, (r, a, "gelu"))
    torch.library.opcheck(OP, (r, a, "silu", d, t, True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_gelu(dtype):
    """As near as the format allows: the framework's own is no nearer."""
    a = torch.linspace(-9, 9, 100_001).to(dtype)
    r = torch.randn(a.shape).to(dtype)
    for ours, theirs, f in (
        (half_gelu.gelu(a), F.gelu(a), F.gelu),
        (half_gelu.gelu_backward(r, a), BACKWARD(r, a), lambda a: BACKWARD(r.double(), a)),
    ):
        exact = f(a.double())
        assert ours.dtype == dtype
        assert (ours.double() - exact).norm() < 1.001 * (theirs.double() - exact).norm()
        assert ((ours.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps + 3e-7).all()
    edges = torch.tensor([0.0, -0.0, 30.0, -30.0, float("inf"), float("nan")], dtype=dtype)
    expected = torch.tensor([0.0, 0.0, 30.0, 0.0, float("inf"), float("nan")], dtype=dtype)
    torch.testing.assert_close(half_gelu.gelu(edges), expected, equal_nan=True)


@needs_triton
def test_kernel_in_the_interpreter():
    interpreted("test_activation", "check_kernel")


def check_kernel() -> None:
    """Against plain PyTorch in float64; runs under TRITON_INTERPRET=1."""
    from threepass.kernels.activation import triton_kernel as activation_triton

    for programs in (1000, 2):  # a block each, and loops over several
        activation_triton.resident_warps = lambda device, registers, n=programs: n * activation_triton.WARPS
        for shape in CASES:
            for kind in activation.KINDS:
                _check_case(shape, kind)


def _check_case(shape, kind) -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        z = signals(shape, dtype)
        assert activation.fits(*z.values())
        assert not activation.fits(z["a"].double(), z["r"].double())
        assert not activation.fits(z["a"], z["r"].transpose(0, 1).contiguous().transpose(0, 1))
        exact = {name: value.double() for name, value in z.items()}
        for changed in ({}, {"with_u": True}, {"d": None, "t": None}):
            call = partial(activation.error, **{**z, "kind": kind, **changed})
            expected = activation.error(**{**exact, "kind": kind, **changed})
            check_results(call, expected, dtype, tolerance, (shape, kind, changed))


@pytest.fixture
def everywhere(as_on_a_gpu):
    """The operation wherever it could be a kernel's."""
    as_on_a_gpu(activation)


class Dropped(nn.Module):
    """The compiler fuses elementwise operations downstream of the activation with its derivative."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x) * 0.5


class Added(nn.Module):
    """The activation's input, and output, have other readers too."""

    def forward(self, x: Tensor) -> Tensor:
        u = F.gelu(x)
        return u + x + u * torch.tanh(u)


class Written(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x).mul_(2.0)


class Hooked(nn.Module):
    """A hook writes to the error of the activation's input, at once or row by row."""

    def __init__(self, rows: bool):
        super().__init__()
        self.rows = rows

    def hook(self, g: Tensor) -> None:
        for z in g if self.rows else [g]:
            z.mul_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(self.hook)
        return F.gelu(x)


class Summed(nn.Module):
    """The error is read in its own format, too, where it is summed."""

    def forward(self, x: Tensor) -> Tensor:
        u = F.gelu(x)
        return u * torch.sigmoid(u.sum((0, 1)))


def net(*activations: nn.Module, bias: bool = True) -> nn.Module:
    layers = [m for f in activations for m in (nn.Linear(12, 12, bias=bias), f)]
    return nn.Sequential(*layers, nn.Linear(12, 12), nn.Flatten(), nn.Linear(48, 10))


NETS = {  # and how often the operation computes an error in pass 2, and in exact mode's last backward pass
    "gelu": (lambda: net(nn.GELU(), nn.GELU()), 2, 2),
    "gelu-tanh": (lambda: net(nn.GELU("tanh"), nn.GELU("tanh")), 2, 2),
    "silu": (lambda: net(nn.SiLU(), nn.SiLU()), 2, 2),
    "no shift": (lambda: net(nn.GELU(), bias=False), 0, 0),
    "others": (lambda: net(nn.Tanh(), nn.ReLU()), 0, 0),
    "dropped": (lambda: net(Dropped()), 0, 0),
    "added": (lambda: net(Added(), nn.GELU()), 1, 1),
    "written": (lambda: net(Written(), nn.GELU()), 1, 1),
    "hooked": (lambda: net(Hooked(rows=False), nn.GELU()), 1, 2),
    "hooked by rows": (lambda: net(Hooked(rows=True), nn.GELU()), 1, 2),
    "summed": (lambda: net(Summed(), nn.GELU()), 1, 1),
    "vit": (lambda: models.by_name("vit", image=16, width=24, depth=2), 2, 2),
}


def step_of(name: str, dtype: torch.dtype, mode: str):
    torch.manual_seed(0)
    model = NETS[name][0]().to(dtype)
    x = torch.randn((8, 3, 16, 16) if name == "vit" else (8, 4, 12), dtype=dtype)
    y = torch.arange(8)
    options = Options(alpha=0.3, mode=mode)

    def step(weights, x, y):
        grads = run(Task(model, F.cross_entropy, x, y), options, weights=(weights[0], weights[1])).grads
        return list(grads.values())

    def eager():
        return list(run(Task(model, F.cross_entropy, x, y), options).grads.values())

    return step, [torch.tensor([0.3, 0.7], dtype=torch.float32), x, y], eager


def calls(program) -> list:
    return [node for node in program.graph.graph.nodes if node.target is OP]


@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.usefixtures("everywhere")
def test_a_captured_step_with_the_operation_is_the_engines(name, mode):
    step, inputs, eager = step_of(name, torch.float32, mode)
    program = trace(step, inputs)
    _, errors, bends = NETS[name]
    most = bends if mode == "exact" else errors  # float formats sum the joined error, in the last backward pass
    assert bool(most) <= len(calls(program)) <= most
    assert {node.args[3] is not None for node in calls(program)} <= {mode == "exact"}
    assert saved(program, trace(step, inputs, kernels=False), *BACKWARDS) >= most
    torch.testing.assert_close(program(*inputs), eager(), rtol=1e-4, atol=1e-6)


@pytest.fixture
def everything_is_faster(as_on_a_gpu, packs):
    as_on_a_gpu(half_gelu, any_format=True)


@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("name", ["vit", "gelu", "summed", "hooked by rows"])
@pytest.mark.usefixtures("everywhere", "everything_is_faster")
def test_in_bfloat16_it_differs_by_rounding_alone(name, mode):
    step, inputs, _ = step_of(name, torch.bfloat16, mode)
    program, without = trace(step, inputs), trace(step, inputs, kernels=False)
    assert calls(program)
    assert not calls(without)
    results = list(zip(program(*inputs), without(*inputs), strict=True))
    assert all(got.dtype == expected.dtype for got, expected in results)
    apart = sum((got - expected).square().sum() for got, expected in results)
    assert apart < 1e-2**2 * sum(expected.square().sum() for _, expected in results)
    for got, expected in results:
        assert (got - expected).norm() < 5e-2 * expected.norm()


@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.usefixtures("everywhere", "everything_is_faster")
def test_in_half_formats_no_gelu_is_left_to_the_framework(mode):
    step, inputs, _ = step_of("vit", torch.bfloat16, mode)
    program = trace(step, inputs)
    assert 0 < len(calls(program)) <= (4 if mode == "exact" else 2)
    targets = [node.target for node in program.graph.graph.nodes]
    assert not {torch.ops.aten.gelu.default, BACKWARD} & set(targets)
    assert targets.count(half_gelu.gelu) <= 4  # of two activations, in passes 1 and 3
    assert targets.count(half_gelu.gelu_backward) <= 2


@pytest.mark.usefixtures("everywhere")
def test_exact_mode_recomputes_u_where_it_is_needed():
    step, inputs, _ = step_of("gelu", torch.bfloat16, "exact")
    for with_kernels in (True, False):
        program = trace(step, inputs, kernels=with_kernels)
        most = 4 if with_kernels else 6  # in pass 1, for pass 3's mix, and for the last backward pass
        assert count(program, torch.ops.aten.gelu.default) <= most
    for node in calls(trace(step, inputs)):
        assert node.args[5] == (node.args[3] is not None)


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.usefixtures("everywhere")
def test_the_compiler_takes_it(mode):
    step, inputs, eager = step_of("gelu", torch.float32, mode)
    captured = capture(step, inputs)
    assert calls(captured.program)
    torch.testing.assert_close(captured(*inputs), eager(), rtol=1e-4, atol=1e-5)
