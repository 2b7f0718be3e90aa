"""Layer norm's operations: against autograd, the kernels against plain PyTorch, and in the graph.

The kernels run in Triton's interpreter, in a process of its own.
"""

from functools import partial

import pytest
import torch
from graphs import saved
from interpreter import check_results, interpreted, needs_triton
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from threepass import models
from threepass.compile.capture import capture
from threepass.compile.trace import trace
from threepass.core.engine import Task, run
from threepass.core.options import Options
from threepass.kernels import layer_norm

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")

CASES = [(3, 5, 24), (7, 192), (2, 9, 200), (2, 1, 1500)]  # rows that fill no block, columns that are no power of two
RATIO = torch.tensor(0.03)
OP = torch.ops.threepass.layer_norm_tangent.default
BEND = torch.ops.threepass.layer_norm_bend.default


def signals(shape, dtype=torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(sum(shape))
    tensors = {name: torch.randn(shape) for name in ("t", "t_2", "a", "d")}
    tensors |= {name: torch.randn(shape[-1]) for name in ("w", "b")}
    return {name: z.to(dtype) for name, z in tensors.items()} | {"ratio": RATIO}


def call(z, dtype, seed=5, **changed):
    return layer_norm.tangent(
        **{**z, "eps": 1e-5, "dtype": dtype, "seed": torch.tensor(seed, dtype=torch.int32), **changed}
    )


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_plain_against_autograd(shape):
    z = signals(shape)
    t, ratio = z["t"] + z["t_2"], RATIO.double()

    def norm(a, w, b):
        return F.layer_norm(a, shape[-1:], w, b)

    u, t_u = torch.func.jvp(lambda a: norm(a, z["w"], z["b"]), (z["a"],), (t,))
    one, none = torch.ones_like(z["w"]), torch.zeros_like(z["w"])
    x, t_x = torch.func.jvp(lambda a: norm(a, one, none), (z["a"],), (t,))
    rows = list(range(len(shape) - 1))
    g = torch.stack([(z["d"] * (x + ratio * t_x)).sum(rows), z["d"].sum(rows)])
    got = call(z | {"ratio": ratio}, torch.float64)
    for result, expected in zip(got, (t_u, u + ratio * t_u, g, t), strict=True):
        torch.testing.assert_close(result, expected)
    bare = call(z | {"ratio": None}, torch.float64, mixes=False)
    torch.testing.assert_close(bare[0], t_u)
    torch.testing.assert_close(bare[2], torch.stack([(z["d"] * t_x).sum(rows), z["d"].sum(rows)]))


def test_what_is_not_asked_for_is_empty():
    z = signals(CASES[0], torch.float32)
    t_u, m, g, t_sum = call(z, torch.float32, d=None, mixes=False, keeps=False)
    assert [m.numel(), g.numel(), t_sum.numel()] == [0, 0, 0]
    torch.testing.assert_close(t_u, call(z, torch.float32)[0])
    assert call(z, torch.float32, t_2=None)[3].numel() == 0
    bare = call(z, torch.float32, w=None, b=None)
    ones = call(z, torch.float32, w=torch.ones(24), b=torch.zeros(24))
    torch.testing.assert_close(bare, ones)


def check_unbiased(rows: int = 64, seeds: int = 16) -> None:
    """The mean of (m - u) / (k t_u) is 1, and m is u or next to it."""
    z = signals((rows, 192), torch.bfloat16)
    t_u, u, *_ = call(z, torch.bfloat16, ratio=torch.tensor(0.0))
    ratio = torch.tensor(1e-3)
    mixes = torch.stack([call(z, torch.bfloat16, seed, ratio=ratio)[1] for seed in range(2, 2 + seeds)]).double()
    pushed = (ratio * t_u).double()
    slope = ((mixes - u.double()) * pushed).sum() / (len(mixes) * pushed.square().sum())
    noise = ((mixes - u.double() - pushed).square() * pushed.square()).sum().sqrt() / (
        len(mixes) * pushed.square().sum()
    )
    assert noise < 0.05
    assert abs(slope - 1) < 4 * noise
    assert ((mixes - u.double()).abs() <= u.double().abs() * 2**-7 + 2 * pushed.abs()).all()
    again, other = (call(z, torch.bfloat16, seed, ratio=ratio)[1] for seed in (2, 3))
    assert torch.equal(again, mixes[0].bfloat16())
    assert not torch.equal(again, other)


def test_random_rounding_is_unbiased():
    check_unbiased()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operation_can_be_traced(dtype):
    z = signals(CASES[0], dtype)
    for changed in ({}, {"t_2": None, "d": None, "b": None}, {"mixes": False, "keeps": False}):
        seed = torch.tensor(3, dtype=torch.int32)
        args = tuple({**z, "eps": 1e-5, "dtype": dtype, "seed": seed, "mixes": True, "keeps": True, **changed}.values())
        names = [*z, "eps", "dtype", "seed", "mixes", "keeps"]
        assert [a.name for a in OP._schema.arguments] == names
        torch.library.opcheck(OP, args)
        graph = make_fx(lambda *z: OP(*z), tracing_mode="fake")(*args).graph
        assert OP in [node.target for node in graph.nodes]


def bend_of(z, dtype, **changed):
    z = {"a": z["a"], "t": z["t"], "d": z["d"], "r": z["t_2"], "r_2": None, "w": z["w"]}
    return layer_norm.bend(**{**z, "eps": 1e-5, "dtype": dtype, **changed})


@pytest.mark.parametrize("changed", [{}, {"r": None}, {"w": None}, {"r": None, "w": None}], ids=str)
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_plain_bend_against_autograd(shape, changed):
    z = signals(shape)
    w = changed.get("w", z["w"])
    r = changed.get("r", z["t_2"])

    def norm(a):  # written out: through the tangent of torch's own, autograd gives something else (seen in 2.13)
        var, mean = torch.var_mean(a, -1, correction=0, keepdim=True)
        x = (a - mean) / (var + 1e-5).sqrt()
        return x if w is None else x * w

    a = z["a"].clone().requires_grad_()
    (expected,) = torch.autograd.grad((z["d"] * torch.func.jvp(norm, (a,), (z["t"],))[1]).sum(), a)  # < d , J t >
    if r is not None:
        expected = expected + torch.autograd.grad((r * norm(a)).sum(), a)[0]
    bent, g = bend_of(z, torch.float64, **changed)
    torch.testing.assert_close(bent, expected)
    torch.testing.assert_close(bend_of(z, torch.float64, **changed, r_2=z["d"])[0], expected + z["d"])
    if r is None:
        assert g.numel() == 0
    else:
        rows = list(range(len(shape) - 1))
        x = F.layer_norm(z["a"], shape[-1:])
        torch.testing.assert_close(g, torch.stack([(r * x).sum(rows), r.sum(rows)]))
        more = bend_of(z, torch.float64, **changed, r_2=z["d"], sums=True)[1]
        torch.testing.assert_close(more, torch.cat([g, (expected + z["d"]).sum(rows)[None]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("missing", [(), ("r", "s"), ("r", "w")], ids=str)
def test_bend_can_be_traced(dtype, missing):
    z = signals(CASES[0], dtype)
    args = [
        None if name in missing else z[at] for name, at in zip("atdrsw", ("a", "t", "d", "t_2", "t", "w"), strict=True)
    ]
    torch.library.opcheck(BEND, (*args, 1e-5, dtype))


@needs_triton
def test_kernel_in_the_interpreter():
    interpreted("test_layer_norm", "check_kernel")


def check_kernel() -> None:
    """Against plain PyTorch in float64; runs under TRITON_INTERPRET=1."""
    from threepass.kernels.layer_norm import triton_kernel as layer_norm_triton

    for shape, warps in zip(CASES, (1000, 2, 2, 1000), strict=True):  # a block each, or loops over several
        layer_norm_triton.resident_warps = lambda device, registers, warps=warps: warps
        _check_case(shape)
        _check_bend(shape)
    check_unbiased(rows=16, seeds=12)


def _check_case(shape) -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 8e-3)):
        z = signals(shape, dtype)
        assert layer_norm.fits(z["a"], z["t"], z["d"])
        assert not layer_norm.fits(z["a"].double(), z["t"], z["d"])
        assert not layer_norm.fits(z["a"].transpose(0, -1), z["t"].transpose(0, -1))
        exact = {name: value.double() for name, value in z.items()}
        rounded = (z["t"] + z["t_2"]).double()  # the norm takes the sum that it hands on
        bare = {"mixes": False, "ratio": None}
        for changed in ({}, {"t_2": None, "b": None}, {"d": None, "w": None}, {"mixes": False, "keeps": False}, bare):
            summed = {} if "t_2" in changed else {"t": rounded, "t_2": torch.zeros_like(rounded)}
            expected = call(exact | summed, torch.float64, **changed)
            check_results(partial(call, z, dtype, **changed), expected, dtype, tolerance, (shape, changed))
    # under autocast: a float32 stream, a branch in bfloat16, and bfloat16 for the product downstream
    z = signals(shape, torch.float32) | {"t_2": signals(shape, torch.bfloat16)["t_2"]}
    got, expected = call(z, torch.bfloat16), layer_norm._plain(*_positional(z, torch.bfloat16))
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
    assert got[3].dtype == torch.float32


def _check_bend(shape) -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        z = signals(shape, dtype)
        exact = {name: value.double() for name, value in z.items()}
        for changed in (
            {},
            {"w": None},
            {"r": None},
            {"r": None, "w": None},
            {"r_2": z["b"].expand(shape).contiguous()},
            {"r_2": z["b"].expand(shape).contiguous(), "sums": True},
        ):
            expected = bend_of(exact, torch.float64, **changed)
            if "sums" in changed:  # what is summed is what is handed on
                expected[1][2] = bend_of(z, dtype, **changed)[0].double().sum(list(range(len(shape) - 1)))
            check_results(partial(bend_of, z, dtype, **changed), expected, dtype, tolerance, (shape, changed))
    # under autocast: a float32 stream, errors in bfloat16
    z = signals(shape, torch.float32) | {name: signals(shape, torch.bfloat16)[name] for name in ("d", "t_2")}
    for result, reference in zip(
        bend_of(z, torch.float32), bend_of({n: v.double() for n, v in z.items()}, torch.float64), strict=True
    ):
        assert (result.double() - reference).norm() < 1e-6 * reference.norm()


def _positional(z, dtype):
    return (*z.values(), 1e-5, dtype, torch.tensor(5, dtype=torch.int32), True, True)


class Block(nn.Module):
    """x + f(norm(x)), as in a pre-norm transformer."""

    def __init__(self, width: int, affine: bool = True):
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=affine)
        self.f = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.norm(x))


