"""`torch.amp.GradScaler`: gradients on their way into `p.grad` are multiplied by its scale.

The passes themselves do not use it: they have their own scales (`numerics/precision.py`), which do not change t_0.
The gradients in `p.grad` are those of `scaler.scale(loss).backward()`, so that the scaler can divide by the scale,
check for overflow and skip the step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.amp import GradScaler

from .._torch_compat import foreach_mul


def scaled(grads: Sequence[Tensor], scaler: GradScaler | None) -> Sequence[Tensor]:
    """grads times the scale, without copying the scale to the host."""
    if scaler is None or not scaler.is_enabled() or not grads:
        return grads
    return times(grads, scaler.scale(torch.ones((), device=grads[0].device)))


def times(grads: Sequence[Tensor], factor: Tensor) -> Sequence[Tensor]:
    """grads times a scalar, on whatever devices they are."""
    factors = {device: factor.to(device) for device in {g.device for g in grads}}
    if len(factors) == 1 and not any(g.is_sparse for g in grads):
        return foreach_mul(list(grads), factors[grads[0].device])
    return [g * factors[g.device] for g in grads]
