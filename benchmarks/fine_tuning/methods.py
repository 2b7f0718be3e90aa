"""Ways to fine-tune: each takes a batch and adds gradients to `p.grad`.

plain    the gradient of the loss
paper    three passes, paper mode, by strength          exact    exact mode, by strength
r-drop   two forwards with other dropout masks, and the divergence of their predictions, by its weight (Liang et
         al. 2021, arXiv 2106.14448)
freelb   two ascent steps on a perturbation of the embeddings, whose gradients are averaged, by the size of a step
         (Zhu et al. 2020, arXiv 1909.11764)
sam      the gradient at weights moved along the gradient, by how far (Foret et al. 2021, arXiv 2010.01412)
"""

from collections.abc import Callable
from typing import Any

import torch
from tasks import EMBEDDINGS
from torch import Tensor, nn
from torch.nn import functional as F

import threepass

Step = Callable[[dict[str, Tensor], Tensor], Any]
VALUES: dict[str, tuple[float, ...]] = {  # that are searched
    "plain": (0.0,), "paper": (1.0, 10.0, 100.0), "exact": (1.0, 10.0, 100.0), "r-drop": (0.3, 1.0),
    "freelb": (0.1, 0.3), "sam": (0.02, 0.05),
}  # fmt: skip


def make_step(method: str, model: nn.Module, value: float, compile: bool) -> Step:
    if method in ("paper", "exact"):
        return threepass.ThreePass(
            model, F.cross_entropy, mode=method, strength=value, input_at=EMBEDDINGS, compile=compile
        )
    return {"plain": _plain, "r-drop": _r_drop, "freelb": _freelb, "sam": _sam}[method](model, value)


def _plain(model: nn.Module, _: float) -> Step:
    return lambda x, y: F.cross_entropy(model(**x), y).backward()


def _r_drop(model: nn.Module, weight: float) -> Step:
    def step(x: dict[str, Tensor], y: Tensor) -> None:
        z = model(**{name: torch.cat([v, v]) for name, v in x.items()})
        p, q = F.log_softmax(z, -1).chunk(2)
        divergence = F.kl_div(p, q, reduction="batchmean", log_target=True)
        divergence = divergence + F.kl_div(q, p, reduction="batchmean", log_target=True)
        (F.cross_entropy(z, torch.cat([y, y])) + weight / 2 * divergence).backward()

    return step


def _freelb(model: nn.Module, size: float, ascents: int = 2) -> Step:
    embeddings = model.get_submodule(EMBEDDINGS)

    def step(x: dict[str, Tensor], y: Tensor) -> None:
        moved: list[Tensor] = []

        def move(module: nn.Module, args: tuple, out: Tensor) -> Tensor:
            if not moved:
                moved.append(torch.zeros_like(out).requires_grad_())
            return out + moved[0]

        handle = embeddings.register_forward_hook(move)
        try:
            for _ in range(ascents + 1):
                (F.cross_entropy(model(**x), y) / (ascents + 1)).backward()
                along = moved[0].grad
                length = along.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1)
                moved[0] = (moved[0].detach() + size * along / length).requires_grad_()
        finally:
            handle.remove()

    return step


def _sam(model: nn.Module, rho: float) -> Step:
    weights = [p for p in model.parameters() if p.requires_grad]

    def step(x: dict[str, Tensor], y: Tensor) -> None:
        along = torch.autograd.grad(F.cross_entropy(model(**x), y), weights, allow_unused=True)
        known = [(p, g) for p, g in zip(weights, along, strict=True) if g is not None]
        scale = rho / (torch.stack([g.norm() for _, g in known]).norm() + 1e-12)
        with torch.no_grad():
            kept = [p.clone() for p, _ in known]
            for p, g in known:
                p.add_(scale * g)
        F.cross_entropy(model(**x), y).backward()
        with torch.no_grad():
            for (p, _), before in zip(known, kept, strict=True):
                p.copy_(before)

    return step
