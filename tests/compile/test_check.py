"""The check of compiled steps: sabotaged programs are refused in every precision, and rounding is not an error."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import threepass
from threepass.compile.capture import Build, capture
from threepass.compile.check import MAX_ERROR_RATIO, Outputs, check, figures
from threepass.compile.trace import trace
from threepass.core.engine import Task, run
from threepass.core.options import Options
from threepass.errors import CaptureError, UncheckedWarning
from threepass.models import mlp, plain, resnet, vit

SAMPLES = 16
PRECISIONS = ("float64", "float32", "bf16 autocast", "bf16")


def small_net():
    """Convolutions, batch norm, dropout and biases."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32, 10),
    )


class Problem:
    """A step, as `ThreePass(compile=True)` captures it; outputs: the gradients, then loss, input loss and dl/dx."""

    def __init__(self, precision, make=small_net, shape=(3, 8, 8), mode="paper", seed=0, device="cpu", **options):
        torch.manual_seed(seed)
        model, x = make(), torch.randn(SAMPLES, *shape)
        dtype = {"float64": torch.float64, "bf16": torch.bfloat16}.get(precision, torch.float32)
        self.model, x = model.to(device, dtype), x.to(device, dtype)  # "tf32" is a switch of PyTorch's
        self.names = [name for name, _ in self.model.named_parameters()]
        self.options = Options(mode=mode, **options)
        self.autocast = torch.autocast(device, torch.bfloat16, enabled=precision == "bf16 autocast")
        weights = torch.tensor([self.options.back, self.options.third], device=device)
        y, seed = torch.randint(10, (SAMPLES,), device=device), torch.tensor(seed, dtype=torch.int32, device=device)
        self.inputs = [weights.double() if precision == "float64" else weights, seed, x, y]

    def __call__(self, weights, seed, x, y):
        with self.autocast:
            pair = (weights[0], weights[1])
            r = run(Task(self.model, F.cross_entropy, x, y), self.options, weights=pair, seed=seed, warn=False)
        return [*r.grads.values(), r.loss, r.input_loss, r.input_grad]

    def capture(self, **kwargs):
        return capture(self, self.inputs, weights=self.inputs[0], **kwargs)


def with_weight_of_third(factor):
    def sabotage(program, values, problem):
        values[len(program.state)][1] *= factor
        return program.graph(*values)

    return sabotage


def with_output(name, change):
    def sabotage(program, values, problem):
        outputs = list(program.graph(*values))
        outputs[problem.names.index(name)] = change(outputs[problem.names.index(name)])
        return outputs

    return sabotage


def one_nan(z):
    z = z.clone()
    z.view(-1)[-1] = math.nan
    return z


def statistics_stay(program, values, problem):
    return program.graph(*(z.clone() for z in values))


def last_sample_dropped(program, values, problem):
    x, y = values[-2:]
    values[-2], values[-1] = torch.cat([x[:-1], x[:1]]), torch.cat([y[:-1], y[:1]])
    return program.graph(*values)


SABOTAGES = {
    "NaN": with_output("3.weight", one_nan),
    "no third term": with_weight_of_third(0.0),
    "half the third term": with_weight_of_third(0.5),
    "a bias's gradient negated": with_output("8.bias", torch.neg),
    "a layer's gradient times 1.1": with_output("3.weight", lambda z: z * 1.1),
    "statistics not moved": statistics_stay,
    "last sample dropped": last_sample_dropped,
}


@pytest.mark.parametrize(
    ("precision", "mode"), [*((each, "paper") for each in PRECISIONS), ("float32", "exact"), ("bf16 autocast", "exact")]
)
@pytest.mark.parametrize("name", SABOTAGES)
def test_sabotaged_programs_are_refused(name, precision, mode):
    problem, program = traced_problem(precision, mode)
    values = [*program.state, *problem.inputs]
    with pytest.raises(CaptureError, match=r"incorrectly|is not finite"):
        check(program.plain, lambda values: SABOTAGES[name](program, values, problem), values, len(program.state))


@functools.cache
def traced_problem(precision, mode):
    problem = Problem(precision, mode=mode)
    return problem, trace(problem, problem.inputs)


def test_a_program_is_checked_when_it_is_captured(monkeypatch):
    problem = Problem("float32")

    def sabotaged(program, inputs):
        return lambda values: SABOTAGES["half the third term"](program, values, problem)

    monkeypatch.setattr("threepass.compile.inductor.compiled", sabotaged)
    with pytest.raises(CaptureError, match=r"computes the third pass's part.* incorrectly") as refused:
        problem.capture()
    assert refused.value.step_seconds > 0


