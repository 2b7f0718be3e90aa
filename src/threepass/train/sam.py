"""Sharpness-aware minimisation (Foret et al. 2020), to compare with: the gradient at w + rho g / |g|."""

import dataclasses

import torch
from torch import Tensor
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
    with torch.enable_grad():
        loss = task.loss_fn(functional_call(task.model, moved, (task.x,)), task.y)
    grads = torch.autograd.grad(loss, list(moved.values()))
    return dataclasses.replace(r, grads=dict(zip(moved, grads, strict=True)))
