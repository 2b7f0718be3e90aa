"""What is reported of a batch's output besides the loss, and the default losses."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._torch_compat import tree_leaves
from ..core.penalty import Penalty

LossFn = Callable[[Any, Any], Tensor]
Metric = Callable[[Any, Any], Any]
IGNORED = -100  # as cross_entropy has it


class Objective(NamedTuple):
    """What a run minimises, and what it reports besides: the loss, the penalty of the input gradient, and a metric."""

    loss_fn: LossFn
    metric: Metric | None
    penalty: Penalty


class GivenFunctions(NamedTuple):
    """The parts of an `Objective` that the user gives; None: the default for the data and the config."""

    loss_fn: LossFn | None = None
    metric: Metric | None = None
    penalty: Penalty | None = None


DEFAULTS = GivenFunctions()


def error(output: Tensor, y: Tensor) -> Tensor:
    """The fraction of wrong predictions. Classes are along dimension 1, or last for tokens, N x T x K; -100 is ignored.

    >>> error(torch.tensor([[0.2, 0.8], [0.6, 0.4], [0.1, 0.9]]), torch.tensor([1, 1, -100])).item()
    0.5
    """
    said = output.argmax(-1 if output.shape[:-1] == y.shape else 1)
    counted = y != IGNORED
    return ((said != y) & counted).sum().double() / counted.sum().clamp_min(1)


def absolute_error(output: Tensor, y: Tensor) -> Tensor:
    """The mean absolute difference."""
    return (output.reshape(y.shape) - y).abs().double().mean()


def mean_squared_error(output: Tensor, y: Tensor) -> Tensor:
    """The mean squared difference, of N x 1 outputs and N targets too, which `mse_loss` would broadcast to N x N."""
    return F.mse_loss(output.reshape(y.shape), y)


def is_squared_error(loss_fn: LossFn | None) -> bool:
    """Whether a loss for floating-point targets is the mean squared error; None: the default."""
    return loss_fn is None or loss_fn is F.mse_loss or isinstance(loss_fn, nn.MSELoss)


def cross_entropy(output: Tensor, y: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """`F.cross_entropy`, with the classes last for tokens, N x T x K."""
    if output.dim() > 2 and output.shape[:-1] == y.shape:
        output = output.movedim(-1, 1)
    return F.cross_entropy(output, y, label_smoothing=label_smoothing)


def default_metric(output: Any, y: Any) -> Metric | None:
    """The metric that suits an output and its targets; None: there is none."""
    if not isinstance(output, Tensor) or not isinstance(y, Tensor):
        return None
    if y.is_floating_point():
        return absolute_error if output.numel() == y.numel() else None
    classes_last, classes_second = output.shape[:-1], output.shape[:1] + output.shape[2:]
    return error if output.dim() > 1 and y.shape in (classes_last, classes_second) else None


def name_of(metric: Metric) -> str:
    """Under which it is reported: its function's name.

    >>> name_of(error), name_of(lambda output, y: 0.0)
    ('error', 'metric')
    """
    name = getattr(metric, "__name__", "metric")
    return name if name.isidentifier() else "metric"


def samples_in(x: Any) -> int:
    """The samples of a batch, along dimension 0 of its first tensor."""
    return next(len(z) for z in tree_leaves(x) if isinstance(z, Tensor))


def batch_sums(n: int, loss: Tensor, input_loss: Tensor, value: Any) -> Tensor:
    """What a batch of n samples adds to an epoch's SUMS, from means over it; value: of the metric."""
    value = torch.as_tensor(value, dtype=torch.double, device=loss.device)
    means = torch.stack([loss.double(), value, input_loss.double(), torch.ones_like(value)])
    return means * n


def best_of(history: Sequence[dict[str, Any]], monitor: str, mode: str) -> dict[str, Any]:
    """The epoch's metrics with the lowest finite `monitor`, or with mode "max" the highest; of equals the first.

    >>> epochs = [{"epoch": 1, "val_loss": math.nan}, {"epoch": 2, "val_loss": 0.5}, {"epoch": 3, "val_loss": 0.4}]
    >>> best_of(epochs, "val_loss", "min")["epoch"], best_of(epochs, "val_loss", "max")["epoch"]
    (3, 2)
    """
    sign = 1 if mode == "min" else -1
    return min(history, key=lambda m: sign * m[monitor] if math.isfinite(m[monitor]) else math.inf)


def in_words(metrics: dict[str, Any]) -> str:
    """An epoch's validation, as people read it.

    >>> in_words({"val_loss": 0.2, "val_error": 0.0312, "val_input_loss": 0.01, "val_seconds": 2.0})
    'validation error 3.12%, input loss 0.01'
    """
    known = ("val_loss", "val_input_loss", "val_seconds")
    name = next((name for name in metrics if name.startswith("val_") and name not in known), "val_loss")
    shown = f"{metrics[name]:.2%}" if name == "val_error" else f"{metrics[name]:.4g}"
    words = name.removeprefix("val_").replace("_", " ")
    return f"validation {words} {shown}, input loss {metrics['val_input_loss']:.3g}"


def guessing_in_words(metrics: dict[str, Any], y: Tensor) -> str | None:
    """A warning where an epoch's validation error is no better than always predicting the most frequent class.

    >>> guessing_in_words({"val_error": 0.5}, torch.tensor([0, 0, 1, 2]))[:49]
    'a validation error of 50.00% is no better than al'
    >>> guessing_in_words({"val_error": 0.4}, torch.tensor([0, 0, 1, 2]))
    """
    if "val_error" not in metrics or y.is_floating_point():
        return None
    guessing = 1 - (y.bincount().max() / len(y)).item()
    if metrics["val_error"] < guessing - 1e-6:
        return None
    return (
        f"a validation error of {metrics['val_error']:.2%} is no better than always predicting the most frequent "
        "class: the model has learned nothing; try a smaller learning rate, or more epochs"
    )
