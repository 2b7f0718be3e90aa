"""3 x 3 convolutions of few channels, with the elementwise operations around them, as operations of the three passes.

    forward           pass 1 with its ReLU; pass 3 of a ReLU net, gated by pass 2's error or by the ReLU's output
    backward_input    pass 2: the error of the previous layer, through its ReLU
    backward_weight   d (x) m summed over samples and pixels, and the sum of d
    forward_tangent   pass 3: the tangent through a ReLU, and the mix a + ratio t

Padding 1, stride 1 or 2, no groups, no dilation. a: (n, i, h, w), W: (o, i, 3, 3), z and d: (n, o, h', w').

The error of a closed ReLU is written as minus zero, that of an open one never is: so d itself tells pass 3 which ReLUs
are open, and pass 1's activations need not be kept for it.

Where TF32 is allowed, the kernels round the operands of their products, which is slow. `round_result` rounds a signal
where it is computed instead; a kernel all of whose operands are TF32 numbers is told so by `rounded`
(`compile/rewrite/tf32.py`).

Each is a custom operation (`torch.ops.threepass`), opaque to the compiler: inlined into Inductor's code the kernels
were no faster, and took six times as long to compile. Where `fits` holds it is a Triton kernel (`triton_kernel.py`),
else plain PyTorch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from ...numerics.precision import HALF, accumulate_dtype, tf32_convolutions
from ...numerics.rounding import round_to_tf32, rounded_randomly
from .. import runs_on

_aten = torch.ops.aten
FEW, BARE, THIN = 64, 32, 4
PIXELS, PIXELS_OF_WEIGHT = 2**16, 2**15  # of n * h' * w', at more than BARE channels
LIMITLESS = 2**31  # from and to an image's channels


def fits(stride: int, *tensors: Tensor, weight: Sequence[int]) -> bool:
    """Whether the kernels take these signals (n, c, h, w) and a weight of this shape (o, i, 3, 3)."""
    z = tensors[0]
    return (
        runs_on(z.device)
        and stride in (1, 2)
        and len(weight) == 4
        and tuple(weight[2:]) == (3, 3)
        and max(weight[:2]) <= FEW
        and z.dtype in (torch.float32, torch.bfloat16)
        and all(s.dtype == z.dtype and s.dim() == 4 for s in tensors)
        and all(s.numel() > 0 and s.is_contiguous(memory_format=torch.channels_last) for s in tensors)
        and stride**2 * z.numel() // z.shape[1] * max(weight[:2]) < 2**31  # the kernels' offsets are 32-bit
    )


class Geometry(NamedTuple):
    """The arguments of `aten.convolution` that follow the bias, in the same order."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    @property
    def is_ours(self) -> bool:
        """Whether the kernels take a 3 x 3 convolution with these."""
        plain = list(self.dilation) == [1, 1] and not self.transposed and self.groups == 1
        return plain and list(self.padding) == [1, 1] and list(self.stride) in ([1, 1], [2, 2])


def is_faster(a: Tensor, w: Tensor, z: Tensor, how: Geometry) -> bool:
    """Whether our kernels take a convolution z of a, and are as fast as the framework's."""
    return (
        how.is_ours and fits(how.stride[0], a, weight=w.shape) and a.dtype == w.dtype and has_few_channels(w, z, PIXELS)
    )


