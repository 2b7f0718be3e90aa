"""What a step depends on besides the data: learning rate, alpha and whether pass 3 runs, by the step's position."""

import math

import torch
from torch import Tensor

from ..core.options import Options
from ..core.penalty import Penalty
from ..numerics.rounding import seed_of
from .config import Config


class Schedule:
    """Functions of the position, the number of steps before this one in the whole run, and of nothing else."""

    def __init__(
        self, config: Config, batches: int, samples: int | None, penalty: Penalty | None = None, ranks: int = 1
    ):
        self.config, self.batches, self.samples, self.ranks = config, batches, samples, ranks
        self.penalty = config.penalty if penalty is None else penalty

    def alpha(self, position: int) -> float:
        c = self.config
        last = max(1, c.epochs * self.batches - 1)
        return c.alpha if c.alpha_end is None else c.alpha + (c.alpha_end - c.alpha) * position / last

    def lr(self, position: int) -> float:
        """Warm-up, then the schedule; by the paper's rule over alpha."""
        c = self.config
        progress = position / (c.epochs * self.batches)
        lr = c.lr / self.alpha(position) if c.eta_over_alpha else c.lr
        if position < c.warmup * self.batches:
            return lr * (position + 1) / (c.warmup * self.batches)
        if c.schedule == "cosine":
            return lr * 0.5 * (1 + math.cos(math.pi * progress))
        if c.schedule == "step":
            return lr * c.gamma ** sum((progress if m < 1 else position / self.batches) >= m for m in c.milestones)
        return lr

    def third(self, position: int) -> bool:
        return position % self.config.every == 0

    def options(self, position: int) -> Options:
        c = self.config
        whole = self.samples if c.update == "epoch" else None if self.ranks == 1 else self._batch_at(position)
        own = (self.alpha(position), c.reduction, c.mode, c.strength, c.input_at, whole)
        return Options(*own, penalty=self.penalty, ranks=self.ranks)

    def _batch_at(self, position: int) -> int:
        """The samples of a batch on all ranks together; the last one of an epoch may be smaller."""
        assert self.samples is not None
        size = self.config.batch_size
        return min(size, self.samples - position % self.batches * size)

    def table(self, epoch: int) -> Tensor:
        """Of every step of an epoch the weights of both terms, the learning rate and a seed: batches x 4, float64."""
        rows = []
        for position in range(epoch * self.batches, (epoch + 1) * self.batches):
            options = self.options(position)
            rows.append((options.back, options.third, self.lr(position), seed_of(position, self.config.seed)))
        return torch.tensor(rows, dtype=torch.float64)
