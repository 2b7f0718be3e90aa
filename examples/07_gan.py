"""A small GAN on MNIST with R1 at every step: `GradientStep` against double backward.

    python examples/07_gan.py FOLDER [--quick] [--steps 1500] [--seed 0] [--out FILE]

FOLDER has MNIST (`threepass data mnist --download` makes one); --quick does without: ten eager steps on scikit-learn's
digits. The discriminator's loss on real images is softplus(-D) + gamma/2 |dD/dx|^2. Both engines start from the same
weights and take turns. The score is the Frechet distance between 2000 generated and 2000 other real images, of their
first 32 principal components.
"""

import argparse
import base64
import copy
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import threepass
from threepass.train.data import load

NOISE, GAMMA, BATCH = 32, 1.0, 64


def generator() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(NOISE, 48 * 49), nn.ReLU(), nn.Unflatten(1, (48, 7, 7)),
        nn.Upsample(scale_factor=2), nn.Conv2d(48, 24, 3, padding=1), nn.ReLU(),
        nn.Upsample(scale_factor=2), nn.Conv2d(24, 1, 3, padding=1), nn.Sigmoid(),
    )  # fmt: skip


def discriminator() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 24, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(24, 48, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(48 * 49, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1),
    )  # fmt: skip


def on_real(output: Tensor, g: Tensor, gamma: float) -> Tensor:
    return F.softplus(-output).mean() + 0.5 * gamma * g.flatten(1).square().sum(1).mean()


def double_backward(model: nn.Module, x: Tensor, gamma: float) -> None:
    """What `GradientStep` is used in place of."""
    x = x.clone().requires_grad_()
    output = model(x)
    (g,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    on_real(output, g, gamma).backward()


class Gan:
    """Both nets with their optimizers, and the CPU time that the discriminator's steps took."""

    def __init__(self, nets: tuple[nn.Module, nn.Module], engine: str, compile: bool):
        self.generator, self.discriminator = nets
        self.optimizers = [torch.optim.Adam(net.parameters(), 1e-3, (0.0, 0.99)) for net in nets]
        self.step_on_real = threepass.GradientStep(self.discriminator, on_real, compile=compile)
        if engine == "double backward":
            self.step_on_real = lambda x, gamma: double_backward(self.discriminator, x, gamma)
        self.seconds = 0.0

    def step(self, real: Tensor, noise: tuple[Tensor, Tensor]) -> None:
        began = time.process_time()
        with torch.no_grad():
            fake = self.generator(noise[0])
        self.optimizers[1].zero_grad()
        self.step_on_real(real, GAMMA)
        F.softplus(self.discriminator(fake)).mean().backward()
        self.optimizers[1].step()
        self.seconds += time.process_time() - began

        self.optimizers[0].zero_grad()
        F.softplus(-self.discriminator(self.generator(noise[1]))).mean().backward()
        self.optimizers[0].step()

    @torch.no_grad()
    def images(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, NOISE, generator=torch.Generator().manual_seed(1)))


def frechet(x: Tensor, y: Tensor, components: int = 32) -> float:
    """The distance of two Gaussians that are fitted to the principal components of two sets of images."""
    x, y = (z.flatten(1).double() for z in (x, y))
    _, _, basis = torch.linalg.svd(y - y.mean(0), full_matrices=False)
    x, y = x @ basis[:components].T, y @ basis[:components].T
    c, d = x.T.cov(), y.T.cov()
    roots = torch.linalg.eigvals(c @ d).real.clamp_min(0).sqrt().sum()
    return ((x.mean(0) - y.mean(0)).square().sum() + c.trace() + d.trace() - 2 * roots).item()


def real_images(folder: str | None) -> Tensor:
    """Images in [0, 1], of 28 x 28 pixels."""
    data = load("digits" if folder is None else "mnist", folder)
    x = data.train.x.float().reshape(-1, 1, *data.train.x.shape[-2:])
    return F.interpolate(x / x.max(), (28, 28))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of what is drawn at each step")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.folder is None and not given.quick:
        parser.error("name the folder of MNIST, or give --quick")
    steps, count = (10, 200) if given.quick else (given.steps, 2000)
    images = real_images(given.folder)
    train, other = images[count:], images[:count]

    torch.manual_seed(given.seed)
    nets = generator(), discriminator()
    gans = {name: Gan(copy.deepcopy(nets), name, not given.quick) for name in ("double backward", "threepass")}
    history: dict[str, list[dict[str, float]]] = {name: [] for name in gans}
    for step in range(1, steps + 1):
        real = train[torch.randint(len(train), (BATCH,))]
        noise = torch.randn(BATCH, NOISE), torch.randn(BATCH, NOISE)
        for name, gan in gans.items():
            gan.step(real, noise)
            if step % (steps // 10) == 0:
                score = frechet(gan.images(count), other)
                history[name].append({"step": step, "seconds": gan.seconds, "distance": score})
                print(f"{step:5} {name:<16} {gan.seconds:6.1f} s   Frechet distance {score:6.2f}", flush=True)
    if given.out is not None:
        samples = {name: _as_text(gan.images(32)) for name, gan in gans.items()}
        settings = {"seed": given.seed, "steps": steps, "batch": BATCH, "gamma": GAMMA, "torch": torch.__version__}
        given.out.write_text(json.dumps({"settings": settings, "history": history, "samples": samples}) + "\n")


def _as_text(images: Tensor) -> str:
    """32 images of 28 x 28 bytes, base64."""
    return base64.b64encode((255 * images).round().to(torch.uint8).numpy().tobytes()).decode()


if __name__ == "__main__":
    main()
