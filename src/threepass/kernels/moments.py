"""The sums that a batch norm takes on its way through a step, in one reading of what they are sums of.

moments         of a tangent, or an error, z:  sum z,  sum x̂ z,  and with d and w  sum d z  and  sum d z / w; with the
                norm's numbers (`pointwise.py`), of z where the rectified norm of a is positive
gated_moments   the first two of a residual block's error z, which is made on the way as by `gated_sum`

x̂ = (a - mean) rstd of the norm's input a; results are rows of channels, in float32 or wider. As in `rules/norm.py` a
scale w of zero counts as a tiny one. Custom operations, which the compiler takes as they are: it would take such sums
in one reading too, but end each in a kernel of its own. Where `fits` says so they are Triton kernels, else plain
PyTorch.
"""

import torch
from torch import Tensor
from torch.library import custom_op

from ..precision import accumulate_dtype
from ..rules.norm import not_zero
from .pointwise import can_gate, gate, rectified

DIMS = [0, 2, 3]


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
        from . import moments_triton

        return moments_triton.moments(z, a, mean, rstd, d, w, numbers)
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
        from . import moments_triton

        return moments_triton.gated_moments(g, h, u, numbers, a, mean, rstd)
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
