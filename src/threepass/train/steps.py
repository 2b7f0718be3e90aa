"""The training steps of a run, as Python runs them: a batch, three passes, an update, and the epoch's sums."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..compile.step import CompiledSteps, three_pass_call
from ..core.engine import Result
from ..core.engine import run as three_passes
from ..core.penalty import Penalty
from ..step import add_to_grad
from .config import Config
from .data import Batches, LoaderBatches
from .metrics import LossFn, Metric, batch_sums, samples_in
from .optimizer import clip_gradients, set_lr
from .sam import sam
from .schedule import Schedule

SUMS = ("loss", "metric", "input_loss", "samples")


class Steps:
    """One call is one step; `sums` are float64 and in the order of SUMS, `loss` is the newest step's.

    `curve` has the loss and the input loss of every step of the epoch, batches x 2.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        metric: Metric | None,
        batches: Batches | LoaderBatches,
        optimizer: Optimizer,
        config: Config,
        penalty: Penalty | None = None,
    ):
        self.model, self.loss_fn, self.metric, self.config = model, loss_fn, metric, config
        self.batches, self.optimizer = batches, optimizer
        self.device = next(model.parameters()).device
        self.passes = partial(sam, rho=config.sam) if config.sam else three_passes
        self.schedule = Schedule(config, len(batches), batches.samples, penalty)
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.curve = torch.zeros((len(batches), 2), dtype=torch.float64, device=self.device)

    def begin(self, epoch: int, start: int) -> None:
        """A new epoch, whose first `start` steps are done already."""
        self._left = self.batches.epoch(epoch, start)

    def __call__(self, position: int) -> None:
        x, y = self.batch(position)
        if self.config.update == "batch":
            self.optimizer.zero_grad()
        with in_precision(self.config, self.device):
            r = self.add_gradients(x, y, position)
        if self.config.update == "batch":
            self.update(position)
        self.sums += self.summed(r, x, y)
        self.loss.copy_(r.loss)
        self.curve[position % len(self.batches)] = torch.stack([r.loss.double(), r.input_loss.double()])

    def batch(self, position: int) -> tuple[Any, Any]:
        return next(self._left)

    def add_gradients(self, x: Any, y: Any, position: int) -> Result:
        options, third = self.schedule.options(position), self.schedule.third(position)
        r = self.passes(self.model, self.loss_fn, x, y, options, third=third)
        add_to_grad(self.model, r, calls=position)
        return r

    def summed(self, r: Result, x: Any, y: Any) -> Tensor:
        """What a batch adds to the epoch's sums."""
        value = 0.0 if self.metric is None else self.metric(r.output, y)
        return batch_sums(samples_in(x), r.loss, r.input_loss, value)

    def finish(self, position: int) -> None:
        """The end of an epoch, whose last step was at `position`."""
        if self.config.update == "epoch":
            self.update(position)
            self.optimizer.zero_grad()

    def update(self, position: int) -> None:
        set_lr(self.optimizer, self.schedule.lr(position))
        clip_gradients(self.optimizer, self.config.clip)
        self.optimizer.step()


class CompiledLoaderSteps(Steps):
    """Steps on batches of a loader, captured and compiled as `ThreePass(compile=True)` does it."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.compiled = CompiledSteps(self.model, self.loss_fn, required=self.config.compile == "require")

    def add_gradients(self, x: Any, y: Any, position: int) -> Result:
        def eager() -> Result:
            return super(CompiledLoaderSteps, self).add_gradients(x, y, position)

        options, third = self.schedule.options(position), self.schedule.third(position)
        return self.compiled(x, y, three_pass_call(self.model, self.loss_fn, options, third), eager, position)


def in_precision(config: Config, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")
