"""What is checked before a run begins: that the model, the loss, the data and the settings fit each other."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_compat import tree_leaves
from ..core.misuse import warn_of_masks, warn_of_sum
from ..core.options import check_loss
from ..errors import reason_of, warn_caller
from ..tape.inputs import call_model
from ..tape.state import unchanged_on_error
from .batch_source import BatchSource
from .config import Config
from .metrics import (
    IGNORED,
    GivenFunctions,
    Metric,
    Objective,
    cross_entropy,
    default_metric,
    is_squared_error,
    mean_squared_error,
    name_of,
)

TYPICAL = 0.1, 3.0  # root mean square of regression targets; 1 where they are standardised
WRONG = (RuntimeError, ValueError, IndexError, TypeError)  # what modules raise for inputs that they do not take


def choose_objective(model: nn.Module, source: BatchSource, config: Config, given: GivenFunctions) -> Objective:
    """The functions given, or the defaults for the targets; tried on a batch."""
    loss_fn, metric, penalty = given
    output, y = _first_output(model, source, config), source.first[1]
    is_default = loss_fn is None
    if loss_fn is None:
        _check_outputs(output, source)
        smoothed = partial(cross_entropy, label_smoothing=config.label_smoothing)
        loss_fn = mean_squared_error if source.is_regression else smoothed
    if config.label_smoothing and not (is_default and loss_fn is not mean_squared_error):
        raise ValueError(
            "label_smoothing applies only to the default cross-entropy, and this run uses another loss: leave it out"
        )
    if source.is_regression and is_squared_error(given.loss_fn):
        _warn_of_scale(source.targets)
    metric = default_metric(output, y) if metric is None else metric
    with torch.no_grad(), unchanged_on_error(model, always=True):
        loss = loss_fn(output, y)
        check_loss(loss)
        if metric is not None and torch.as_tensor(metric(output, y)).numel() != 1:
            raise ValueError(f"metric {name_of(metric)!r} must return one number, a mean over the batch")
    warn_of_sum(model, loss_fn, source.first[0], y, output, loss)
    _check_monitor(config, metric)
    if config.input_at is None:
        warn_of_masks(model, source.first[0])
    return Objective(loss_fn, metric, config.penalty if penalty is None else penalty)


def _warn_of_scale(targets: Tensor) -> None:
    """The largest stable learning rate and the effect of a strength depend on the scale of the targets."""
    size = targets.double().square().mean().sqrt().item()
    if 0 < size < TYPICAL[0] or TYPICAL[1] < size < math.inf:
        warn_caller(
            f"the targets of this regression have a root mean square of {size:.3g}: standardise them, (y - mean) / std "
            "of the training targets, and undo it on the model's outputs. Default learning rates and strengths are for "
            "standardised targets; with large ones training diverges, or the third pass dominates",
            UserWarning,
        )


def _check_monitor(config: Config, metric: Metric | None) -> None:
    measured = ["loss", "input_loss"] if metric is None else ["loss", "input_loss", name_of(metric)]
    known = [f"{part}_{name}" for part in ("val", "train") for name in measured]
    if config.monitor not in known:
        raise ValueError(f"monitor must be one of {', '.join(known)}, got {config.monitor!r}")


def _first_output(model: nn.Module, source: BatchSource, config: Config) -> Any:
    """The model's output for a batch, in eval mode, which changes nothing; what does not fit is an error in words."""
    if config.input_at is not None and config.input_at not in dict(model.named_modules()):
        names = ", ".join([name for name, _ in model.named_modules() if name][:20])
        raise ValueError(f"input_at={config.input_at!r} names no module of the model; it has: {names}")
    x, home = source.first[0], next(model.parameters()).device
    away = [z.device for z in tree_leaves(x) if isinstance(z, Tensor) and z.device != home]
    if away:
        raise ValueError(f"the model is on {home} and the data on {away[0]}: move one of them")
    before = model.training
    model.eval()
    try:
        with torch.no_grad(), unchanged_on_error(model, always=True):
            return call_model(model, x)
    except WRONG as error:
        shapes = ", ".join(str(tuple(z.shape)) for z in tree_leaves(x) if isinstance(z, Tensor))
        text = f"the model fails on a batch of {source.name} (shape {shapes}): {reason_of(error)}"
        raise ValueError(text) from error
    finally:
        model.train(before)


def _check_outputs(output: Any, source: BatchSource) -> None:
    """That the default losses can compare the output with the targets."""
    y = source.first[1]
    if not isinstance(output, Tensor) or not isinstance(y, Tensor):
        kinds = f"{type(output).__name__} and {type(y).__name__}"
        raise ValueError(f"the default losses compare tensors, got {kinds}: pass a loss_fn of your own")
    if y.is_floating_point():
        if output.numel() != y.numel():
            raise ValueError(
                f"the model's output has shape {tuple(output.shape)} and the targets {tuple(y.shape)}: regression "
                "needs one output per target, classification integer labels"
            )
        return
    if output.dim() < 2 or y.shape not in (output.shape[:-1], output.shape[:1] + output.shape[2:]):
        raise ValueError(
            f"cross-entropy needs outputs of shape (N, C) or (N, T, C); got {tuple(output.shape)} for labels of shape "
            f"{tuple(y.shape)}: pass a loss_fn of your own"
        )
    outputs = output.shape[-1] if y.shape == output.shape[:-1] else output.shape[1]
    labels = y[y != IGNORED]
    classes = source.classes or (int(labels.max()) + 1 if labels.numel() else 0)
    if outputs < classes:
        raise ValueError(f"the model has only {outputs} outputs, but {source.name} has {classes} classes")
