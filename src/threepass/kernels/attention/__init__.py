"""Attention's tangent and its exact-mode pass as operations; formulas in `rules/attention.py`.

Custom operations (`torch.ops.threepass`), which the compiler takes as they are. They run as Triton kernels
(`triton_kernel.py`) and have no other path: `rules/attention.py` writes the formulas out where the kernels do not fit.
"""

import torch
from torch import Tensor

from .layout import empty, empty_packed


def _kernels():
    """The kernels' module; it needs Triton."""
    from . import triton_kernel

    return triton_kernel


def launch_tangent(*operands) -> Tensor:
    """`attention_tangent` without the dispatcher, which takes longer than the launch: for eager steps."""
    return _kernels().launch_tangent(*operands)


def launch_bend(*operands) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_bend` likewise."""
    return _kernels().launch_bend(*operands)


@torch.library.custom_op("threepass::attention_tangent", mutates_args=())
def attention_tangent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    t_q: Tensor | None,
    t_k: Tensor | None,
    t_v: Tensor | None,
    scale: float,
    causal: bool,
    precision: str,
    by_token: bool,
) -> Tensor:
    """t_u; precision: of float32 products, as `tl.dot` has it; by_token: in memory (batch, queries, heads, w)."""
    return _kernels().launch_tangent(q, k, v, t_q, t_k, t_v, scale, causal, precision, by_token)


@attention_tangent.register_fake
def _(q, k, v, t_q, t_k, t_v, scale, causal, precision, by_token):
    return empty(q, q.shape[-2], v.shape[-1], by_token)


@torch.library.custom_op("threepass::attention_bend", mutates_args=())
def attention_bend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    t_q: Tensor | None,
    t_k: Tensor | None,
    t_v: Tensor | None,
    d: Tensor,
    r: Tensor | None,
    scale: float,
    causal: bool,
    precision: str,
    by_token: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """R{d} of q, k and v; by_token: each in memory (batch, queries or keys, heads, width)."""
    return _kernels().launch_bend(q, k, v, t_q, t_k, t_v, d, r, scale, causal, precision, by_token)


@attention_bend.register_fake
def _(q, k, v, t_q, t_k, t_v, d, r, scale, causal, precision, by_token):
    return tuple(empty(q, z.shape[-2], z.shape[-1], by_token) for z in (q, k, v))


@torch.library.custom_op("threepass::attention_bend_packed", mutates_args=())
def attention_bend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    t_q: Tensor | None,
    t_k: Tensor | None,
    t_v: Tensor | None,
    d: Tensor,
    r: Tensor | None,
    scale: float,
    causal: bool,
    precision: str,
) -> Tensor:
    """The same of q, k and v of one shape, as one tensor; in memory (batch, tokens, 3, heads, width)."""
    out = empty_packed(q)
    _kernels().launch_bend(q, k, v, t_q, t_k, t_v, d, r, scale, causal, precision, out=tuple(out.unbind()))
    return out


@attention_bend_packed.register_fake
def _(q, k, v, t_q, t_k, t_v, d, r, scale, causal, precision):
    return empty_packed(q)
