"""What is said of a training loss that grows, or is not finite, and of data that are the reason."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from torch import Tensor

from ..errors import LossGrowthWarning, warn_caller

FAR = 10.0  # times the loss of the first step
LOOKS = 5  # whose median is compared, because single batches differ


class LossWatch:
    """Looks at the losses of steps; warns once when they have grown far over the first one."""

    def __init__(self) -> None:
        self.first: float | None = None
        self._newest: deque[float] = deque(maxlen=LOOKS)
        self._has_warned = False

    def is_finite(self, loss: float, lr: float) -> bool:
        """Whether this loss is; lr: the learning rate, for the warning."""
        if not math.isfinite(loss):
            return False
        self.first = loss if self.first is None else self.first
        self._newest.append(loss)
        now = median(self._newest)
        if len(self._newest) == LOOKS and not self._has_warned and now > FAR * self.first > 0:
            self._has_warned = True
            warn_caller(
                f"the training loss has grown from {self.first:.3g} in the first step to {now:.3g}: training is likely "
                f"to diverge; lower the learning rate (lr {lr:.3g}) or the strength",
                LossGrowthWarning,
            )
        return True


def bad_values(batches: Iterable[tuple[Any, Any]]) -> str | None:
    """Which part of the first batch with NaN or infinity contains it, in words; None: there is none.

    >>> import torch
    >>> bad_values([(torch.tensor([[1.0], [math.nan]]), torch.tensor([0, 1]))])
    'x contains NaN or infinity in 1 of the 2 samples of the batch'
    """
    for x, y in batches:
        for name, z in [*_named("x", x), *_named("y", y)]:
            bad = ~z.isfinite() if name in ("x", "y") else z.isnan() | z.isposinf()  # masks may hold -infinity
            if bool(bad.any()):
                count = int(bad.flatten(1).any(1).sum()) if z.dim() > 1 else int(bad.sum())
                return f"{name} contains NaN or infinity in {count} of the {z.shape[:1].numel()} samples of the batch"
    return None


def _named(name: str, part: Any) -> Iterable[tuple[str, Tensor]]:
    """The floating-point tensors of a part of a batch, as one writes them in Python."""
    if isinstance(part, Tensor):
        return [(name, part)] if part.is_floating_point() else []
    entries = part.items() if isinstance(part, Mapping) else enumerate(part) if isinstance(part, (tuple, list)) else ()
    return [named for key, value in entries for named in _named(f"{name}[{key!r}]", value)]
