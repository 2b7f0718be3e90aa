"""`three_pass` in every surrounding: modes of autograd, autocast, hooks, layouts, containers, states of the model."""

import copy

import pytest
import torch
from close import assert_close, norm, plain_grads
from torch import nn
from torch.nn import functional as F

import threepass


def conv_net(dtype=torch.float64):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3, padding=1), nn.SiLU(), nn.Conv2d(6, 6, 3, stride=2), nn.Tanh(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(54, 4)).to(dtype)
    return model, torch.randn(5, 3, 8, 8, dtype=dtype), torch.randint(0, 4, (5,))


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_works_where_gradients_are_switched_off(context, mode):
    model, x, y = conv_net()
    expected = threepass.three_pass(model, F.cross_entropy, x, y, mode=mode)
    with context():
        inside = threepass.three_pass(model, F.cross_entropy, x.clone(), y.clone(), mode=mode)
        assert torch.is_grad_enabled() == (context is torch.enable_grad)
        threepass.ThreePass(model, F.cross_entropy, mode=mode)(x.clone(), y.clone())
    assert_close(inside.grads, expected.grads, 0.0)
    assert_close({n: p.grad for n, p in model.named_parameters()}, expected.grads, 0.0)


def test_a_compiled_step_that_begins_in_inference_mode_goes_on_outside_of_it():
    """What it keeps between calls, the seed among them, is no inference tensor."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.randint(0, 3, (6,))
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.5, compile="require")
    with torch.inference_mode():
        step(x, y)
    step(x, y)
    expected = threepass.three_pass(model, F.cross_entropy, x, y, strength=0.5).grads
    assert_close({n: p.grad / 2 for n, p in model.named_parameters()}, expected, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_autocast_around_the_call_or_inside_the_model(dtype, inside, mode):
    model, x, y = conv_net(torch.float32)
    exact = threepass.three_pass(
        copy.deepcopy(model).double(), F.cross_entropy, x.double(), y, mode=mode, separate=True
    )
    if inside:
        forward = model.forward
        model.forward = torch.autocast("cpu", dtype)(forward)
    with torch.autocast("cpu", dtype, enabled=not inside):
        r = threepass.three_pass(model, F.cross_entropy, x, y, mode=mode, separate=True)
    assert r.output.dtype == dtype
    for terms, reference in ((r.third_grads, exact.third_grads), (r.backprop_grads, exact.backprop_grads)):
        for name, g in reference.items():
            assert terms[name].dtype == torch.float32
            if g.any():
                assert (terms[name] - g).norm() < 0.05 * g.norm(), name


@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_layouts(mode):
    model, x, y = conv_net()
    expected = threepass.three_pass(model, F.cross_entropy, x, y, mode=mode)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    r = threepass.three_pass(last, F.cross_entropy, x.to(memory_format=torch.channels_last), y, mode=mode)
    assert_close(r.grads, expected.grads, 1e-12)
    assert r.input_grad.is_contiguous(memory_format=torch.channels_last)
    wide = torch.randn(5, 8, 8, 6, dtype=x.dtype)
    wide[..., ::2] = x.permute(0, 2, 3, 1)
    strided = wide[..., ::2].permute(0, 3, 1, 2)
    assert not strided.is_contiguous()
    assert_close(threepass.three_pass(model, F.cross_entropy, strided, y, mode=mode).grads, expected.grads, 1e-12)


def test_hooks_fire_once():
    model, x, y = conv_net()
    fired = []
    model[0].register_forward_hook(lambda *_: fired.append("forward"))
    model[0].register_forward_pre_hook(lambda *_: fired.append("pre"))
    model[2].register_full_backward_hook(lambda *_: fired.append("backward"))
    model[5].weight.register_hook(lambda g: fired.append("weight"))
    model[5].bias.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    r = threepass.three_pass(model, F.cross_entropy, x, y)
    assert sorted(fired) == ["backward", "forward", "pre"]
    assert_close(r.grads, threepass.three_pass(conv_net()[0], F.cross_entropy, x, y).grads, 1e-14)
    fired.clear()
    threepass.ThreePass(model, F.cross_entropy)(x, y)
    assert sorted(fired) == ["accumulated", "backward", "forward", "pre", "weight"]


def test_eval_mode_is_not_touched():
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4)).double().eval()
    x = torch.randn(6, 5).double()
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    threepass.three_pass(model, F.cross_entropy, x, torch.tensor([0, 1, 2, 3, 0, 1]))
    assert torch.equal(torch.get_rng_state(), rng)
    assert not model.training
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(3, 4)

    def forward(self, left, right, rows=None, scale=1.0):
        out = torch.tanh(self.a(left)) * self.b(right) * scale
        return out if rows is None else out[rows]


@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_tuples_and_dicts(mode):
    torch.manual_seed(0)
    model, left, right = Two().double(), torch.randn(6, 5).double(), torch.randn(6, 3).double()
    y = torch.tensor([0, 1, 2, 3, 0, 1])
    a = threepass.three_pass(model, F.cross_entropy, (left, right), y, mode=mode)
    b = threepass.three_pass(
        model, F.cross_entropy, {"right": right, "left": left, "rows": torch.arange(6), "scale": 1.0}, y, mode=mode
    )
    assert_close(a.grads, b.grads, 1e-12)
    assert [g.shape for g in a.input_grad] == [left.shape, right.shape]
    assert b.input_grad["rows"] is None
    torch.testing.assert_close(b.input_grad["left"], a.input_grad[0])
    both = sum(g.square().sum() for g in a.input_grad)
    torch.testing.assert_close(a.input_loss, 0.5 * both * 6)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.embed(ids))).mean(1))


def test_token_models():
    torch.manual_seed(0)
    model, ids, y = Tokens().double(), torch.randint(0, 11, (6, 5)), torch.tensor([0, 1, 2, 3, 0, 1])
    named = threepass.three_pass(model, F.cross_entropy, ids, y, input_at="embed", separate=True)
    default = threepass.three_pass(model, F.cross_entropy, ids, y, separate=True)
    assert_close(named.grads, default.grads, 0.0)
    assert named.input_grad.shape == (6, 5, 6)
    assert_close(named.backprop_grads, plain_grads(model, F.cross_entropy, ids, y), 1e-12)
    assert not named.third_grads["embed.weight"].any()
    assert named.third_grads["mix.weight"].any()
    params = dict(model.named_parameters())
    e = model.embed(ids)
    loss = F.cross_entropy(model.head(torch.tanh(model.mix(e)).mean(1)), y)
    (de,) = torch.autograd.grad(loss, e, create_graph=True)
    expected = dict(
        zip(params, torch.autograd.grad(0.5 * de.square().sum(), params.values(), allow_unused=True), strict=True)
    )
    exact = threepass.three_pass(model, F.cross_entropy, ids, y, input_at="embed", separate=True, mode="exact")
    expected = {n: torch.zeros_like(params[n]) if g is None else g for n, g in expected.items()}
    assert_close(exact.third_grads, expected, 1e-10)
    assert norm({"e": exact.third_grads["embed.weight"]}) > 0
    later = threepass.three_pass(model, F.cross_entropy, ids, y, input_at="mix", separate=True)
    assert not later.third_grads["mix.weight"].any()
    assert_close(later.backprop_grads, named.backprop_grads, 1e-12)


def test_parameters_in_the_loss_get_their_gradient():
    """A weight penalty in loss_fn, and a head that the loss applies."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    x, y = torch.randn(6, 5).double(), torch.tensor([0, 1, 2, 3, 0, 1])

    def loss_fn(out, y):
        return F.cross_entropy(out @ model[2].weight.T[:4, :4], y) + 0.1 * sum(
            p.square().sum() for p in model.parameters()
        )

    assert_close(threepass.three_pass(model, loss_fn, x, y, alpha=1.0).grads, plain_grads(model, loss_fn, x, y), 1e-12)
    r = threepass.three_pass(model, loss_fn, x, y, mode="exact", separate=True)
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(loss_fn(model(leaf), y), leaf, create_graph=True)
    expected = torch.autograd.grad(0.5 * dx.square().sum(), list(model.parameters()), allow_unused=True)
    for (name, p), g in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(r.third_grads[name], torch.zeros_like(p) if g is None else g, rtol=1e-10, atol=1e-14)


