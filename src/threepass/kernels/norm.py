"""The formulas of normalisation, x̂ = (a - mean) / std over groups of N elements: the elements along `dims`.

The Jacobian of x̂ is symmetric:    J z = (z - mean(z) - x̂ mean(x̂ z)) / std
and its derivative along t gives:   d/da < g , J t > = - (x̂ mean(t J g) + mean(x̂ t) J g + mean(x̂ g) J t) / std

Everything is computed in float32 at least. RMS norms have no mean: centred is False. weight: None, or the scale of u =
w x̂ + b, as it is broadcast along x̂. `kernels/layer_norm` and `kernels/batch_norm` have kernels that take the place of
these formulas.

Means are sums over a count: the gradients of scale and shift take the same sums, and the compiler takes each once. The
kernels of batch norm take all sums of a tensor at once, and leave the rest of a formula to the compiler.
"""

import math

import torch
from torch import Tensor

from ..numerics.precision import accumulate_dtype
from .fusible import fusible

TINY = 1e-20


@fusible("norm_normalized")
def normalized(a: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x̂, 1 / std and the mean"""
    a = a.to(accumulate_dtype(a.dtype))
    var, mean = torch.var_mean(a, dims, correction=0, keepdim=True)
    rstd = (var + eps).rsqrt()
    return (a - mean) * rstd, rstd, mean


@fusible("norm_jacobian")
def jacobian(
    z: Tensor, x_hat: Tensor, rstd: Tensor, dims: list[int], centred: bool, sums: Tensor | None = None
) -> Tensor:
    """J z. sums: if they are known, sum z and sum x̂ z, as rows."""
    z = z.to(rstd.dtype)
    shifted = z - mean_of(z, dims, sums) if centred else z
    return rstd * (shifted - x_hat * mean_of(x_hat * z, dims, sums, 1))


@fusible("norm_scaled")
def scaled(z: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """w z"""
    return (z * weight).to(dtype)


@fusible("norm_pulled")
def pulled(r: Tensor, weight: Tensor | None, x_hat: Tensor, rstd: Tensor, dims: list[int], centred: bool) -> Tensor:
    """J (w r): the error of a from r, the error of u."""
    return jacobian.formula(_weighted(r, weight, rstd.dtype), x_hat, rstd, dims, centred)


@fusible("norm_curved")
def curved(
    d: Tensor, t: Tensor, weight: Tensor | None, x_hat: Tensor, rstd: Tensor, dims: list[int], centred: bool
) -> Tensor:
    """d/da < w d , J t >, with d the error of u."""
    g = _weighted(d, weight, rstd.dtype)
    d_a, along = jacobian.formula(g, x_hat, rstd, dims, centred), mean_of(x_hat * g, dims)
    return curved_at_input.formula(d_a, t, along, x_hat, rstd, dims, centred)


@fusible("norm_curved_at_input")
def curved_at_input(
    d_a: Tensor,
    t: Tensor,
    along: Tensor,
    x_hat: Tensor,
    rstd: Tensor,
    dims: list[int],
    centred: bool,
    sums: Tensor | None = None,
) -> Tensor:
    """d/da < g , J t >, given d_a = J g and along = mean(x̂ g). sums: if known, sum t, sum x̂ t and sum d_a t."""
    d_a, t = d_a.to(rstd.dtype), t.to(rstd.dtype)
    terms = x_hat * mean_of(d_a * t, dims, sums, 2) + mean_of(x_hat * t, dims, sums, 1) * d_a
    return -rstd * (terms + along * jacobian.formula(t, x_hat, rstd, dims, centred, sums))


@fusible("norm_scale_gradient")
def scale_gradient(d: Tensor, s: Tensor, dims: list[int], shape: list[int]) -> Tensor:
    """sum d s over `dims`: the gradient of w for s = x̂, pass 3's for s = t̂; in w's shape."""
    z = s * d
    return (z.sum(dims, keepdim=True) if dims else z).reshape(shape)


@fusible("norm_scale_gradient_at_input")
def scale_gradient_at_input(d_a: Tensor, t: Tensor, weight: Tensor, dims: list[int]) -> Tensor:
    """Pass 3's gradient of batch norm's w, sum d t̂ = sum d_a t / w, given d_a = w J d."""
    exact = accumulate_dtype(d_a.dtype)
    return (d_a.to(exact) * t.to(exact)).sum(dims, keepdim=True).flatten() / not_zero(weight)


def not_zero(weight: Tensor) -> Tensor:
    """Batch norm's scale with a tiny one in place of zero, so that J d can be recovered from w J d."""
    return torch.where(weight.abs() < TINY, torch.full_like(weight, TINY), weight)


def mean_of(z: Tensor, dims: list[int], sums: Tensor | None = None, row: int = 0) -> Tensor:
    """The mean over `dims`, by a sum; or by a row of sums over all but the channels, if there is that row."""
    if sums is not None and row < len(sums):
        total = sums[row].view([1, -1] + [1] * (z.dim() - 2))
    else:
        total = z.sum(dims, keepdim=True)
    return total / math.prod(z.shape[i] for i in dims)


def _weighted(z: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    return z.to(dtype) if weight is None else (z.to(dtype) * weight).to(dtype)
