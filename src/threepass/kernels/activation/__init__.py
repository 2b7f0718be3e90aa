"""The backward pass through a smooth activation u = f(a), fused with what the neighbouring weights need.

    e    = f'(a) r                   pass 2: the error of a from r, the error of u
    e    = f'(a) r + f''(a) d t      exact mode's last backward pass: r = R{d}, d the error of u, t the tangent of a
    sums = sum e                     over all rows, in float32, before e is rounded: the gradient of a bias
    u    = f(a)                      recomputed for the gradient of the weight downstream

a, r, d, t, e, u: (..., C); sums: (C). f: see `KINDS`. Each signal is read once. This is a custom operation, opaque to
the compiler, because Inductor would compute the sums in a second kernel that reads e again. Where `fits` holds it is a
Triton kernel (`triton_kernel.py`), else plain PyTorch.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn import functional as F

from ...numerics.precision import accumulate_dtype
from .. import runs_on
from .derivatives import gelu_second, gelu_tanh_second, silu_second

_aten = torch.ops.aten

KINDS: dict[str, tuple[Callable[..., Tensor], ...]] = {  # f, r -> f'(a) r, f''
    "gelu": (F.gelu, _aten.gelu_backward.default, gelu_second),
    "gelu-tanh": (
        lambda a: F.gelu(a, approximate="tanh"),
        lambda r, a: _aten.gelu_backward(r, a, approximate="tanh"),
        gelu_tanh_second,
    ),
    "silu": (F.silu, _aten.silu_backward.default, silu_second),
}


def fits(a: Tensor, *signals: Tensor) -> bool:
    """Whether the kernel takes these signals (..., C) as they lie in memory."""
    return (
        runs_on(a.device)
        and a.dim() > 1
        and 0 < a.numel() < 2**31  # the kernel's offsets are 32-bit
        and a.dtype in (torch.float32, torch.bfloat16)
        and all(z.shape == a.shape and z.dtype == a.dtype and z.is_contiguous() for z in (a, *signals))
    )


@custom_op("threepass::activation_error", mutates_args=())
def error(
    r: Tensor, a: Tensor, kind: str, d: Tensor | None = None, t: Tensor | None = None, again: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(e, sums, u): u is empty if it is not asked for, by `again`."""
    if fits(a, r, *(z for z in (d, t) if z is not None)):
        from . import triton_kernel

        e, sums, u = _empty(a, again)
        triton_kernel.error(r, a, list(KINDS).index(kind), d, t, e, sums, u if again else None)
        return e, sums, u
    return _plain(r, a, kind, d, t, again)


@error.register_fake
def _(r, a, kind, d=None, t=None, again=False):
    return _empty(a, again)


def _empty(a: Tensor, again: bool) -> tuple[Tensor, Tensor, Tensor]:
    sums = a.new_empty(a.shape[-1], dtype=accumulate_dtype(a.dtype))
    return a.new_empty(a.shape), sums, a.new_empty(a.shape if again else 0)


def _plain(r, a, kind, d, t, again) -> tuple[Tensor, Tensor, Tensor]:
    """The operation in plain PyTorch."""
    value, backward, second = KINDS[kind]
    r, d, t = (None if z is None else z.to(accumulate_dtype(z.dtype)) for z in (r, d, t))
    exact = a.to(r.dtype)
    e = backward(r, exact) if d is None else backward(r, exact) + second(exact) * t * d
    sums = e.sum(list(range(a.dim() - 1)))
    return e.to(a.dtype).contiguous(), sums, value(a).contiguous() if again else a.new_empty(0)
