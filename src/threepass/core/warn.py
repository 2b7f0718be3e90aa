"""Warnings about a model, once for each model and kind."""

import weakref
from collections.abc import Iterable

from torch import nn

from ..errors import LeftOutWarning, NormalizationWarning, warn_caller
from ..tape.checkpointed import Block
from ..tape.operation import Operation

_NORMS = ("batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm", "SyncBatchNorm")


_warned: "weakref.WeakKeyDictionary[nn.Module, set[type[Warning]]]" = weakref.WeakKeyDictionary()


def warn_of_norms(model: nn.Module, operations: Iterable[Operation]) -> None:
    if not _has_warned(model, NormalizationWarning) and (norms := curved_norms(operations)):
        warn_once(
            model,
            f'mode="paper" leaves out the curvature of {", ".join(norms)} and of the loss, so on this model the third '
            'pass may point away from the gradient of the input loss; mode="exact" is that gradient, and '
            "threepass.alignment(model, loss_fn, x, y) measures how far the two agree",
            NormalizationWarning,
        )


def warn_of_other_leaves(model: nn.Module, count: int) -> None:
    if count:
        warn_once(
            model,
            f"{count} tensor(s) require grad but are not parameters of the model (parameters of the loss, say); no "
            "gradients are computed for them. Make them parameters of the model, or set requires_grad_(False)",
            LeftOutWarning,
        )


def curved_norms(operations: Iterable[Operation]) -> list[str]:
    """The names of the normalisations that depend on the statistics of their input."""
    each = (inside for op in operations for inside in (op.inside if isinstance(op, Block) else [op]))
    return sorted({op.name for op in each if _is_curved_norm(op)})


def warn_once(model: nn.Module, text: str, category: type[Warning]) -> None:
    """Warns the first time that a model gets this category of warning, at the user's line."""
    if not _has_warned(model, category):
        _warned.setdefault(model, set()).add(category)
        warn_caller(text, category)


def _has_warned(model: nn.Module, category: type[Warning]) -> bool:
    return category in _warned.get(model, ())


def _is_curved_norm(op: Operation) -> bool:
    fixed = op.name in ("batch_norm", "instance_norm") and op.values[5] is False  # the running statistics
    return op.name in _NORMS and not fixed
