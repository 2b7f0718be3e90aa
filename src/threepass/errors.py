"""Exceptions and warnings of the library."""

import sys
import warnings
from dataclasses import dataclass

_INTERNAL = ("threepass", "torch", "contextlib", "")  # code that PyTorch generates is in no module


@dataclass(frozen=True)
class Place:
    """An operation of a model that three passes do not support."""

    module: str
    operation: str
    reason: str
    advice: str

    def __str__(self) -> str:
        return f"{self.module or '(model)'}: {self.operation}: {self.reason}; {self.advice}"


class UnsupportedError(RuntimeError):
    """Lists every operation of the model that has no third pass; gradients, buffers and random state are unchanged.

    Attributes:
        places: the operations, each with `module`, `operation`, `reason` and `advice`.
    """

    def __init__(self, places: list[Place]):
        self.places = list({(place.module, place.operation): place for place in reversed(places)}.values())[::-1]
        lines = "\n".join(f"  - {place}" for place in self.places)
        super().__init__(
            f"three passes do not support {len(self.places)} operation(s) of this model:\n{lines}\n"
            "threepass.coverage(model, x) shows every parameter with its rule."
        )


class CaptureError(RuntimeError):
    """Says why a step cannot be captured; `compile="require"` raises it where `compile=True` warns.

    Attributes:
        step_seconds: the time of one captured step, if a program was made and then refused; else None.
    """

    def __init__(self, reason: str, step_seconds: float | None = None):
        super().__init__(reason)
        self.step_seconds = step_seconds


class DivergedError(ArithmeticError):
    """Training stopped because the loss is not finite.

    Attributes:
        epoch: in which it happened, counted from 1.
        step: of the whole run, counted from 1; None: every training loss was finite, the validation loss is not.

    bad_data: what is not finite in the data themselves, in words, if that is the reason.
    """

    def __init__(self, epoch: int, batch: int | None, position: int, bad_data: str | None = None):
        self.epoch, self.step = epoch, None if batch is None else position + 1
        where = f"validation loss after epoch {epoch}"
        if batch is not None:
            where = f"training loss at step {self.step} (epoch {epoch}, batch {batch + 1})"
        reason = "training diverged. Lower the learning rate or the strength"
        if self.step == 1:
            reason = "this is before the first update. Look for NaN or infinity in the data and in the initial weights"
        if bad_data is not None:
            reason = f"{bad_data}. Remove or fix these samples"
        super().__init__(f"the {where} is not finite: {reason}. To continue anyway: keep_going=True (--keep-going)")


class LeftOutWarning(UserWarning):
    """A tensor in the step requires grad but is not a parameter of the model; no gradient is computed for it."""


class UncheckedWarning(UserWarning):
    """A captured step is used although it could not be compared with the float64 reference."""


class AccumulationWarning(UserWarning):
    """Gradients of several calls went into one update, and `batch_size` was not given."""


class LossReductionWarning(UserWarning):
    """The loss is a sum over the batch, and three passes expect a mean."""


class BatchDimensionWarning(UserWarning):
    """The batch dimension of x seems to be dimension 1, and three passes take dimension 0."""


class LossGrowthWarning(UserWarning):
    """The training loss has grown far over that of the first step."""


class MaskWarning(UserWarning):
    """A floating-point mask counts as the input of a token model."""


class LabelWarning(UserWarning):
    """Floating-point labels in x count as the input."""


class UncompiledWarning(UserWarning):
    """`compile=True` could not capture a step, which therefore runs eagerly."""


def reason_of(error: Exception) -> str:
    """An exception in one line; of a `CaptureError`, the first line of its message alone."""
    name, line = type(error).__name__, first_line_of(error)
    if isinstance(error, UnsupportedError) and error.places:
        line = f"{line.removesuffix(':')}, the first in {error.places[0]}"
    return line if isinstance(error, CaptureError) or line == name else f"{name}: {line}"


def first_line_of(error: Exception) -> str:
    """The first line of an exception's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def warn_uncompiled(error: CaptureError, seconds: float, compile: bool | str = True) -> None:
    """Says why steps run eagerly and what that costs. seconds: of the eager step that was just measured."""
    cost = f"{seconds * 1e3:.3g} ms, measured on this call"
    if error.step_seconds:
        refused = f"the captured program took {error.step_seconds * 1e3:.3g} ms"
        cost = f"{cost}; {refused}, so this is {seconds / error.step_seconds:.1f}x slower"
    text = f"compile={compile!r}: this step runs eagerly ({cost}), with the same results, because {reason_of(error)}"
    also = ", which also compiles the step" if compile == "trace" else ""
    advice = f'To get an error with its traceback instead, pass compile="require"{also}'
    warn_caller(f"{text}. {advice}", UncompiledWarning)


def warn_caller(text: str, category: type[Warning]) -> None:
    """Warns at the user's line: the nearest one outside of this package and of PyTorch."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INTERNAL:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


class NormalizationWarning(UserWarning):
    """The model has normalisation layers, whose curvature paper mode ignores and `mode="exact"` does not."""
