"""The signed distance of a plane shape from points on its outline, by the Eikonal equation |df/dx| = 1.

    python examples/06_distance.py [--quick] [--steps 1000] [--seed 0] [--out FILE]

f is 0 on the outline, its gradient there is the normal, and its length is 1 everywhere. `GradientStep` and double
backward start from the same weights and take turns; times are CPU times. --quick: twenty eager steps.
"""

import argparse
import copy
import json
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import threepass

GRID = 64  # points along a side of the picture, which shows [-1, 1] x [-1, 1]


class Sine(nn.Module):
    """SIREN's activation."""

    def __init__(self, frequency: float):
        super().__init__()
        self.frequency = frequency

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.frequency * x)


def siren(width: int = 128, hidden: int = 3, frequency: float = 3.0) -> nn.Sequential:
    layers: list[nn.Module] = []
    for k in range(hidden + 1):
        linear = nn.Linear(width if k else 2, width)
        bound = math.sqrt(6 / width) / frequency if k else 1 / 2
        nn.init.uniform_(linear.weight, -bound, bound)
        layers += [linear, Sine(frequency)]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def outline(angle: Tensor) -> tuple[Tensor, Tensor]:
    """Points of a flower with five leaves, and the outward normals."""
    radius, slope = 0.55 + 0.15 * torch.cos(5 * angle), -0.75 * torch.sin(5 * angle)
    cos, sin = angle.cos(), angle.sin()
    tangent = torch.stack([slope * cos - radius * sin, slope * sin + radius * cos], 1)
    normal = torch.stack([tangent[:, 1], -tangent[:, 0]], 1)
    return torch.stack([radius * cos, radius * sin], 1), normal / normal.norm(dim=1, keepdim=True)


def distance(x: Tensor) -> Tensor:
    """The signed distance itself, from many points of the outline: negative inside."""
    points, _ = outline(torch.linspace(0, 2 * math.pi, 4001))
    nearest = torch.cdist(x, points).amin(1)
    inside = x.norm(dim=1) < 0.55 + 0.15 * torch.cos(5 * torch.atan2(x[:, 1], x[:, 0]))
    return torch.where(inside, -nearest, nearest)


def loss_fn(f: Tensor, g: Tensor, normals: Tensor) -> Tensor:
    """The first rows are points of the outline, the others lie anywhere."""
    count = len(normals)
    on_outline = 3 * f[:count].abs().mean() + (g[:count] - normals).square().sum(1).mean()
    lengths = (g.square().sum(1) + 1e-12).sqrt()
    return on_outline + (lengths - 1).square().mean()


def double_backward(model: nn.Module, x: Tensor, normals: Tensor) -> None:
    """What `GradientStep` is used in place of."""
    x = x.clone().requires_grad_()
    f = model(x)
    (g,) = torch.autograd.grad(f.sum(), x, create_graph=True)
    loss_fn(f, g, normals).backward()


def picture(model: nn.Module) -> tuple[Tensor, float]:
    """f on a grid, and its mean absolute error there."""
    side = torch.linspace(-1, 1, GRID)
    x = torch.cartesian_prod(side, side)
    with torch.no_grad():
        f = model(x).squeeze(1)
    return f.view(GRID, GRID), (f - distance(x)).abs().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of what is drawn at each step")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    steps, points = (20, 100) if given.quick else (given.steps, 1000)

    torch.manual_seed(given.seed)
    models = {"double backward": siren()}
    models["threepass"] = copy.deepcopy(models["double backward"])
    gradient_step = threepass.GradientStep(models["threepass"], loss_fn, compile=not given.quick)
    engines = {
        "double backward": lambda x, normals: double_backward(models["double backward"], x, normals),
        "threepass": gradient_step,
    }
    optimizers = {name: torch.optim.Adam(model.parameters(), 1e-3) for name, model in models.items()}
    schedules = {name: torch.optim.lr_scheduler.OneCycleLR(z, 1e-3, steps) for name, z in optimizers.items()}
    seconds, history = dict.fromkeys(models, 0.0), {name: [] for name in models}
    for step in range(1, steps + 1):
        on_outline, normals = outline(2 * math.pi * torch.rand(points))
        x = torch.cat([on_outline, 2 * torch.rand(points, 2) - 1])
        for name, engine in engines.items():
            began = time.process_time()
            optimizers[name].zero_grad()
            engine(x, normals)
            optimizers[name].step()
            schedules[name].step()
            seconds[name] += time.process_time() - began
            if step % (steps // 20) == 0:
                error = picture(models[name])[1]
                history[name].append({"step": step, "seconds": seconds[name], "error": error})
                print(f"{step:5} {name:<16} {seconds[name]:6.1f} s   mean error of f {error:.4f}", flush=True)
    if given.out is not None:
        fields = {name: [[round(v, 3) for v in row] for row in picture(m)[0].tolist()] for name, m in models.items()}
        settings = {"seed": given.seed, "steps": steps, "points": 2 * points, "torch": torch.__version__}
        given.out.write_text(json.dumps({"settings": settings, "history": history, "fields": fields}) + "\n")


if __name__ == "__main__":
    main()
