"""The training steps of a run, captured: one replay is one step, from the pixels to the updated weights.

The data set lies on the device. An epoch's order, crops and flips, and the learning rate, the weights of both terms and
the seed of random numbers at each of its steps, are copied there once; a counter on the device says which step comes
next. So a replay needs nothing from the host, and the host waits for nothing until the epoch's sums are read.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_compat import has_gradient_hooks
from ..compile.step import capturable, laid_out
from ..core.engine import Task
from ..errors import CaptureError
from ..numerics.precision import weights_dtype
from ..tape.state import unchanged_on_error
from .data import Batches
from .graph_capture import CapturedFunction, Function, GraphCapture
from .optimizer import clip_gradients, is_graphable, lr_in, state_tensors
from .steps import LOSSES, EagerSteps, in_precision, losses_in


@dataclass(frozen=True)
class Kind:
    """What a captured step is made for besides the batch size: which of the two terms it computes."""

    back: bool
    third: bool
    hooks: bool  # on parameters

    def __str__(self) -> str:
        return "training steps" if self.third else "training steps without the third pass"


@dataclass(frozen=True)
class CapturedStep(CapturedFunction):
    """A captured step, the parameters that it gives gradients for, and with update="epoch" the sums that it adds to."""

    trained: list[nn.Parameter]
    sums: list[Tensor]

    def add_to_sums(self) -> None:
        """Makes the tensors that a replay adds to the parameters' `grad`, after others were there."""
        for p, total in zip(self.trained, self.sums, strict=True):
            if p.grad is not total:
                total.zero_() if p.grad is None else total.copy_(p.grad)
                p.grad = total


class CapturedSteps(EagerSteps):
    """Replays captured steps, and eagerly where a step cannot be captured."""

    batches: Batches

    def __init__(self, *args: Any, graphs: GraphCapture):
        super().__init__(*args)
        self.graphs = graphs
        self.graphable = is_graphable(self.optimizer)
        self.drawn = torch.empty((4, self.batches.samples), dtype=torch.int64, device=self.device)
        # Fused optimizers on a GPU read a float32 learning rate.
        kind = torch.float32 if self.device.type == "cuda" else torch.float64
        self.lr = torch.zeros((), dtype=kind, device=self.device)
        self.table = torch.zeros((len(self.batches), 4), dtype=torch.float64, device=self.device)
        self.place = torch.zeros(1, dtype=torch.int64, device=self.device)
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
        kind, rows = self._kind(position), self._rows(position)
        step: Any = self.graphs.find(kind, rows, lambda: self._capture(kind, rows, position))
        if step is None:
            self.graphs.programs.eagerly(lambda: super(CapturedSteps, self).__call__(position), self.device)
            self.place += 1
            return
        if self.config.update == "epoch":
            step.add_to_sums()
        grads = step()
        if not self.graphable and self.config.update == "batch":
            _put(step.trained, grads)
            self.update(position)
            self.optimizer.zero_grad()

    def batch(self, position: int) -> tuple[Any, Any]:
        first = position % len(self.batches) * self.batches.batch_size
        return self.batches.cut(self.drawn[:, first : first + self.batches.batch_size])

    def finish(self, position: int) -> None:
        if self.config.update == "epoch":
            self.update(position)
            self.optimizer.zero_grad()
        following = position // len(self.batches) + 1
        if following < self.config.epochs:
            self._drawn(following)  # while the device works off what is queued

    def _kind(self, position: int) -> Kind:
        options = self.schedule.options(position)
        hooks = has_gradient_hooks(self.model.parameters())
        return Kind(options.back > 0, self.schedule.third(position) and options.third > 0, hooks)

    def _rows(self, position: int) -> int:
        size = self.batches.batch_size
        return min(size, len(self.batches.split) - position % len(self.batches) * size)

    def _capture(self, kind: Kind, rows: int, position: int) -> CapturedStep:
        if kind.hooks:
            raise CaptureError("a parameter has a hook on its gradient, which a captured step would not call")
        # The last, smaller batch comes once an epoch: compiling it would take longer than it saves.
        often = rows == min(self.batches.batch_size, len(self.batches.split))
        trained: list[nn.Parameter] = []
        program, weights = partial(self._passes, kind, rows, position, trained), self.table if kind.third else None
        function = Function(program, partial(self._then, trained), self._restored, weights, LOSSES)
        made = self.graphs.capture(function, self.place, often)
        by_epoch = self.config.update == "epoch"
        sums = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained] if by_epoch else []
        return CapturedStep(made.replay, made.check_seconds, made.graph_bytes, trained, sums)

    def _passes(self, kind: Kind, rows: int, position: int, trained: list[nn.Parameter], place: Tensor) -> list[Tensor]:
        """The losses and the gradients of the batch at a place in the epoch; moves the place on, adds to the sums."""
        size = self.batches.batch_size
        at = place * size + torch.arange(rows, device=self.device)
        x, y = self.batches.cut(self.drawn[:, at])
        back, third, lr, seed = self.table.index_select(0, place)[0].unbind()
        named = dict(self.model.named_parameters())
        dtype = weights_dtype(named.values())
        signature = self.graphs.programs.signature
        with in_precision(self.config, self.device), capturable(self.model, signature):
            options = self.schedule.options(position)
            weights, seed = (back.to(dtype), third.to(dtype)), seed.to(torch.int32)
            r = self.passes(
                Task(self.model, self.loss_fn, x, y), options, runs_third_pass=kind.third, weights=weights, seed=seed
            )
        added = self.summed(r, x, y)
        self.sums += added
        self.loss.copy_(r.loss)
        self.curve.index_copy_(0, place, torch.stack([r.loss.double(), r.input_loss.double()])[None])
        self.lr.copy_(lr)
        place += 1
        trained[:] = [named[name] for name in r.grads]
        return [*losses_in(added), *laid_out(trained, list(r.grads.values()))]

    def _then(self, trained: list[nn.Parameter], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """What a step does with its gradients, as far as the device can do it alone."""
        grads = outputs[len(LOSSES.names) :]
        if self.config.update == "epoch":
            for p, g in zip(trained, grads, strict=True):
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad += g
            return []
        if not self.graphable:
            return grads
        _put(trained, grads)
        clip_gradients(self.optimizer, self.config.clip)
        with lr_in(self.optimizer, self.lr):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return []

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        """Restores all tensors that a step changes; those that it creates (the optimizer's state) become zero."""
        copies = [(z, z.detach().clone()) for z in self._changing()]
        known = {id(z) for z, _ in copies}
        try:
            with unchanged_on_error(self.model, always=True):
                yield
        finally:
            with torch.no_grad():
                for z, contents in copies:
                    z.copy_(contents)
                for z in self._changing():
                    if id(z) not in known:
                        z.zero_()

    def _changing(self) -> list[Tensor]:
        parameters = list(self.model.parameters())
        grads = [p.grad for p in parameters if p.grad is not None]
        own = [self.sums, self.loss, self.curve, self.lr, self.place]
        return [*parameters, *grads, *state_tensors(self.optimizer), *own]


def _put(trained: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> None:
    for p, g in zip(trained, grads, strict=True):
        p.grad = g
