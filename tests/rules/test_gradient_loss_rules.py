"""What nets with losses on their gradients use has fast rules, and gives double backward's gradients."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import threepass
from threepass.core.engine import Task, forward
from threepass.core.gradient_loss import GradientOptions
from threepass.tape.record import Record

TO, SOURCE = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])


def _distances(x):
    return (x[TO] - x[SOURCE]).norm(dim=-1)


def _rows(x):
    return TO[:, None].expand(-1, x.shape[1])


def _gaussians(x):
    d = _distances(x)
    return torch.exp(-0.5 * (d[:, None] - torch.linspace(0, 5, 6)) ** 2)


def _cosine_cutoff(x):
    d = _distances(x)
    return 0.5 * (torch.cos(d * math.pi / 5) + 1) * (d < 5)


def _polynomial_cutoff(x):
    d = torch.linalg.norm(x[TO] - x[SOURCE], dim=-1) / 5
    return (1 - 28 * d**6 + 48 * d**7 - 21 * d**8) * (d < 1)


def _bessel(x):
    d = _distances(x)[:, None]
    return torch.sin(torch.arange(1, 5) * math.pi / 5 * d) / d


def _safe_length(x):
    squares = (x[TO] - x[SOURCE]).square().sum(-1)
    return torch.where(squares == 0, 0.0, torch.where(squares == 0, 1.0, squares).sqrt())


def _minibatch_std(x):  # StyleGAN2's
    y = x.reshape(2, -1, *x.shape[1:])
    y = ((y - y.mean(0)).square().mean(0) + 1e-8).sqrt().mean([1], keepdim=True)
    return torch.cat([x, y.repeat(2, 1)], 1)


def _progressive_std(x):  # of the progressive GAN
    return torch.cat([x, x.std(0, unbiased=False).mean().expand(len(x), 1)], 1)


def _fourier(x):
    z = x[..., None] * 2.0 ** torch.arange(4)
    return torch.cat([z.sin(), z.cos()], -1).flatten(-2)


def _random_features(x):
    z = 2 * math.pi * x @ torch.ones(3, 8, dtype=x.dtype)
    return torch.cat([x, z.sin(), z.cos()], -1)


FUNCTIONS = {
    "gather": lambda x: x.gather(0, _rows(x)),
    "index": lambda x: x[TO],
    "index_select": lambda x: x.index_select(0, TO),
    "index_add": lambda x: torch.zeros_like(x).index_add(0, TO, x[SOURCE]),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(0, _rows(x), x[SOURCE]),
    "scatter_reduce": lambda x: torch.zeros_like(x).scatter_reduce(0, _rows(x), x[SOURCE], "sum"),
    "outer product": lambda x: x[:, :, None] * x[:, None, :],
    "outer": lambda x: torch.outer(x[0], x[1]),
    "einsum": lambda x: torch.einsum("ni,nj,nk->nijk", x, x, x),
    "sin": torch.sin,
    "cos": torch.cos,
    "softplus": F.softplus,
    "sharp softplus": lambda x: F.softplus(x, beta=100),
    "shifted softplus": lambda x: F.softplus(x) - math.log(2),
    "tanh": torch.tanh,
    "silu": F.silu,
    "sqrt": lambda x: (x.square() + 1).sqrt(),
    "distances": _distances,
    "safe length": _safe_length,
    "inverse distances": lambda x: 1 / _distances(x),
    "gaussians": _gaussians,
    "cosine cutoff": _cosine_cutoff,
    "polynomial cutoff": _polynomial_cutoff,
    "bessel": _bessel,
    "leaky relu": lambda x: F.leaky_relu(x, 0.2),
    "minibatch stddev": _minibatch_std,
    "progressive stddev": _progressive_std,
    "fourier": _fourier,
    "random features": _random_features,
    "unbind": lambda x: torch.stack([a * b for a, b, _ in [x.unbind(1)]]),
    "chunk": lambda x: torch.cat([x.chunk(3)[0], x.chunk(2, 1)[1][:2]], 1),
    "split": lambda x: x.split(3)[1] * x.split(1)[2],
    "split by sizes": lambda x: x.split([1, 2], 1)[1] * x.split([1, 2], 1)[0],
}
MODULES = {
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 2)),
    "spectral norm, old": lambda: nn.utils.spectral_norm(nn.Linear(3, 2)),
    "spectral norm of a convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), parametrizations.spectral_norm(nn.Conv1d(1, 2, 2))
    ),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 2)),
}


class Piece(nn.Module):
    """A linear layer, then a piece, which is a function or a module, then a curved function."""

    def __init__(self, piece):
        super().__init__()
        self.inner, self.piece = nn.Linear(3, 3), piece

    def forward(self, x):
        return torch.sin(self.piece(self.inner(x)))


def loss(output, g, y):
    return output.square().mean() + g.pow(3).sum()


def rules_of(model, x):
    """The operations of the model without a fast rule."""
    tape = Record("cpu")
    with torch.enable_grad():
        forward(Task(model, lambda output, y: output.sum(), x, None), tape, GradientOptions())
    return [op.name for op in tape.operations if op.linearize() is None]


@pytest.mark.parametrize("name", [*FUNCTIONS, *MODULES])
def test_fast_rules_give_double_backwards_gradients(name):
    torch.manual_seed(0)
    piece = FUNCTIONS[name] if name in FUNCTIONS else MODULES[name]()
    model, x = Piece(piece).double().eval(), torch.randn(4, 3, dtype=torch.float64)
    assert rules_of(model, x) == []
    assert {row.rule for row in threepass.coverage(model, x)} == {"fast"}
    leaf = x.clone().requires_grad_()
    output = model(leaf)
    (g,) = torch.autograd.grad(output.sum(), leaf, create_graph=True)
    expected = torch.autograd.grad(loss(output, g, None), list(model.parameters()))
    found = threepass.gradient_step(model, loss, x).grads
    largest = max(float(e.abs().max()) for e in expected)
    for (parameter, _), e in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(found[parameter], e, rtol=1e-12, atol=1e-13 * largest)
