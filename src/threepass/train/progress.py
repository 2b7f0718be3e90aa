"""The progress of a run: a bar with the current numbers, or one line an epoch where there is no terminal."""

import sys
import time
from typing import Any

from torch import Tensor

from .metrics import in_words


class Progress:
    """Epochs, loss, error, input loss and the time left, on standard error."""

    def __init__(self, epochs: int, batches: int, shown: bool = True):
        self._is_shown = shown
        self._epochs, self._batches = epochs, batches
        self._shown, self._text = 0.0, ""
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        if self._is_shown and sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
                from rich.progress import Progress as Bar
            except ImportError:
                return self
            columns = [TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(elapsed_when_finished=True)]
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task("", total=self._epochs * self._batches)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def announce(self, text: str) -> None:
        """What takes long next."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{text} ...")
        elif self._is_shown:
            print(f"{text} ...", file=sys.stderr, flush=True)

    def step(self, epoch: int, done: int, loss: Tensor) -> None:
        """At most ten times a second, because reading the loss waits for the device."""
        if self._bar is not None and (time.monotonic() - self._shown > 0.1 or done == self._batches):
            self._shown = time.monotonic()
            text = f"epoch {epoch + 1}/{self._epochs}  loss {loss.item():.4f}{self._text}"
            self._bar.update(self._task, completed=epoch * self._batches + done, description=text)

    def epoch(self, metrics: dict[str, Any]) -> None:
        """The epoch's own numbers."""
        self._text = f"  {in_words(metrics)}"
        line = f"epoch {metrics['epoch']}/{self._epochs}  loss {metrics['train_loss']:.4f}{self._text}"
        if self._bar is not None:
            self._bar.update(self._task, completed=metrics["epoch"] * self._batches, description=line)
            return
        if not self._is_shown:
            return
        left, seconds = self._epochs - metrics["epoch"], metrics["seconds"]  # the first epochs may compile
        times = f"  {_duration(seconds)} an epoch" + (f", {_duration(left * seconds)} left" if left else "")
        print(line + times, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    """A duration in two units at most.

    >>> _duration(0.04), _duration(75), _duration(7260)
    ('0.04 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