class Twice(Block):
    """The norm's output goes through a weight and past it; its input to a second norm."""

    def forward(self, x: Tensor) -> Tensor:
        u = self.norm(x)
        return x.mean(-1, keepdim=True) + self.f(u) * torch.tanh(u) + F.layer_norm(x, x.shape[-1:])


class Turned(nn.Module):
    """Rows that do not lie one after another in memory; `written`: and are added to in place."""

    def __init__(self, written: bool = False):
        super().__init__()
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
        return x.add_(1.0) if self.written else x + 1.0


class Shared(Block):
    """One norm, twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Read(Block):
    """The norm's input and output are scaled by what does not depend on them alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.f(self.norm(x)))


def stack(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), *blocks, nn.LayerNorm(24), nn.Flatten(), nn.Linear(96, 10))


def frozen(block: Block, name: str = "") -> Block:
    (getattr(block.norm, name) if name else block.norm).requires_grad_(False)
    return block


NETS = {  # and how many of its layer norms pass 3 goes through, and how many of these take the sum before them along
    "vit": (lambda: models.by_name("vit", image=16, width=24, depth=2), 5, 4),
    "blocks": (lambda: stack(Block(24), Block(24)), 3, 2),
    "not affine": (lambda: stack(Block(24, affine=False), Block(24)), 3, 2),
    "frozen scale": (lambda: stack(frozen(Block(24)), Block(24)), 3, 2),
    "frozen shift": (lambda: stack(frozen(Block(24), "bias"), Block(24)), 3, 2),
    "shared": (lambda: stack(Shared(24)), 3, 2),
    "read": (lambda: stack(Read(24), Block(24)), 3, 1),
    "turned": (lambda: stack(Turned(), Block(24)), 2, 1),
    "turned and written": (lambda: stack(Turned(written=True), Block(24)), 0, 0),
    "twice": (lambda: stack(Twice(24), Block(24)), 4, 1),
    "over two dimensions": (lambda: nn.Sequential(nn.LayerNorm([4, 12]), nn.Flatten(), nn.Linear(48, 10)), 0, 0),
}


