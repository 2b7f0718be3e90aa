"""Ctrl-C and SIGTERM stop training between two steps, so that a checkpoint can be saved."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupts:
    """The signal that asked training to stop, if one has come."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.at_once = False  # in the middle of a step, so that there is nothing whole to save

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The first signal waits for the step in hand; a second one does not."""
        if self.received is not None:
            self.at_once = True
            self.stop(number)
        self.received = number

    def check(self) -> None:
        if self.received is not None:
            self.stop(self.received)

    def stop(self, number: int) -> None:
        """Ctrl-C as Python raises it; SIGTERM as the exit code of a program that it ended."""
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


@contextlib.contextmanager
def interrupts_between_steps() -> Iterator[Interrupts]:
    """Signals are kept for `check` here. A SIGTERM that the caller handles, and other threads' signals, stay theirs."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    numbers = [signal.SIGINT]
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        numbers.append(signal.SIGTERM)
    before = {number: signal.signal(number, interrupts.receive) for number in numbers}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
