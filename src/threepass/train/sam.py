"""Sharpness-aware minimisation (Foret et al. 2020), to compare with: the gradient at w + rho g / |g|."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..core.engine import Result, Task
from ..core.engine import run as three_passes
from ..core.options import Options


def sam(
    task: Task,
    options: Options,
    runs_third_pass: bool = False,
    weights: tuple[Tensor, Tensor] | None = None,
    seed: Tensor | None = None,
    *,
    rho: float,
) -> Result:
    """A step like one of `engine.run` without a third pass: output and losses are those at w, gradients those above it.

    Two forward and two backward passes; buffers move with both forwards.
    """
    r = three_passes(task, options, runs_third_pass=False, weights=weights, seed=seed)
    named = dict(task.model.named_parameters())
    length = torch.stack([g.norm() for g in r.grads.values()]).norm()
    up = rho / length.clamp_min(torch.finfo(length.dtype).tiny)
    moved = {name: (named[name] + up * g).detach().requires_grad_() for name, g in r.grads.items()}
    above = {f"model.{name}": z for name, z in moved.items()}
    grads = functional_call(_Gradients(task, list(moved.values())), above, ())
    return dataclasses.replace(r, grads=dict(zip(moved, grads, strict=True)))


class _Gradients(nn.Module):
    """The gradients as a forward pass, so that activation checkpoints recompute the model with the same weights."""

    def __init__(self, task: Task, weights: Sequence[Tensor]):
        super().__init__()
        self.model, self.task, self.weights = task.model, task, weights

    def forward(self) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            loss = self.task.loss_fn(self.model(self.task.x), self.task.y)
        return torch.autograd.grad(loss, self.weights)
