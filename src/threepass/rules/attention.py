"""Attention: u = P v with P = softmax(S), S = scale q kᵀ + mask, for each head separately.

Pass 3, with t_S = scale (t_q kᵀ + q t_kᵀ) and t_P = P ∘ (t_S - rowsum(P ∘ t_S)):

    t_u = P t_v + t_P v.

Pass 2 is d_v = Pᵀ d, d_P = d vᵀ, d_S = P ∘ (d_P - D) with D = rowsum(P ∘ d_P), d_q = scale d_S k, d_k = scale d_Sᵀ q.
Exact mode differentiates it along (t_q, t_k, t_v) and r = R{d}:

    R{d_v} = t_Pᵀ d + Pᵀ r            R{d_P} = r vᵀ + d t_vᵀ
    R{d_S} = t_P ∘ (d_P - D) + P ∘ (R{d_P} - R{D})            R{D} = rowsum(t_P ∘ d_P + P ∘ R{d_P})
    R{d_q} = scale (R{d_S} k + d_S t_k)            R{d_k} = scale (R{d_S}ᵀ q + d_Sᵀ t_q).

The output u stays what pass 1's fused kernel computed. On a GPU both run in kernels that keep S, P and the rest on the
chip (`kernels/attention`); here they are written out, for every other call.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .._torch_compat import has_dispatch_modes, safe_softmax, softmax_backward
from ..kernels import runs_on
from ..kernels.attention import attention_bend, attention_tangent, launch_bend, launch_tangent
from ..tracing import is_for_compiler
from .table import Linearization, Signal, has_symbolic_shape, rule


@rule(F.scaled_dot_product_attention, arity=3)
def attention(
    u, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> Linearization | None:
    """q: (..., l, n), k: (..., m, n), v: (..., m, o), u: (..., l, o)."""
    if dropout_p > 0 or enable_gqa:
        return None
    at = Heads(*_to(u.dtype, (q.detach(), k.detach(), v.detach())))
    scores = Scores(1 / math.sqrt(q.shape[-1]) if scale is None else scale, is_causal, attn_mask)
    fused = _fits_kernels(at, scores)

    def push(*t: Tensor | None) -> Tensor:
        along = Heads(*_to(u.dtype, t))
        if fused:
            return _fused_tangent(u, at, along, scores)
        if _is_plain((*at, *along), scores):
            return _batched_tangent(at, along, scores).view(u.shape)
        t_u = tangent(at, along, scores)
        return torch.zeros_like(u, device=q.device) if t_u is None else t_u

    def bend(r: Signal, d: Signal, t: Signal) -> Signal:
        d_u, r_u = _to(u.dtype, (*d, *r))
        along = Heads(*_to(u.dtype, t))
        if not fused and _is_plain((*at, *along, d_u, r_u), scores):
            return [s.view(z.shape) for s, z in zip(_batched_bend(at, along, d_u, r_u, scores), at, strict=True)]
        bent = (_fused_bend if fused else curved)(at, along, d_u, r_u, scores)
        return [None if s is None else s.sum_to_size(z.shape).to(z.dtype) for s, z in zip(bent, (q, k, v), strict=True)]

    return Linearization(push=push, bend=bend)


class Heads(NamedTuple):
    """q, k and v, or their tangents, of which those that are zero may be None."""

    q: Any
    k: Any
    v: Any


@dataclass(frozen=True, slots=True)
class Scores:
    """S = scale q kᵀ + mask; causal: query i sees keys 0 to i; of a boolean mask the false entries are left out."""

    scale: float
    causal: bool = False
    mask: Tensor | None = None

    def softmax(self, q: Tensor, k: Tensor) -> Tensor:
        """P, in float32 at least; a row that sees nothing is zero."""
        s = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * self.scale
        mask = torch.ones_like(s, dtype=torch.bool).tril() if self.causal else self.mask
        if mask is not None:
            s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
        return safe_softmax(s, -1)


def tangent(at: Heads, t: Heads, scores: Scores) -> Tensor | None:
    """t_u; a tangent that is None is zero."""
    p = scores.softmax(at.q, at.k)
    return _sum(_product(p, t.v), _product(_tangent_of_softmax(p, at, t, scores), at.v))


def _is_plain(operands: Sequence[Tensor | None], scores: Scores) -> bool:
    """Whether `_batched_tangent` serves a call that is not compiled: float32 or wider, with all tangents, unmasked."""
    if is_for_compiler() or scores.mask is not None:
        return False
    if any(z is not None and has_symbolic_shape(z) for z in operands):  # symbols cannot be hashed
        return False
    shapes = {None if z is None else z.shape[:-2] for z in operands}
    is_wide = operands[0] is not None and operands[0].dtype in (torch.float32, torch.float64)
    return is_wide and None not in shapes and len(shapes) == 1


def _batched_tangent(at: Heads, t: Heads, scores: Scores) -> Tensor:
    """`tangent` in fewer launches, with batch and heads as one dimension."""
    q, k, v, t_q, t_k, t_v = map(_one_batch, (*at, *t))
    p, t_p = _batched_softmax(Heads(q, k, v), Heads(t_q, t_k, t_v), scores)
    return torch.baddbmm(torch.bmm(p, t_v), t_p, v)


def _batched_bend(at: Heads, t: Heads, d: Tensor | None, r: Tensor | None, scores: Scores) -> list[Tensor]:
    """`curved` likewise."""
    q, k, v, t_q, t_k, t_v, d, r = map(_one_batch, (*at, *t, d, r))
    p, t_p = _batched_softmax(Heads(q, k, v), Heads(t_q, t_k, t_v), scores)
    d_p = torch.bmm(d, v.mT)
    d_p -= (p * d_p).sum(-1, keepdim=True)
    bent = t_p * d_p
    r_s = softmax_backward(torch.baddbmm(torch.bmm(r, v.mT), d, t_v.mT), p, -1, p.dtype)
    r_s = r_s.add_(bent).addcmul_(p, bent.sum(-1, keepdim=True), value=-1)
    d_s = d_p.mul_(p)
    scale = scores.scale
    r_q = torch.baddbmm(torch.bmm(r_s, k), d_s, t_k, beta=scale, alpha=scale)
    r_k = torch.baddbmm(torch.bmm(r_s.mT, q), d_s.mT, t_q, beta=scale, alpha=scale)
    return [r_q, r_k, torch.baddbmm(torch.bmm(t_p.mT, d), p.mT, r)]


def _batched_softmax(at: Heads, t: Heads, scores: Scores) -> tuple[Tensor, Tensor]:
    """P and t_P: softmax's own backward is its tangent too."""
    scale = scores.scale
    s = torch.baddbmm(at.q.new_empty(1, 1, 1), at.q, at.k.mT, beta=0, alpha=scale)
    if scores.causal:
        s = s.masked_fill_(torch.ones(s.shape[1:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    p = s.softmax(-1)
    t_s = torch.baddbmm(torch.bmm(t.q, at.k.mT), at.q, t.k.mT, beta=scale, alpha=scale)
    return p, softmax_backward(t_s, p, -1, p.dtype)


def _one_batch(z: Tensor) -> Tensor:
    return z.reshape(-1, *z.shape[-2:])


def curved(at: Heads, t: Heads, d: Tensor | None, r: Tensor | None, scores: Scores) -> Signal:
    """R{d} of q, k and v; what is None of the tangents, d and r is zero."""
    p = scores.softmax(at.q, at.k)
    t_p = _tangent_of_softmax(p, at, t, scores)
    d_p = _centred(p, _product(d, at.v.mT))
    r_p = _centred(p, _sum(_product(r, at.v.mT), _product(d, _turned(t.v))))
    d_s = None if d_p is None else p * d_p
    r_s = None if r_p is None else p * r_p
    if t_p is not None and d_p is not None:  # rowsum(t_P) = 0, so that R{D} may take d_P - D for d_P
        bent = t_p * d_p
        r_s = _sum(r_s, bent - p * bent.sum(-1, keepdim=True))
    r_v = _sum(_product(_turned(t_p), d), _product(_turned(p), r))
    r_q = _sum(_product(r_s, at.k), _product(d_s, t.k))
    r_k = _sum(_product(_turned(r_s), at.q), _product(_turned(d_s), t.q))
    return [None if r_q is None else r_q * scores.scale, None if r_k is None else r_k * scores.scale, r_v]


def _tangent_of_softmax(p: Tensor, at: Heads, t: Heads, scores: Scores) -> Tensor | None:
    t_s = _centred(p, _sum(_product(t.q, at.k.mT), _product(at.q, _turned(t.k))))
    return None if t_s is None else p * t_s * scores.scale


def _centred(p: Tensor, z: Tensor | None) -> Tensor | None:
    """z - rowsum(P ∘ z), in P's dtype."""
    return None if z is None else z.to(p.dtype) - (p * z).sum(-1, keepdim=True)


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """a b in the dtype of b: a may be like P, which has a wider dtype than the signals."""
    if a is None or b is None:
        return None
    return a.to(b.dtype) @ b


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _turned(z: Tensor | None) -> Tensor | None:
    return None if z is None else z.mT


def _to(dtype: torch.dtype, signals) -> Signal:
    return [None if s is None else s.to(dtype) for s in signals]


def _fits_kernels(at: Heads, scores: Scores) -> bool:
    q, k, v = at
    return (
        q.is_cuda
        and scores.mask is None
        and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and q.dim() in (3, 4)
        and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
        and all(z.numel() > 0 for z in (q, k, v))
        and max(q.shape[-1], v.shape[-1]) <= _widest_head(q.device, q.dtype)
    )


@functools.cache
def _widest_head(device: torch.device, dtype: torch.dtype) -> int:
    """The widest head that the kernels take on this GPU, with room on the chip for blocks of all operands."""
    if not runs_on(device):
        return 0
    gpu = torch.cuda.get_device_properties(device)
    room = getattr(gpu, "shared_memory_per_block_optin", gpu.shared_memory_per_block)
    if room < 96 * 1024:
        return 0
    return 128 if dtype != torch.float32 and room >= 160 * 1024 else 64


def _fused_tangent(u: Tensor, at: Heads, t: Heads, scores: Scores) -> Tensor:
    by_token = u.dim() == 4 and u.stride(1) < u.stride(2)
    operands = map(_with_heads, (*at, *t))
    run = attention_tangent if has_dispatch_modes() else launch_tangent
    return run(*operands, scores.scale, scores.causal, _float32_products(), by_token).view(u.shape)


def _fused_bend(at: Heads, t: Heads, d: Any, r: Any, scores: Scores) -> Signal:
    by_token = at.q.dim() == 4 and at.q.stride(1) < at.q.stride(2)
    if d is None:
        d = torch.zeros_like(r)
    operands = map(_with_heads, (*at, *t, d, r))
    run = attention_bend if has_dispatch_modes() else launch_bend
    bent = run(*operands, scores.scale, scores.causal, _float32_products(), by_token)
    return [s.view(z.shape) for s, z in zip(bent, at, strict=True)]


def _with_heads(z: Tensor | None) -> Tensor | None:
    return z if z is None or z.dim() == 4 else z.unsqueeze(1)


def _float32_products() -> str:
    """As torch's own products: TF32 where it is allowed, else what tensor cores make of three of them."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"
