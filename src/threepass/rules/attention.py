"""Attention: u = P v with P = softmax(S), S = q kᵀ / √n + mask.

The tangent is P t_v + (P ∘ (t_S - rowsum(P ∘ t_S))) v. The output u stays what pass 1's fused kernel computed.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .table import Map, rule


@rule(F.scaled_dot_product_attention, arity=3)
def attention(u, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False) -> Map | None:
    """q: (..., l, n), k: (..., m, n), v: (..., m, o), u: (..., l, o)."""
    if dropout_p > 0 or enable_gqa:
        return None
    q, k, v = (z.detach().to(u.dtype) for z in (q, k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale

    def probabilities() -> Tensor:
        scores = ((q @ k.mT) * scale).to(torch.promote_types(u.dtype, torch.float32))
        mask = torch.ones_like(scores, dtype=torch.bool).tril() if is_causal else attn_mask
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        return torch.ops.aten._safe_softmax(scores, -1)

    def push(t_q: Tensor | None, t_k: Tensor | None, t_v: Tensor | None) -> Tensor:
        p = probabilities()
        out = torch.zeros_like(u, device=q.device) if t_v is None else p.to(u.dtype) @ t_v.to(u.dtype)
        t_s = [z for z in (t_q is not None and t_q.to(u.dtype) @ k.mT, t_k is not None and q @ t_k.to(u.dtype).mT)
               if z is not False]  # fmt: skip
        if t_s:
            t_s = sum(t_s).to(p.dtype) * scale
            out = out + (p * (t_s - (p * t_s).sum(-1, keepdim=True))).to(u.dtype) @ v
        return out

    return Map(push=push)
