"""The nets of `gradient_losses.py`, each with a batch and a loss on its input gradient.

`schnet` and `painn` are SchNetPack's, `schnet-pyg` is PyTorch Geometric's, unchanged: `pip install --no-deps
schnetpack==2.1.1 ase` and `pip install --no-deps torch_geometric tqdm xxhash psutil`, beside numpy and scipy, are
enough for them. SchNetPack's modules are imported without its `__init__`, which imports its data loaders, and these do
not import with every torch.

Result: those of `gradient_losses.py`, quoted by docs/gradient-losses.md.
"""

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threepass.models import resnet18


@dataclass
class Problem:
    """A model with a batch and a loss.

    model: takes x, a dict of tensors, by keyword. inner: (output, y) -> the scalar that is differentiated at x[wrt].
    loss: (output, g, y) -> the training loss. plain: (output, y) -> its part without g. penalty: the name of
    `ThreePass`'s penalty where the loss is one, with strength 1 (else `GradientStep` runs). tf32: whether products and
    convolutions use TF32 on a GPU, as nets on images are trained, or float32, as force fields and distances are.
    """

    model: nn.Module
    x: dict[str, Tensor]
    wrt: str
    y: dict[str, Tensor]
    loss: Callable[[Any, Tensor, dict[str, Tensor]], Tensor]
    plain: Callable[[Any, dict[str, Tensor]], Tensor]
    inner: Callable[[Any, dict[str, Tensor]], Tensor] = field(default=lambda output, y: output.sum())
    penalty: str | None = None
    tf32: bool = False

    def to(self, device: str, dtype: torch.dtype) -> "Problem":
        def moved(z: Tensor) -> Tensor:
            return z.to(device, dtype) if z.is_floating_point() else z.to(device)

        self.model.to(device, dtype)
        self.x, self.y = ({name: moved(z) for name, z in d.items()} for d in (self.x, self.y))
        return self


def force_loss(output: Tensor, g: Tensor, y: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, y["energy"]) + 10 * F.mse_loss(-g, y["forces"])


def energy_loss(output: Tensor, y: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, y["energy"])


def molecules(count: int, atoms: int = 21, cutoff: float = 5.0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random molecules of `atoms` atoms (aspirin has 21) with the edges of each within the cutoff, and labels."""
    offsets = torch.cartesian_prod(*3 * [torch.arange(3.0)])[:atoms] * 1.6
    positions = (offsets + 0.25 * torch.randn(count, len(offsets), 3)).flatten(0, 1)
    molecule = torch.arange(count).repeat_interleave(len(offsets))
    local = torch.cdist(positions.view(count, -1, 3), positions.view(count, -1, 3))
    m, i, j = ((local < cutoff) & ~torch.eye(len(offsets), dtype=torch.bool)).nonzero().T
    numbers = torch.tensor([1, 6, 7, 8])[torch.randint(4, (len(positions),))]
    x = {"positions": positions, "numbers": numbers, "molecule": molecule}
    x |= {"i": m * len(offsets) + i, "j": m * len(offsets) + j}
    return x, {"energy": torch.randn(count), "forces": torch.randn(len(positions), 3)}


class SchNetPack(nn.Module):
    """A representation of SchNetPack between its own modules for distances and for atoms' energies."""

    def __init__(self, name: str, width: int, layers: int, molecules: int):
        super().__init__()
        spk, atomistic = _schnetpack("nn"), _schnetpack("atomistic")
        bases, cutoff = spk.GaussianRBF(n_rbf=20, cutoff=5.0), spk.CosineCutoff(5.0)
        self.molecules, self.distances = molecules, atomistic.PairwiseDistances()
        self.representation = getattr(_schnetpack("representation"), name)(width, layers, bases, cutoff)
        self.energies = atomistic.Atomwise(
            width, output_key="energy", aggregation_mode=None, per_atom_output_key="each"
        )

    def forward(self, positions: Tensor, numbers: Tensor, molecule: Tensor, i: Tensor, j: Tensor) -> Tensor:
        p = _schnetpack("properties")
        x = {p.R: positions, p.Z: numbers, p.idx_m: molecule, p.idx_i: i, p.idx_j: j}
        x[p.offsets] = positions.new_zeros(len(i), 3)
        each = self.energies(self.representation(self.distances(x)))["each"]
        return each.new_zeros(self.molecules).index_add(0, molecule, each.squeeze(1))


def _schnetpack(name: str) -> Any:
    if "schnetpack" not in sys.modules:
        spec = importlib.util.find_spec("schnetpack")
        if spec is None:
            raise ModuleNotFoundError("schnetpack is not installed", name="schnetpack")
        sys.modules["schnetpack"] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"schnetpack.{name}")


def _force_field(model: Callable[[int], nn.Module], count: int) -> Problem:
    x, y = molecules(count)
    return Problem(model(count), x, "positions", y, force_loss, energy_loss)


def schnet(size: int, width: int, depth: int) -> Problem:
    return _force_field(lambda count: SchNetPack("SchNet", width, depth, count), size)


def painn(size: int, width: int, depth: int) -> Problem:
    return _force_field(lambda count: SchNetPack("PaiNN", width, depth, count), size)


class _Edges(nn.Module):
    """PyTorch Geometric's SchNet asks this for its graph."""

    def forward(self, positions: Tensor, _molecule: Tensor) -> tuple[Tensor, Tensor]:
        i, j = self.edges
        return self.edges, (positions[i] - positions[j]).norm(dim=-1)