@pytest.fixture
def tf32():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["tf32", "bf16 autocast"])
@pytest.mark.parametrize("name", SABOTAGES)
def test_sabotaged_programs_are_refused_on_a_gpu(name, precision, monkeypatch, tf32):
    problem = Problem(precision, device="cuda")
    monkeypatch.setattr(
        "threepass.compile.inductor.compiled",
        lambda program, inputs: lambda values: SABOTAGES[name](program, values, problem),
    )
    with pytest.raises(CaptureError, match=r"incorrectly|is not finite"):
        problem.capture(build=Build(graph=False))


NETS = {
    "small": (small_net, (3, 8, 8)),
    "mlp": (lambda: mlp(24, 32, 32, 10), (24,)),
    "gelu": (lambda: mlp(24, 32, 10, activation=nn.GELU), (24,)),
    "plain": (lambda: plain(8, width=4), (3, 8, 8)),
    "resnet": (lambda: resnet(8, width=4), (3, 8, 8)),
    "vit": (lambda: vit(image=8, width=12, depth=1), (3, 8, 8)),
}


@pytest.mark.parametrize(("precision", "mode"), [*((each, "paper") for each in PRECISIONS), ("bf16 autocast", "exact")])
@pytest.mark.parametrize("name", NETS)
def test_rewritten_graphs_pass_for_many_weights(name, precision, mode):
    """One graph, which refers to its parameters, at several draws of weights and data."""
    make, shape = NETS[name]
    problem = Problem(precision, make, shape, mode)
    program = trace(problem, problem.inputs)
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in problem.model.parameters():
                p.copy_(torch.randn(p.shape) / max(1, p[0].numel()) ** 0.5)
        problem.inputs[2].copy_(torch.randn(problem.inputs[2].shape))
        values = [*program.state, *problem.inputs]
        check(program.plain, lambda values: program.graph(*values), values, len(program.state))


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.slow), "bf16 autocast"])
def test_a_compiled_step_with_dropout_passes(precision):
    captured = Problem(precision).capture()
    assert captured.program.draws
    assert captured.check_seconds > 0


