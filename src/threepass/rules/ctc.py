"""The CTC loss, whose backward PyTorch cannot differentiate: u = -log sum_alignments prod_t exp(a[t, symbol at t]).

A recursion over time, in plain operations, gives u, and autograd both of its derivatives. PyTorch's error of a, which
pass 2 has, is that of u plus exp(a), a term that cancels in the `log_softmax` that a comes from. The curvature has its
derivative.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .table import Linearization, rule

_NEVER = -1e30  # the logarithm of 0, finite, so that its derivatives are zero and not NaN
_SUM, _MEAN = 2, 1  # as torch numbers the reductions


@rule(torch.ctc_loss)
def ctc_loss(
    u, a, targets, input_lengths, target_lengths, blank=0, reduction=0, zero_infinity=False
) -> Linearization | None:
    """u = sum_i w_i n_i over the samples: t -> sum_i w_i <n_i', t>, R{d_a} = w (R{d} n' + d n'' t)"""
    if a.dtype not in (torch.float32, torch.float64):
        return None
    shape, log_probs = a.shape, a if a.dim() == 3 else a.unsqueeze(1)
    frames, samples = log_probs.shape[:2]
    inputs = _numbers(input_lengths, a).expand(samples)
    lengths = _numbers(target_lengths, a).expand(samples)
    symbols = _extended(targets, lengths, blank)
    p = log_probs.exp() * (torch.arange(frames, device=a.device)[:, None] < inputs).unsqueeze(2)
    weights = torch.ones_like(log_probs[0, :, 0])
    if reduction == _MEAN:
        weights = weights / (lengths.clamp(min=1) * samples)
    if zero_infinity:
        weights = torch.where(_losses(log_probs, symbols, inputs, lengths) < -_NEVER / 2, weights, 0)

    def derivatives(t: Tensor | None = None) -> Tensor:
        """n', or the derivative of <n', t>, without the weights."""
        with torch.enable_grad():
            leaf = log_probs.detach().requires_grad_()
            total = _losses(leaf, symbols, inputs, lengths).sum()
            (first,) = torch.autograd.grad(total, leaf, create_graph=t is not None)
            if t is None:
                return first + p
            return torch.autograd.grad((first * t).sum(), leaf)[0] + p * t

    def weighted(r: Tensor, z: Tensor) -> Tensor:
        return (z * (r * weights).unsqueeze(1)).reshape(shape)

    def push(t: Tensor) -> Tensor:
        each = (derivatives() * t.reshape(log_probs.shape)).sum((0, 2)) * weights
        return each.sum() if reduction in (_SUM, _MEAN) else each.reshape(u.shape)

    return Linearization(
        push=push,
        pull=lambda r: weighted(r, derivatives()),
        curve=lambda d, t: weighted(d, derivatives(t.reshape(log_probs.shape))),
    )


def _numbers(lengths, a: Tensor) -> Tensor:
    return torch.as_tensor(lengths, device=a.device).reshape(-1)


def _extended(targets: Tensor, lengths: Tensor, blank: int) -> Tensor:
    """Every sample's symbols with blanks around them, (samples, 2 S + 1); after its length, blanks."""
    targets = targets.to(lengths.device)
    places = torch.arange(targets.shape[-1], device=lengths.device)
    if targets.dim() == 1:  # of all samples, one after the other
        starts = (lengths.cumsum(0) - lengths).unsqueeze(1)
        targets = targets[(starts + places).clamp(max=max(len(targets) - 1, 0))]
    targets = torch.where(places < lengths.unsqueeze(1), targets, blank).long()
    blanks = torch.full_like(targets, blank)
    return F.pad(torch.stack([blanks, targets], 2).flatten(1), (0, 1), value=blank)


def _losses(log_probs: Tensor, symbols: Tensor, inputs: Tensor, lengths: Tensor) -> Tensor:
    """The samples' losses, by the forward recursion over time."""
    skips = F.pad((symbols[:, 2:] != symbols[:, :-2]) & (symbols[:, 2:] != symbols[:, :1]), (2, 0))
    first = torch.arange(symbols.shape[1], device=symbols.device) < 2
    alpha = torch.where(first, log_probs[0].gather(1, symbols), _NEVER)
    for time in range(1, len(log_probs)):
        before = F.pad(alpha, (1, 0), value=_NEVER)[:, :-1]
        skipped = torch.where(skips, F.pad(alpha, (2, 0), value=_NEVER)[:, : alpha.shape[1]], _NEVER)
        moved = torch.logsumexp(torch.stack([alpha, before, skipped]), 0) + log_probs[time].gather(1, symbols)
        alpha = torch.where((time < inputs).unsqueeze(1), moved, alpha)
    last = (2 * lengths).unsqueeze(1).to(torch.int64)
    in_symbol = torch.where(last > 0, alpha.gather(1, (last - 1).clamp(min=0)), _NEVER)
    return -torch.logsumexp(torch.cat([alpha.gather(1, last), in_symbol], 1), 1)
