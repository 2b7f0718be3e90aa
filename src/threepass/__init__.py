"""Three-pass learning for PyTorch: train on the loss and on its gradient at the input, at 4/3 of the arithmetic."""

from . import models, reference
from .alignment import Alignment, alignment
from .coverage import Coverage, coverage
from .engine import Result, three_pass
from .errors import NormalizationWarning, UnsupportedError
from .rules import Map, rule
from .step import ThreePass

__all__ = [
    "Alignment",
    "Coverage",
    "Map",
    "NormalizationWarning",
    "Result",
    "ThreePass",
    "UnsupportedError",
    "alignment",
    "coverage",
    "models",
    "reference",
    "rule",
    "three_pass",
]
