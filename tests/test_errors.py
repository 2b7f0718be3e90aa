"""Bad input is refused in words that say what to do, and leaves nothing changed."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import threepass

X, Y = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 0, 1])


def net():
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4))


def call(model=None, loss_fn=F.cross_entropy, x=X, y=Y, **options):
    return threepass.three_pass(net() if model is None else model, loss_fn, x, y, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"alpha": -0.1}, ValueError, r"alpha must be a number in \[0, 1\]"),
        ({"alpha": 1.5}, ValueError, r"alpha must be a number in \[0, 1\]"),
        ({"alpha": float("nan")}, ValueError, r"alpha must be a number in \[0, 1\]"),
        ({"alpha": "0.1"}, ValueError, r"alpha must be a number in \[0, 1\]"),
        ({"reduction": "mean"}, ValueError, 'reduction must be "batch" or "sample"'),
        ({"mode": "fast"}, ValueError, 'mode must be "paper" or "exact"'),
        ({"strength": -1}, ValueError, "strength must be a finite number >= 0"),
        ({"strength": 1.0, "alpha": 0.5}, ValueError, "not both"),
        ({"strength": 1.0, "alpha": 0.1}, ValueError, "not both: strength=s is backpropagation"),
        ({"strength": 1.0, "reduction": "sample"}, ValueError, "leave out reduction"),
        ({"batch_size": 0}, ValueError, "batch_size must be a positive integer"),
        ({"batch_size": 3}, ValueError, "batch_size=3 is less than the 6 samples in x"),
        ({"input_at": "nowhere"}, ValueError, "names no module of the model; it has: 0, 1, 2"),
        ({"x": X.to(torch.complex64)}, TypeError, "x is complex"),
        ({"x": torch.arange(30).view(6, 5)}, TypeError, "no tensor of x is floating point"),
        ({"x": X[:0], "y": Y[:0]}, ValueError, "empty batch"),
        ({"x": [X]}, TypeError, "a tuple or dict"),
        ({"x": ()}, TypeError, "x contains no tensor"),
        ({"x": torch.tensor(1.0)}, ValueError, "no batch dimension"),
        ({"model": lambda x: x}, TypeError, "model must be a torch.nn.Module"),
        ({"model": nn.Linear(3, 4, device="meta")}, ValueError, r"on the meta device.*model\.to_empty"),
        ({"model": nn.LazyLinear(4)}, ValueError, r"lazy parameters.*run model\(x\) once"),
        ({"model": nn.ReLU()}, ValueError, "no parameter of the model requires grad"),
        ({"model": net().requires_grad_(False)}, ValueError, "no parameter of the model requires grad"),
        ({"loss_fn": lambda o, y: F.cross_entropy(o, y, reduction="none")}, ValueError, r"a scalar.*got shape \(6,\)"),
        ({"loss_fn": lambda o, y: 3.0}, TypeError, "must return a tensor"),
        ({"loss_fn": lambda o, y: o.sum().detach()}, ValueError, "does not depend on the input"),
        ({"loss_fn": lambda o, y: o.argmax()}, TypeError, "floating-point"),
    ],
)
def test_bad_input(options, error, message):
    with pytest.raises(error, match=message):
        call(**options)


def test_an_alpha_that_equals_the_default_is_refused_beside_strength_too():
    for made in (threepass.ThreePass, lambda *args, **options: threepass.loss(*args, X, Y, **options)):
        for both in ({"alpha": 0.1}, {"alpha": lambda calls: 0.1}):
            with pytest.raises(ValueError, match="not both"):
                made(net(), F.cross_entropy, strength=0.5, **both)
        made(net(), F.cross_entropy, strength=0.5)
    pickled = pickle.loads(pickle.dumps(threepass.ThreePass(net(), F.cross_entropy, strength=0.5)))
    pickled(X, Y)


def test_the_defaults_of_alpha_and_reduction():
    model = net()
    default, given = call(model), call(model, alpha=0.1, reduction="batch")
    positional = threepass.three_pass(model, F.cross_entropy, X, Y, 0.1, "batch", "paper", None)
    for name, g in default.grads.items():
        assert torch.equal(g, given.grads[name])
        assert torch.equal(g, positional.grads[name])
    shown = str(inspect.signature(threepass.three_pass))
    assert "alpha: float = 0.1, reduction: str = 'batch'" in shown


def test_module_named_by_input_at_must_run():
    model = net()
    model.spare = nn.Linear(2, 2)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    with pytest.raises(ValueError, match="input_at='spare': this module was not called in the forward pass"):
        call(model, input_at="spare")


def test_parameters_made_in_inference_mode():
    with torch.inference_mode():
        model = net()
    with pytest.raises(ValueError, match="inference_mode"):
        call(model)
    with pytest.raises(ValueError, match="inference_mode"):  # also where the step watches versions of parameters
        threepass.ThreePass(model, torch.nn.functional.mse_loss, alpha=0.5)(torch.randn(4, 3))


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, w):
        ctx.save_for_backward(a, w)
        return a * w

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d):
        a, w = ctx.saved_tensors
        return d * w, (d * a).sum(0)


class Unsupported(nn.Module):
    """Two places that cannot be gone through, with state all around them."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.inner = nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 5)
        self.first, self.second = Wrapped(), Wrapped()
        self.head = nn.Linear(5, 4)
        self.scripted = None

    def forward(self, x):
        return self.head(self.second(self.drop(self.first(self.inner(self.norm(x))))))


