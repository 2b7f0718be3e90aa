"""A progress bar with the numbers people watch; silent where there is no terminal."""

import sys
import time
from typing import Any

from torch import Tensor


class Progress:
    """Epochs, loss, error, input loss and the time left, on one line of a terminal."""

    def __init__(self, epochs: int, batches: int):
        self._total, self._batches, self._last, self._text = epochs * batches, batches, 0.0, ""
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
                from rich.progress import Progress as Bar
            except ImportError:
                return self
            columns = [TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(elapsed_when_finished=True)]
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, epoch: int, done: int, loss: Tensor) -> None:
        """At most ten times a second, because reading the loss waits for the device."""
        if self._bar is not None and (time.monotonic() - self._last > 0.1 or done == self._batches):
            self._last = time.monotonic()
            text = f"epoch {epoch + 1}  loss {loss.item():.4f}{self._text}"
            self._bar.update(self._task, completed=epoch * self._batches + done, description=text)

    def epoch(self, metrics: dict[str, Any]) -> None:
        self._text = f"  val error {metrics['val_error']:.2%}  input loss {metrics['val_input_loss']:.3g}"
