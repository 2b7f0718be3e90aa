"""Loss, error and input loss on the validation set, in eval mode."""

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from ..compile.signature import Signature
from ..compile.step import capturable
from ..core.penalty import evaluate
from ..tape.state import unchanged_on_error
from .data import Batches
from .recorder import Recorder, Recording
from .schedule import Schedule
from .steps import SUMS, LossFn, batch_sums, in_precision

AT_ONCE = 2**22  # numbers in the input of one batch, or as many samples as a training batch has


def size_of_batches(samples: int, numbers: int, batch_size: int) -> int:
    """A batch size that fills the device, since there are no weight gradients to keep, in parts of about one size."""
    most = max(batch_size, min(1024, AT_ONCE // numbers))
    return -(-samples // -(-samples // most))


class Validation:
    """Measures the model as it stands; the numbers are read once, at the end. With a recorder, by replays."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, batches: Batches, schedule: Schedule, recorder: Recorder | None = None
    ):
        self.model, self.loss_fn, self.batches, self.recorder = model, loss_fn, batches, recorder
        self.config, self.penalty = schedule.config, schedule.penalty
        self.device = next(model.parameters()).device
        self.drawn = batches.draw(0).to(self.device)
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)
        self.place = torch.zeros(1, dtype=torch.int64, device=self.device)

    def __call__(self) -> dict[str, float]:
        self.model.eval()
        self.sums.zero_()
        self.place.zero_()
        for number in range(len(self.batches)):
            self._measure(number)
        self.model.train()
        loss, wrong, input_loss, n = self.sums.tolist()
        return {"loss": loss / n, "error": wrong / n, "input_loss": input_loss / n}

    def _measure(self, number: int) -> None:
        size = self.batches.batch_size
        first = number * size
        rows = min(size, len(self.batches.split) - first)
        part = self.drawn[:, first : first + rows]
        if (recorder := self.recorder) is None:
            self.sums += self._batch(part)
            return
        recording = recorder.find("validation", rows, lambda: self._record(recorder, rows))
        if recording is not None:
            recording()
            return
        self.sums += recorder.programs.eagerly(lambda: self._batch(part), self.device)
        self.place += 1

    def _record(self, recorder: Recorder, rows: int) -> Recording:
        # The last, smaller batch comes once an epoch: compiling it would take longer than it saves.
        often = rows == min(self.batches.batch_size, len(self.batches.split))
        program = partial(self._program, recorder.programs.signature, rows)
        return recorder.record(program, self.place, tuple, self._restored, None, often)

    def _program(self, signature: Signature, rows: int, place: Tensor) -> list[Tensor]:
        at = place * self.batches.batch_size + torch.arange(rows, device=self.device)
        with capturable(self.model, signature):
            self.sums += self._batch(self.drawn[:, at])
        place += 1
        return []

    def _batch(self, drawn: Tensor) -> Tensor:
        x, y = self.batches.cut(drawn)
        x = x.detach().requires_grad_(x.is_floating_point() and self.config.input_at is None)
        with torch.enable_grad(), in_precision(self.config, self.device):
            out = self.model(x)
            loss = self.loss_fn(out, y)
        input_loss = torch.zeros_like(loss, dtype=torch.double)
        if x.requires_grad:
            (dx,) = torch.autograd.grad(loss, x)
            input_loss, _ = evaluate(self.penalty, [dx.double() * len(x)], len(x), lambda g: g[0])
        return batch_sums(out.detach(), y, loss.detach(), input_loss).detach()

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        kept = [(z, z.clone()) for z in (self.sums, self.place)]
        try:
            with unchanged_on_error(self.model, always=True):
                yield
        finally:
            for z, contents in kept:
                z.copy_(contents)
