"""The training steps of a run, as Python runs them: a batch, three passes, an update, and the epoch's sums."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.engine import Result
from ..core.engine import run as three_passes
from ..core.penalty import Penalty
from ..step import add_to_grad
from .config import Config
from .data import Batches
from .optimizer import set_lr
from .sam import sam
from .schedule import Schedule

SUMS = ("loss", "wrong", "input_loss", "samples")
LossFn = Callable[[Any, Any], Tensor]


class Steps:
    """One call is one step; `sums` are float64 and in the order of SUMS, `loss` is the newest step's."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batches: Batches,
        optimizer: Optimizer,
        config: Config,
        penalty: Penalty | None = None,
    ):
        self.model, self.loss_fn, self.batches, self.optimizer, self.config = model, loss_fn, batches, optimizer, config
        self.device = next(model.parameters()).device
        self.passes = partial(sam, rho=config.sam) if config.sam else three_passes
        self.schedule = Schedule(config, len(batches), len(batches.split), penalty)
        self.drawn = torch.empty((4, len(batches.split)), dtype=torch.int64, device=self.device)
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)

    def begin(self, epoch: int, start: int) -> None:
        """The epoch's order, crops and flips; its first `start` steps are done already."""
        self.drawn.copy_(self.batches.draw(epoch))

    def __call__(self, position: int) -> None:
        first = position % len(self.batches) * self.batches.batch_size
        x, y = self.batches.cut(self.drawn[:, first : first + self.batches.batch_size])
        if self.config.update == "batch":
            self.optimizer.zero_grad()
        with in_precision(self.config, self.device):
            options, third = self.schedule.options(position), self.schedule.third(position)
            r = self.passes(self.model, self.loss_fn, x, y, options, third=third)
        add_to_grad(self.model, r, calls=position)
        if self.config.update == "batch":
            self.update(position)
        self.sums += summed(r, y)
        self.loss.copy_(r.loss)

    def finish(self, position: int) -> None:
        """The end of an epoch, whose last step was at `position`."""
        if self.config.update == "epoch":
            self.update(position)
            self.optimizer.zero_grad()

    def update(self, position: int) -> None:
        set_lr(self.optimizer, self.schedule.lr(position))
        self.optimizer.step()


def summed(r: Result, y: Tensor) -> Tensor:
    """What a batch adds to the epoch's sums."""
    return batch_sums(r.output, y, r.loss, r.input_loss)


def batch_sums(output: Tensor, y: Tensor, loss: Tensor, input_loss: Tensor) -> Tensor:
    """SUMS of a batch, from the means over it of the loss and the input loss."""
    wrong = (output.argmax(-1) != y).sum().double() if output.dim() == 2 else torch.zeros_like(loss, dtype=torch.double)
    n = len(y)
    return torch.stack([loss.double() * n, wrong, input_loss.double() * n, torch.full_like(wrong, n)])


def in_precision(config: Config, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")
