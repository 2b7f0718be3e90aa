"""Normalisation: u = w x̂ + b with x̂ = (a - mean) / std over groups of N elements.

The Jacobian of x̂, J = (I - 11ᵀ/N - x̂x̂ᵀ/N) / std, is symmetric, so one formula is the tangent of x̂ and the error of a:
t̂ = J t and d_a = J (w d). Its own derivative is what exact mode needs. `kernels/norm.py` has the formulas.

In batch norm w is constant over a group, so d_a = w J d, and pass 3's gradient of the scale follows from the error of
the input: sum(d t̂) = dᵀ J t = sum(d_a t) / w. d_a is then the only error to keep, and usually it is also that of the
convolution upstream; pass 2's gradients of scale and shift are sums that batch norm's own backward computes anyway.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._torch_compat import batch_norm_backward, batch_norm_forward
from ..kernels import norm
from ..numerics.precision import accumulate_dtype
from ..tracing import is_for_compiler
from .table import Linearization, Tap, has_symbolic_shape, rule

_aten = torch.ops.aten
_NATIVE = 0  # PyTorch's own implementation, in what `batch_norm_forward` returns


def _tap(a, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled) -> Tap | None:
    """Batch norm in training mode, on an alias of a and on leaves of its own for scale and shift."""
    if not _at_input(a, weight, training):
        return None
    a = _aten.alias.default(a)
    w = (_ones(a, running_mean) if weight is None else weight.detach()).requires_grad_()
    b = None if bias is None else bias.detach().requires_grad_()
    saved: list[Tensor] = []
    u = _BatchNorm.apply(a, w, b, running_mean, running_var, momentum, eps, cudnn_enabled, saved)
    return Tap(u, a, [(weight, w)] if b is None else [(weight, w), (bias, b)], saved)


def _ones(a: Tensor, running_mean: Tensor | None) -> Tensor:
    """A scale where there is none: its gradient is a sum that exact mode needs."""
    like = torch.promote_types(a.dtype, torch.float32) if running_mean is None else running_mean.dtype
    return a.new_ones(a.shape[1], dtype=like)


def _at_input(a: Tensor, weight: Tensor | None, training: bool) -> bool:
    """Whether J d is computed as d_a / w from d_a = w J d: in float16, the tiny scale used for zero would underflow."""
    return training and torch.float16 not in (a.dtype, a.dtype if weight is None else weight.dtype)


class _BatchNorm(torch.autograd.Function):
    """Batch norm in training mode, whose backward replaces a scale of zero by a tiny one, so that J d is not lost.

    The forward uses the zero itself: with 1e-20 a rectifier downstream would see positive inputs and open its gates.
    """

    @staticmethod
    def forward(ctx, a, weight, bias, running_mean, running_var, momentum, eps, cudnn_enabled, saved):
        u, mean, rstd, reserve, kind = batch_norm_forward(
            a, weight, bias, running_mean, running_var, True, momentum, eps, cudnn_enabled
        )
        is_native = _is_native(a, weight)
        w = _nudged(weight) if is_native else weight
        ctx.save_for_backward(a, w, mean, rstd, reserve)
        ctx.how = kind, eps, is_native
        saved += mean, rstd, w
        return u

    @staticmethod
    @once_differentiable
    def backward(ctx, d):
        a, w, mean, rstd, reserve = ctx.saved_tensors
        (kind, eps, is_native), mask = ctx.how, list(ctx.needs_input_grad[:3])
        w = w if is_native else norm.not_zero(w)
        if kind == _NATIVE or has_symbolic_shape(a):
            errors = _aten.native_batch_norm_backward.default(d, a, w, None, None, mean, rstd, True, eps, mask)
        else:
            errors = batch_norm_backward(kind, a, d, w, None, None, mean, rstd, True, eps, mask, reserve)
        return *(e if needed else None for e, needed in zip(errors, mask, strict=True)), *[None] * 6


@rule(torch.batch_norm, tap=_tap)
def batch_norm(
    u, a, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled, *, saved=()
) -> Linearization:
    """Over the batch and positions of each channel; in eval mode a fixed affine map.

    saved: mean and 1 / std, and w without zeros
    """
    dims, shape = channels(a)
    if _at_input(a, weight, training):
        return _norm_at_input(u, a, weight, bias, eps, saved)
    if training:
        return _norm(u, a, weight, bias, _Axes(dims, dims, shape), eps)
    mean, scale = running_mean.view(shape), (running_var + eps).rsqrt().view(shape)
    full = scale if weight is None else scale * weight.view(shape)
    return Linearization(
        signal=(a.detach() - mean) * scale,
        tangent=lambda t: t * scale,
        push=lambda s: _scale(s, None if weight is None else weight.view(shape), u.dtype),
        pull=lambda d: (d * full).to(a.dtype),
        **affine_gradients(weight, bias, dims),
    )


@rule(torch.layer_norm)
def layer_norm(u, a, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True) -> Linearization:
    """Over the last dimensions of each position."""
    if _is_native(a, weight):
        return _native_layer_norm(a, list(normalized_shape), weight, bias, eps)
    return _norm(u, a, weight, bias, _last(a, normalized_shape), eps)


@rule(torch.rms_norm)
def rms_norm(u, a, normalized_shape, weight=None, eps=None) -> Linearization | None:
    """Over the last dimensions of each position, without the mean."""
    if eps is None and a.dtype not in (torch.float32, torch.float64):  # versions differ in what they then take
        return None
    eps = torch.finfo(a.dtype).eps if eps is None else eps
    return _norm(u, a, weight, None, _last(a, normalized_shape)._replace(centred=False), eps)


@rule(torch.group_norm)
def group_norm(u, a, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True) -> Linearization:
    """Over the positions and channels of each group of each sample."""
    n, channels, *size = a.shape
    view = [n, num_groups, channels // num_groups, *size]
    shape = [*view[1:3], *[1] * len(size)]
    dims = list(range(2, len(view)))
    return _norm(u, a, weight, bias, _Axes(dims, [0, *dims[1:]], shape, view), eps)


@rule(torch.instance_norm)
def instance_norm(u, a, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled):
    """Over the positions of each channel of each sample."""
    dims, shape = channels(a)
    return _norm(u, a, weight, bias, _Axes(dims[1:], dims, shape), eps) if use_input_stats else None


class _Axes(NamedTuple):
    """What is normalised.

    dims     the dimensions of a group
    summed   those that scale and shift are broadcast along
    shape    of scale and shift beside a
    view     where groups split a dimension of a, a's shape with it split: the first three are for that
    centred  whether the mean is subtracted
    """

    dims: list[int]
    summed: list[int]
    shape: list[int]
    view: list[int] | None = None
    centred: bool = True


def _last(a: Tensor, normalized_shape: Sequence[int]) -> _Axes:
    first = a.dim() - len(normalized_shape)
    return _Axes(list(range(first, a.dim())), list(range(first)), list(normalized_shape))


class _Group(NamedTuple):
    """What the formulas of `kernels/norm.py` take of a normalised tensor."""

    x_hat: Tensor
    rstd: Tensor
    dims: list[int]
    centred: bool


def _group(a: Tensor, dims: list[int], eps: float, centred: bool = True) -> _Group:
    a = a.detach()
    if centred:
        x_hat, rstd, _ = norm.normalized(a, dims, eps)
    else:
        a = a.to(accumulate_dtype(a.dtype))
        rstd = (norm.mean_of(a.square(), dims) + eps).rsqrt()
        x_hat = a * rstd
    return _Group(x_hat, rstd, dims, centred)


def _norm_at_input(u, a, weight, bias, eps, saved: Sequence[Tensor]) -> Linearization:
    """Batch norm, with d the error of a."""
    if _is_native(a, weight):
        return _native_norm_at_input(a, weight, bias, eps, saved)
    dims, shape = channels(a)
    group = _group(a, dims, eps)
    w = None if weight is None else weight.view(shape)
    dtype, count = group.rstd.dtype, a.numel() // a.shape[1]

    def curve(d: Tensor, t: Tensor, scale: Tensor, *_: Any) -> Tensor:
        along = _scale(scale.view(shape) / count, w, dtype)
        return norm.curved_at_input(d, t, along, *group)

    return Linearization(
        signal=group.x_hat,
        push=lambda t: _scale(norm.jacobian(t, *group), w, u.dtype),
        pull=lambda r: _scale(norm.jacobian(r, *group), w, dtype),
        curve=curve,
        third={} if weight is None else {weight: lambda d, t: norm.scale_gradient_at_input(d, t, weight, dims)},
        **affine_gradients(weight, bias, dims),
    )


def _is_native(a: Tensor, weight: Tensor | None) -> bool:
    """Whether PyTorch's own kernels take the place of the formulas, in a step that runs operation by operation.

    The backward of a norm is J (w d), and J is symmetric, so that it computes tangents too. In half precision it would
    round what the formulas keep in float32. A compiled step has the formulas, which its compiler fuses.
    """
    is_wide = a.dtype in (torch.float32, torch.float64) and (weight is None or weight.dtype == a.dtype)
    return is_wide and type(a) is Tensor and a.numel() > 0 and not is_for_compiler()


def _nudged(weight: Tensor) -> Tensor:
    """The weight plus 1e-20, so that it is not zero: `norm.not_zero` in one kernel launch.

    Rounding leaves every weight of ordinary size as it was.
    """
    return weight + norm.TINY


def _native_norm_at_input(
    a: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, saved: Sequence[Tensor]
) -> Linearization:
    """`_norm_at_input` by PyTorch's kernels, with the statistics of pass 1 where they were saved."""
    dims, shape = channels(a)
    count = a.numel() // a.shape[1]
    mean, rstd = saved[:2] or torch.native_batch_norm(a, None, None, None, None, True, 0.0, eps)[1:]
    w = torch.ones_like(rstd) if weight is None else weight  # on a GPU there is no sum x̂ z without a scale

    def backward(z: Tensor, *mask: bool) -> tuple[Tensor, ...]:
        """J (w z) and sum x̂ z, where the mask has a True for them."""
        return _aten.native_batch_norm_backward.default(z, a, w, None, None, mean, rstd, True, eps, mask)

    def weighted_jacobian(z: Tensor) -> Tensor:
        return backward(z, True, False, False)[0]

    def curve(d_a: Tensor, t: Tensor, of_scale: Tensor, *_: Any) -> Tensor:
        """of_scale: the gradient of w, which is sum x̂ d with d the error of u."""
        x_hat: Tensor = torch.native_batch_norm(a, None, None, None, None, True, 0.0, eps)[0]
        w_j_t, sum_t = backward(t, True, True, False)[:2]
        of_d, of_t, of_w = ((z / count).view(shape) for z in ((d_a * t).sum(dims), sum_t, of_scale))
        return _curved(x_hat * of_d, (of_t, d_a), (of_w, w_j_t), -rstd.view(shape))

    return Linearization(
        signal=a,
        push=weighted_jacobian,
        pull=weighted_jacobian,
        curve=curve,
        grad={} if weight is None else {weight: lambda d, _: backward(d, False, True, False)[1]},
        add={} if bias is None else {bias: lambda d: d.sum(dims)},
        third={}
        if weight is None
        else {weight: lambda d, t: (d * t).sum(dims) / (saved[2] if saved else _nudged(weight))},
    )


