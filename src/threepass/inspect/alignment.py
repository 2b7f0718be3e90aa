"""How far the paper's third pass points along the true gradient of the input loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.engine import Task, run
from ..core.options import Options
from ..tape.state import unchanged_on_error

NO_DIRECTION = (
    "-: paper mode's third pass is exactly zero for biases and other parameters that are added, so there is no "
    "direction to compare"
)


@dataclass(frozen=True)
class Agreement:
    """The cosine between the paper's gradient and the exact one, and the ratio |paper| / |exact|.

    Where the paper's gradient is zero and the exact one is not, as for biases, both numbers are 0.
    """

    cosine: float
    norm_ratio: float


@dataclass(frozen=True)
class Alignment:
    """Paper mode's third pass compared with the gradient of the input loss.

    Attributes:
        cosine: the cosine between the two, over all parameters together.
        norm_ratio: |paper| / |exact|, over all parameters together.
        by_parameter: both numbers for each parameter, by name.
    """

    cosine: float
    norm_ratio: float
    by_parameter: dict[str, Agreement]

    def __str__(self) -> str:
        rows = [("(all)", Agreement(self.cosine, self.norm_ratio)), *self.by_parameter.items()]
        width = max(len(name) for name, _ in rows)
        cosines = [f"{'-':>7}" if row.norm_ratio == 0 else f"{row.cosine:+7.3f}" for _, row in rows]
        lines = [f"{name:<{width}}  {c}  {row.norm_ratio:9.3g}" for (name, row), c in zip(rows, cosines, strict=True)]
        if any(row.norm_ratio == 0 for _, row in rows):
            lines.append(NO_DIRECTION)
        return "\n".join([f"{'parameter':<{width}}   cosine  paper/exact", *lines])


def alignment(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], x: Any, y: Any, input_at: str | None = None
) -> Alignment:
    """Compares paper mode's third pass with the gradient of the input loss, on one batch; changes nothing.

    With a cosine near 1, `mode="paper"` gives nearly the direction of `mode="exact"`, at a lower cost. With a cosine
    near 0 or below, use `mode="exact"`.
    """
    paper, exact = (_third(model, loss_fn, x, y, mode, input_at) for mode in ("paper", "exact"))
    whole = _compare(*(torch.cat([g.flatten() for g in grads.values()]) for grads in (paper, exact)))
    return Alignment(whole.cosine, whole.norm_ratio, {name: _compare(paper[name], exact[name]) for name in paper})


def _third(model, loss_fn, x, y, mode: str, input_at: str | None) -> dict[str, Tensor]:
    with unchanged_on_error(model, always=True):
        options = Options(mode=mode, input_at=input_at, separate=True)
        return run(Task(model, loss_fn, x, y), options, warn=False).third_grads or {}


def _compare(paper: Tensor, exact: Tensor) -> Agreement:
    paper, exact = paper.double().flatten(), exact.double().flatten()
    norms = paper.norm().item(), exact.norm().item()
    cosine = (paper @ exact).item() / (norms[0] * norms[1]) if all(norms) else float(norms[0] == norms[1])
    return Agreement(cosine, norms[0] / norms[1] if norms[1] else 1.0 if norms[0] == 0 else float("inf"))
