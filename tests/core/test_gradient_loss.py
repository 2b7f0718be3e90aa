"""Losses on the input gradient, against autograd with create_graph=True, in float64."""

import copy
import functools

import pytest
import torch
from cases import CASES
from close import assert_close, restored
from families import SchNet, _index_add, _index_add_in_place, _molecules, _scatter_add
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import threepass

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")


def by_double_backward(model, loss_fn, x, y, value_fn=torch.sum, wrt=None):
    """The loss, g and the gradients of the parameters that the loss depends on. x: a tensor, or a dict with wrt."""
    leaf = (x if wrt is None else x[wrt]).clone().requires_grad_()
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with restored(model), sdpa_kernel(SDPBackend.MATH):
        output = model(leaf * 1) if wrt is None else model(**x | {wrt: leaf * 1})
        (g,) = torch.autograd.grad(value_fn(output), leaf, create_graph=True)
        loss = loss_fn(output, g, y)
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    return loss.detach(), g.detach(), {n: g for n, g in zip(params, grads, strict=True) if g is not None}


def agrees(model, loss_fn, x, y, tolerance=1e-12, **options):
    """A step, whole and in two parts, against double backward."""
    value_fn, wrt = options.get("value_fn") or torch.sum, options.get("wrt")
    loss, g, grads = by_double_backward(model, loss_fn, x, y, value_fn, wrt)
    with restored(model):
        r = threepass.gradient_step(model, loss_fn, x, y, **options)
    torch.testing.assert_close(r.loss, loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(r.input_grad, g, rtol=1e-12, atol=1e-14)
    assert_close(with_zeros(r.grads, grads), with_zeros(grads, r.grads), tolerance)
    with restored(model):
        parts = threepass.gradient_step(model, loss_fn, x, y, separate=True, **options)
    assert_close(parts.grads, r.grads, tolerance)
    summed = {n: parts.through_output[n] + parts.through_input_grad[n] for n in parts.grads}
    assert_close(summed, parts.grads, 1e-14)
    return r


def with_zeros(grads, others):
    """Autograd may find no gradient where ours is zero, or the other way round."""
    return grads | {n: torch.zeros_like(g) for n, g in others.items() if n not in grads}


@pytest.mark.parametrize("case", [c for c in CASES if not (c.hidden or c.once or c.random)], ids=str)
def test_every_operation_of_the_grid(case):
    model, loss_fn, x, y = case.build()
    target = torch.randn_like(x)

    def both(output, g, y):
        return loss_fn(output, y) + (g - target).square().mean()

    agrees(model, both, x, y, 1e-11, value_fn=lambda output: output.sin().sum())


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Softplus(), nn.Linear(6, 1)).double()


X, Y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)


def forces(output, g, y):
    return (-g - y).square().mean() + 0.1 * output.square().mean()


