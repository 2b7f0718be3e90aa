"""A moving average of the weights, which is validated and returned instead of the last step's weights."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class MovingAverage:
    """average <- decay * average + (1 - decay) * weights after every update; buffers are the model's own.

    In the first updates the decay is smaller, (1 + n) / (10 + n) after n of them, so that the initial weights fade.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay, self.updates = model, decay, 0
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for name, p in self.model.named_parameters():
            self.weights[name].lerp_(p, 1 - decay)

    @torch.no_grad()
    def swap_in(self) -> dict[str, Tensor]:
        """Puts the average into the model; returns the weights that were there."""
        named = dict(self.model.named_parameters())
        before = {name: p.detach().clone() for name, p in named.items()}
        for name, p in named.items():
            p.copy_(self.weights[name])
        return before

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the averaged weights here, in the same memory."""
        before = self.swap_in()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    p.copy_(before[name])
