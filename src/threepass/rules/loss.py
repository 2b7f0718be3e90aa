"""Cross-entropy of classes: u = mean over the samples of logsumexp(a) - a[target], curved as its softmax P is.

    t -> mean(<P, t> - t[target])        R{d_a} = (R{d} (P - onehot) + d P ∘ (t - <P, t>)) / n

Exact mode carries pass 3 through the loss, where the generic rule takes several times as long as a small net's layer.
"""

import torch
from torch import Tensor

from .. import _torch_compat
from .._torch_compat import softmax_backward
from ..tracing import is_for_compiler
from .table import Linearization, rule

_MEAN = 1  # as torch numbers the reductions


@rule(_torch_compat.cross_entropy_loss)
def cross_entropy(
    u, a, target, weight=None, reduction=0, ignore_index=-100, label_smoothing=0.0
) -> Linearization | None:
    """Cross-entropy of a: (n, classes), without weights and smoothing; in steps without a compiler."""
    is_plain = weight is None and reduction == _MEAN and label_smoothing == 0 and not target.is_floating_point()
    if not is_plain or a.dim() != 2 or a.dtype not in (torch.float32, torch.float64) or is_for_compiler():
        return None
    p = a.softmax(1)
    counts = (target != ignore_index).to(a.dtype)
    share = (counts / counts.sum()).unsqueeze(1)  # of a sample in the mean
    index = target.clamp(0, a.shape[1] - 1).unsqueeze(1)

    def pull(r: Tensor) -> Tensor:
        return p.scatter_add(1, index, -torch.ones_like(share)) * (r * share)

    return Linearization(
        push=lambda t: (((p * t).sum(1, keepdim=True) - t.gather(1, index)) * share).sum(),
        pull=pull,
        curve=lambda d, t: softmax_backward(t, p, 1, p.dtype) * (d * share),
    )
