"""Measurements of a trained net besides its history: functions of the run, its data and the model, by name."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.engine import Task
from ...core.engine import run as three_passes
from ...core.options import Options
from ...inspect.alignment import Alignment
from ...inspect.alignment import alignment as aligned
from ...inspect.variances import variances as measure_variances
from ...tape.state import unchanged_on_error
from ...train.data import Batches, DataSet
from ...train.runs import Run
from ..attacks import robustness as measure_robustness

SIGMAS = (0.0, 0.05, 0.1)
RADII = (0.0, 0.5 / 255, 1 / 255, 2 / 255, 4 / 255)
EXAMPLES = 500


def robustness(run: Run, data: DataSet, model: nn.Module) -> dict[str, Any]:
    """Accuracy under noise, FGSM and PGD on the first validation images, fewer in a small version of a study."""
    examples = max(1, min(EXAMPLES, len(data.train) // 20))
    curves = measure_robustness(model, data, SIGMAS, RADII, examples=examples)
    return {kind: [round(100 * a, 2) for a in curves[kind]["accuracy"]] for kind in ("noise", "fgsm", "pgd")}


def variances(run: Run, data: DataSet, model: nn.Module) -> dict[str, Any]:
    """Variances of both passes' signals at every layer, before and after training, on the first validation batch."""
    x, y = first_batch(run, data)
    by_time: dict[str, Any] = {}
    for when, net in {"start": run.make_model(data), "end": model}.items():
        rows = [dataclasses.asdict(row) for row in measure_variances(net.eval(), F.cross_entropy, x, y)]
        by_time[when] = {q: [_short(row[q]) for row in rows] for q in ("v", "pass2", "pass3")}
    return by_time


def alignment(run: Run, data: DataSet, model: nn.Module) -> dict[str, Any]:
    """Pass 3 against the gradient of the input loss before and after training: whole, by layer, term by term."""
    return {when: alignment_now(run, data, net) for when, net in {"start": run.make_model(data), "end": model}.items()}


def alignment_now(run: Run, data: DataSet, model: nn.Module) -> dict[str, Any]:
    """The same at one time, in float64; the model is left as it is."""
    x, y = first_batch(run, data)
    net = copy.deepcopy(model).double().train()
    return by_layer(aligned(net, F.cross_entropy, x.double(), y)) | terms(net, x.double(), y)


def by_layer(aligned: Alignment) -> dict[str, Any]:
    """The cosines, whole and of every parameter that pass 3 reaches: biases get nothing from it."""
    weights = {name: a for name, a in aligned.by_parameter.items() if 0 < a.norm_ratio < float("inf")}
    return {
        "cosine": _short(aligned.cosine),
        "ratio": _short(aligned.norm_ratio),
        "layers": {name: _short(a.cosine) for name, a in weights.items()},
    }


def terms(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Which term that pass 3 drops is to blame.

    The gradient of the input loss is pass 3 + H + C: H from the Hessian of the loss, C from the curvature of
    activations, norms and attention. With a loss that is linear in the output and has the same gradient there, H is
    gone and the rest stays. Lengths are relative to the whole gradient.
    """
    exact = _third(model, F.cross_entropy, x, y, "exact")
    paper = _third(model, F.cross_entropy, x, y, "paper")
    with unchanged_on_error(model, always=True), torch.no_grad():
        out = model(x)
    out = out.detach().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(out, y), out)
    linear = _third(model, lambda z, _: (z * slope).sum(), x, y, "exact")
    hessian, curvature, size = exact - linear, linear - paper, exact.norm()
    return {
        "hessian": _short((hessian.norm() / size).item()),
        "curvature": _short((curvature.norm() / size).item()),
        "cosine without hessian": _short(F.cosine_similarity(paper, linear, 0).item()),
        "cosine without curvature": _short(F.cosine_similarity(paper + hessian, exact, 0).item()),
    }


def first_batch(run: Run, data: DataSet) -> tuple[Tensor, Tensor]:
    """As many validation examples as a training batch has."""
    size = min(run.config.batch_size, len(data.val))
    batches = Batches(data.val, size, normalise=(data.mean, data.std), shuffle=False, seed=0)
    return next(iter(batches.epoch(0)))


def _third(model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], x: Tensor, y: Tensor, mode: str) -> Tensor:
    with unchanged_on_error(model, always=True):
        r = three_passes(Task(model, loss_fn, x, y), Options(mode=mode, separate=True), warn=False)
    return torch.cat([g.double().flatten() for g in (r.third_grads or {}).values()])


def _short(value: float) -> float:
    return float(f"{value:.4g}")


MEASURES: dict[str, Callable[[Run, DataSet, nn.Module], dict[str, Any]]] = {
    f.__name__: f for f in (robustness, variances, alignment)
}
ALONG = {"alignment": alignment_now}  # measured at every quarter of the run too
