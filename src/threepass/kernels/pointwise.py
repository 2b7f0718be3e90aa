"""Two elementwise operations that a compiler would take apart: as operations of their own they are one kernel each.

norm_numbers   (w / std, b - mean w / std) of a batch norm: in one piece, so that an expression with it reads little
               enough to be fused into all its readers
gated_sum      the error behind a residual block, (g_1 + g_2) where the block's rectified output u is positive: it is
               read many times, and a compiler that fused it would read all that it is made of each time. With a
               norm's numbers, u is made again from the norm's input.
"""

import torch
from torch import Tensor
from torch.library import custom_op

from . import runs_on


def _kernels():
    """The kernels' module; it needs Triton."""
    from . import pointwise_triton

    return pointwise_triton


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


def gate(g: Tensor, h: Tensor, u: Tensor, numbers: Tensor | None) -> Tensor:
    return torch.where((u if numbers is None else rectified(u, numbers)) > 0, g + h, 0.0)


@gated_sum.register_fake
def _(g, h, u, numbers=None):
    return torch.empty_like(g)


def rectified(z: Tensor, numbers: Tensor) -> Tensor:
    """max(w x̂ + b, 0), of a norm's input z and its numbers.

    As good as z is: its own rounding moves w x̂ as much as that of `shift` does.
    """
    scale, shift = (n.view([-1] + [1] * (z.dim() - 2)) for n in numbers.unbind())
    return (z * scale + shift).to(z.dtype).relu()
