"""The training steps of a run, recorded: one replay is one step, from the pixels to the updated weights.

The data set lies on the device. An epoch's order, crops and flips, and the learning rate and the weights of both terms
at each of its steps, are copied there once; a counter on the device says which step comes next. So a replay needs
nothing from the host, and the host waits for nothing until the epoch's sums are read.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..compiled import capturable, laid_out
from ..errors import CaptureError
from ..surroundings import unchanged_on_error
from .optimizer import is_graphable, lr_in, state_tensors
from .recorder import Recorder
from .steps import Steps, in_precision, summed


@dataclass(frozen=True)
class Kind:
    """What a recorded step is made for: the samples in its batch, and which of the two terms it computes."""

    rows: int
    back: bool
    third: bool


class CapturedSteps(Steps):
    """`Steps` with a replay for every kind of step, and eager steps for kinds that cannot be recorded."""

    def __init__(self, *args: Any, recorder: Recorder):
        super().__init__(*args)
        self.recorder = recorder
        self.named = dict(self.model.named_parameters())
        self.graphable = is_graphable(self.optimizer)
        # Fused optimizers on a GPU read a float32 learning rate.
        kind = torch.float32 if self.device.type == "cuda" else torch.float64
        self.lr = torch.zeros((), dtype=kind, device=self.device)
        self.table = torch.zeros((len(self.batches), 3), dtype=torch.float64, device=self.device)
        self.place = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._replays: dict[Kind, Any] = {}
        self._trained: list[nn.Parameter] = []
        self._ahead: tuple[int, Tensor, Tensor] | None = None

    def begin(self, epoch: int, start: int) -> None:
        drawn, table = self._drawn(epoch)
        self.drawn.copy_(drawn)
        self.table.copy_(table)
        self.place.fill_(start)

    def _drawn(self, epoch: int) -> tuple[Tensor, Tensor]:
        if self._ahead is None or self._ahead[0] != epoch:
            self._ahead = (epoch, self.batches.draw(epoch), self.schedule.table(epoch))
        return self._ahead[1:]

    def __call__(self, position: int) -> None:
        kind = self._kind(position)
        if kind not in self._replays:
            self._replays[kind] = self._record(kind, position)
        replay = self._replays[kind]
        if replay is None:
            super().__call__(position)
            self.place += 1
            return
        grads = replay()
        if not self.graphable and self.config.update == "batch":
            self._put(grads)
            self.update(position)
            self.optimizer.zero_grad()

    def finish(self, position: int) -> None:
        if self.config.update == "epoch":
            self.update(position)
            self.optimizer.zero_grad(set_to_none=False)  # the replays add to these tensors
        following = position // len(self.batches) + 1
        if following < self.config.epochs:
            self._drawn(following)  # while the device works off what is queued

    def _kind(self, position: int) -> Kind:
        options, size = self.schedule.options(position), self.batches.batch_size
        rows = min(size, len(self.batches.split) - position % len(self.batches) * size)
        return Kind(rows, options.back > 0, self.schedule.third(position) and options.third > 0)

    def _record(self, kind: Kind, position: int) -> Any:
        # The last, smaller batch comes once an epoch: compiling it would take longer than it saves.
        often = kind.rows == min(self.batches.batch_size, len(self.batches.split))
        program = partial(self._passes, kind, position)
        return self.recorder.record(program, self.place, self._then, self._restored, often)

    def _passes(self, kind: Kind, position: int, place: Tensor) -> list[Tensor]:
        """The gradients of the batch at a place in the epoch; moves the place on, adds to the sums."""
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self.named.values()):
            raise CaptureError("a parameter has a hook on its gradient")
        size = self.batches.batch_size
        at = place * size + torch.arange(kind.rows, device=self.device)
        x, y = self.batches.cut(self.drawn[:, at])
        back, third, lr = self.table.index_select(0, place)[0].unbind()
        first = next(iter(self.named.values()))
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        with in_precision(self.config, self.device), capturable(self.model):
            options = self.schedule.options(position)
            weights = back.to(dtype), third.to(dtype)
            r = self.passes(self.model, self.loss_fn, x, y, options, third=kind.third, weights=weights)
        self.sums += summed(r, y)
        self.loss.copy_(r.loss)
        self.lr.copy_(lr)
        place += 1
        self._trained = [self.named[name] for name in r.grads]
        return laid_out(self._trained, list(r.grads.values()))

    def _then(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """What a step does with its gradients, as far as the device can do it alone."""
        if self.config.update == "epoch":
            for p, g in zip(self._trained, grads, strict=True):
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad += g
            return []
        if not self.graphable:
            return grads
        self._put(grads)
        with lr_in(self.optimizer, self.lr):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return []

    def _put(self, grads: Sequence[Tensor]) -> None:
        for p, g in zip(self._trained, grads, strict=True):
            p.grad = g

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        """Everything that a step changes, as it was; what it makes (the optimizer's state) starts as zeros."""
        kept = [(z, z.detach().clone()) for z in self._changing()]
        known = {id(z) for z, _ in kept}
        try:
            with unchanged_on_error(self.model, always=True):
                yield
        finally:
            with torch.no_grad():
                for z, contents in kept:
                    z.copy_(contents)
                for z in self._changing():
                    if id(z) not in known:
                        z.zero_()

    def _changing(self) -> list[Tensor]:
        grads = [p.grad for p in self.named.values() if p.grad is not None]
        return [*self.named.values(), *grads, *state_tensors(self.optimizer), self.sums, self.loss, self.lr, self.place]
