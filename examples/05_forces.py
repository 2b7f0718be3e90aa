"""A force field for ethanol, trained on energies and forces of GFN2-xTB: `GradientStep` against double backward.

    python examples/05_forces.py [--quick] [--epochs 60] [--seed 0] [--out FILE]

The energy is a SchNet-like net of the atoms' distances, the forces are minus its gradient. Both engines start from the
same weights and take turns, an epoch each; times are CPU times. --quick: two eager epochs on a part of the data. The
data, `data/ethanol.npz`, were made by `forces_data.py`.
"""

import argparse
import copy
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import threepass


class Energy(nn.Module):
    """Continuous-filter convolutions over all pairs of atoms; positions (batch, atoms, 3) -> energies (batch)."""

    def __init__(self, numbers: Tensor, width: int = 64, bases: int = 24, layers: int = 3):
        super().__init__()
        self.atoms, pairs = len(numbers), torch.cartesian_prod(*2 * [torch.arange(len(numbers))])
        i, j = pairs[pairs[:, 0] != pairs[:, 1]].T
        for name, value in {"i": i, "j": j, "numbers": numbers, "centres": torch.linspace(0.8, 4.5, bases)}.items():
            self.register_buffer(name, value)
        self.embedding = nn.Embedding(10, width)
        self.filters = nn.ModuleList(_net(bases, width, width) for _ in range(layers))
        self.updates = nn.ModuleList(_net(width, width, width) for _ in range(layers))
        self.head = _net(width, width, 1)

    def forward(self, positions: Tensor) -> Tensor:
        difference = positions.index_select(1, self.i) - positions.index_select(1, self.j)
        lengths = difference.square().sum(2, keepdim=True).sqrt()
        bases = torch.exp(-10 * (lengths - self.centres).square())
        h = self.embedding(self.numbers).expand(len(positions), -1, -1)
        for filters, update in zip(self.filters, self.updates, strict=True):
            messages = h.index_select(1, self.j) * filters(bases)
            h = h + update(messages.unflatten(1, (self.atoms, -1)).sum(2))
        return self.head(h).sum((1, 2))


def _net(n: int, m: int, k: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n, m), nn.SiLU(), nn.Linear(m, k))


def loss_fn(energy: Tensor, g: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(energy, y[0]) + 10 * F.mse_loss(-g, y[1])


def double_backward(model: nn.Module, x: Tensor, y: tuple[Tensor, Tensor]) -> None:
    """What `GradientStep` is used in place of."""
    x = x.clone().requires_grad_()
    energy = model(x)
    (g,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    loss_fn(energy, g, y).backward()


class Trainer:
    """A model with its optimizer, and the CPU time that its steps took."""

    def __init__(self, model: nn.Module, step, updates: int):
        self.model, self.step, self.seconds = model, step, 0.0
        self.optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 3e-3, updates)

    def epoch(self, data: list[Tensor], order: Tensor, batch: int) -> None:
        began = time.process_time()
        for rows in order.split(batch):
            x, energies, forces = (z[rows] for z in data)
            self.optimizer.zero_grad()
            self.step(x, (energies, forces))
            self.optimizer.step()
            self.schedule.step()
        self.seconds += time.process_time() - began

    def errors(self, data: list[Tensor]) -> dict[str, float]:
        """Mean absolute errors, in meV and meV/Angstrom."""
        x = data[0].clone().requires_grad_()
        energy = self.model(x)
        (g,) = torch.autograd.grad(energy.sum(), x)
        return {
            "energy": 1e3 * (energy - data[1]).abs().mean().item(),
            "forces": 1e3 * (-g - data[2]).abs().mean().item(),
        }


def load(path: Path, count: int) -> tuple[Tensor, list[Tensor]]:
    """Atomic numbers; positions, energies without their mean, forces."""
    with np.load(path) as file:
        energies = torch.tensor(file["energies"] - file["energies"].mean(), dtype=torch.float32)
        data = [torch.tensor(file["positions"]), energies, torch.tensor(file["forces"])]
        return torch.tensor(file["numbers"]), [z[torch.arange(0, len(z), len(z) // count)] for z in data]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data" / "ethanol.npz")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of the batches")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    epochs, count, batch = (2, 100, 16) if given.quick else (given.epochs, 1500, 32)
    numbers, data = load(given.data, count)
    cut = batch * (4 * count // (5 * batch))  # whole batches, so that a compiled step meets one shape
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    train, test = ([z[rows] for z in data] for rows in (shuffled[:cut], shuffled[cut:]))

    torch.manual_seed(given.seed)
    first, second = (lambda model: (model, copy.deepcopy(model)))(Energy(numbers))
    updates = epochs * cut // batch
    trainers = {
        "double backward": Trainer(first, lambda x, y: double_backward(first, x, y), updates),
        "threepass": Trainer(second, threepass.GradientStep(second, loss_fn, compile=not given.quick), updates),
    }
    history: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    for epoch in range(1, epochs + 1):
        order = torch.randperm(cut, generator=torch.Generator().manual_seed(1000 * given.seed + epoch))
        for name, trainer in trainers.items():
            trainer.epoch(train, order, batch)
            if epoch % 3 and epoch not in (1, epochs):
                continue
            errors = trainer.errors(test)
            history[name].append({"epoch": epoch, "seconds": trainer.seconds, **errors})
            print(
                f"{epoch:3} {name:<16} {trainer.seconds:6.1f} s   energy {errors['energy']:6.1f} meV   "
                f"forces {errors['forces']:6.1f} meV/A",
                flush=True,
            )
    if given.out is not None:
        settings = {
            "seed": given.seed,
            "epochs": epochs,
            "batch": batch,
            "train": cut,
            "test": count - cut,
            "torch": torch.__version__,
        }
        given.out.write_text(json.dumps({"settings": settings, "history": history}, indent=1) + "\n")


if __name__ == "__main__":
    main()
