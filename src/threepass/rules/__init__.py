"""How signals are propagated through an operation: fast rules by family, and the generic rule for everything else."""

from . import activation, affine, attention, ctc, indexing, loss, norm, pointwise, product, sync_batch_norm, views
from .table import Linearization, rule

__all__ = [
    "Linearization",
    "activation",
    "affine",
    "attention",
    "ctc",
    "indexing",
    "loss",
    "norm",
    "pointwise",
    "product",
    "rule",
    "sync_batch_norm",
    "views",
]
