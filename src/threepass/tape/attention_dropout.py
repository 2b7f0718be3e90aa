"""Attention with dropout in a captured step: its operations one by one.

A fused kernel draws its mask inside, and pass 3 could not get the same one: restoring a generator's state cannot be
traced. Written out, the mask is that of an ordinary dropout, which the tape keeps. None of the operations has weights,
so that both modes give the gradients of the fused one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._torch_compat import is_traced

ATTENTION = F.scaled_dot_product_attention


def body_in_trace(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Tensor] | None:
    """What a trace runs in place of a call: the operations of attention with dropout; None for every other call."""
    if func is not ATTENTION or not is_traced():
        return None
    dropout_p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    return _attention if dropout_p > 0 else None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`, with its argument names."""
    if enable_gqa:
        key, value = (z.repeat_interleave(query.shape[-3] // z.shape[-3], -3) for z in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = scores.softmax(-1) if attn_mask is None else _masked_softmax(scores, attn_mask)
    return F.dropout(weights, dropout_p) @ value


def _masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """mask: False for what is left out, or a number to add. Rows that are left out altogether are zero, not NaN."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -torch.inf)
    is_empty = (mask == -torch.inf).all(-1, keepdim=True)
    return (scores + mask.masked_fill(is_empty, 0.0)).softmax(-1).masked_fill(is_empty, 0.0)
