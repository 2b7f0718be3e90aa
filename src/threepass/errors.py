"""What goes wrong, in words a user can act on."""

import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """One spot of a model that three passes cannot go through."""

    module: str
    operation: str
    reason: str
    advice: str

    def __str__(self) -> str:
        return f"{self.module or '(model)'}: {self.operation}: {self.reason}; {self.advice}"


class UnsupportedError(RuntimeError):
    """Lists every place of the model that has no third pass; raised with gradients, buffers and RNG as they were."""

    def __init__(self, places: list[Place]):
        self.places = list({(place.module, place.operation): place for place in reversed(places)}.values())[::-1]
        lines = "\n".join(f"  - {place}" for place in self.places)
        super().__init__(
            f"three passes cannot go through {len(self.places)} place(s) of this model:\n{lines}\n"
            "threepass.coverage(model, x) shows every parameter with its rule."
        )


class CaptureError(Exception):
    """A step that cannot be captured, and why."""


class LeftOutWarning(UserWarning):
    """A tensor that needs a gradient takes part, and is no parameter of the model: it gets none."""


class UncheckedWarning(UserWarning):
    """A compiled step is used that could not be compared with a reference."""


class UncompiledWarning(UserWarning):
    """`compile=True` could not capture a step: it runs eagerly."""


def warn_uncompiled(reason: Exception | str, stacklevel: int) -> None:
    """Says in one line why a step is not captured."""
    if isinstance(reason, Exception):
        words = str(reason).strip().splitlines()
        reason = f"{type(reason).__name__}: {words[0]}" if words else type(reason).__name__
    text = "compile=True: this step runs eagerly, with the same results, because it cannot be captured"
    warnings.warn(f"{text}: {reason}", UncompiledWarning, stacklevel=stacklevel)


class NormalizationWarning(UserWarning):
    """Paper mode leaves out the curvature of normalisation layers; `mode="exact"` does not."""