class Detached(torch.autograd.Function):
    """Its backward hides that it depends on w."""

    @staticmethod
    def forward(ctx, a, w):
        ctx.save_for_backward(a, w)
        return a * w

    @staticmethod
    def backward(ctx, d):
        a, w = ctx.saved_tensors
        return d * w.detach(), (d * a).sum(0)


class Hidden(torch.autograd.Function):
    """Its backward hides that it depends on d."""

    @staticmethod
    def forward(ctx, a):
        return a * 2

    @staticmethod
    def backward(ctx, d):
        return d.detach() * 2


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda s, x: s.head(Detached.apply(s.first(x), s.w)), "depends on a weight, and autograd does not see it"),
        (
            lambda s, x: s.head(Hidden.apply(s.first(x))) + s.w[:4],
            "autograd does not see how its backward depends on the incoming gradient",
        ),
    ],
)
def test_never_a_silent_zero(forward, reason):
    model = nn.Module()
    model.first, model.head, model.w = nn.Linear(5, 5), nn.Linear(5, 4), nn.Parameter(torch.randn(5))
    model.forward = lambda x: forward(model, x)
    with pytest.raises(threepass.UnsupportedError, match=reason):
        threepass.three_pass(model, F.cross_entropy, X, Y)


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return Once.apply(x, self.w)


@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_every_unsupported_place_is_listed_and_nothing_has_changed(mode):
    model = Unsupported()
    model.head.weight.grad = torch.ones(4, 5)
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(threepass.UnsupportedError) as raised:
        threepass.three_pass(model, F.cross_entropy, X, Y, mode=mode)
    assert [(p.module, p.operation) for p in raised.value.places] == [("first", "Once"), ("second", "Once")]
    assert "once_differentiable" in str(raised.value)
    assert "add-a-rule" in str(raised.value)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.equal(model.head.weight.grad, torch.ones(4, 5))
    assert all(p.grad is None for n, p in model.named_parameters() if n != "head.weight")
    assert (
        threepass.three_pass(model, F.cross_entropy, X, Y, alpha=1.0).grads.keys()
        == dict(model.named_parameters()).keys()
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_code_that_torch_functions_do_not_show():
    class InAThread(nn.Module):
        def forward(self, x):
            return torch.jit.wait(torch.jit.fork(torch.relu, x))

    class Scripted(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = torch.jit.script(InAThread())
            self.head = nn.Linear(5, 4)

        def forward(self, x):
            return self.head(self.f(x))

    model = Scripted()
    with pytest.raises(
        threepass.UnsupportedError, match=r"head: linear: one of its arguments .* was computed .*TorchScript"
    ) as raised:
        threepass.three_pass(model, F.cross_entropy, X, Y)
    assert len(raised.value.places) == 1
    assert "unsupported: head: linear" in str(threepass.coverage(model, X))


def test_an_error_in_the_users_code_is_the_users_and_buffers_are_put_back():
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 6), nn.Linear(7, 4))
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        call(model)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_norms_warn_once_in_paper_mode_only():
    def norm_net():
        return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))

    model = norm_net()
    with pytest.warns(threepass.NormalizationWarning) as caught:
        call(model)
    call(model)
    (warning,) = caught
    assert warning.filename == __file__
    for word in ("batch_norm", "layer_norm", 'mode="exact"', "alignment"):
        assert word in str(warning.message)
    call(norm_net(), mode="exact")
    call(norm_net(), alpha=1.0)
    call(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).eval())
    threepass.alignment(norm_net(), F.cross_entropy, X, Y)
    threepass.coverage(norm_net(), X)


def test_parameters_outside_the_model_are_named_once():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, out, y):
            return F.cross_entropy(out * self.scale, y)

    model, criterion = net(), Scaled()
    with pytest.warns(threepass.LeftOutWarning, match="not parameters of the model") as caught:
        call(model, criterion)
    assert caught[0].filename == __file__
    call(model, criterion)
    call(net(), criterion.requires_grad_(False))
