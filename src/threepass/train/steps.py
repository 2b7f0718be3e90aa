"""The training steps of a run, as Python runs them: a batch, three passes, an update, and the epoch's sums."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..compile.check import Outputs
from ..compile.step import CompiledSteps, three_pass_call
from ..core.engine import Result, Task
from ..core.engine import run as three_passes
from ..step import add_to_grad
from .config import Config
from .data import Batches, LoaderBatches
from .metrics import Objective, batch_sums, samples_in
from .optimizer import clip_gradients, set_lr
from .ranks import ALONE, Ranks
from .sam import sam
from .schedule import Schedule

SUMS = ("loss", "metric", "input_loss", "samples")
LOSSES = Outputs(("the loss", "the input loss"), penalties=(1,))  # the first results of a captured step


def losses_in(sums: Tensor) -> list[Tensor]:
    """LOSSES: the loss and the input loss of SUMS, so that the check of a captured step compares each by itself.

    In the vector of sums, a wrong input loss could pass that is small beside the loss and the number of samples.
    """
    return [sums[SUMS.index(name)] for name in ("loss", "input_loss")]


class EagerSteps:
    """One call is one step; `sums` are float64 and in the order of SUMS, `loss` is the newest step's.

    `curve` has the loss and the input loss of every step of the epoch, batches x 2.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        objective: Objective,
        batches: Batches | LoaderBatches,
        optimizer: Optimizer,
        ranks: Ranks = ALONE,
    ):
        self.model, self.config = model, config
        self.loss_fn, self.metric, penalty = objective
        self.batches, self.optimizer, self.ranks = batches, optimizer, ranks
        self.device = next(model.parameters()).device
        self.passes = partial(sam, rho=config.sam) if config.sam else three_passes
        self.schedule = Schedule(config, len(batches), batches.samples, penalty, ranks.size)
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
        self.ranks.seed_step(self.config.seed, position)
        with in_precision(self.config, self.device):
            r = self.add_gradients(x, y, position)
        if self.config.update == "batch":
            self.update(position)
        self.ranks.take_from_first(self.model.buffers())
        added = self.ranks.add_up(self.summed(r, x, y))
        self.sums += added
        loss, input_loss = (r.loss, r.input_loss) if self.ranks.size == 1 else added[[0, 2]] / added[3]
        self.loss.copy_(loss)
        self.curve[position % len(self.batches)] = torch.stack([loss.double(), input_loss.double()])

    def batch(self, position: int) -> tuple[Any, Any]:
        return next(self._left)

    def add_gradients(self, x: Any, y: Any, position: int) -> Result:
        options, third = self.schedule.options(position), self.schedule.third(position)
        r = self.passes(Task(self.model, self.loss_fn, x, y), options, runs_third_pass=third)
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
        self.ranks.average_gradients(self.model.parameters())
        set_lr(self.optimizer, self.schedule.lr(position))
        clip_gradients(self.optimizer, self.config.clip)
        self.optimizer.step()


class CompiledGradientSteps(EagerSteps):
    """EagerSteps whose gradients are captured and compiled as `ThreePass(compile=True)` does it.

    For batches of a loader, and for several ranks.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.compiled = CompiledSteps(self.model, self.loss_fn, self.config.compile)

    def add_gradients(self, x: Any, y: Any, position: int) -> Result:
        def eager() -> Result:
            return super(CompiledGradientSteps, self).add_gradients(x, y, position)

        options, third = self.schedule.options(position), self.schedule.third(position)
        return self.compiled(x, y, three_pass_call(self.model, self.loss_fn, options, third), eager, position)


def in_precision(config: Config, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")
