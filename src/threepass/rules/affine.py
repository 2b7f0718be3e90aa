"""Linear layers and convolutions: u = W a + b.

The signal is a itself, `push` is the layer without its bias, `pull` its transpose, and one product of error and signal
is the weight's gradient: d (x) a in pass 2, d (x) t in pass 3, d (x) mix for both at once.
"""

import functools
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels import conv as conv_kernels
from ..kernels.conv import Geometry
from ..numerics.precision import as_dtype
from .table import Linearization, rule

_aten = torch.ops.aten


def linear_by_rows(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear as one matrix product, of a copy of a where its rows are not evenly spaced.

    F.linear itself multiplies such an a (a transposed batch, as in nn.MultiheadAttention) slice by slice, unless the
    weight requires grad, which those of a step do not: many small products take longer.
    """
    return F.linear(a.reshape(-1, a.shape[-1]), weight, bias).view(*a.shape[:-1], -1)


linear_by_rows.__name__ = "linear"  # in messages and tables, the user's operation


def has_uneven_rows(a: Tensor, weight: Tensor) -> bool:
    return a.dim() > 2 and weight.dim() == 2 and not a.is_contiguous()


def _linear(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return (linear_by_rows if has_uneven_rows(a, weight) else F.linear)(a, weight, bias)


@rule(F.linear, linear_by_rows)
def linear(u: Tensor, a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Linearization | None:
    """u = a Wᵀ + b, with a: (..., i), W: (o, i), b: (o), u: (..., o)."""
    if weight.dim() != 2 or u.is_complex():
        return None
    dtype = u.dtype
    w = as_dtype(weight, dtype)

    return Linearization(
        signal=as_dtype(a, dtype),
        tangent=lambda t: as_dtype(t, dtype),
        push=lambda s: _linear(s, w),
        mix=lambda m, back: _linear(as_dtype(m, dtype), w, _times(back, bias, dtype)),
        pull=lambda d: as_dtype(_linear(d, w.mT), a.dtype),
        grad={weight: lambda d, s: torch.mm(_rows(d).mT, _rows(s))},
        add={} if bias is None else {bias: lambda d: _rows(d).sum(0)},
    )


def _rows(z: Tensor) -> Tensor:
    return z if z.dim() == 2 else z.reshape(-1, z.shape[-1])


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
        mix=lambda m, back: torch.addmm(_scaled(bias, back).to(u.dtype), m.to(u.dtype), w),
        pull=lambda d: (d @ w.mT).to(a.dtype),
        grad={weight: lambda d, s: s.mT @ d},
        add={bias: lambda d: d.sum(0)},
    )


@rule(torch.conv1d, torch.conv2d, torch.conv3d)
def conv(u, a, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) -> Linearization | None:
    """u = W * a + b, with a: (n, i, ...), W: (o, i / groups, k...), b: (o), u: (n, o, ...)."""
    how = _geometry(weight.shape[2:], *map(_fixed, (stride, padding, dilation)), groups)
    return None if how is None else _convolution(u, a, weight, bias, how)


@functools.lru_cache(maxsize=4096)
def _geometry(kernel: torch.Size, stride, padding, dilation, groups: int) -> Geometry | None:
    """The arguments of `conv` as tuples of numbers; None for "same" padding that needs one more on one side. Cached."""
    each = partial(_per_dim, dims=len(kernel))
    dilation = each(dilation)
    if padding == "same":
        total = [r * (k - 1) for r, k in zip(dilation, kernel, strict=True)]
        if any(p % 2 for p in total):
            return None
        padding = [p // 2 for p in total]
    padding = 0 if padding == "valid" else padding
    return Geometry(each(stride), each(padding), dilation, False, each(0), groups)


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
    dtype = u.dtype
    w = as_dtype(weight, dtype)
    signal = as_dtype(a, dtype)

    def weight_gradient(d: Tensor, s: Tensor) -> Tensor:
        geometry = how
        if _overruns_memory(w, how):
            s = s[(slice(None), slice(None), *(slice(None, None, step) for step in how.stride))]
            geometry = how._replace(stride=[1] * len(how.stride))
        return _aten.convolution_backward.default(d, s, w, None, *geometry, (False, True, False))[1]

    def error(d: Tensor) -> Tensor:
        e = _aten.convolution_backward.default(d, signal, w, None, *how, (True, False, False))[0]
        return as_dtype(e, a.dtype)

    return Linearization(
        signal=signal,
        tangent=lambda t: as_dtype(t, dtype),
        push=lambda s: torch.convolution(s, w, None, *how),
        mix=lambda m, back: torch.convolution(as_dtype(m, dtype), w, _times(back, bias, dtype), *how),
        pull=error,
        grad={weight: weight_gradient},
        add={} if bias is None else {bias: lambda d: d.sum([0, *range(2, d.dim())])},
        cheap=lambda: conv_kernels.is_faster(signal, w, u, how),
    )


def _overruns_memory(w: Tensor, how: Geometry) -> bool:
    """Whether the weight gradient is one for which oneDNN writes outside its memory, if tensors are in channels_last.

    It is that of a 1 x 1 convolution with stride and few input channels, in float32 (oneDNN issue 6035, seen in torch
    2.13 and 2.14). Only the pixels that the stride meets count there, so it is taken of those, without a stride.
    """
    if max(how.stride) == 1 or how.transposed or any(how.padding):
        return False
    few = w.device.type == "cpu" and w.dtype == torch.float32 and w.shape[1] < 16
    return few and all(size == 1 for size in w.shape[2:])


def _times(back, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else as_dtype(_scaled(bias, back), dtype)


def _scaled(bias: Tensor, back) -> Tensor:
    return bias if isinstance(back, float) and back == 1 else back * bias


def _fixed(value):
    """An argument as something that can be hashed."""
    return tuple(value) if isinstance(value, list) else value


def _per_dim(value, dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values
