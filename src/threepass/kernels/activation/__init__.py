"""The backward pass through a smooth activation u = f(a), fused with what the neighbouring weights need.

    e    = f'(a) r                   pass 2: the error of a from r, the error of u
    e    = f'(a) r + f''(a) d t      exact mode's last backward pass: r = R{d}, d the error of u, t the tangent of a
    sums = sum e                     over all rows, in float32, before e is rounded: the gradient of a bias
    u    = f(a)                      recomputed for the gradient of the weight downstream

a, r, d, t, e, u: (..., C); sums: (C). f: see `KINDS`. Each signal is read once. This is a custom operation, opaque to
the compiler, because Inductor would compute the sums in a second kernel that reads e a second time. Where `fits` holds
it is a Triton kernel (`triton_kernel.py`), else plain PyTorch.

f''(a) d t alone is `curve`, which the rules call.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from ..._torch_compat import OpOverload
from ...numerics.precision import accumulate_dtype
from .. import runs_on
from ..fusible import fusible
from .derivatives import gelu_second, gelu_tanh_second, silu_second

_aten = torch.ops.aten


class Kind(NamedTuple):
    """An activation u = f(a), by PyTorch's own operations: a -> f(a), (r, a) -> f'(a) r; second: a -> f''(a)."""

    value: OpOverload
    backward: OpOverload
    second: Callable[[Tensor], Tensor]
    options: dict[str, Any]  # keyword arguments of both operations


KINDS = {
    "gelu": Kind(_aten.gelu.default, _aten.gelu_backward.default, gelu_second, {}),
    "gelu-tanh": Kind(_aten.gelu.default, _aten.gelu_backward.default, gelu_tanh_second, {"approximate": "tanh"}),
    "silu": Kind(_aten.silu.default, _aten.silu_backward.default, silu_second, {}),
}


@fusible("activation_curve")
def curve(d: Tensor, t: Tensor, a: Tensor, kind: str) -> Tensor:
    """f''(a) d t"""
    exact = accumulate_dtype(a.dtype)
    return (KINDS[kind].second(a.to(exact)) * t.to(exact)).conj() * d.to(exact)


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
    r: Tensor, a: Tensor, kind: str, d: Tensor | None = None, t: Tensor | None = None, with_u: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(e, sums, u): u is empty without `with_u`."""
    if fits(a, r, *(z for z in (d, t) if z is not None)):
        from . import triton_kernel

        e, sums, u = _empty(a, with_u)
        triton_kernel.error(r, a, list(KINDS).index(kind), d, t, e, sums, u if with_u else None)
        return e, sums, u
    return _plain(r, a, kind, d, t, with_u)


@error.register_fake
def _(r, a, kind, d=None, t=None, with_u=False):
    return _empty(a, with_u)


def _empty(a: Tensor, with_u: bool) -> tuple[Tensor, Tensor, Tensor]:
    sums = a.new_empty(a.shape[-1], dtype=accumulate_dtype(a.dtype))
    return a.new_empty(a.shape), sums, a.new_empty(a.shape if with_u else 0)


def _plain(r, a, kind, d, t, with_u) -> tuple[Tensor, Tensor, Tensor]:
    """The operation in plain PyTorch."""
    f = KINDS[kind]
    exact = accumulate_dtype(a.dtype)
    e = f.backward(r.to(exact), a.to(exact), **f.options)
    e = e if d is None else e + curve(d, t, a, kind)
    sums = e.sum(list(range(a.dim() - 1)))
    return e.to(a.dtype).contiguous(), sums, f.value(a, **f.options).contiguous() if with_u else a.new_empty(0)
