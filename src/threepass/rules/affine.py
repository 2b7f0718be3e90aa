"""Linear layers and convolutions: u = W a + b.

The signal is a itself, `push` is the layer without its bias, `pull` its transpose, and one product of error and signal
is the weight's gradient: d (x) a in pass 2, d (x) t in pass 3, d (x) mix for both at once.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels import conv as conv_kernels
from ..kernels.conv import Geometry
from .table import Linearization, rule

_aten = torch.ops.aten


@rule(F.linear)
def linear(u: Tensor, a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Linearization | None:
    """u = a Wᵀ + b, with a: (..., i), W: (o, i), b: (o), u: (..., o)."""
    if weight.dim() != 2 or u.is_complex():
        return None
    w = weight.to(u.dtype)

    def rows(z: Tensor) -> Tensor:
        return z.reshape(-1, z.shape[-1])

    return Linearization(
        signal=a.detach().to(u.dtype),
        tangent=lambda t: t.to(u.dtype),
        push=lambda s: F.linear(s, w),
        mix=lambda m, back: F.linear(m.to(u.dtype), w, _times(back, bias, u.dtype)),
        pull=lambda d: (d @ w).to(a.dtype),
        grad={weight: lambda d, s: rows(d).mT @ rows(s)},
        add={} if bias is None else {bias: lambda d: rows(d).sum(0)},
    )


@rule(torch.addmm, Tensor.addmm, arity=2)
def addmm(u, bias, a, weight, *, beta=1, alpha=1, active) -> Linearization | None:
    """u = a W + b, with a: (n, i), W: (i, o), b: (o), u: (n, o): the linear layer of GPT-2 in transformers."""
    if active != [1] or (beta, alpha) != (1, 1) or bias.shape != u.shape[1:] or u.is_complex():
        return None
    w = weight.to(u.dtype)
    return Linearization(
        signal=a.detach().to(u.dtype),
        tangent=lambda t: t.to(u.dtype),
        push=lambda s: s @ w,
        mix=lambda m, back: F.linear(m.to(u.dtype), w.mT, _times(back, bias, u.dtype)),
        pull=lambda d: (d @ w.mT).to(a.dtype),
        grad={weight: lambda d, s: s.mT @ d},
        add={bias: lambda d: d.sum(0)},
    )


@rule(torch.conv1d, torch.conv2d, torch.conv3d)
def conv(u, a, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) -> Linearization | None:
    """u = W * a + b, with a: (n, i, ...), W: (o, i / groups, k...), b: (o), u: (n, o, ...)."""
    dims = weight.dim() - 2
    dilation = _per_dim(dilation, dims)
    if padding == "same":
        total = [r * (k - 1) for r, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(p % 2 for p in total):
            return None
        padding = [p // 2 for p in total]
    padding = 0 if padding == "valid" else padding
    each = partial(_per_dim, dims=dims)
    return _convolution(u, a, weight, bias, Geometry(each(stride), each(padding), dilation, False, each(0), groups))


@rule(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
def conv_transpose(
    u, a, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
) -> Linearization | None:
    """The transpose of `conv`, with W: (i, o / groups, k...)."""
    each = partial(_per_dim, dims=weight.dim() - 2)
    how = Geometry(each(stride), each(padding), each(dilation), True, each(output_padding), groups)
    return _convolution(u, a, weight, bias, how)


def _convolution(u, a, weight, bias, how: Geometry) -> Linearization | None:
    if a.dim() != weight.dim() or u.is_complex():  # one sample without a batch dimension
        return None
    w = weight.to(u.dtype)
    signal = a.detach().to(u.dtype)

    def backward(d: Tensor, s: Tensor, *mask: bool) -> tuple[Tensor, ...]:
        return _aten.convolution_backward(d, s, w, None, *how, mask)

    return Linearization(
        signal=signal,
        tangent=lambda t: t.to(u.dtype),
        push=lambda s: _aten.convolution(s, w, None, *how),
        mix=lambda m, back: _aten.convolution(m.to(u.dtype), w, _times(back, bias, u.dtype), *how),
        pull=lambda d: backward(d, signal, True, False, False)[0].to(a.dtype),
        grad={weight: lambda d, s: backward(d, s, False, True, False)[1]},
        add={} if bias is None else {bias: lambda d: d.sum([0, *range(2, d.dim())])},
        cheap=lambda: conv_kernels.pays(signal, w, u, how),
    )


def _times(back, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if bias is None:
        return None
    return (bias if isinstance(back, float) and back == 1 else back * bias).to(dtype)


def _per_dim(value, dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values
