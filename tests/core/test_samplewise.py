"""Piecewise linear nets that treat samples alone need no fourth pass; all others have one, and all are exact."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import threepass
from threepass.core import gradient_loss, samplewise
from threepass.rules.linearity import OPERATIONS

BATCH = 4


class Fn(nn.Module):
    """A convolution, a function, and a linear layer; the function may use a parameter as large as an image."""

    def __init__(self, f, size=3 * 4 * 4, outputs=1):
        super().__init__()
        self.conv, self.f, self.head = nn.Conv2d(2, 3, 3), f, nn.Linear(size, outputs)
        self.scale = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x):
        return self.head(self.f(self, self.conv(x)).flatten(1))


WITHOUT = {
    "leaky": lambda s, z: F.leaky_relu(z, 0.2),
    "in-place": lambda s, z: F.leaky_relu(z, 0.2, inplace=True),
    "relu": lambda s, z: torch.relu(z) * s.scale + s.scale,
    "residual": lambda s, z: z + F.leaky_relu(z).sub(0.5).div(2.0).neg(),
    "reshape": lambda s, z: F.relu(z).view(BATCH, 3, 16).unsqueeze(1),
    "dropout": lambda s, z: F.dropout(z, 0.0),
    "blur": lambda s, z: F.conv2d(z, torch.ones(3, 1, 1, 1).to(z), groups=3),
}
POOLED = {
    "max-pool": lambda s, z: F.max_pool2d(z, 2),
    "average": lambda s, z: F.avg_pool2d(F.relu(z), 2),
    "adaptive": lambda s, z: F.adaptive_avg_pool2d(z, 2),
}
WITH = {
    "tanh": lambda s, z: z.tanh(),
    "product": lambda s, z: z * z.relu(),
    "mean of samples": lambda s, z: z - z.relu().mean(0, keepdim=True),
    "flip": lambda s, z: z + z.flip(0).relu(),
    "transpose": lambda s, z: z.relu() + z.flatten(1).view(BATCH, BATCH, 12).transpose(0, 1).reshape(z.shape),
    "one of them": lambda s, z: z.relu() + z[:1],
    "norm": lambda s, z: F.batch_norm(z, None, None, training=True),
    "pool over samples": lambda s, z: F.max_pool2d(z.transpose(0, 1).reshape(3, BATCH, 16), 1).view(3, BATCH, 16)
    .transpose(0, 1),
}  # fmt: skip


def loss(output, g, y):
    return F.softplus(-output).mean() + (g**2).sum() + (g**3).mean()


def by_double_backward(model, x):
    x = x.clone().requires_grad_()
    output = model(x)
    (g,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return torch.autograd.grad(loss(output, g, None), list(model.parameters()), allow_unused=True)


def takes_pass_4(monkeypatch, model, x, **options):
    """Whether the step runs a fourth pass; its gradients are double backward's."""
    runs, run = [], gradient_loss.backward_again
    monkeypatch.setattr(gradient_loss, "backward_again", lambda *given: runs.append(given) or run(*given))
    found = threepass.gradient_step(model, loss, x, **options).grads
    for (name, p), g in zip(model.named_parameters(), by_double_backward(model, x), strict=True):
        g = torch.zeros_like(p) if g is None else g
        torch.testing.assert_close(found.get(name, torch.zeros_like(p)), g, rtol=1e-12, atol=1e-13)
    return bool(runs)


def net(f, **sizes):
    torch.manual_seed(0)
    return Fn(f, **sizes).double(), torch.randn(BATCH, 2, 6, 6).double()


@pytest.mark.parametrize("name", WITHOUT)
def test_nets_without_a_fourth_pass(monkeypatch, name):
    assert not takes_pass_4(monkeypatch, *net(WITHOUT[name]))


@pytest.mark.parametrize("name", POOLED)
def test_pooling(monkeypatch, name):
    assert not takes_pass_4(monkeypatch, *net(POOLED[name], size=12))


@pytest.mark.parametrize("name", WITH)
def test_curvature_and_mixed_samples_need_it(monkeypatch, name):
    assert takes_pass_4(monkeypatch, *net(WITH[name]))


class mul(torch.autograd.Function):  # noqa: N801
    """A square, under the name of another operation."""

    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * a

    @staticmethod
    def backward(ctx, d):
        return 2 * d * ctx.saved_tensors[0]


def test_an_operation_of_a_user_is_not_known_by_its_name(monkeypatch):
    assert takes_pass_4(monkeypatch, *net(lambda s, z: mul.apply(z)))


def test_every_operation_is_affine():
    """All but products, which are affine in one factor."""
    others = set(samplewise._TESTS) - samplewise.PRODUCTS
    assert others <= set(OPERATIONS)


def test_several_outputs_a_sample_need_it(monkeypatch):
    assert takes_pass_4(monkeypatch, *net(WITHOUT["leaky"], outputs=2))


@pytest.mark.parametrize("options", [{"separate": True}, {"value_fn": torch.sum}], ids=["separate", "value_fn"])
def test_options_that_need_it(monkeypatch, options):
    assert takes_pass_4(monkeypatch, *net(WITHOUT["leaky"]), **options)


def test_a_captured_step_is_the_same(graph_only):
    model, x = net(WITHOUT["leaky"])
    r = threepass.GradientStep(model, loss, compile="require")(x)
    for g, (name, _) in zip(by_double_backward(model, x), model.named_parameters(), strict=True):
        if g is not None:
            torch.testing.assert_close(r.grads[name], g, rtol=1e-12, atol=1e-13)
