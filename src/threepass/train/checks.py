"""What is checked before a run begins: that the model, the loss, the data and the settings fit each other."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import reason_of
from ..tape.state import unchanged_on_error
from .config import Config
from .data import DataSet

WRONG = (RuntimeError, ValueError, IndexError, TypeError)  # what modules raise for inputs that they do not take


def check_training(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    x: Tensor,
    y: Tensor,
    data: DataSet,
    config: Config,
    default_loss: bool,
) -> None:
    """Runs the model and the loss on one batch, in eval mode, which changes nothing."""
    if config.input_at is not None and config.input_at not in dict(model.named_modules()):
        names = ", ".join([name for name, _ in model.named_modules() if name][:20])
        raise ValueError(f"input_at={config.input_at!r} names no module of the model; it has: {names}")
    if x.device != next(model.parameters()).device:
        raise ValueError(f"the model is on {next(model.parameters()).device} and the data on {x.device}: move one")
    before = model.training
    model.eval()
    try:
        with torch.no_grad(), unchanged_on_error(model, always=True):
            output = _output(model, x, data.name)
            if default_loss:
                _check_classes(output, data)
            loss_fn(output, y)
    finally:
        model.train(before)


def _output(model: nn.Module, x: Tensor, name: str) -> Any:
    try:
        return model(x)
    except WRONG as error:
        text = f"the model does not take the examples of {name}, batches of shape {tuple(x.shape)}: {reason_of(error)}"
        raise ValueError(text) from error


def _check_classes(output: Any, data: DataSet) -> None:
    if not isinstance(output, Tensor) or output.dim() != 2:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"cross-entropy needs outputs samples x classes, got {got}: give a loss_fn of your own")
    if output.shape[1] < len(data.classes):
        raise ValueError(f"the model has {output.shape[1]} outputs, and {data.name} has {len(data.classes)} classes")
