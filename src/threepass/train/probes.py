"""Measurements of both passes' gradients along a run; none of them changes it."""

from typing import Any

import torch
from torch import nn

from ..core.engine import Task
from ..core.engine import run as three_passes
from ..core.options import Options
from ..inspect.alignment import alignment
from ..tape.state import unchanged_on_error
from .config import Config
from .metrics import LossFn, Objective


def compare_passes(model: nn.Module, objective: Objective, x: Any, y: Any, config: Config) -> dict[str, float]:
    """The norms of the gradients of passes 2 and 3, and the cosine between them."""
    c = config
    options = Options(c.alpha, c.reduction, c.mode, c.strength, c.input_at, separate=True, penalty=objective.penalty)
    with unchanged_on_error(model, always=True):
        r = three_passes(Task(model, objective.loss_fn, x, y), options, warn=False)
    back, third = (
        torch.cat([g.double().flatten() for g in (t or {}).values()]) for t in (r.backprop_grads, r.third_grads)
    )
    norms = back.norm().item(), third.norm().item()
    cosine = (back @ third).item() / (norms[0] * norms[1]) if all(norms) else 0.0
    return {"grad_norm": norms[0], "third_norm": norms[1], "grad_cosine": cosine}


def measure_alignment(model: nn.Module, loss_fn: LossFn, x: Any, y: Any, config: Config) -> dict[str, float]:
    """The paper's gradient against the exact one."""
    result = alignment(model, loss_fn, x, y, config.input_at)
    return {"alignment_cosine": result.cosine, "alignment_ratio": result.norm_ratio}