def _native_layer_norm(
    a: Tensor, normalized: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Linearization:
    """Layer norm by PyTorch's kernels, with d the error of u."""
    first = a.dim() - len(normalized)
    dims, summed = list(range(first, a.dim())), list(range(first))
    x_hat, mean, rstd = torch.native_layer_norm(a, normalized, None, None, eps)

    def jacobian(z: Tensor, w: Tensor | None = None) -> Tensor:
        mask = (True, False, False)
        return _aten.native_layer_norm_backward.default(z, a, normalized, mean, rstd, w, None, mask)[0]

    def over_positions(z: Tensor) -> Tensor:
        return z.sum(summed) if summed else z

    def curve(d: Tensor, t: Tensor) -> Tensor:
        g = d if weight is None else d * weight
        d_a = jacobian(g)
        of_d, of_t, of_g = (z.mean(dims, keepdim=True) for z in (d_a * t, x_hat * t, x_hat * g))
        return _curved(x_hat * of_d, (of_t, d_a), (of_g, jacobian(t)), -rstd)

    return Linearization(
        signal=x_hat,
        tangent=jacobian,
        push=lambda s: s if weight is None else s * weight,
        pull=lambda r: jacobian(r, weight),
        curve=curve,
        grad={} if weight is None else {weight: lambda d, s: over_positions(d * s)},
        add={} if bias is None else {bias: over_positions},
    )


def _curved(total: Tensor, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], factor: Tensor) -> Tensor:
    """`norm.curved_at_input` from its terms: x̂ mean(t J g), whose memory it takes, and two products."""
    return total.addcmul_(*first).addcmul_(*second).mul_(factor)