def test_the_check_changes_nothing():
    problem = Problem("float32")
    before = {name: z.clone() for name, z in problem.model.state_dict().items()}
    program = trace(problem, problem.inputs)
    problem.model.load_state_dict(before)
    values = [*program.state, *problem.inputs]
    drawn = torch.get_rng_state()
    check(program.plain, lambda values: program.graph(*values), values, len(program.state))
    assert all(torch.equal(z, before[name]) for name, z in problem.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_results_that_are_not_finite_are_not_called_checked():
    problem = Problem("float32")
    program = trace(problem, problem.inputs)
    problem.inputs[2][0] = math.inf
    values = [*program.state, *problem.inputs]
    with pytest.warns(UncheckedWarning, match="outputs of the captured step could not be checked"):
        check(program.plain, lambda values: program.graph(*values), values, len(program.state))


def test_figures_of_an_output():
    reference = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    found = figures(1.1 * reference, reference, 0.0)
    assert found.error == pytest.approx(0.1)
    assert found.slope == pytest.approx(0.1)
    assert found.row == pytest.approx(0.1 * math.sqrt(2))
    across = figures(reference + torch.tensor([[-0.4, 0.3], [0.0, 0.0]], dtype=torch.float64), reference, 0.0)
    assert across.error == pytest.approx(0.1)
    assert across.slope == pytest.approx(0.0, abs=1e-12)
    assert figures(reference, torch.zeros_like(reference), 50.0).error == pytest.approx(0.1)
    infinite = torch.tensor([math.inf, 1.0], dtype=torch.float64)
    assert figures(infinite, infinite, 0.0).error == 0
    assert not math.isfinite(figures(infinite, torch.ones(2, dtype=torch.float64), 0.0).error)


def test_errors_of_the_size_of_the_eager_ones_pass():
    """A program whose results are eager ones plus as much noise again is used, one with far more noise is not."""
    problem = Problem("bf16 autocast")
    program = trace(problem, problem.inputs)
    values = [*program.state, *problem.inputs]

    def noisy(size):
        def run_(values):
            torch.manual_seed(0)  # the same noise in every run, as a compiled program rounds
            outputs = program.graph(*values)
            return [z * (1 + size * torch.randn_like(z)) if z.dim() > 1 else z for z in outputs]

        return run_

    check(program.plain, noisy(2**-8), values, len(program.state))
    with pytest.raises(CaptureError, match="compared with a float64 reference"):
        check(program.plain, noisy(MAX_ERROR_RATIO), values, len(program.state))


def with_noise(program, values, names, size):
    """The outputs of the traced program, with noise on the gradient of the bias before the batch norm."""
    outputs = list(program.graph(*values))
    generator = torch.Generator().manual_seed(0)
    place = names.index("0.bias")
    outputs[place] = outputs[place] + size * torch.randn(8, generator=generator) * max(z.abs().max() for z in outputs)
    return outputs


@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_a_gradient_that_is_zero_but_for_rounding_may_have_other_rounding_errors(mode):
    """As that of a bias before a batch norm; an error of a thousandth of the largest results is refused."""
    problem, program = traced_problem("float32", mode)
    values, names = [*program.state, *problem.inputs], problem.names
    labels = [f"the gradient of {name}" for name in names]

    def checked(size):
        noisy = functools.partial(with_noise, program, names=names, size=size)
        check(program.plain, noisy, values, len(program.state), Outputs(labels))

    checked(2e-6)
    with pytest.raises(CaptureError, match=r"part of the gradient of 0\.bias, of shape \(8,\)"):
        checked(1e-3)


def test_a_number_beside_a_jump_may_come_out_on_the_other_side(monkeypatch):
    """One of 1000 signs differs, as by rounding; a program of which all results are a little wrong is refused."""
    generator = torch.Generator().manual_seed(0)
    a, b, w = (torch.randn(shape, generator=generator) for shape in (1000, 1000, (1000, 64)))
    b[0] = -a[0] * (1 + 1e-6)  # several rounding errors beside the jump
    program = trace(lambda a, b, w: [(a + b).sign() @ w, ((a + b).sign() + a) @ w], [a, b, w])

    def rounded_otherwise(values):
        a, b, w = values
        signs = (a + b).sign()
        signs[0] = -signs[0]
        return [signs @ w, (signs + a) @ w]

    check(program.plain, rounded_otherwise, [a, b, w])
    with pytest.raises(CaptureError, match="compared with a float64 reference"):
        check(program.plain, lambda values: [1.5 * z for z in rounded_otherwise(values)], [a, b, w])
    monkeypatch.setattr("threepass.compile.check.LARGER_PERTURBATIONS", ())
    with pytest.raises(CaptureError, match="compared with a float64 reference"):
        check(program.plain, rounded_otherwise, [a, b, w])


def test_a_sum_that_is_added_up_one_term_after_the_other_is_rounding():
    """Inductor's loops do so, and lose more digits of equal terms than eager kernels, which add in pairs."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    program = trace(lambda x: [x.expand(4096, 64).sum(0)], [x])

    def one_by_one(values):
        found = torch.zeros(64)
        for row in values[-1].expand(4096, 64):
            found += row
        return [found]

    values = [*program.state, x]
    assert figures(one_by_one(values)[0].double(), 4096 * x.double(), 0.0).error > 1e-5
    check(program.plain, one_by_one, values)
    with pytest.raises(CaptureError, match="compared with a float64 reference"):
        check(program.plain, lambda values: [1.001 * one_by_one(values)[0]], values)


def test_a_penalty_is_measured_against_its_own_size_however_small_it_is():
    """An input loss of an untrained net is far smaller than its loss, and so is a fault in it."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    program = trace(lambda x: [1e3 * x, x.sum(), 1e-9 * x.square().sum()], [x])

    def without_penalty(values):
        *others, penalty = program.graph(*values)
        return [*others, 0 * penalty]

    values = [*program.state, x]
    check(program.plain, without_penalty, values)  # by the sizes of the others, it is rounding
    known = Outputs(("a", "the loss", "the input loss"), penalties=(2,))
    check(program.plain, lambda values: program.graph(*values), values, outputs=known)
    with pytest.raises(CaptureError, match=r"computes the input loss, of shape \(\)"):
        check(program.plain, without_penalty, values, outputs=known)


def test_a_step_says_which_of_its_results_are_losses(monkeypatch):
    """The model returns an integer too, which is not compared."""

    class Two(nn.Linear):
        def forward(self, x):
            return torch.arange(3), super().forward(x)

    def sabotaged(program, inputs):
        def run(values):
            outputs = list(program.graph(*values))
            return [z * 0.5 if z.dim() == 0 and z.is_floating_point() and z < 1e-2 else z for z in outputs]

        return run

    monkeypatch.setattr("threepass.compile.inductor.compiled", sabotaged)
    torch.manual_seed(0)
    model, x, y = Two(4, 3), torch.randn(8, 4), torch.randint(3, (8,))
    with torch.no_grad():
        model.weight.mul_(1e-2)
    step = threepass.ThreePass(model, lambda output, y: F.cross_entropy(output[1], y), alpha=0.3, compile="require")
    with pytest.raises(CaptureError, match=r"computes backpropagation's part of the input loss, of shape \(\)"):
        step(x, y)
