"""Small nets and batches for tests of several ranks, and what one process computes of the whole batch."""

import torch
from torch import nn
from torch.nn import functional as F

import threepass


def fourth_powers(g: torch.Tensor) -> torch.Tensor:
    """A penalty of the user's own."""
    return g.flatten(1).pow(4).sum(1)


B = 8
TERMS = {
    f"{name}, {mode}": {"mode": mode, **options}
    for mode in ("paper", "exact")
    for name, options in {
        "alpha, batch": {"alpha": 0.1},
        "alpha, sample": {"alpha": 0.1, "reduction": "sample"},
        "strength": {"strength": 0.5},
        "l1": {"strength": 0.5, "penalty": "l1"},
        "norm, batch": {"alpha": 0.1, "penalty": "norm"},
        "callable": {"strength": 0.5, "penalty": fourth_powers},
    }.items()
}
UNEVEN = [5, 3]


def net(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(6)] if norm else []
    return nn.Sequential(nn.Linear(5, 6), *norms, nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)).double()


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embeddings, self.head = nn.Embedding(7, 5).double(), net()

    def forward(self, ids, scale):
        return self.head(scale * self.embeddings(ids).mean(1))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(B, 5).double(), torch.randint(0, 4, (B,))


def tokens() -> tuple[dict, torch.Tensor]:
    torch.manual_seed(2)
    return {"ids": torch.randint(0, 7, (B, 3)), "scale": 2.0}, torch.randint(0, 4, (B,))


def of_gradients(output, g, y):
    return g.square().sum(1).mean() + F.cross_entropy(output, y)


def refused(make, error=NotImplementedError):
    x, y = batch()
    try:
        make(x[:4], y[:4])
    except error as e:
        return str(e)
    return "no error"


def whole(**options) -> threepass.Result:
    return threepass.three_pass(net(), F.cross_entropy, *batch(), **options)


class WithUnusedLayer(nn.Module):
    """One of its layers is not used."""

    def __init__(self):
        super().__init__()
        self.body, self.unused = net(), nn.Linear(5, 4).double()

    def forward(self, x):
        return self.body(x)
