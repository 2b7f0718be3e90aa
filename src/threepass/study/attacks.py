"""Accuracy under Gaussian noise, FGSM and PGD: what a smaller input gradient buys.

All is in units of pixels, 0 to 1: a model takes x = (pixels - mean) / std, and the attacks move the pixels,

    FGSM:  p + eps sign(dl/dp)                    PGD:  p <- ball(p + 2.5 eps / steps sign(dl/dp)), `steps` times,

with |p - pixels| <= eps at every pixel, and clamped to the range of pixels. Everything runs in float64. In float32 the
loss of a confident net and its gradient round to zero, an attack finds no direction, and plain training, whose nets are
the most confident, looks robust where it is not.
"""

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..train.data import DataSet

SIGMAS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
RADII = (0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.12, 0.16)
STEPS = 10  # of PGD


@dataclass(frozen=True)
class Pixels:
    """Examples in float64 in units of pixels, their labels, the range they are clamped to, and their normalisation."""

    x: Tensor
    y: Tensor
    low: float
    high: float
    mean: Tensor
    std: Tensor

    def normalised(self, pixels: Tensor) -> Tensor:
        return (pixels - self.mean) / self.std

    def part(self, which: Tensor) -> "Pixels":
        return dataclasses.replace(self, x=self.x[which], y=self.y[which])

    def clamp(self, pixels: Tensor) -> Tensor:
        return pixels.clamp(self.low, self.high)


def pixels(data: DataSet, examples: int = 500) -> Pixels:
    """The first validation examples. The range is 0 to 1, or, where data go beyond, that of their training split."""
    one = 255.0 if data.train.x.dtype == torch.uint8 else 1.0
    low, high = (end.item() / one for end in data.train.x.aminmax())
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    device = "cpu" if data.val.x.device.type == "mps" else data.val.x.device  # there is no float64 on MPS
    x, y = data.val.x[:examples].to(device).double() / one, data.val.y[:examples].to(device)
    shape = (len(data.mean), *[1] * (x.dim() - 2))
    mean, std = (torch.tensor(z, dtype=torch.float64, device=device).view(shape) for z in (data.mean, data.std))
    return Pixels(x, y, low, high, mean, std)


def in_float64(model: nn.Module, device: torch.device | str) -> nn.Module:
    """A copy to look at: float64, in eval mode, its parameters constants."""
    return copy.deepcopy(model).to(device=device, dtype=torch.float64).eval().requires_grad_(False)


def robustness(
    model: nn.Module,
    data: DataSet,
    sigmas: Sequence[float] = SIGMAS,
    radii: Sequence[float] = RADII,
    examples: int = 500,
) -> dict[str, Any]:
    """Accuracy at every sigma of noise and every radius of attack, as a record for JSON.

    >>> from threepass.train.data import load
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    >>> found = robustness(model, load("digits"), sigmas=[0.0], radii=[0.0, 0.1], examples=20)
    >>> found["noise"]["accuracy"][0] == found["fgsm"]["accuracy"][0] == found["pgd"]["accuracy"][0]
    True
    """
    p = pixels(data, examples)
    model = in_float64(model, p.x.device)
    drawn = torch.randn(p.x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(p.x.device)
    slope = input_gradient(model, p, p.x).sign()
    noisy = [p.clamp(p.x + sigma * drawn) if sigma else p.x for sigma in sigmas]
    moved = [p.clamp(p.x + eps * slope) for eps in radii]
    return {
        "examples": len(p.y),
        "of": "pixel" if data.train.x.dim() == 4 or data.train.x.dtype == torch.uint8 else "feature",
        "range": [p.low, p.high],
        "steps": STEPS,
        "noise": {"at": list(sigmas), "accuracy": [_right(model, p, x).double().mean().item() for x in noisy]},
        "fgsm": {"at": list(radii), "accuracy": [_right(model, p, x).double().mean().item() for x in moved]},
        "pgd": {"at": list(radii), "accuracy": _pgd_accuracies(model, p, radii)},
    }


def pgd(model: nn.Module, p: Pixels, eps: float) -> tuple[Tensor, Tensor]:
    """Projected gradient ascent from the example itself: where every example ends, and whether it is still right there.

    An example stays where it is first classified wrongly: an attacker would stop there.
    """
    points, held = p.x.clone(), _right(model, p, p.x)
    for _ in range(STEPS if eps else 0):
        left = held.nonzero()[:, 0]
        rest = p.part(left)
        moved = points[left] + 2.5 * eps / STEPS * input_gradient(model, rest, points[left]).sign()
        points[left] = p.clamp(moved.clamp(rest.x - eps, rest.x + eps))
        held[left] = _right(model, rest, points[left])
    return points, held


def input_gradient(model: nn.Module, p: Pixels, at: Tensor) -> Tensor:
    """dl_i/dp_i of every example's own loss, in units of pixels."""
    at = at.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(p.normalised(at)), p.y, reduction="sum"), at)
    return gradient


def _pgd_accuracies(model: nn.Module, p: Pixels, radii: Sequence[float]) -> list[float]:
    """What falls to a radius falls to every larger one: the point is in that ball too."""
    total, accuracies = len(p.y), {}
    for eps in sorted(radii):
        p = p.part(pgd(model, p, eps)[1])
        accuracies[eps] = len(p.y) / total
    return [accuracies[eps] for eps in radii]


@torch.no_grad()
def _right(model: nn.Module, p: Pixels, x: Tensor) -> Tensor:
    return model(p.normalised(x)).argmax(1) == p.y
