"""The optimizer of a run, by its name."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .config import OPTIMIZERS, Config


def make_optimizer(model: nn.Module, config: Config) -> Optimizer:
    """SGD with momentum, Adam, AdamW, or any class of torch.optim by its name; for compiled steps, their fused form."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.optimizer == "sgd":
        fused = {"fused": True} if config.compile else {}
        return torch.optim.SGD(parameters, config.lr, config.momentum, weight_decay=config.weight_decay, **fused)
    made = _class_of(config.optimizer)
    if made is None:
        raise ValueError(
            f"optimizer must be one of {', '.join(OPTIMIZERS)} or a class of torch.optim, got {config.optimizer!r}"
        )
    accepted = inspect.signature(made).parameters
    options: dict[str, Any] = {"lr": config.lr}
    if "weight_decay" in accepted:
        options["weight_decay"] = config.weight_decay
    elif config.weight_decay:
        raise ValueError(f"optimizer {config.optimizer!r} has no weight decay: leave weight_decay at 0")
    if made is torch.optim.LBFGS:
        raise ValueError(
            "fit does not support LBFGS, which evaluates the loss several times per step: call a ThreePass in a "
            "closure (docs/loops.md)"
        )
    if config.compile and made in (torch.optim.Adam, torch.optim.AdamW):
        options |= {"fused": True, "capturable": True}
    return made(parameters, **options)


def default_lr(optimizer: str) -> float | None:
    """The learning rate that torch.optim gives an optimizer by itself, if there is one."""
    made = _class_of(optimizer)
    lr = None if made is None else inspect.signature(made).parameters["lr"].default
    return lr if isinstance(lr, float) else None


def _class_of(name: str) -> type[Optimizer] | None:
    made = getattr(torch.optim, {"adam": "Adam", "adamw": "AdamW"}.get(name, name), None)
    return made if isinstance(made, type) and issubclass(made, Optimizer) else None


def clip_gradients(optimizer: Optimizer, norm: float) -> None:
    """Scales all gradients together to at most this norm; 0 leaves them as they are."""
    if norm:
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], norm)


def is_graphable(optimizer: Optimizer) -> bool:
    """Whether a step is device work alone, with the learning rate in a tensor, and its state starts as zeros."""
    return type(optimizer) in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW) and all(
        group["fused"] for group in optimizer.param_groups
    )


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    return [z for entries in optimizer.state.values() for z in entries.values() if isinstance(z, Tensor)]


def set_lr(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


@contextlib.contextmanager
def lr_in(optimizer: Optimizer, lr: Tensor) -> Iterator[None]:
    """The learning rate is read from a tensor here; outside, the groups hold numbers, as checkpoints want them."""
    before = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = lr
    try:
        yield
    finally:
        for group, number in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = number