def has_few_channels(w: Tensor, z: Tensor, most: int) -> bool:
    """Whether our kernels pay: for few channels always, for some with at most so many pixels of z."""
    channels = max(w.shape[:2])
    return channels <= BARE or (channels <= FEW and z.numel() // z.shape[1] <= most)


def _kernels():
    """The kernels' module; it needs Triton."""
    from . import triton_kernel

    return triton_kernel


@custom_op("threepass::conv3x3", mutates_args=())
def forward(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: int,
    relu: bool,
    gate: Tensor | None = None,
    relu_output: Tensor | None = None,
    rounded: bool = False,
    round_result: bool = False,
) -> Tensor:
    """z = W * a + bias; with `relu` max(z, 0).

    With a `gate` like z, 0 where that is minus zero; with `relu_output` like z, 0 where that is not positive.
    """
    if fits(stride, a, weight=w.shape) and a.dtype == w.dtype:
        return _kernels().forward(a, w, bias, stride, relu, gate, relu_output, rounded, round_result)
    z = _convolution(a, w, None if bias is None else bias.to(a.dtype), stride)
    z = z.relu() if relu else z
    z = z if gate is None else torch.where((gate == 0) & torch.signbit(gate), 0.0, z)
    z = z if relu_output is None else torch.where(relu_output > 0, z, 0.0)
    return _nhwc(_to_tf32(z) if round_result else z)


@forward.register_fake
def _(a, w, bias, stride, relu, gate=None, relu_output=None, rounded=False, round_result=False):
    return _like(a, w.shape[0], *((size - 1) // stride + 1 for size in a.shape[2:]))


@custom_op("threepass::conv3x3_input", mutates_args=())
def backward_input(
    d: Tensor,
    w: Tensor,
    stride: int,
    size: Sequence[int],
    relu_output: Tensor | None,
    rounded: bool = False,
    round_result: bool = False,
) -> Tensor:
    """g = W^T * d, of height and width `size`; with `relu_output` like g, minus zero where that is not positive."""
    height, width = size
    if fits(stride, d, weight=w.shape) and d.dtype == w.dtype:
        return _kernels().backward_input(d, w, stride, (height, width), relu_output, rounded, round_result)
    a = torch.empty((d.shape[0], w.shape[1], height, width), dtype=d.dtype, device=d.device)
    g = _convolution_backward(d, a, w, stride, (True, False, False))[0]
    g = _to_tf32(g) if round_result else g
    return _nhwc(g if relu_output is None else torch.where(relu_output > 0, torch.where(g == 0, 0.0, g), -0.0))


@backward_input.register_fake
def _(d, w, stride, size, relu_output, rounded=False, round_result=False):
    return _like(d, w.shape[1], *size)


@custom_op("threepass::conv3x3_weight", mutates_args=())
def backward_weight(
    d: Tensor, m: Tensor, stride: int, channels_last: bool, rounded: bool = False
) -> tuple[Tensor, Tensor]:
    """(sum d (x) m as (o, i, 3, 3), sum d as (o)) in float32, the same bits every time."""
    shape = (d.shape[1], m.shape[1], 3, 3)
    if fits(stride, d, m, weight=shape):
        return _kernels().backward_weight(d, m, stride, channels_last, rounded)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    d, m = (z.to(accumulate_dtype(z.dtype)) for z in (d, m))
    w = torch.empty(shape, dtype=d.dtype, device=d.device)
    g_w = _convolution_backward(d, m, w, stride, (False, True, False))[1]
    return g_w.contiguous(memory_format=layout), d.sum((0, 2, 3))


@backward_weight.register_fake
def _(d, m, stride, channels_last, rounded=False):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    dtype, o, i = accumulate_dtype(d.dtype), d.shape[1], m.shape[1]
    return d.new_empty((o, i, 3, 3), dtype=dtype).contiguous(memory_format=layout), d.new_empty((o,), dtype=dtype)


@custom_op("threepass::conv3x3_tangent", mutates_args=())
def forward_tangent(t: Tensor, w: Tensor, stride: int, a: Tensor, ratio: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    """z = W * t where a > 0, else 0, and a + ratio z, in bfloat16 rounded at random with the right mean.

    a is the ReLU's output, like z; ratio is a float32 scalar, seed an int32 one. The random bits are a hash of value,
    place and seed.
    """
    if fits(stride, t, a, weight=w.shape) and t.dtype == w.dtype and ratio.dtype == torch.float32:
        return _kernels().forward_tangent(t, w, stride, a, ratio, seed)
    z = torch.where(a > 0, _convolution(t, w, None, stride), 0.0)
    exact = accumulate_dtype(a.dtype)
    mix = a.to(exact) + ratio * z.to(exact)
    return _nhwc(z), _nhwc(mix if a.dtype not in HALF else _rounded_randomly(mix, seed, a.dtype))


@forward_tangent.register_fake
def _(t, w, stride, a, ratio, seed):
    out = _like(t, w.shape[0], *a.shape[2:])
    return out, torch.empty_like(out, dtype=a.dtype)


def _like(z: Tensor, channels: int, *size: int) -> Tensor:
    return z.new_empty((z.shape[0], channels, *size)).contiguous(memory_format=torch.channels_last)


def _to_tf32(z: Tensor) -> Tensor:
    return round_to_tf32(z) if z.dtype == torch.float32 and tf32_convolutions() else z


def _rounded_randomly(z: Tensor, seed: Tensor, dtype: torch.dtype) -> Tensor:
    """At random, with the positions in memory for the hash."""
    n, c, height, width = z.shape
    position = torch.arange(z.numel(), device=z.device).view(n, height, width, c).permute(0, 3, 1, 2)
    return rounded_randomly(z, position, seed, dtype)


def _nhwc(z: Tensor) -> Tensor:
    return z.contiguous(memory_format=torch.channels_last)


def _convolution(a: Tensor, w: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    return _aten.convolution(a, w, bias, [stride] * 2, [1, 1], [1, 1], False, [0, 0], 1)


def _convolution_backward(d: Tensor, a: Tensor, w: Tensor, stride: int, mask: tuple[bool, ...]) -> tuple[Tensor, ...]:
    return _aten.convolution_backward(d, a, w, None, [stride] * 2, [1, 1], [1, 1], False, [0, 0], 1, mask)
