"""Nets and losses for tests of narrow formats."""

from torch import nn

WIDTH, BATCH = 48, 32


def net(kind: str) -> nn.Module:
    if kind == "conv":
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 10))
    norm = [nn.LayerNorm(WIDTH)] if kind == "norm" else []
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), *norm, nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )


def loss_of_scale(scale: float):
    """A linear loss, whose scale sets |t| / |a|."""
    return lambda out, y: scale * (out * y).sum() / BATCH
