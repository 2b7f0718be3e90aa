"""Pass 3 through a layer norm u = w x̂ + b, x̂ = (a - mean(a)) / std(a) over the last dimension, as one operation.

    t    = t_1 + t_2                               the tangent of a; t_2: of a residual branch, or none
    t̂    = (t - mean(t) - x̂ mean(x̂ t)) / std(a)
    t_u  = w t̂                                     the tangent of u
    m    = u + k t_u                               for the next weight's gradient; u is recomputed
    g_w  = sum d (x̂ + k t̂),  g_b = sum d           over all rows, in float32

a, t, d, t_u, m: (..., C), where d is the error of u; w, b, g_w, g_b: (C); k: a float32 scalar. Without a mix there
is no k, and g_w = sum d t̂.

Exact mode's last backward pass, from r = R{d} of u to R{d} of a, is another operation. With J z = (z - mean(z) - x̂
mean(x̂ z)) / std(a),

    R{d_a} = J (w r) - (x̂ mean(t J g) + mean(x̂ t) J g + mean(x̂ g) J t) / std(a) + r_2,   g = w d
    g_w    = sum r x̂,  g_b = sum r                 over all rows, in float32; r_2: of a residual branch, or none
    g_a    = sum R{d_a}                            the bias gradient of the layer upstream of the norm

Custom operations (`torch.ops.threepass`), opaque to the compiler. Where `fits` holds they are Triton
kernels (`triton_kernel.py`), which read and write each signal once, else plain PyTorch.
"""

import torch
from torch import Tensor
from torch.library import custom_op

from ...numerics.precision import HALF, accumulate_dtype
from ...numerics.rounding import rounded_randomly
from .. import norm, runs_on

_COLUMNS = 4096


def fits(a: Tensor, *signals: Tensor) -> bool:
    """Whether the kernel takes these signals (..., C) as they lie in memory."""
    return (
        runs_on(a.device)
        and a.dim() > 1
        and a.shape[-1] <= _COLUMNS
        and 0 < a.numel() < 2**31  # the kernel's offsets are 32-bit
        and all(
            z.shape == a.shape and z.dtype in (torch.float32, torch.bfloat16) and z.is_contiguous()
            for z in (a, *signals)
        )
    )


@custom_op("threepass::layer_norm_tangent", mutates_args=())
def tangent(
    t: Tensor,
    t_2: Tensor | None,
    a: Tensor,
    d: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    ratio: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    seed: Tensor | None,
    mixes: bool = True,
    keeps: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(t_u, m, (g_w, g_b), t_1 + t_2): t_u and m in `dtype`, m in bfloat16 rounded at random with the right mean.

    What is not asked for is empty: m without `mixes` (which need a ratio and a seed), the gradients without d, the sum
    without t_2 or `keeps`. The random bits are a hash of value, place and seed.
    """
    if fits(a, t, *(z for z in (t_2, d) if z is not None)) and dtype in (torch.float32, torch.bfloat16):
        from . import triton_kernel

        results = _empty(t, t_2, a, d, dtype, mixes, keeps)
        m, g, t_sum = (z if z.numel() else None for z in results[1:])
        w, b = (None if z is None else z.contiguous() for z in (w, b))
        triton_kernel.tangent(t, t_2, a, d, w, b, ratio, eps, seed, t_sum, results[0], m, g)
        return results
    return _plain(t, t_2, a, d, w, b, ratio, eps, dtype, seed, mixes, keeps)


@tangent.register_fake
def _(t, t_2, a, d, w, b, ratio, eps, dtype, seed, mixes=True, keeps=True):
    return _empty(t, t_2, a, d, dtype, mixes, keeps)


def _empty(
    t: Tensor, t_2: Tensor | None, a: Tensor, d: Tensor | None, dtype: torch.dtype, mixes: bool, keeps: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        a.new_empty(a.shape, dtype=dtype),
        a.new_empty(a.shape if mixes else 0, dtype=dtype),
        a.new_empty((2, a.shape[-1]) if d is not None else 0, dtype=accumulate_dtype(a.dtype)),
        t.new_empty(0)
        if t_2 is None or not keeps
        else t.new_empty(a.shape, dtype=torch.promote_types(t.dtype, t_2.dtype)),
    )


def _plain(t, t_2, a, d, w, b, ratio, eps, dtype, seed, mixes, keeps) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operation in plain PyTorch."""
    t_u, m, g, t_sum = _empty(t, t_2, a, d, dtype, mixes, keeps)
    t = t if t_2 is None else t + t_2
    if t_sum.numel():
        t_sum.copy_(t)
    x, rstd, _ = norm.normalized(a, [-1], eps)
    t = norm.jacobian(t, x, rstd, [-1], True)
    t_u.copy_(t if w is None else t * w)
    if mixes:
        u = x if w is None else x * w
        mix = (u if b is None else u + b).to(dtype).to(x.dtype) + ratio * t_u
        position = torch.arange(mix.numel(), device=mix.device).view(mix.shape)
        m.copy_(rounded_randomly(mix, position, seed, dtype) if dtype in HALF else mix)
    if d is not None:
        rows = list(range(a.dim() - 1))
        g[0], g[1] = (d * (t if ratio is None else x + ratio * t)).sum(rows), d.sum(rows, dtype=g.dtype)
    return t_u, m, g, t_sum


@custom_op("threepass::layer_norm_bend", mutates_args=())
def bend(
    a: Tensor,
    t: Tensor,
    d: Tensor,
    r: Tensor | None,
    r_2: Tensor | None,
    w: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    sums: bool = False,
) -> tuple[Tensor, Tensor]:
    """(R{d_a}, (g_w, g_b)), or with `sums` (g_w, g_b, g_a); R{d_a} in `dtype`, before r_2 is added and after.

    Without r the gradients are empty.
    """
    if fits(a, t, d, *(z for z in (r, r_2) if z is not None)) and dtype in (torch.float32, torch.bfloat16):
        from . import triton_kernel

        bent, g = _empty_bend(a, r, dtype, sums)
        w = None if w is None else w.contiguous()
        triton_kernel.bend(a, t, d, r, r_2, w, eps, bent, g if g.numel() else None)
        return bent, g
    return _plain_bend(a, t, d, r, r_2, w, eps, dtype, sums)


@bend.register_fake
def _(a, t, d, r, r_2, w, eps, dtype, sums=False):
    return _empty_bend(a, r, dtype, sums)


def _empty_bend(a: Tensor, r: Tensor | None, dtype: torch.dtype, sums: bool) -> tuple[Tensor, Tensor]:
    columns = (2 + sums, a.shape[-1]) if r is not None else 0
    return a.new_empty(a.shape, dtype=dtype), a.new_empty(columns, dtype=accumulate_dtype(a.dtype))


def _plain_bend(a, t, d, r, r_2, w, eps, dtype, sums) -> tuple[Tensor, Tensor]:
    """The operation in plain PyTorch."""
    bent, gradients = _empty_bend(a, r, dtype, sums)
    x, rstd, _ = norm.normalized(a, [-1], eps)
    total = norm.curved(d, t, w, x, rstd, [-1], True)
    if r is not None:
        r = r.to(x.dtype)
        total = total + norm.pulled(r, w, x, rstd, [-1], True)
    bent.copy_(total)
    bent = bent if r_2 is None else (bent + r_2).to(dtype)
    if r is not None:
        rows = list(range(a.dim() - 1))
        gradients[0], gradients[1] = (r * x).sum(rows), r.sum(rows)
        if sums:
            gradients[2] = bent.to(gradients.dtype).sum(rows)
    return bent, gradients
