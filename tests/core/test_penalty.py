"""Penalties on the input gradient: their gradients against double backward, in float64."""

import oracle
import pytest
import torch
from close import assert_close, restored
from torch import nn
from torch.nn import functional as F

import threepass
from threepass import models


def smooth_norm(g):
    return (g.flatten(1).square().sum(1) + 0.1).sqrt() + g.flatten(1)[:, 0] ** 3


PENALTIES = {
    "l2": lambda g: 0.5 * g.flatten(1).square().sum(1),
    "l1": lambda g: g.flatten(1).abs().sum(1),
    "norm": lambda g: g.flatten(1).norm(dim=1),
    "smooth_norm": smooth_norm,
}
ALL = pytest.mark.parametrize("name", PENALTIES)


def penalty_of(name):
    return PENALTIES[name] if name == "smooth_norm" else name


def mlp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.GELU(), nn.Linear(6, 4)).double()
    return model, torch.randn(8, 5, dtype=torch.float64), torch.randint(4, (8,))


def conv():
    torch.manual_seed(1)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).double(), torch.randn(6, 2, 6, 6, dtype=torch.float64), torch.randint(3, (6,))


def by_double_backward(model, x, y, penalty):
    """dl/dw and d/dw mean_i penalty(g_i), with the penalty's value."""
    leaf = x.clone().requires_grad_()
    params = dict(model.named_parameters())
    with restored(model):
        loss = F.cross_entropy(model(leaf), y)
        (g,) = torch.autograd.grad(loss, leaf, create_graph=True)
        value = penalty(len(x) * g).mean()
        terms = [torch.autograd.grad(z, params.values(), retain_graph=True, allow_unused=True) for z in (loss, value)]
    return [{n: _or_zero(g, params[n]) for n, g in zip(params, t, strict=True)} for t in terms], value.detach()


def _or_zero(g, p):
    return torch.zeros_like(p) if g is None else g


@ALL
@pytest.mark.parametrize("net", [mlp, conv])
def test_exact_mode_is_the_gradient_of_the_penalty(net, name):
    model, x, y = net()
    (back, third), value = by_double_backward(model, x, y, PENALTIES[name])
    options = {"mode": "exact", "penalty": penalty_of(name)}
    with restored(model):
        r = threepass.three_pass(model, F.cross_entropy, x, y, strength=0.7, separate=True, **options)
    assert_close(r.third_grads, third, 1e-12)
    torch.testing.assert_close(r.input_loss, value, rtol=1e-13, atol=0)
    with restored(model):
        joined = threepass.three_pass(model, F.cross_entropy, x, y, strength=0.7, **options)
    assert_close(joined.grads, {n: back[n] + 0.7 * third[n] for n in back}, 1e-12)


@ALL
@pytest.mark.parametrize("reduction", ["batch", "sample"])
def test_alpha_weighs_the_penalty_as_it_weighs_the_input_loss(name, reduction):
    model, x, y = mlp()
    (back, third), _ = by_double_backward(model, x, y, PENALTIES[name])
    r = threepass.three_pass(
        model, F.cross_entropy, x, y, alpha=0.3, reduction=reduction, mode="exact", penalty=penalty_of(name)
    )
    c = 1 / len(x) if reduction == "batch" else 1.0
    assert_close(r.grads, {n: 0.3 * back[n] + 0.7 * c * third[n] for n in back}, 1e-12)


@ALL
def test_paper_mode_starts_from_the_slope_of_the_penalty(name):
    model, x, y = mlp()

    def start(dx):
        g = (len(x) * dx).requires_grad_()
        return torch.autograd.grad(PENALTIES[name](g).sum(), g)[0]

    expected = oracle.third_grads(model, F.cross_entropy, x, y, start=start)
    r = threepass.three_pass(model, F.cross_entropy, x, y, strength=0.5, penalty=penalty_of(name), separate=True)
    assert_close(r.third_grads, {n: expected[n] for n in r.third_grads}, 1e-6)


@ALL
def test_a_piecewise_linear_net_carries_the_mix_from_any_penalty(name):
    torch.manual_seed(0)
    model, x, y = models.mlp(5, 8, 6, 4).double(), torch.randn(8, 5, dtype=torch.float64), torch.randint(4, (8,))
    options = {"strength": 0.5, "penalty": penalty_of(name)}
    r = threepass.three_pass(model, F.cross_entropy, x, y, separate=True, **options)
    expected = {n: r.backprop_grads[n] + 0.5 * r.third_grads[n] for n in r.grads}
    assert_close(threepass.three_pass(model, F.cross_entropy, x, y, **options).grads, expected, 1e-12)


@ALL
def test_parts_of_a_batch_add_up(name):
    model, x, y = mlp()
    options = {"mode": "exact", "alpha": 0.3, "penalty": penalty_of(name), "batch_size": 8}
    whole = threepass.three_pass(model, F.cross_entropy, x, y, **options)
    parts = [threepass.three_pass(model, F.cross_entropy, x[i], y[i], **options) for i in (slice(3), slice(3, 8))]
    assert_close({n: parts[0].grads[n] + parts[1].grads[n] for n in whole.grads}, whole.grads, 1e-12)
    torch.testing.assert_close((3 * parts[0].input_loss + 5 * parts[1].input_loss) / 8, whole.input_loss)