LOSSES = {
    "forces": forces,
    "eikonal": lambda output, g, y: (g.norm(dim=1) - 1).square().mean() + output.abs().mean(),
    "r1": lambda output, g, y: F.softplus(-output).mean() + 5 * g.square().sum(1).mean(),
    "wgan-gp": lambda output, g, y: output.mean() + 10 * (g.norm(dim=1) - 1).square().mean(),
    "l1": lambda output, g, y: g.abs().sum(1).mean(),
    "product": lambda output, g, y: (output * g).square().mean(),
    "only the output": lambda output, g, y: output.square().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    agrees(two_layers(), LOSSES[name], X, Y)


@pytest.mark.parametrize("collect", [_index_add, _scatter_add, _index_add_in_place])
@pytest.mark.parametrize("by_name", [True, False])
def test_batches_of_graphs(collect, by_name):
    torch.manual_seed(0)
    model = SchNet(collect).double()
    x = dict(zip(("positions", "kinds", "edges", "molecule"), _molecules(), strict=True))
    x["positions"] = x["positions"].double()
    y = torch.randn(2, 1, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)

    def loss_fn(output, g, y):
        return F.mse_loss(output, y[0]) + 10 * F.mse_loss(-g, y[1])

    r = agrees(model, loss_fn, x, y, wrt="positions")
    if not by_name:
        by_index = threepass.gradient_step(model, loss_fn, tuple(x.values()), y, wrt=0)
        assert_close(by_index.grads, r.grads, 1e-14)


class Several(nn.Module):
    """Returns what depends on x, twice; what depends on weights alone; and a number."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.aux = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 2)
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        h = torch.tanh(self.body(x))
        energy = self.head(h)
        return {"energy": energy, "again": energy, "aux": self.aux(h), "scale": self.log_scale.exp(), "n": len(x)}


def test_outputs_of_all_kinds():
    torch.manual_seed(0)

    def loss_fn(output, g, y):
        likelihood = output["energy"].mean() * output["again"].sum() / output["scale"] + output["scale"] ** 2
        return likelihood + (g - y).square().mean() * output["n"] + output["aux"].square().mean()

    agrees(Several().double(), loss_fn, X, Y, value_fn=lambda output: output["energy"].sum())


def test_parameters_that_the_loss_reads_itself():
    model = two_layers()

    def loss_fn(output, g, y):
        return forces(output, g, y) + 0.1 * model[0].weight.square().sum() * output.mean()

    agrees(model, loss_fn, X, Y)


def test_several_inputs():
    model = nn.Bilinear(3, 3, 1).double()
    x = {"input1": X, "input2": Y}

    def loss_fn(output, g, y):
        return g["input1"].square().mean() + (g["input2"] * output).mean()

    leaves = {n: z.clone().requires_grad_() for n, z in x.items()}
    output = model(**leaves)
    g = dict(zip(leaves, torch.autograd.grad(output.sum(), leaves.values(), create_graph=True), strict=True))
    expected = torch.autograd.grad(loss_fn(output, g, None), model.parameters())
    for wrt in (None, ("input1", "input2"), ("input2", "input1")):
        r = threepass.gradient_step(model, loss_fn, x, None, wrt=wrt)
        assert_close(r.grads, dict(zip(("weight", "bias"), expected, strict=True)), 1e-12)
        assert list(r.input_grad) == list(wrt or x)


def test_an_input_that_requires_grad_is_no_weight():
    x = X.clone().requires_grad_()
    assert_close(
        threepass.gradient_step(two_layers(), forces, x, Y).grads,
        threepass.gradient_step(two_layers(), forces, X, Y).grads,
        1e-14,
    )
    assert x.grad is None
    threepass.three_pass(two_layers(), lambda output, y: output.square().mean(), x)  # warnings are errors


class Decoder(nn.Module):
    """Takes what may be computed from its own parameters."""

    def __init__(self):
        super().__init__()
        self.codes, self.a, self.b = nn.Parameter(torch.randn(5, 3)), nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, code, at):
        return self.b(torch.tanh(self.a(at * code)))


@pytest.mark.parametrize("wrt", [None, "at"])
@pytest.mark.parametrize("computed", [False, True])
def test_inputs_and_targets_that_are_parameters_or_computed_from_them(computed, wrt):
    torch.manual_seed(0)
    model, at = Decoder().double(), torch.randn(5, 3).double()
    code = model.codes.sin() if computed else model.codes

    def loss_fn(output, g, y):
        g = g if wrt else g["at"]
        return g.square().sum() + (output - y).square().sum()

    y = model.codes.sum(1, keepdim=True)
    leaf = at.clone().requires_grad_()
    output = model(code, leaf)
    (g,) = torch.autograd.grad(output.sum(), leaf, create_graph=True)
    loss = loss_fn(output, g if wrt else {"at": g}, y)
    grads = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    expected = dict(zip(dict(model.named_parameters()), grads, strict=True))
    x = {"code": code, "at": at}
    assert_close(threepass.gradient_step(model, loss_fn, x, y, wrt=wrt).grads, expected, 1e-12)
    step = threepass.GradientStep(model, loss_fn, wrt=wrt, compile=True)
    with pytest.warns(threepass.UncompiledWarning, match="a parameter, or computed from one"):
        assert_close(step(x, y).grads, expected, 1e-12)
    required = threepass.ThreePass(model, lambda output, y: output.square().mean(), compile="require")
    with pytest.raises(threepass.CaptureError, match="Compute it inside the model"):
        required(x)


def test_input_at_names_a_module():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randint(9, (5, 2))

    def loss_fn(output, g, y):
        return g.square().sum() + output.square().sum()

    h = model[0](x)
    output = model[1:](h)
    (g,) = torch.autograd.grad(output.sum(), h, create_graph=True)
    expected = torch.autograd.grad(loss_fn(output, g, None), model.parameters())
    r = threepass.gradient_step(model, loss_fn, x, None, input_at="0")
    assert_close(r.grads, dict(zip(dict(model.named_parameters()), expected, strict=True)), 1e-12)


def test_is_pure_and_moves_buffers_once():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    twin = copy.deepcopy(model)
    torch.manual_seed(3)
    threepass.gradient_step(model, forces, X, Y)
    ours = torch.rand(1)
    torch.manual_seed(3)
    twin(X)
    assert torch.equal(ours, torch.rand(1))
    assert all(map(torch.equal, model.buffers(), twin.buffers()))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_formats(dtype):
    model = two_layers()
    r = threepass.gradient_step(model, forces, X, Y)
    half = threepass.gradient_step(model.to(dtype), forces, X.to(dtype), Y.to(dtype))
    assert_close({n: g.double() for n, g in half.grads.items()}, r.grads, 0.1)


@pytest.mark.parametrize("compiled", [False, "require"])
def test_steps_add_to_grad(compiled, graph_only):
    model = two_layers()
    step = threepass.GradientStep(model, forces, compile=compiled)
    expected = threepass.gradient_step(model, forces, X, Y)
    for count in (1, 2):
        r = step(X, Y)
        assert_close({n: p.grad for n, p in model.named_parameters()}, _times(count, expected.grads), 1e-12)
        torch.testing.assert_close((r.output, r.value, r.input_grad, r.loss), _fields(expected))
    assert step.state_dict() == {"calls": 2}
    if compiled:
        assert len(step.compiled.programs) == 1


def _times(count, grads):
    return {n: count * g for n, g in grads.items()}


def _fields(r):
    return r.output, r.value, r.input_grad, r.loss


def test_a_captured_step_notices_another_value_fn(graph_only):
    model, power = two_layers(), [2]
    step = threepass.GradientStep(model, forces, lambda output: (output ** power[0]).sum(), compile="require")
    for power[0] in (2, 3, 2):
        model.zero_grad()
        r = step(X, Y)
        exponent = power[0]
        e = threepass.gradient_step(model, forces, X, Y, lambda output, n=exponent: (output**n).sum())
        assert_close(r.grads, e.grads, 1e-12)
    assert len(step.compiled.programs) == 2


@pytest.mark.slow
def test_a_compiled_step():
    model = two_layers()
    r = threepass.GradientStep(model, forces, compile="require")(X, Y)
    assert_close(r.grads, threepass.gradient_step(model, forces, X, Y).grads, 1e-12)


def test_training_reaches_the_forces_of_a_known_energy():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.rand(256, 2) * 2 - 1
    step = threepass.GradientStep(model, lambda output, g, y: (g - y).square().mean())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        losses.append(step(x, 2 * x).loss)  # the energy |x|²
        optimizer.step()
    assert losses[-1] < 0.02 * losses[0]


class Opaque:
    def __init__(self, energy):
        self.energy = energy


class ReturnsOpaque(nn.Linear):
    def forward(self, x):
        return Opaque(super().forward(x))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"value_fn": lambda o: o}, ValueError, r"value_fn must return a floating-point scalar.*shape \(5, 1\)"),
        ({"value_fn": lambda o: 1.0}, ValueError, "value_fn must return a floating-point scalar.*got 1.0"),
        ({"value_fn": lambda o: o.argmax()}, ValueError, "floating-point scalar.*int64"),
        ({"value_fn": lambda o: o.detach().sum()}, ValueError, "does not depend on the input"),
        ({"value_fn": 3}, TypeError, "value_fn must be a function"),
        ({"loss_fn": lambda o, g, y: g}, ValueError, r"must return a scalar, any .* got shape \(5, 3\)"),
        ({"loss_fn": lambda o, g, y: g.detach().sum()}, ValueError, "depends neither on the output nor on g"),
        ({"loss_fn": lambda o, g, y: (g * 0).norm(dim=1).sqrt().sum()}, FloatingPointError, "with respect to g is NaN"),
        ({"model": nn.LSTM(3, 4).double()}, TypeError, "the model returns a tuple, not a tensor: pass value_fn"),
        ({"wrt": "x"}, ValueError, "leave wrt out"),
        ({"wrt": "x", "input_at": "0"}, ValueError, "not both"),
        (
            {
                "model": ReturnsOpaque(3, 1).double(),
                "value_fn": lambda o: o.energy.sum(),
                "loss_fn": lambda o, g, y: o.energy.sum() + g.square().sum(),
            },
            TypeError,
            "returned a Opaque, whose tensors cannot be found",
        ),
    ],
)
def test_errors(options, error, message):
    arguments = {"model": two_layers(), "loss_fn": forces, "x": X, "y": Y} | options
    with pytest.raises(error, match=message):
        threepass.gradient_step(**arguments)


@pytest.mark.parametrize("keyword", [False, True])
def test_third_derivatives_are_refused(keyword):
    x = X.clone().requires_grad_()

    def laplacian(output, g, y):
        how = {"create_graph": True, "allow_unused": True}
        d2 = [torch.autograd.grad(g[:, i].sum(), **how, inputs=x) if keyword else
              torch.autograd.grad(g[:, i].sum(), x, **how) for i in range(3)]  # fmt: skip
        return sum(z[0].sum() for z in d2)

    with pytest.raises(NotImplementedError, match=r"third derivatives .*create_graph=True.* or torch.func"):
        threepass.gradient_step(two_layers(), laplacian, x.detach(), Y)


def test_derivatives_of_the_loss_at_g_are_allowed():
    def loss_fn(output, g, y):
        (slope,) = torch.autograd.grad(g.pow(3).sum(), g, create_graph=True)
        return (slope - y).square().mean()

    agrees(two_layers(), loss_fn, X, Y)


def test_tensors_outside_of_the_model_are_named():
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    with pytest.warns(threepass.LeftOutWarning, match="1 tensor"):
        threepass.gradient_step(two_layers(), lambda o, g, y: weight * forces(o, g, y), X, Y)


def test_a_grad_scaler_scales_the_loss():
    model, scaler = two_layers(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected = threepass.gradient_step(model, forces, X, Y).grads
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    scaler.scale(threepass.GradientStep(model, forces).loss(X, Y)).backward()
    assert_close({n: p.grad for n, p in model.named_parameters()}, _times(1024.0, expected), 1e-12)
    scaler.step(optimizer)
    scaler.update()
    assert_close({n: before[n] - p for n, p in model.named_parameters()}, _times(0.1, expected), 1e-9)


def _scattered(x, index):
    return x.new_zeros(2, x.shape[1]).index_add(0, index, x.tanh())


class Scatters(nn.Module):
    def __init__(self, scatter):
        super().__init__()
        self.first, self.last, self.scatter = nn.Linear(3, 4), nn.Linear(4, 1), scatter

    def forward(self, x):
        return self.last(self.scatter(self.first(x), torch.tensor([0, 1, 1, 0, 1])))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_functions_run_as_the_python_that_they_were_made_from():
    scripted = torch.jit.script(_scattered)
    torch.manual_seed(0)
    agrees(Scatters(scripted).double(), lambda o, g, y: o.square().sum() + g.square().sum(), X, None)
    assert "IndexAdd" in scripted(X.clone().requires_grad_(), torch.zeros(5, dtype=int)).grad_fn.name()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_traced_functions_run_with_the_numbers_of_their_trace():
    traced = torch.jit.trace(_scattered, (torch.randn(5, 4).double(), torch.zeros(5, dtype=int)))
    agrees(Scatters(traced).double(), lambda o, g, y: o.square().sum() + g.square().sum(), X, None)


INDEX = torch.tensor([0, 1, 1, 0, 1])[:, None].expand(-1, 4)
WRITES = {  # into an activation; a rule is there for each of these functions, and declines the call
    "amax": lambda u, z, w: u.scatter_reduce_(0, INDEX, z, "amax", include_self=False),
    "amin of both": lambda u, z, w: u.scatter_reduce_(0, INDEX, z, "amin"),
    "mean": lambda u, z, w: u.scatter_reduce_(0, INDEX, z, "mean"),
    "prod": lambda u, z, w: u.scatter_reduce_(0, INDEX, z, "prod"),
    "a weight": lambda u, z, w: u.index_add_(0, INDEX[:, 0], w * z.mean()).index_add_(0, INDEX[:, 0], w),
}


class Writes(nn.Module):
    def __init__(self, write, onto_zeros):
        super().__init__()
        self.first, self.last, self.write, self.onto_zeros = nn.Linear(3, 4), nn.Linear(4, 1), write, onto_zeros
        self.weight = nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        z = self.first(x).sin()
        into = z.new_zeros(2, 4) if self.onto_zeros else 0.1 * z[:2]
        return self.last(self.write(into, z, self.weight).sin())


@pytest.mark.parametrize("onto_zeros", [True, False])
@pytest.mark.parametrize("name", WRITES)
def test_writes_that_their_rule_declines_have_what_was_there_before(name, onto_zeros):
    torch.manual_seed(0)
    agrees(Writes(WRITES[name], onto_zeros).double(), lambda o, g, y: o.square().mean() + (g**3).sum(), X, None)


class Forces(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy = two_layers()

    def forward(self, x):
        energy = self.energy(x)
        return torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


def test_a_model_that_differentiates_itself_is_pointed_here():
    with pytest.raises(
        threepass.UnsupportedError, match=r"autograd.grad: the model computes a gradient .*gradient_step"
    ):
        threepass.three_pass(Forces(), F.mse_loss, X, Y)


class ForcesAndStress(Forces):
    def forward(self, x):
        strain = torch.zeros(3, 3, dtype=x.dtype).requires_grad_()
        energy = self.energy(x + x @ strain)
        return torch.autograd.grad(energy.sum(), [x, strain], create_graph=True)[0]


@pytest.mark.parametrize("model", [Forces, ForcesAndStress])
def test_a_model_that_differentiates_itself_is_refused_here_too(model):
    with pytest.raises(threepass.UnsupportedError, match=r"autograd.grad: the model computes .*return the scalar"):
        threepass.gradient_step(model(), lambda output, g, y: output.square().mean(), X, Y)


def test_a_loss_of_two_arguments_is_refused_before_anything_runs():
    for make in (threepass.GradientStep, functools.partial(threepass.gradient_step, x=torch.randn(2, 3))):
        with pytest.raises(TypeError, match=r"loss_fn must take \(output, g, y\)"):
            make(nn.Linear(3, 1), lambda output, y: output.sum())


def test_a_result_prints_in_one_line():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 3)
    results = [
        threepass.gradient_step(model, lambda output, g, y: g.square().mean(), x, separate=separate)
        for separate in (False, True)
    ]
    start = f"GradientResult(loss={results[0].loss:.4g}, value={results[0].value:.4g}, grads of "
    assert all(repr(r).startswith(start) and "\n" not in repr(r) for r in results)
    assert "through_input_grad" not in repr(results[0])
    assert repr(results[1]).endswith("; also output, input_grad, through_output, through_input_grad)")
