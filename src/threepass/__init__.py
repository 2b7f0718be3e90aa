"""Three-pass learning for PyTorch: train on the loss and on its gradient at the input, at 4/3 of the arithmetic."""

import warnings
from typing import Any

from . import models, reference
from ._version import code_version
from .core.engine import Result, three_pass
from .core.gradient_loss import GradientResult, gradient_step
from .errors import (
    CaptureError,
    DivergedError,
    LeftOutWarning,
    NormalizationWarning,
    UncompiledWarning,
    UnsupportedError,
)
from .init import init_
from .inspect.advise import Advice, advise
from .inspect.alignment import Alignment, alignment
from .inspect.coverage import Coverage, coverage
from .inspect.variances import variances
from .rules import Linearization, rule
from .step import GradientStep, ThreePass, loss

__all__ = [
    "Advice",
    "Alignment",
    "CaptureError",
    "Coverage",
    "DivergedError",
    "GradientResult",
    "GradientStep",
    "LeftOutWarning",
    "Linearization",
    "NormalizationWarning",
    "Result",
    "ThreePass",
    "UncompiledWarning",
    "UnsupportedError",
    "advise",
    "alignment",
    "coverage",
    "fit",
    "gradient_step",
    "init_",
    "load_run",
    "loss",
    "models",
    "reference",
    "rule",
    "three_pass",
    "variances",
]


def __getattr__(name: str) -> Any:
    if name == "fit":  # training needs more than torch
        from .train.loop import fit

        return fit
    if name == "load_run":
        from .train.trained import load_run

        return load_run
    if name == "Map":
        warnings.warn("threepass.Map is now threepass.Linearization", DeprecationWarning, stacklevel=2)
        return Linearization
    if name == "__version__":
        return code_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
