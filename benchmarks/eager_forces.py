"""A loss on forces through a SchNet-like net, without a compiler: against double backward and plain training.

    python benchmarks/eager_forces.py [--atoms 600] [--edges 12000] [--width 64] [--rounds 15]

`gradient_step`, and `GradientStep` with compile="trace". The methods take turns, so that a change of the machine's load
meets them all. Seconds are the process's own (CPU time of one thread), the least of all rounds. Prints a table, and
with --out writes JSON.

Result: results/gradient-losses/cpu-schnet.json (and cpu-schnet-small.json for the small batch), quoted by
docs/gradient-losses.md. Relative to double backward `gradient_step` takes 0.91x, traced 0.79x.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import threepass


class Energies(nn.Module):
    """Continuous-filter convolutions over edges; returns the energy of each molecule."""

    def __init__(self, width: int, bases: int = 32, layers: int = 3):
        super().__init__()
        self.atoms = nn.Embedding(5, width)
        self.register_buffer("centres", torch.linspace(0, 5, bases))
        self.filters = nn.ModuleList(_softplus_net(bases, width, width) for _ in range(layers))
        self.updates = nn.ModuleList(_softplus_net(width, width, width) for _ in range(layers))
        self.head = _softplus_net(width, width, 1)

    def forward(self, positions: Tensor, kinds: Tensor, edges: Tensor, molecule: Tensor) -> Tensor:
        to, source = edges
        lengths = (positions[to] - positions[source]).norm(dim=1, keepdim=True)
        bases = torch.exp(-2 * (lengths - self.centres) ** 2)
        h = self.atoms(kinds)
        for filters, update in zip(self.filters, self.updates, strict=True):
            messages = h[source] * filters(bases)
            h = h + update(torch.zeros_like(h).index_add(0, to, messages))
        return h.new_zeros(2, 1).index_add(0, molecule, self.head(h))


def _softplus_net(n: int, m: int, k: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n, m), nn.Softplus(), nn.Linear(m, k))


def loss_fn(output: Tensor, g: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(output, y[0]) + 10 * F.mse_loss(-g, y[1])


def methods(atoms: int, edges: int, width: int) -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    model = Energies(width)
    pairs = torch.randint(atoms, (2, edges))
    pairs[1] = torch.where(pairs[0] == pairs[1], (pairs[1] + 1) % atoms, pairs[1])
    x = {"positions": 2 * torch.randn(atoms, 3), "kinds": torch.randint(5, (atoms,)), "edges": pairs}
    x["molecule"] = 2 * torch.arange(atoms) // atoms
    y = torch.randn(2, 1), torch.randn(atoms, 3)
    weights = list(model.parameters())

    def plain() -> Any:
        return torch.autograd.grad(F.mse_loss(model(**x), y[0]), weights)

    def double_backward() -> Any:
        positions = x["positions"].clone().requires_grad_()
        output = model(**x | {"positions": positions})
        (g,) = torch.autograd.grad(output.sum(), positions, create_graph=True)
        return torch.autograd.grad(loss_fn(output, g, y), weights)

    def gradient_step() -> Any:
        return threepass.gradient_step(model, loss_fn, x, y, wrt="positions")

    captured = threepass.GradientStep(model, loss_fn, wrt="positions", compile="trace")

    def traced() -> Any:
        model.zero_grad()
        return captured(x, y)

    return {
        "plain, energies only": plain,
        "double backward": double_backward,
        "gradient_step": gradient_step,
        "GradientStep, traced": traced,
    }


def measure(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds + 1):  # the first one warms up
        for name, run in runs.items():
            began = time.process_time()
            run()
            least[name] = min(least[name], time.process_time() - began)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"atoms": 600, "edges": 12_000, "width": 64, "rounds": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    seconds = measure(methods(given.atoms, given.edges, given.width), given.rounds)
    first = next(iter(seconds.values()))
    for name, s in seconds.items():
        print(f"{name:<22} {1e3 * s:8.1f} ms  {s / first:5.2f}x")
    if given.out is not None:
        settings = {name: value for name, value in vars(given).items() if name != "out"}
        given.out.write_text(
            json.dumps({"settings": settings, "torch": torch.__version__, "seconds": seconds}, indent=1)
        )


if __name__ == "__main__":
    main()