def step_of(net: str, dtype: torch.dtype, exact: bool = False, autocast: bool = False):
    torch.manual_seed(0)
    model = NETS[net][0]().to(dtype)
    x = torch.randn(8, 3, 16, 16) if net == "vit" else torch.randn(8, 4, 12)
    inputs = [x.to(dtype), torch.randint(10, (8,)), torch.tensor([0.5, 0.5])]
    options = Options(alpha=0.5, mode="exact" if exact else "paper")

    def step(x, y, weights):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            r = run(Task(model, F.cross_entropy, x, y), options, weights=(weights[0], weights[1]))
        return list(r.grads.values())

    def eager():
        return list(run(Task(model, F.cross_entropy, *inputs[:2]), options).grads.values())

    return step, inputs, eager


@pytest.fixture
def everywhere(as_on_a_gpu):
    """The operation wherever it could be a kernel's."""
    as_on_a_gpu(layer_norm)


def calls(program, op=OP) -> list:
    return [node for node in program.graph.graph.nodes if node.target is op]


def check_calls(program, net, exact) -> None:
    """At most one call for each norm, and in exact mode one more; none where the operation does not apply."""
    norms = NETS[net][1]
    assert bool(norms) <= len(calls(program)) <= norms
    assert bool(norms and exact) <= len(calls(program, BEND)) <= (norms if exact else 0)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.usefixtures("everywhere")
