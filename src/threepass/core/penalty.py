"""Penalties on the input gradient: the mean over the samples of penalty(g_i), with g_i = dl_i/dx_i.

    "l2"       1/2 |g_i|^2        t_0 = g_i
    "l1"       sum |g_i|          t_0 = sign(g_i)
    "norm"     |g_i|              t_0 = g_i / |g_i|, and 0 where g_i is 0
    callable   one number per sample, by autograd

Pass 3 starts from t_0 = d penalty(g_i) / dg_i in place of g_i; everything after that is the same, because the gradient
of the penalty is d/dw < t_0 , dl/dx > with t_0 held fixed.
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import FakeTensor, no_dispatch_modes
from ..rules.generic import leaf_tensors_of

NAMES = ("l2", "l1", "norm")
Penalty = str | Callable[[Any], Tensor]

_checked: "weakref.WeakSet[Callable[[Any], Tensor]]" = weakref.WeakSet()  # callables that do not mix samples


def check_penalty(penalty: Any) -> None:
    if not callable(penalty) and (not isinstance(penalty, str) or penalty not in NAMES):
        raise ValueError(f'penalty must be "l2", "l1", "norm" or a function of the input gradients, got {penalty!r}')


def evaluate(
    penalty: Penalty, g: Sequence[Tensor], samples: int, structure: Callable[[list[Tensor]], Any]
) -> tuple[Tensor, list[Tensor]]:
    """The penalty's mean over the samples, and its derivative t_0 at each tensor of g.

    Args:
        g: the per-sample gradients dl_i/dx_i, one tensor for each input of the net.
        structure: arranges such tensors as a callable penalty expects them.
    """
    leaves = [z.detach().requires_grad_() for z in g]
    with torch.enable_grad():
        if isinstance(penalty, str):
            total = _by_name(penalty, leaves, samples)
        else:
            values = _values(penalty, structure(leaves), samples)
            _check_leaves(values, leaves)
            _check_samples(penalty, values, leaves)
            total = values.sum()
        penalty_grads = torch.autograd.grad(total, leaves, allow_unused=True)
    t_0 = [torch.zeros_like(z) if t is None else t for t, z in zip(penalty_grads, leaves, strict=True)]
    if callable(penalty):
        check_finite("penalty(g)", "g", t_0, leaves)
    return total.detach() / samples, t_0


def _by_name(name: str, g: list[Tensor], samples: int) -> Tensor:
    """The sum over the samples of a penalty that has a name."""
    if name == "l2":
        return torch.stack([0.5 * z.square().sum() for z in g]).sum()
    if name == "l1":
        return torch.stack([z.abs().sum() for z in g]).sum()
    for z in g:
        if z.dim() == 0 or z.shape[0] != samples:
            raise ValueError(
                f'penalty="norm" needs the batch dimension first ({samples} samples), but the input has shape '
                f"{tuple(z.shape)}"
            )
    return torch.linalg.vector_norm(torch.cat([z.flatten(1) if z.dim() > 1 else z[:, None] for z in g], 1), dim=1).sum()


def _values(penalty: Callable[[Any], Tensor], g: Any, samples: int) -> Tensor:
    """What a callable penalty returns, which has to be one number per sample, computed from g."""
    values = penalty(g)
    if not isinstance(values, Tensor) or values.shape != (samples,):
        actual = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"penalty must return one number per sample, a tensor of shape ({samples},), got {actual}: sum over all "
            "dimensions but the first, as in g.flatten(1).abs().sum(1)"
        )
    if values.is_complex():
        raise TypeError(f"penalty must return real numbers, got {values.dtype}: take .abs() or .real of them")
    if not values.requires_grad:
        raise ValueError(
            "penalty(g) is not differentiable in g: its result has no grad_fn. Use differentiable torch operations, "
            "without detach, no_grad, item or integer results"
        )
    return values


def _check_leaves(values: Tensor, g: list[Tensor]) -> None:
    """Refuses a penalty whose value depends on trained tensors directly: that part of its gradient is not computed."""
    others = sum(all(leaf is not z for z in g) for leaf in leaf_tensors_of(values))
    if others:
        raise ValueError(
            f"penalty(g) depends on {others} tensor(s) other than g that require grad, but gradients are computed "
            "through g only: detach() them, or use threepass.gradient_step, whose loss may depend on parameters"
        )


def _check_samples(penalty: Callable[[Any], Tensor], values: Tensor, g: list[Tensor]) -> None:
    """Raises an error if the value of one sample depends on the gradients of others; checks each callable once.

    For a penalty that treats samples separately, the derivative of sum_i w_i value_i at g_i is w_i times that of
    sum_i value_i. The w_i are powers of two, so that multiplying by them rounds nothing.
    """
    samples = len(values)
    if isinstance(values, FakeTensor) or samples == 1:  # a trace with dynamic shapes computes no values
        return
    with contextlib.suppress(TypeError):  # takes no weak reference: it is checked in every call
        if penalty in _checked:
            return
    with no_dispatch_modes():
        weights = 2.0 ** (torch.arange(samples, device=values.device) % 7 - 3)
        unweighted, weighted = (
            torch.autograd.grad(values, g, w.to(values.dtype), retain_graph=True, allow_unused=True)
            for w in (torch.ones_like(weights), weights)
        )
        if any(_differs(z, s, weights) for s, z in zip(unweighted, weighted, strict=True) if s is not None):
            raise ValueError(
                "penalty mixes samples: its value for one sample depends on the gradients of other samples. It must be "
                "computed for each sample on its own; use threepass.gradient_step for a loss on all of g at once"
            )
    with contextlib.suppress(TypeError):
        _checked.add(penalty)


def _differs(weighted: Tensor, unweighted: Tensor, weights: Tensor) -> bool:
    """Whether `weighted` differs from `unweighted` with the part of each sample multiplied by the sample's weight."""
    if unweighted.numel() % len(weights):  # the samples' parts are not known
        return False
    expected = unweighted.reshape(len(weights), -1) * weights.to(unweighted.dtype)[:, None]
    difference = (weighted.reshape(expected.shape) - expected).abs()
    known = difference.isfinite()
    return bool((difference[known] > 1e-4 * expected[known].abs().max()).any()) if bool(known.any()) else False


def check_finite(what: str, of: str, t_0: Sequence[Tensor], g: Sequence[Tensor]) -> None:
    """Raises where a derivative is NaN or infinite although the gradient that it is taken at is finite."""
    if any(isinstance(t, FakeTensor) for t in t_0):  # a trace with dynamic shapes computes no values
        return
    with torch.no_grad(), no_dispatch_modes():
        for i, (t, z) in enumerate(zip(t_0, g, strict=False)):
            bad = ~torch.isfinite(t)
            if not bool(bad.any()) or not bool(torch.isfinite(z).all()):
                continue
            zeros = int((bad & (z == 0)).sum())
            at = f"; {zeros} of them where {of} is 0" if zeros else ""
            raise FloatingPointError(
                f"the derivative of {what} with respect to {of} is NaN or infinite in {int(bad.sum())} of {t.numel()} "
                f"entries (input {i}{at}), although {of} is finite. A square root or a norm at 0 and a logarithm do "
                "this: add a small constant inside, as in (g.square().sum(1) + 1e-12).sqrt()"
            )