def test_unused_and_frozen_parameters_have_no_entry():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4))
    model.unused = nn.Linear(2, 2)
    model[0].weight.requires_grad_(False)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    r = threepass.three_pass(model, F.cross_entropy, torch.randn(3, 5), torch.tensor([0, 1, 2]))
    assert list(r.grads) == ["0.bias", "2.weight", "2.bias"]


def test_the_same_model_may_be_called_twice_in_one_forward():
    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4))

        def forward(self, a, b):
            return self.f(a) - self.f(b)

    torch.manual_seed(0)
    model = Siamese().double()
    x = (torch.randn(6, 5).double(), torch.randn(6, 5).double())
    y = torch.tensor([0, 1, 2, 3, 0, 1])
    r = threepass.three_pass(model, F.cross_entropy, x, y, mode="exact", separate=True)
    leaves = [z.clone().requires_grad_() for z in x]
    dx = torch.autograd.grad(F.cross_entropy(model(*leaves), y), leaves, create_graph=True)
    expected = torch.autograd.grad(0.5 * sum(g.square().sum() for g in dx), list(model.parameters()), allow_unused=True)
    for (name, p), g in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(r.third_grads[name], torch.zeros_like(p) if g is None else g, rtol=1e-10, atol=1e-14)


def test_compiled_models_run_as_written():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    x, y = torch.randn(6, 5).double(), torch.tensor([0, 1, 2, 3, 0, 1])
    compiled = torch.compile(model, backend="eager")
    expected = threepass.three_pass(model, F.cross_entropy, x, y).grads
    got = threepass.three_pass(compiled, F.cross_entropy, x, y).grads
    assert_close({n.removeprefix("_orig_mod."): g for n, g in got.items()}, expected, 1e-14)


def test_vmap_is_refused_in_words():
    model = nn.Linear(5, 4)
    net = nn.Module()
    net.model, net.forward = model, lambda x: torch.tanh(torch.func.vmap(model)(x))
    with pytest.raises(threepass.UnsupportedError, match="vmap"):
        threepass.three_pass(net, F.cross_entropy, torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 0, 1]))