def _norm(u, a, weight, bias, axes: _Axes, eps: float) -> Linearization:
    """Any norm, with d the error of u."""

    def split(z: Tensor) -> Tensor:  # no reshape where there is nothing to split: the compiler then shares statistics
        return z if axes.view is None else z.reshape(axes.view)

    def joined(z: Tensor) -> Tensor:
        return z if axes.view is None else z.reshape(a.shape)

    group = _group(split(a), axes.dims, eps, axes.centred)
    w = None if weight is None else weight.view(axes.shape)
    return Linearization(
        signal=group.x_hat,
        tangent=lambda t: norm.jacobian(split(t), *group),
        push=lambda s: joined(_scale(s, w, u.dtype)),
        pull=lambda r: joined(norm.pulled(split(r), w, *group)),
        curve=lambda d, t: joined(norm.curved(split(d), split(t), w, *group)),
        **affine_gradients(weight, bias, axes.summed, split),
    )


def channels(a: Tensor) -> tuple[list[int], list[int]]:
    """All dimensions but the channels', and the shape of a tensor of channels beside a."""
    return [0, *range(2, a.dim())], [1, -1] + [1] * (a.dim() - 2)


def _scale(s: Tensor, w: Tensor | None, dtype: torch.dtype) -> Tensor:
    return s.to(dtype) if w is None else norm.scaled(s, w, dtype)


def affine_gradients(
    weight, bias, summed: list[int], split: Callable[[Tensor], Tensor] = lambda z: z
) -> dict[str, Any]:
    """The gradients of scale and shift: sums over every dimension that they are broadcast along."""

    def total(d: Tensor) -> Tensor:
        return (d.sum(summed, keepdim=True) if summed else d).reshape(bias.shape)

    return {
        "grad": {}
        if weight is None
        else {weight: lambda d, s: norm.scale_gradient(split(d), s, summed, list(weight.shape))},
        "add": {} if bias is None else {bias: lambda d: total(split(d))},
    }