def test_a_captured_step_with_the_operation_is_the_engines(net, exact):
    step, inputs, eager = step_of(net, torch.float32, exact)
    program = trace(step, inputs)
    check_calls(program, net, exact)
    _, norms, sums = NETS[net]
    without = trace(step, inputs, kernels=False)
    additions = 4 * norms + 2 * sums if exact else norms + sums  # of a norm's formula, and of a sum before it
    assert saved(program, without, torch.ops.aten.add.Tensor) >= additions
    torch.testing.assert_close(program(*inputs), eager(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.usefixtures("everywhere")
def test_separate_terms(mode):
    """x̂ has another reader, backpropagation's gradient of the scale, and the third pass's is without a mix."""
    torch.manual_seed(0)
    model, x, y = stack(Block(24), Block(24)), torch.randn(8, 4, 12), torch.arange(8)
    options = Options(alpha=0.5, mode=mode, separate=True)

    def step(x, y, weights=None):
        weights = None if weights is None else (weights[0], weights[1])
        r = run(Task(model, F.cross_entropy, x, y), options, weights=weights)
        return [*r.grads.values(), *r.backprop_grads.values(), *r.third_grads.values()]

    inputs = [x, y, torch.tensor([0.5, 0.5])]
    program = trace(step, inputs)
    check_calls(program, "blocks", mode == "exact")
    torch.testing.assert_close(program(*inputs), step(x, y), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_first_of_all_and_before_a_flat_loss(dtype):
    """R{d} of the input is not needed; downstream of the last norm there is none, or pass 2's error in its place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.LayerNorm(24), nn.Linear(24, 10)).to(dtype)
    inputs = [torch.randn(8, 4, 12, dtype=dtype), torch.randn(8, 4, 10, dtype=dtype)]
    options = Options(alpha=0.5, mode="exact")

    def step(x, y, weights=None):
        weights = None if weights is None else (weights[0], weights[1])
        return list(run(Task(model, lambda u, y: (u * y).sum(), x, y), options, weights=weights).grads.values())

    mixed = [*inputs, torch.tensor([0.5, 0.5])]
    program = trace(step, mixed)
    ((r, r_2),) = (node.args[3:5] for node in calls(program, BEND))
    assert r_2 is None
    assert (r is None) == (dtype == torch.bfloat16)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    for g, expected in zip(program(*mixed), step(*inputs), strict=True):
        assert (g - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("exact", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("autocast", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.usefixtures("everywhere")
def test_in_bfloat16_it_differs_by_rounding_alone(autocast, exact):
    """The stream is bfloat16, or under autocast float32, and what goes to the next product bfloat16."""
    step, inputs, _ = step_of("vit", torch.float32 if autocast else torch.bfloat16, exact, autocast)
    program, without = trace(step, inputs), trace(step, inputs, kernels=False)
    check_calls(program, "vit", exact)
    assert not calls(without) + calls(without, BEND)
    *dtypes, last = [node.args[8] for node in calls(program)]
    assert set(dtypes) == {torch.bfloat16}
    assert last == (torch.float32 if autocast else torch.bfloat16)  # to a mean
    apart = sum((a - b).square().sum() for a, b in zip(program(*inputs), without(*inputs), strict=True))
    assert apart < 1e-2**2 * sum(b.square().sum() for b in without(*inputs))


def column_sums(program, dims) -> int:
    nodes = program.graph.graph.nodes
    return sum(node.target is torch.ops.aten.sum.dim_IntList and node.args[1] == dims for node in nodes)


@pytest.mark.usefixtures("everywhere", "packs")
def test_column_sums_are_the_operations_where_gradients_are_packed_in_bfloat16():
    """The gradients of a format are read as one tensor."""
    step, inputs, _ = step_of("blocks", torch.bfloat16, exact=True)
    program, without = trace(step, inputs), trace(step, inputs, kernels=False)
    assert column_sums(without, [0, 1])
    assert not column_sums(program, [0, 1])  # d mix, d, r x and r of each norm
    norms = NETS["blocks"][1]
    assert column_sums(program, [0]) <= column_sums(without, [0]) - norms  # R{d} downstream of each
    for got, expected in zip(program(*inputs), without(*inputs), strict=True):
        assert got.dtype == expected.dtype
        assert (got - expected).norm() < 5e-2 * expected.norm()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.usefixtures("everywhere")
def test_the_compiler_takes_it(exact):
    step, inputs, eager = step_of("turned", torch.float32, exact)
    captured = capture(step, inputs)
    check_calls(captured.program, "turned", exact)
    torch.testing.assert_close(captured(*inputs), eager(), rtol=1e-4, atol=1e-5)
