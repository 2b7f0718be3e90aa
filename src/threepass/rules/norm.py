"""Normalisation: u = w x̂ + b with x̂ = (a - mean) / std.

The signal is x̂. Its tangent is the norm's own backward formula, t̂ = (t - mean(t) - x̂ mean(x̂ t)) / std, because the
Jacobian of x̂ is symmetric. Statistics are taken in float32 at least.
"""

import torch
from torch import Tensor

from .table import Map, rule


@rule(torch.batch_norm)
def batch_norm(u, a, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled) -> Map:
    """Over the batch and positions of each channel; in eval mode a fixed affine map."""
    dims = [0, *range(2, a.dim())]
    shape = [1, -1] + [1] * (a.dim() - 2)
    if training:
        return _norm(u, a, weight, bias, dims, dims, shape, eps)
    mean, scale = running_mean.view(shape), (running_var + eps).rsqrt().view(shape)
    full = scale if weight is None else scale * weight.view(shape)
    return Map(
        signal=(a.detach() - mean) * scale,
        tangent=lambda t: t * scale,
        push=lambda s: _scale(s, weight, shape, u.dtype),
        pull=lambda d: (d * full).to(a.dtype),
        **_affine(weight, bias, dims),
    )


@rule(torch.layer_norm)
def layer_norm(u, a, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True) -> Map:
    """Over the last dimensions of each position."""
    dims = list(range(a.dim() - len(normalized_shape), a.dim()))
    return _norm(u, a, weight, bias, dims, list(range(dims[0])), list(normalized_shape), eps)


def _norm(u, a, weight, bias, dims, summed, shape, eps) -> Map:
    a = a.detach().to(torch.promote_types(a.dtype, torch.float32))
    var, mean = torch.var_mean(a, dims, correction=0, keepdim=True)
    rstd = (var + eps).rsqrt()
    x_hat = (a - mean) * rstd

    def tangent(t: Tensor) -> Tensor:
        t = t.to(a.dtype)
        return rstd * (t - t.mean(dims, keepdim=True) - x_hat * (x_hat * t).mean(dims, keepdim=True))

    return Map(
        signal=x_hat,
        tangent=tangent,
        push=lambda s: _scale(s, weight, shape, u.dtype),
        **_affine(weight, bias, summed),
    )


def _scale(s: Tensor, weight: Tensor | None, shape: list[int], dtype: torch.dtype) -> Tensor:
    return (s if weight is None else s * weight.view(shape)).to(dtype)


def _affine(weight: Tensor | None, bias: Tensor | None, summed: list[int]) -> dict:
    """The gradients of scale and shift: sums over every dimension that they are broadcast along."""

    def total(z: Tensor) -> Tensor:
        return z.sum(summed) if summed else z

    return {
        "grad": {} if weight is None else {weight: lambda d, s: total(d * s)},
        "add": {} if bias is None else {bias: total},
    }
