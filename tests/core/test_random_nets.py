"""The properties again, over randomly drawn small architectures."""

import oracle
import pytest
import torch
from close import assert_close, plain_grads
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import threepass

ACTIVATIONS = [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.Softplus]


class Residual(nn.Module):
    def __init__(self, inner, gate):
        super().__init__()
        self.inner, self.gate = inner, nn.Parameter(torch.randn(()) if gate == "scalar" else torch.randn(6))

    def forward(self, x):
        return x + self.gate * self.inner(x)


class Concat(nn.Module):
    def __init__(self, left, right):
        super().__init__()
        self.left, self.right, self.down = left, right, nn.Linear(12, 6)

    def forward(self, x):
        return self.down(torch.cat([self.left(x), self.right(x)], -1))


class Convolved(nn.Module):
    """Six features as a 2 x 3 image, through a convolution and back."""

    def __init__(self, kernel, groups):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, kernel, padding="same", groups=groups)

    def forward(self, x):
        return self.conv(x.view(-1, 2, 1, 3)).flatten(1)


class Attended(nn.Module):
    """Six features as three tokens of two."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(2, 6)

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.qkv(x.view(-1, 3, 2)).chunk(3, -1)).flatten(1)


class Looped(nn.Module):
    """The same weights several times over."""

    def __init__(self, inner, times):
        super().__init__()
        self.inner, self.times = inner, times

    def forward(self, x):
        for _ in range(self.times):
            x = torch.tanh(self.inner(x))
        return x


layers = st.deferred(
    lambda: st.one_of(
        st.builds(nn.Linear, st.just(6), st.just(6), st.booleans()),
        st.sampled_from(ACTIVATIONS).map(lambda make: make()),
        st.builds(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True))),
        st.builds(nn.LayerNorm, st.just(6)),
        st.builds(nn.RMSNorm, st.just(6)),
        st.builds(nn.GroupNorm, st.just(2), st.just(6)),
        st.builds(Convolved, st.sampled_from([(1, 1), (1, 3)]), st.sampled_from([1, 2])),
        st.builds(Attended),
        st.builds(Residual, layers, st.sampled_from(["scalar", "vector"])),
        st.builds(Concat, layers, layers),
        st.builds(Looped, layers, st.integers(1, 3)),
        st.lists(layers, min_size=1, max_size=3).map(lambda ls: nn.Sequential(*ls)),
    )
)
losses = st.sampled_from([F.cross_entropy, F.mse_loss, F.binary_cross_entropy_with_logits])


@st.composite
def settings_drawn(draw):
    torch.manual_seed(draw(st.integers(0, 2**16)))
    body = draw(st.lists(layers, min_size=1, max_size=4))
    model = nn.Sequential(nn.Linear(6, 6), *body, nn.Linear(6, 4)).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.6)
    loss_fn = draw(losses)
    y = torch.randint(0, 4, (5,)) if loss_fn is F.cross_entropy else torch.rand(5, 4).double()
    return model, loss_fn, torch.randn(5, 6).double(), y


@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
@given(settings_drawn(), st.sampled_from([0.0, 0.25, 0.9]))
def test_properties_of_random_nets(drawn, alpha):
    model, loss_fn, x, y = drawn
    paper, exact = (threepass.three_pass(model, loss_fn, x, y, mode=mode, separate=True) for mode in ("paper", "exact"))
    assert_close(paper.backprop_grads, plain_grads(model, loss_fn, x, y), 1e-11, 1e-13)
    assert_close(threepass.three_pass(model, loss_fn, x, y, alpha=1.0).grads, paper.backprop_grads, 1e-12, 1e-13)
    expected = {n: alpha * g + (1 - alpha) * paper.third_grads[n] for n, g in paper.backprop_grads.items()}
    assert_close(threepass.three_pass(model, loss_fn, x, y, alpha=alpha).grads, expected, 1e-11, 1e-13)

    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(loss_fn(model(leaf), y), leaf, create_graph=True)
    params = dict(model.named_parameters())
    grads = torch.autograd.grad(0.5 * dx.square().sum(), list(params.values()), allow_unused=True)
    double = {n: torch.zeros_like(params[n]) if g is None else g for n, g in zip(params, grads, strict=True)}
    assert_close(exact.third_grads, {n: double[n] for n in exact.third_grads}, 1e-9, 1e-13)

    definition = oracle.third_grads(model, loss_fn, x, y)
    assert_close(paper.third_grads, {n: definition[n] for n in paper.third_grads}, 3e-6, 1e-10)

    parts = [
        threepass.three_pass(model, loss_fn, a, b, strength=0.5, batch_size=5)
        for a, b in zip(x.split([2, 3]), y.split([2, 3]), strict=True)
    ]
    whole = threepass.three_pass(model, loss_fn, x, y, strength=0.5)
    assert_close({n: parts[0].grads[n] + parts[1].grads[n] for n in whole.grads}, whole.grads, 1e-10, 1e-13)
