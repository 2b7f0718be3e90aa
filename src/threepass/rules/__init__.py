"""How signals pass an operation: the table of fast rules, their families, and the generic rule behind them all."""

from . import activation, affine, attention, indexing, norm, pointwise
from .table import Linearization, rule

__all__ = ["Linearization", "activation", "affine", "attention", "indexing", "norm", "pointwise", "rule"]