@pytest.mark.parametrize("options", [{"alpha": 1.0}, {"strength": 0.0}])
def test_without_a_third_pass_the_penalty_is_still_reported(options):
    model, x, y = mlp()
    (back, _), value = by_double_backward(model, x, y, PENALTIES["l1"])
    r = threepass.three_pass(model, F.cross_entropy, x, y, penalty="l1", **options)
    torch.testing.assert_close(r.input_loss, value)
    assert_close(r.grads, back, 1e-12)


def test_samples_with_no_gradient_have_slope_zero():
    model = nn.Linear(3, 1).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    for penalty in ("l1", "norm"):
        r = threepass.three_pass(model, lambda o, y: (o * y).mean(), x, torch.tensor([[1.0], [0], [2], [0]]),
                                 mode="exact", strength=1.0, penalty=penalty)  # fmt: skip
        assert all(g.isfinite().all() for g in r.grads.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_half_formats_keep_the_penalty(dtype, mode):
    model, x, y = mlp()
    options = {"strength": 0.01, "mode": mode, "penalty": "l1", "separate": True}
    expected = threepass.three_pass(model, F.cross_entropy, x, y, **options).third_grads
    half = threepass.three_pass(model.to(dtype), F.cross_entropy, x.to(dtype), y, **options).third_grads
    for n in ("0.weight", "2.weight"):  # float16 and bfloat16 round the signs of small gradients
        slope = (half[n].double() * expected[n]).sum() / expected[n].square().sum()
        assert 0.9 < slope < 1.1


class Masked(nn.Module):
    """Attention with a float mask beside the features."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, features, mask, scale=1.0):
        h = self.embed(features)
        h = F.scaled_dot_product_attention(h, h, h, attn_mask=mask) * scale
        return self.head(h.mean(1))


def masked():
    torch.manual_seed(0)
    x = {"features": torch.randn(5, 4, 3), "mask": torch.randn(5, 4, 4)}
    return Masked().double(), {k: z.double() for k, z in x.items()}, torch.randint(2, (5,))


@pytest.mark.parametrize("wrt", ["features", ("features",), ["mask", "features"]])
def test_wrt_names_what_counts_as_the_input(wrt):
    model, x, y = masked()
    r = threepass.three_pass(model, F.cross_entropy, x, y, mode="exact", strength=0.5, wrt=wrt, separate=True)
    names = [wrt] if isinstance(wrt, str) else list(wrt)
    leaves = {n: x[n].clone().requires_grad_() for n in names}
    loss = F.cross_entropy(model(**x | leaves), y)
    dx = torch.autograd.grad(loss, leaves.values(), create_graph=True)
    params = dict(model.named_parameters())
    value = sum(0.5 * (5 * g).square().sum() for g in dx) / 5
    expected = torch.autograd.grad(value, params.values(), allow_unused=True)
    expected = {n: _or_zero(g, params[n]) for n, g in zip(params, expected, strict=True)}
    assert_close(r.third_grads, expected, 1e-12)
    torch.testing.assert_close(r.input_loss, value.detach())
    assert isinstance(r.input_grad, torch.Tensor if isinstance(wrt, str) else dict)
    found = [r.input_grad] if isinstance(wrt, str) else [r.input_grad[n] for n in names]
    torch.testing.assert_close(found, [g.detach() for g in dx])


def test_wrt_of_a_tuple_is_an_index():
    model, x, y = masked()
    r = threepass.three_pass(model, F.cross_entropy, tuple(x.values()), y, wrt=0)
    expected = threepass.three_pass(model, F.cross_entropy, x, y, wrt="features")
    assert_close(r.grads, expected.grads, 1e-14)
    torch.testing.assert_close(r.input_grad, expected.input_grad)


def test_a_penalty_gets_gradients_structured_as_the_result_gives_them():
    model, x, y = masked()
    seen = []

    def penalty(g):
        seen.append({n: z.shape for n, z in g.items()} if isinstance(g, dict) else g.shape)
        return (g["features"] if isinstance(g, dict) else g).flatten(1).square().sum(1)

    for wrt in (None, "features", ("features",)):
        threepass.three_pass(model, F.cross_entropy, x, y, wrt=wrt, penalty=penalty)
    assert seen == [{"features": (5, 4, 3), "mask": (5, 4, 4)}, (5, 4, 3), {"features": (5, 4, 3)}]


@pytest.mark.parametrize(
    ("wrt", "error", "message"),
    [
        ("positions", ValueError, r"wrt='positions' is not an entry of x; x has: 'features', 'mask', 'scale'"),
        ("scale", TypeError, r"wrt names x\['scale'\], which is a float: only floating-point tensors"),
        ((), ValueError, "wrt must be a key of the dict x"),
        (("mask", "mask"), ValueError, "without duplicates"),
        (1.5, ValueError, "wrt must be a key of the dict x"),
    ],
)
def test_bad_wrt(wrt, error, message):
    model, x, y = masked()
    with pytest.raises(error, match=message):
        threepass.three_pass(model, F.cross_entropy, x | {"scale": 2.0}, y, wrt=wrt)


def test_wrt_needs_entries_and_excludes_input_at():
    model, x, y = mlp()
    with pytest.raises(ValueError, match="x is a tensor: leave wrt out"):
        threepass.three_pass(model, F.cross_entropy, x, y, wrt=0)
    with pytest.raises(ValueError, match=r"wrt .* or input_at .*, not both"):
        threepass.three_pass(model, F.cross_entropy, x, y, wrt="x", input_at="0")


def mixing(g):
    return g.square().sum(1) / g.square().sum()


def mixing_in_the_last(g):
    return torch.cat([g[:-1].square().sum(1), g.square().sum()[None]])


def inactive_for_the_first(g):
    return F.relu((g - g.mean(0)).norm(dim=1) - (g - g.mean(0)).norm(dim=1)[0].detach())


METRIC = torch.ones(5, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("penalty", "error", "message"),
    [
        ("l3", ValueError, 'penalty must be "l2", "l1", "norm" or a function'),
        (None, ValueError, "penalty must be"),
        (lambda g: g.abs().sum(), ValueError, r"one number per sample, a tensor of shape \(8,\), got shape \(\)"),
        (lambda g: g.abs(), ValueError, r"got shape \(8, 5\)"),
        (lambda g: 0.0, ValueError, "got float"),
        (lambda g: g.detach().abs().sum(1), ValueError, "not differentiable in g"),
        (lambda g: (g > 0).sum(1), ValueError, "not differentiable in g"),
        (lambda g: (g + 1j).sum(1), TypeError, "must return real numbers, got torch.complex128"),
        (lambda g: (g * METRIC).sum(1), ValueError, r"penalty\(g\) depends on 1 tensor\(s\) other than g"),
        (mixing, ValueError, "penalty mixes samples"),
        (mixing_in_the_last, ValueError, "penalty mixes samples"),
        (inactive_for_the_first, ValueError, "penalty mixes samples"),
        (lambda g: g.square().sum(1).cumsum(0), ValueError, "penalty mixes samples"),
        (
            lambda g: (g * 0).norm(dim=1).sqrt(),
            FloatingPointError,
            "derivative of penalty.* NaN or infinite in 40 of 40",
        ),
    ],
)
def test_bad_penalties(penalty, error, message):
    model, x, y = mlp()
    for _ in range(2):
        with pytest.raises(error, match=message):
            threepass.three_pass(model, F.cross_entropy, x, y, penalty=penalty)


def test_a_penalty_that_mixes_samples_is_seen_after_a_batch_of_one():
    model, x, y = mlp()

    def centred(g):
        return (g - 0.5 * g.mean(0)).square().sum(1)

    threepass.three_pass(model, F.cross_entropy, x[:1], y[:1], penalty=centred)
    with pytest.raises(ValueError, match="penalty mixes samples"):
        threepass.three_pass(model, F.cross_entropy, x, y, penalty=centred)


def test_norm_needs_samples_along_dimension_0():
    model = nn.Sequential(nn.Embedding(9, 3), nn.Flatten(0), nn.Linear(15, 2)).double()

    def loss_fn(output, y):
        return F.cross_entropy(output[None], y)

    with pytest.raises(ValueError, match=r'penalty="norm".* \(5 samples\), but the input has shape \(15,\)'):
        threepass.three_pass(model, loss_fn, torch.arange(5), torch.tensor([1]), input_at="1", penalty="norm")


@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_compiled_steps_notice_another_penalty(mode, graph_only):
    model, x, y = mlp()
    factor = [1.0]

    def scaled(g):
        return factor[0] * g.abs().sum(1)

    step = threepass.ThreePass(model, F.cross_entropy, mode=mode, strength=0.5, penalty="norm", compile="require")
    for penalty, scale in [("norm", 1.0), (scaled, 1.0), (scaled, 2.0), (smooth_norm, 2.0)]:
        factor[0] = scale
        step.options["penalty"] = penalty
        model.zero_grad()
        r = step(x, y)
        e = threepass.three_pass(model, F.cross_entropy, x, y, mode=mode, strength=0.5, penalty=penalty)
        assert_close(r.grads, e.grads, 1e-12)
        torch.testing.assert_close(r.input_loss, e.input_loss)
    assert len(step.compiled.programs) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["l1", "norm", "smooth_norm"])
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_compiled_penalties(name, mode):
    model, x, y = mlp()
    options = {"mode": mode, "strength": 0.5, "penalty": penalty_of(name)}
    r = threepass.ThreePass(model, F.cross_entropy, compile="require", **options)(x, y)
    assert_close(r.grads, threepass.three_pass(model, F.cross_entropy, x, y, **options).grads, 1e-12)
