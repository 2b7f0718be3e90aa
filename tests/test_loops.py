"""The loops people have: each beside the same updates written out by hand, from `three_pass`, in float64."""

import copy
import math

import pytest
import torch
from close import assert_close, norm
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils

import threepass

LR, STEPS, MOST = 0.1, 4, 0.2  # MOST: the norm that gradients are clipped to
OPTIMIZERS = {
    "SGD": lambda parameters, **how: torch.optim.SGD(parameters, LR, momentum=0.9, **how),
    "AdamW": lambda parameters, **how: torch.optim.AdamW(parameters, LR, weight_decay=0.1, **how),
}
IMPLEMENTATIONS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
TERMS = {"alpha": 0.2}


def setting():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    return model, [(torch.randn(8, 5).double(), torch.randint(0, 4, (8,))) for _ in range(STEPS)]


def weights(model) -> dict:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


class ByHand:
    """Updates of the weights from r.grads, without torch's optimizers."""

    def __init__(self, model, optimizer: str, clipped: bool = False):
        self.model, self.update, self.clipped = model, getattr(self, optimizer), clipped
        self.m = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        self.v, self.steps = {n: torch.zeros_like(m) for n, m in self.m.items()}, 0

    @torch.no_grad()
    def __call__(self, grads: dict) -> None:
        self.steps += 1
        size = norm(grads)
        if self.clipped and size > MOST:
            grads = {n: g * (MOST / (size + 1e-6)) for n, g in grads.items()}
        for n, p in self.model.named_parameters():
            self.update(n, p, grads[n])

    def SGD(self, n, p, g):  # noqa: N802
        self.m[n] = 0.9 * self.m[n] + g
        p -= LR * self.m[n]

    def AdamW(self, n, p, g):  # noqa: N802
        self.m[n] = 0.9 * self.m[n] + 0.1 * g
        self.v[n] = 0.999 * self.v[n] + 0.001 * g**2
        m, v = self.m[n] / (1 - 0.9**self.steps), self.v[n] / (1 - 0.999**self.steps)
        p *= 1 - LR * 0.1
        p -= LR * m / (v.sqrt() + 1e-8)


def by_hand(optimizer: str, clipped: bool = False, after=lambda model: None) -> dict:
    model, batches = setting()
    update = ByHand(model, optimizer, clipped)
    for x, y in batches:
        update(threepass.three_pass(model, F.cross_entropy, x, y, **TERMS).grads)
        after(model)
    return weights(model)


def loop(optimizer: str, how: dict, clipped=False, set_to_none=True, parts=1, after=lambda model: None, **options):
    model, batches = setting()
    step = threepass.ThreePass(model, F.cross_entropy, batch_size=8, **TERMS, **options)
    optimizer = OPTIMIZERS[optimizer](model.parameters(), **how)
    for x, y in batches:
        optimizer.zero_grad(set_to_none=set_to_none)
        for part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            step(*part)
        if clipped:
            nn.utils.clip_grad_norm_(model.parameters(), MOST)
        optimizer.step()
        after(model)
    if options.get("compile"):
        assert step.compiled.compile_seconds > 0
    return weights(model)


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "options",
    [{}, {"clipped": True}, {"set_to_none": False}, {"parts": 4}, {"clipped": True, "set_to_none": False, "parts": 2}],
    ids=str,
)
def test_optimizers(optimizer, how, options):
    expected = by_hand(optimizer, options.get("clipped", False))
    assert_close(loop(optimizer, IMPLEMENTATIONS[how], **options), expected, 1e-10)


@pytest.mark.parametrize(
    ("optimizer", "how", "options"),
    [
        ("SGD", "fused", {"clipped": True}),
        ("AdamW", "foreach", {"set_to_none": False, "parts": 2}),
    ],
)
def test_optimizers_of_a_compiled_step(optimizer, how, options):
    expected = by_hand(optimizer, options.get("clipped", False))
    assert_close(loop(optimizer, IMPLEMENTATIONS[how], compile=True, **options), expected, 1e-10)


def test_moving_averages_of_the_weights():
    average, expected = setting()[0], weights(setting()[0])
    averaged = swa_utils.AveragedModel(average, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.75))
    averaged.update_parameters(average)

    def follow(model):
        for n, p in weights(model).items():
            expected[n] = 0.75 * expected[n] + 0.25 * p

    by_hand("SGD", after=follow)
    loop("SGD", {}, after=averaged.update_parameters)
    assert_close(weights(averaged.module), expected, 1e-12)


def test_lbfgs_minimises_loss_and_penalty():
    """Exact mode with strength gives the gradients of r.loss + strength * r.input_loss, as a line search needs."""
    model, batches = setting()
    twin, (x, y) = copy.deepcopy(model), batches[0]
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.5, mode="exact")

    def by_three_passes():
        model.zero_grad()
        r = step(x, y)
        return r.loss + 0.5 * r.input_loss

    def by_autograd():
        twin.zero_grad()
        leaf = x.clone().requires_grad_()
        losses = F.cross_entropy(twin(leaf), y, reduction="none")
        (g,) = torch.autograd.grad(losses.sum(), leaf, create_graph=True)
        total = (losses + 0.25 * g.square().sum(1)).mean()
        total.backward()
        return total.detach()

    for each, closure in ((model, by_three_passes), (twin, by_autograd)):
        optimizer = torch.optim.LBFGS(each.parameters(), max_iter=6, line_search_fn="strong_wolfe")
        first = optimizer.step(closure)
    assert step.calls > 6
    assert_close(weights(model), weights(twin), 1e-8)
    assert by_autograd() < 0.8 * first


def test_hooks_that_step_in_the_backward_pass():
    """An optimizer for each parameter, run as soon as its gradient is there."""
    model, batches = setting()
    step = threepass.ThreePass(model, F.cross_entropy, **TERMS)
    optimizers = {p: torch.optim.SGD([p], LR, momentum=0.9) for p in model.parameters()}

    def update(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for x, y in batches:
        step(x, y)
    assert all(p.grad is None for p in model.parameters())
    assert_close(weights(model), by_hand("SGD"), 1e-12)


def test_learning_rate_of_plain_training_over_alpha():
    """The paper's rule: backpropagation then moves the weights as in plain training; a bias has no third term."""
    model, batches = setting()
    x, y = batches[0]
    bias = model[4].bias
    plain = bias.detach() - LR * torch.autograd.grad(F.cross_entropy(model(x), y), bias)[0]
    threepass.ThreePass(model, F.cross_entropy, **TERMS)(x, y)
    torch.optim.SGD(model.parameters(), LR / TERMS["alpha"]).step()
    assert math.isclose((bias - plain).norm().item(), 0, abs_tol=1e-14)


def test_channels_last_weights_in_fused_optimizers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 4)).double()
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 6, 6).double().to(memory_format=torch.channels_last)
    y = torch.randint(0, 4, (4,))
    r = threepass.ThreePass(model, F.cross_entropy, **TERMS)(x, y)
    assert all(p.grad.stride() == p.stride() for p in model.parameters())
    before = weights(model)
    torch.optim.SGD(model.parameters(), LR, fused=True).step()
    assert_close(weights(model), {n: p - LR * r.grads[n] for n, p in before.items()}, 1e-14)
