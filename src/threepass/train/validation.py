"""Loss, metric and input loss on the validation set, in eval mode."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_compat import tree_map
from ..compile.signature import Signature
from ..compile.step import capturable
from ..core.engine import Task
from ..core.engine import run as three_passes
from ..core.options import Options
from ..core.penalty import evaluate
from ..tape.state import unchanged_on_error
from .config import Config
from .data import Batches, LoaderBatches
from .graph_capture import CapturedFunction, Function, GraphCapture
from .metrics import Objective, batch_sums, samples_in
from .ranks import ALONE, Ranks
from .steps import LOSSES, SUMS, in_precision, losses_in

AT_ONCE = 2**22  # numbers in the input of one batch, or as many samples as a training batch has


def size_of_batches(samples: int, numbers: int, batch_size: int) -> int:
    """A batch size that fills the device, since there are no weight gradients to keep, in parts of about one size."""
    most = max(batch_size, min(1024, AT_ONCE // numbers))
    return -(-samples // -(-samples // most))


class Validation:
    """Measures the model as it stands; the numbers are read once, at the end."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        objective: Objective,
        batches: Batches | LoaderBatches,
        ranks: Ranks = ALONE,
    ):
        self.model, self.config, self.batches, self.ranks = model, config, batches, ranks
        self.loss_fn, self.metric, self.penalty = objective
        self.device = next(model.parameters()).device
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)

    def __call__(self) -> dict[str, float]:
        """The means over the set of SUMS, but for the number of samples."""
        self.model.eval()
        self.sums.zero_()
        self.measure()
        self.model.train()
        *totals, n = self.sums.tolist()
        return {name: total / n for name, total in zip(SUMS, totals, strict=False)}

    def measure(self) -> None:
        for i, (x, y) in enumerate(self.batches.epoch(0)):
            if i % self.ranks.size == self.ranks.rank:
                self.sums += self.sums_of(x, y)
        self.ranks.add_up(self.sums)

    def sums_of(self, x: Any, y: Any) -> Tensor:
        with in_precision(self.config, self.device):
            if isinstance(x, Tensor) and x.is_floating_point() and self.config.input_at is None:
                output, loss, input_loss = self._by_autograd(x, y)
            else:
                options = Options(alpha=1.0, input_at=self.config.input_at, penalty=self.penalty)
                r = three_passes(Task(self.model, self.loss_fn, x, y), options, runs_third_pass=False, warn=False)
                output, loss, input_loss = r.output, r.loss, r.input_loss
            value = 0.0 if self.metric is None else self.metric(output, y)
        return batch_sums(samples_in(x), loss, input_loss, value).detach()

    def _by_autograd(self, x: Tensor, y: Any) -> tuple[Any, Tensor, Tensor]:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = self.model(x)
            loss = self.loss_fn(output, y)
        (dx,) = torch.autograd.grad(loss, x)
        output = tree_map(lambda z: z.detach() if isinstance(z, Tensor) else z, output)
        input_loss, _ = evaluate(self.penalty, [dx.double() * len(x)], len(x), lambda g: g[0])
        return output, loss.detach(), input_loss


class CapturedValidation(Validation):
    """`Validation` of a data set in memory by replays, and eagerly where it cannot be captured."""

    batches: Batches

    def __init__(self, *args: Any, graphs: GraphCapture):
        super().__init__(*args)
        self.graphs = graphs
        self.drawn = self.batches.draw(0).to(self.device)
        self.place = torch.zeros(1, dtype=torch.int64, device=self.device)

    def measure(self) -> None:
        self.place.zero_()
        for part in self.drawn.split(self.batches.batch_size, dim=1):
            rows, graphs = part.shape[1], self.graphs
            replay = graphs.find("validation", rows, partial(self._capture, graphs, rows))
            if replay is not None:
                replay()
                continue
            self.sums += graphs.programs.eagerly(partial(self._sums_at, part), self.device)
            self.place += 1

    def _sums_at(self, drawn: Tensor) -> Tensor:
        return self.sums_of(*self.batches.cut(drawn))

    def _capture(self, graphs: GraphCapture, rows: int) -> CapturedFunction:
        # The last, smaller batch comes once an epoch: compiling it would take longer than it saves.
        often = rows == min(self.batches.batch_size, len(self.batches.split))
        program = partial(self._program, graphs.programs.signature, rows)
        return graphs.capture(Function(program, tuple, self._restored, known=LOSSES), self.place, often)

    def _program(self, signature: Signature, rows: int, place: Tensor) -> list[Tensor]:
        at = place * self.batches.batch_size + torch.arange(rows, device=self.device)
        with capturable(self.model, signature):
            added = self._sums_at(self.drawn[:, at])
        self.sums += added
        place += 1
        return losses_in(added)

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        copies = [(z, z.clone()) for z in (self.sums, self.place)]
        try:
            with unchanged_on_error(self.model, always=True):
                yield
        finally:
            for z, contents in copies:
                z.copy_(contents)
