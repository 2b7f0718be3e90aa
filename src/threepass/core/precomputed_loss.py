"""A loss whose gradients are already computed: its backward pass adds them to `p.grad`.

Autograd accumulates them as it does any gradients, multiplied by whatever the loss was multiplied with, so that loss
scaling, division by the number of micro-batches, hooks on parameters and reducers work as they do for any loss.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..numerics.rounding import round_stochastically, seed_of
from .scaler import times


@dataclass(frozen=True)
class PrecomputedLoss:
    """The value of a loss, the parameters, and their gradients.

    calls: the number of this call, from which rounding to a half-precision dtype takes its seed.
    """

    value: Tensor
    parameters: Sequence[nn.Parameter]
    grads: Sequence[Tensor]
    calls: int = 0

    def loss(self) -> Tensor:
        """The loss as a scalar that requires grad. Its backward pass can run once."""
        return _PrecomputedLoss.apply(self, *self.parameters)


def rounded(grads: Iterable[Tensor], dtypes: Iterable[torch.dtype], calls: int) -> list[Tensor]:
    """Gradients in the parameters' own dtypes, rounded stochastically, differently in each call."""
    return [
        g if g.dtype == dtype else round_stochastically(g, dtype, seed_of(calls, i))
        for i, (g, dtype) in enumerate(zip(grads, dtypes, strict=True))
    ]


class _PrecomputedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: PrecomputedLoss, *parameters: Tensor) -> Tensor:
        ctx.calls = loss.calls
        ctx.dtypes = [p.dtype for p in parameters]
        ctx.save_for_backward(*loss.grads)
        return loss.value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, error: Tensor) -> Any:
        return None, *rounded(times(ctx.saved_tensors, error), ctx.dtypes, ctx.calls)