class PyGSchNet(nn.Module):
    def __init__(self, width: int, layers: int, molecules: int):
        super().__init__()
        from torch_geometric.nn.aggr import SumAggregation
        from torch_geometric.nn.models import SchNet

        class Sum(SumAggregation):
            """Into a known number of molecules; by default it is read from the GPU in every step."""

            def __call__(self, x: Tensor, index: Tensor, dim: int) -> Tensor:
                return super().__call__(x, index, dim_size=molecules, dim=dim)

        self.graph = _Edges()
        self.net = SchNet(width, width, layers, 50, 5.0, interaction_graph=self.graph, readout=Sum())

    def forward(self, positions: Tensor, numbers: Tensor, molecule: Tensor, i: Tensor, j: Tensor) -> Tensor:
        self.graph.edges = torch.stack([i, j])
        return self.net(numbers, positions, molecule).squeeze(1)


def schnet_pyg(size: int, width: int, depth: int) -> Problem:
    return _force_field(lambda count: PyGSchNet(width, depth, count), size)


class _Residual(nn.Module):
    """R3GAN's block: 1x1, grouped 3x3 and 1x1 convolutions without norms."""

    def __init__(self, width: int, groups: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, 2 * width, 1, bias=False), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=groups, bias=False), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, width, 1, bias=False),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Discriminator(nn.Module):
    """R3GAN-style: `stages` of two blocks that halve the resolution down to 4 x 4 and double the width, to 512."""

    def __init__(self, width: int, stages: int):
        super().__init__()
        widths = [min(width * 2**k, 512) for k in range(stages + 1)]
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for n, wider in pairwise(widths):
            layers += [_Residual(n, n // 16), _Residual(n, n // 16), nn.AvgPool2d(2), nn.Conv2d(n, wider, 1)]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(widths[-1] * 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


def r1_loss(output: Tensor, g: Tensor, y: dict[str, Tensor]) -> Tensor:
    return F.softplus(-output).mean() + 0.5 * g.flatten(1).square().sum(1).mean()


def discriminator(size: int, width: int, depth: int) -> Problem:
    x = {"x": torch.randn(size, 3, 4 * 2**depth, 4 * 2**depth)}
    model = Discriminator(width, depth)
    return Problem(model, x, "x", {}, r1_loss, lambda output, y: F.softplus(-output).mean(), tf32=True)


class Siren(nn.Module):
    def __init__(self, width: int, depth: int, frequency: float = 30.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width if k else 3, width) for k in range(depth))
        self.head, self.frequency = nn.Linear(width, 1), frequency
        for k, layer in enumerate(self.layers):
            bound = math.sqrt(6 / width) / frequency if k else 1 / 3
            nn.init.uniform_(layer.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(self.frequency * layer(x))
        return self.head(x)


def eikonal_loss(output: Tensor, g: Tensor, y: dict[str, Tensor]) -> Tensor:
    return output.abs().mean() + 0.1 * (g.norm(dim=1) - 1).square().mean()


def siren(size: int, width: int, depth: int) -> Problem:
    x = {"x": 2 * torch.rand(size, 3) - 1}
    return Problem(Siren(width, depth), x, "x", {}, eikonal_loss, lambda output, y: output.abs().mean())


class _Images(nn.Module):
    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def resnet(size: int, width: int) -> Problem:
    """ResNet-18 with GELU: cross entropy, and the l1 norm of each sample's input gradient."""

    def inner(output: Tensor, y: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output, y["label"])

    def loss(output: Tensor, g: Tensor, y: dict[str, Tensor]) -> Tensor:
        return inner(output, y) + g.abs().sum()  # of size samples, each 1/size of g's sum times size

    x, y = {"x": torch.randn(size, 3, 32, 32)}, {"label": torch.randint(10, (size,))}
    model = _Images(resnet18(width=width, activation="gelu"))
    return Problem(model, x, "x", y, loss, inner, inner, penalty="l1", tf32=True)


NETS: dict[str, Callable[..., Problem]] = {
    "schnet": schnet, "painn": painn, "schnet-pyg": schnet_pyg, "discriminator": discriminator, "siren": siren,
    "resnet18": resnet,
}  # fmt: skip
SIZES: dict[str, dict[str, tuple[int, ...]]] = {  # samples, width, and depth in blocks, stages or layers
    "tiny": {"schnet": (2, 16, 2), "painn": (2, 16, 2), "schnet-pyg": (2, 16, 2), "discriminator": (2, 16, 1),
             "siren": (16, 32, 3), "resnet18": (2, 16)},
    "cpu": {"schnet": (10, 128, 6), "painn": (10, 128, 3), "schnet-pyg": (10, 128, 6), "discriminator": (8, 32, 3),
            "siren": (2000, 256, 5), "resnet18": (8, 64)},
    "cuda": {"schnet": (64, 128, 6), "painn": (64, 128, 3), "schnet-pyg": (64, 128, 6), "discriminator": (64, 64, 4),
             "siren": (2**16, 256, 5), "resnet18": (256, 64)},
}  # fmt: skip


def make(name: str, size: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Problem:
    torch.manual_seed(0)
    return NETS[name](*SIZES[size][name]).to(device, dtype)
