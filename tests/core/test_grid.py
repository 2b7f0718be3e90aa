"""Every operation of the grid x every property, in float64."""

import copy

import oracle
import pytest
import torch
from cases import CASES
from close import assert_close, plain_grads, restored
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import threepass

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
ALL = pytest.mark.parametrize("case", CASES, ids=str)
SPLITTABLE = pytest.mark.parametrize("case", [c for c in CASES if not c.random and not c.mixes_samples], ids=str)


def run(case, model, loss_fn, x, y, **options):
    with restored(model):
        return threepass.three_pass(model, loss_fn, x, y, **options)


@ALL
def test_alpha_one_is_backpropagation(case):
    model, loss_fn, x, y = case.build()
    with restored(model):
        params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        loss_fn(model(x.clone()), y).backward()
        expected = {n: p.grad for n, p in params.items() if p.grad is not None}
    model.zero_grad()
    r = run(case, model, loss_fn, x, y, alpha=1.0)
    assert_close(r.grads, expected, 1e-12)
    assert_close(run(case, model, loss_fn, x, y, separate=True).backprop_grads, expected, 1e-12)
    assert all(p.grad is None for p in params.values())


@pytest.mark.parametrize("case", [c for c in CASES if not c.random and not c.hidden], ids=str)
def test_third_pass_is_its_definition(case):
    model, loss_fn, x, y = case.build()
    r = run(case, model, loss_fn, x, y, separate=True)
    with restored(model):
        expected = oracle.third_grads(model, loss_fn, x, y)
    assert_close(r.third_grads, {n: expected[n] for n in r.third_grads}, 1e-6)


