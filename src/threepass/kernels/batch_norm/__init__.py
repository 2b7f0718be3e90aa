"""Batch norm's operations in a step: its two numbers per channel, gates computed from them, and its sums.

norm_numbers    (w / std, b - mean w / std): one tensor, so that an expression with it has few enough inputs for
                Inductor to fuse it into all its users
gated_sum       the error of a residual block's output, (g_1 + g_2) where its rectified output u is positive: it
                has many users, and if Inductor fused it into them each would read all of its inputs. With a norm's
                numbers, u is recomputed from the norm's input.
moments         of a tangent, or an error, z:  sum z,  sum x̂ z,  and with d and w  sum d z  and  sum d z / w; with the
                norm's numbers, of z where the rectified norm of a is positive
gated_moments   the first two of a residual block's error z, which is computed on the way as by `gated_sum`

x̂ = (a - mean) rstd of the norm's input a; sums are rows of channels, in float32 or wider, all sums of a
tensor in one read of it. A scale w of zero counts as a tiny one (`norm.not_zero`). Custom operations, opaque to
the compiler: Inductor would also read the tensor once, but finish each sum in a separate kernel. Where `fits` or
`can_gate` holds they are Triton kernels (`triton_kernel.py`), else plain PyTorch.
"""

import torch
from torch import Tensor
from torch.library import custom_op

from ...numerics.precision import accumulate_dtype
from .. import runs_on
from ..norm import not_zero

DIMS = [0, 2, 3]


def _kernels():
    """The kernels' module; it needs Triton."""
    from . import triton_kernel

    return triton_kernel


@custom_op("threepass::norm_numbers", mutates_args=())
def norm_numbers(mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if runs_on(mean.device) and mean.dtype == torch.float32:
        return _kernels().norm_numbers(mean, rstd, weight, bias)
    scale = (rstd if weight is None else rstd * weight).to(mean.dtype)
    shift = -mean * scale
    return torch.stack([scale, shift if bias is None else shift + bias])


@norm_numbers.register_fake
def _(mean, rstd, weight, bias):
    return mean.new_empty((2, *mean.shape))


def can_gate(*tensors: Tensor, numbers: bool = False) -> bool:
    """Whether `gated_sum` is one kernel: of tensors that lie in memory alike, with numbers channels last."""
    z = tensors[0]
    nhwc = z.dim() == 4 and z.is_contiguous(memory_format=torch.channels_last)
    dense = nhwc or (not numbers and z.is_contiguous())
    same = all((s.shape, s.stride(), s.dtype) == (z.shape, z.stride(), z.dtype) for s in tensors)
    known = z.dtype in (torch.float32, torch.bfloat16) and 0 < z.numel() < 2**31
    return runs_on(z.device) and dense and same and known


@custom_op("threepass::gated_sum", mutates_args=())
def gated_sum(g: Tensor, h: Tensor, u: Tensor, numbers: Tensor | None = None) -> Tensor:
    if can_gate(g, h, u, numbers=numbers is not None):
        return _kernels().gated_sum(g, h, u, numbers)
    return gate(g, h, u, numbers)


@gated_sum.register_fake
def _(g, h, u, numbers=None):
    return torch.empty_like(g)


def gate(g: Tensor, h: Tensor, u: Tensor, numbers: Tensor | None) -> Tensor:
    return torch.where((u if numbers is None else rectified(u, numbers)) > 0, g + h, 0.0)


def rectified(z: Tensor, numbers: Tensor) -> Tensor:
    """max(w x̂ + b, 0), of a norm's input z and its numbers.

    As accurate as z: the rounding of z changes w x̂ by as much as that of `shift` does.
    """
    scale, shift = (n.view([-1] + [1] * (z.dim() - 2)) for n in numbers.unbind())
    return (z * scale + shift).to(z.dtype).relu()


def fits(*images: Tensor) -> bool:
    """Whether the kernels take these images as they lie in memory."""
    return can_gate(*images, numbers=True)


@custom_op("threepass::moments", mutates_args=())
def moments(
    z: Tensor,
    a: Tensor,
    mean: Tensor,
    rstd: Tensor,
    d: Tensor | None = None,
    w: Tensor | None = None,
    numbers: Tensor | None = None,
) -> Tensor:
    if fits(z, a, *([] if d is None else [d])) and mean.dtype == rstd.dtype == torch.float32:
        return _kernels().moments(z, a, mean, rstd, d, w, numbers)
    opened = z if numbers is None else torch.where(rectified(a, numbers) > 0, z, 0.0)
    return _plain(opened, a, mean, rstd, d, w)


@moments.register_fake
def _(z, a, mean, rstd, d=None, w=None, numbers=None):
    return _empty(z, 2 + (d is not None) + (w is not None))


@custom_op("threepass::gated_moments", mutates_args=())
def gated_moments(
    g: Tensor, h: Tensor, u: Tensor, numbers: Tensor | None, a: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """(g + h) where u, or the rectified norm of it with these numbers, is positive, else 0; and its moments."""
    if fits(g, h, u, a) and mean.dtype == rstd.dtype == torch.float32:
        return _kernels().gated_moments(g, h, u, numbers, a, mean, rstd)
    z = gate(g, h, u, numbers)
    return z, _plain(z, a, mean, rstd, None, None)


@gated_moments.register_fake
def _(g, h, u, numbers, a, mean, rstd):
    return torch.empty_like(g), _empty(g, 2)


def error(z: Tensor, a: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, sums: Tensor) -> Tensor:
    """The error of a batch norm's input from that of its output z: w J z."""
    count = z.numel() // z.shape[1]
    w, mean, rstd, total, along = (v.view(1, -1, 1, 1) for v in (weight, mean, rstd, *sums.unbind()))
    centred = z - total / count - (a - mean) * (rstd * (along / count))
    return (centred * (rstd * w)).to(z.dtype)


def _plain(z: Tensor, a: Tensor, mean: Tensor, rstd: Tensor, d: Tensor | None, w: Tensor | None) -> Tensor:
    exact = accumulate_dtype(z.dtype)
    z = z.to(exact)
    x_hat = (a.to(exact) - mean.view(1, -1, 1, 1)) * rstd.view(1, -1, 1, 1)
    rows = [z.sum(DIMS), (x_hat * z).sum(DIMS)]
    if d is not None:
        rows.append((d.to(exact) * z).sum(DIMS))
    if w is not None:
        rows.append(rows[-1] / not_zero(w.to(exact)))
    return torch.stack(rows)


def _empty(z: Tensor, rows: int) -> Tensor:
    return z.new_empty((rows, z.shape[1]), dtype=accumulate_dtype(z.dtype))