@pytest.mark.parametrize("case", [c for c in CASES if not c.hidden and not c.once], ids=str)
def test_exact_is_double_backward(case):
    model, loss_fn, x, y = case.build()
    r = run(case, model, loss_fn, x, y, mode="exact", separate=True)
    params = {n: p for n, p in model.named_parameters() if n in r.grads}
    with restored(model), sdpa_kernel(SDPBackend.MATH):
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(loss_fn(model(leaf * 1), y), leaf, create_graph=True)
        grads = torch.autograd.grad(0.5 * dx.square().sum(), list(params.values()), allow_unused=True)
    expected = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(params.items(), grads, strict=True)}
    assert_close(r.third_grads, expected, 1e-10)
    torch.testing.assert_close(r.input_grad, dx.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_what_wraps_an_operation_changes_nothing(mode):
    """Reentrant checkpoints, which forbid autograd.grad, and an autograd.Function against the code that they wrap."""
    for name, forward in {
        "checkpoint": lambda s, x: s.head(checkpoint(s.a, x, use_reentrant=True)),
        "autograd-function": lambda s, x: s.head(torch.sin(torch.tanh(x) * s.w)),
    }.items():
        model, loss_fn, x, y = next(c for c in CASES if c.name == name).build()
        other = copy.deepcopy(model)
        other.f = forward
        a, b = (threepass.three_pass(m, loss_fn, x, y, mode=mode, separate=True) for m in (model, other))
        assert_close(a.third_grads, b.third_grads, 1e-12)
        assert_close(a.backprop_grads, b.backprop_grads, 1e-12)


@ALL
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_mix_is_the_sum_of_its_terms(case, mode):
    model, loss_fn, x, y = case.build()
    terms = run(case, model, loss_fn, x, y, mode=mode, separate=True)
    for alpha in (0.0, 0.3, 0.8):
        expected = {n: alpha * g + (1 - alpha) * terms.third_grads[n] for n, g in terms.backprop_grads.items()}
        assert_close(run(case, model, loss_fn, x, y, mode=mode, alpha=alpha).grads, expected, 1e-12)


@ALL
def test_additive_parameters_get_exactly_zero_from_the_third_pass(case):
    model, loss_fn, x, y = case.build()
    grads = run(case, model, loss_fn, x, y, alpha=0.0).grads
    additive = (nn.Linear, nn.modules.conv._ConvNd, nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
    names = {f"{n}.bias".removeprefix(".") for n, m in model.named_modules() if isinstance(m, additive)}
    whole = [f"{n}.out_proj.bias" for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    for name in (names | set(whole)) & grads.keys():
        assert not grads[name].any(), name


@SPLITTABLE
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_sample_is_the_mean_over_batches_of_one(case, mode):
    model, loss_fn, x, y = case.build()
    sample, batch = (
        run(case, model, loss_fn, x, y, mode=mode, reduction=r, separate=True) for r in ("sample", "batch")
    )
    ones = [run(case, model, loss_fn, x[i : i + 1], y[i : i + 1], mode=mode, separate=True) for i in range(len(x))]
    mean = {n: sum(r.third_grads[n] for r in ones) / len(x) for n in sample.third_grads}
    assert_close(sample.third_grads, mean, 1e-10)
    torch.testing.assert_close(sample.input_loss, sum(r.input_loss for r in ones) / len(x))
    assert_close({n: g / len(x) for n, g in sample.third_grads.items()}, batch.third_grads, 1e-12)


@SPLITTABLE
@pytest.mark.parametrize("options", [{"alpha": 0.3}, {"strength": 0.7}, {"alpha": 0.3, "mode": "exact"}], ids=str)
def test_parts_of_a_batch_add_up(case, options):
    model, loss_fn, x, y = case.build()
    whole = run(case, model, loss_fn, x, y, **options)
    parts = [
        run(case, model, loss_fn, a, b, batch_size=len(x), **options)
        for a, b in zip(x.split([1, 2, len(x) - 3]), y.split([1, 2, len(x) - 3]), strict=True)
    ]
    assert_close({n: sum(p.grads[n] for p in parts) for n in whole.grads}, whole.grads, 1e-10)
    torch.testing.assert_close(torch.cat([p.input_grad for p in parts]), whole.input_grad, rtol=1e-10, atol=1e-14)


@ALL
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_strength_is_a_penalty(case, mode):
    model, loss_fn, x, y = case.build()
    terms = run(case, model, loss_fn, x, y, mode=mode, reduction="sample", separate=True)
    expected = {n: g + 0.7 * terms.third_grads[n] for n, g in terms.backprop_grads.items()}
    assert_close(run(case, model, loss_fn, x, y, mode=mode, strength=0.7).grads, expected, 1e-12)


@ALL
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_one_forward_leaves_its_traces_once(case, mode):
    model, loss_fn, x, y = case.build()
    twin = copy.deepcopy(model)
    torch.manual_seed(7)
    out = twin(x.clone())
    rng = torch.get_rng_state()
    torch.manual_seed(7)
    before = x.clone()
    r = threepass.three_pass(model, loss_fn, x, y, mode=mode)
    assert torch.equal(torch.get_rng_state(), rng)
    for (name, b), c in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(b, c, rtol=0, atol=0, msg=name)
    assert torch.equal(x, before)
    torch.testing.assert_close(r.output, out.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(r.loss, loss_fn(out, y).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", [c for c in CASES if c.random], ids=str)
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_dropout_uses_one_mask(case, mode):
    """The same seed gives the same gradients, and backpropagation's are those of the mask that the seed draws."""
    model, loss_fn, x, y = case.build()
    torch.manual_seed(3)
    a = threepass.three_pass(model, loss_fn, x, y, mode=mode, alpha=0.0)
    torch.manual_seed(3)
    b = threepass.three_pass(model, loss_fn, x, y, mode=mode, alpha=0.0)
    assert_close(a.grads, b.grads, 0.0)
    torch.manual_seed(3)
    with sdpa_kernel(SDPBackend.MATH):
        expected = plain_grads(model, loss_fn, x, y)
    torch.manual_seed(3)
    assert_close(threepass.three_pass(model, loss_fn, x, y, alpha=1.0).grads, expected, 1e-12)


def test_other_additive_parameters():
    """Class token, position embedding, what is written into a buffer: not in any Jacobian."""
    for name, additive in {"class-token-position": ("token", "position"), "in-place-writes": ("token",)}.items():
        model, loss_fn, x, y = next(c for c in CASES if c.name == name).build()
        grads = threepass.three_pass(model, loss_fn, x, y, alpha=0.0).grads
        for parameter in additive:
            assert not grads[parameter].any(), parameter
