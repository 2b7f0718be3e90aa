# ruff: noqa: N803 (what Triton knows when it compiles is in capitals)
"""Attention's tangent and its exact-mode pass without a matrix of scores in memory; formulas in `rules/attention.py`.

q, t_q: (batch, heads, queries, n); k, t_k: (batch, heads, keys, n); v, t_v: (batch, heads, keys, w); u, d, r: (batch,
heads, queries, w). A program has one head and one block i of queries (or j of keys), goes along the blocks of the other
side, and recomputes S, P, t_S, ... of the two blocks from the operands. Products take the operands' dtype and add
up in float32; softmax and row sums are in float32.

A row's sums are taken on the fly, as in flash attention: with the largest score so far as the softmax's base, and with
t_S and d_P less their means so far, so that nothing large cancels in the end.

Blocks of all operands are padded to one width, PADDED: that of the wider of the two heads. With two widths the code for
sm_90 can be wrong. An operand's address for a tensor core's product (wgmma) has the block's place in shared memory
in its lower half, and its swizzle, which depends on the width, in its upper half. A block of k and a later one of v can
have the same place; where their upper halves differ, ptxas 12.8.93, which comes with Triton 3.6 and 3.7, may compute
one of the two from a register that was never written. Products then read whatever lies there, or outside of memory.
`tests/kernels/test_attention_code.py` looks for such reads.
"""

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from ..launch import on_its_device
from ..product_triton import padded, product
from .layout import empty

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(base, b, h, stride_b, stride_h, stride_t, rows, count, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The given rows of one head: (rows, PADDED), zero outside the head."""
    columns = tl.arange(0, PADDED)
    at = base + b * stride_b + h * stride_h + rows[:, None] * stride_t + columns[None, :]
    return tl.load(at, mask=(rows < count)[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def _store(base, b, h, stride_b, stride_h, stride_t, rows, count, tile, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    columns = tl.arange(0, PADDED)
    at = base + b * stride_b + h * stride_h + rows[:, None] * stride_t + columns[None, :]
    inside = (rows < count)[:, None] & (columns < WIDTH)[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _visible(rows, columns, keys, CAUSAL: tl.constexpr):
    seen = columns < keys
    if CAUSAL:
        seen = seen & (columns <= rows)
    return seen


@triton.jit
def _tangent_of_product(x, y, t_x, t_y, HAS_X: tl.constexpr, HAS_Y: tl.constexpr, PRECISION: tl.constexpr):
    """t_x yᵀ + x t_yᵀ."""
    out = tl.zeros((x.shape[0], y.shape[0]), tl.float32)
    if HAS_X:
        out = product(t_x, tl.trans(y), out, PRECISION)
    if HAS_Y:
        out = product(x, tl.trans(t_y), out, PRECISION)
    return out


@triton.jit
def _tangent_kernel(
    q, k, v, t_q, t_k, t_v, out,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, tq_b, tq_h, tq_t, tk_b, tk_h, tk_t, tv_b, tv_h, tv_t, o_b, o_h, o_t,
    heads, queries, keys, scale,
    HAS_Q: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr, CAUSAL: tl.constexpr, ONE_BLOCK: tl.constexpr,
    N: tl.constexpr, W: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = t_u of one block of queries."""
    b = (tl.program_id(0) // heads).to(tl.int64)
    h = (tl.program_id(0) % heads).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_i = _load(q, b, h, q_b, q_h, q_t, rows, queries, N, PADDED)
    tq_i = q_i
    if HAS_Q:
        tq_i = _load(t_q, b, h, tq_b, tq_h, tq_t, rows, queries, N, PADDED)
    peak = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    rho = tl.zeros((BLOCK_Q,), tl.float32)  # mean of t_S so far
    pv = tl.zeros((BLOCK_Q, PADDED), tl.float32)
    acc = tl.zeros((BLOCK_Q, PADDED), tl.float32)
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, (tl.program_id(1) + 1) * BLOCK_Q)
    for start in range(0, end, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        k_j = _load(k, b, h, k_b, k_h, k_t, columns, keys, N, PADDED)
        s = product(q_i, tl.trans(k_j), None, PRECISION) * (scale * LOG2_E)
        s = tl.where(_visible(rows[:, None], columns[None, :], keys, CAUSAL), s, -float("inf"))
        higher = tl.maximum(peak, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(peak - higher)
        peak = higher
        before = total * shrink
        total = before + tl.sum(p, 1)
        acc *= shrink[:, None]
        if HAS_Q or HAS_K:
            tk_j = k_j
            if HAS_K:
                tk_j = _load(t_k, b, h, tk_b, tk_h, tk_t, columns, keys, N, PADDED)
            t_s = _tangent_of_product(q_i, k_j, tq_i, tk_j, HAS_Q, HAS_K, PRECISION) * scale
            v_j = _load(v, b, h, v_b, v_h, v_t, columns, keys, W, PADDED)
            mean = (rho * before + tl.sum(p * t_s, 1)) / total
            if not ONE_BLOCK:
                pv *= shrink[:, None]
                acc += (rho - mean)[:, None] * pv
                pv = product(p.to(v_j.dtype), v_j, pv, PRECISION)
            acc = product((p * (t_s - mean[:, None])).to(v_j.dtype), v_j, acc, PRECISION)
            rho = mean
        if HAS_V:
            tv_j = _load(t_v, b, h, tv_b, tv_h, tv_t, columns, keys, W, PADDED)
            acc = product(p.to(tv_j.dtype), tv_j, acc, PRECISION)
    _store(out, b, h, o_b, o_h, o_t, rows, queries, acc / total[:, None], W, PADDED)


@triton.jit
def _bend_tile_kernel(
    q, k, v, t_q, t_k, t_v, d, r, out_q, out_k, out_v,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, tq_b, tq_h, tq_t, tk_b, tk_h, tk_t, tv_b, tv_h, tv_t,
    d_b, d_h, d_t, r_b, r_h, r_t, oq_b, oq_h, oq_t, ok_b, ok_h, ok_t, ov_b, ov_h, ov_t,
    heads, queries, keys, scale,
    HAS_Q: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr, HAS_R: tl.constexpr, CAUSAL: tl.constexpr,
    N: tl.constexpr, W: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """R{d} of q, k and v, for a head whose queries and keys fit one block."""
    b = (tl.program_id(0) // heads).to(tl.int64)
    h = (tl.program_id(0) % heads).to(tl.int64)
    rows, columns = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    q_i = _load(q, b, h, q_b, q_h, q_t, rows, queries, N, PADDED)
    k_j = _load(k, b, h, k_b, k_h, k_t, columns, keys, N, PADDED)
    tq_i, tk_j = q_i, k_j
    if HAS_Q:
        tq_i = _load(t_q, b, h, tq_b, tq_h, tq_t, rows, queries, N, PADDED)
    if HAS_K:
        tk_j = _load(t_k, b, h, tk_b, tk_h, tk_t, columns, keys, N, PADDED)
    s = product(q_i, tl.trans(k_j), None, PRECISION) * (scale * LOG2_E)
    s = tl.where(_visible(rows[:, None], columns[None, :], keys, CAUSAL), s, -float("inf"))
    p = tl.exp2(s - tl.max(s, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    t_p = _tangent_of_product(q_i, k_j, tq_i, tk_j, HAS_Q, HAS_K, PRECISION) * scale
    t_p = p * (t_p - tl.sum(p * t_p, 1)[:, None])

    v_j = _load(v, b, h, v_b, v_h, v_t, columns, keys, W, PADDED)
    d_i = _load(d, b, h, d_b, d_h, d_t, rows, queries, W, PADDED)
    tv_j, r_i = v_j, d_i
    if HAS_V:
        tv_j = _load(t_v, b, h, tv_b, tv_h, tv_t, columns, keys, W, PADDED)
    if HAS_R:
        r_i = _load(r, b, h, r_b, r_h, r_t, rows, queries, W, PADDED)
    d_p = product(d_i, tl.trans(v_j), None, PRECISION)
    d_p -= tl.sum(p * d_p, 1)[:, None]
    r_p = _tangent_of_product(d_i, v_j, r_i, tv_j, HAS_R, HAS_V, PRECISION)
    r_v = product(tl.trans(t_p.to(d_i.dtype)), d_i, None, PRECISION)
    if HAS_R:
        r_v = product(tl.trans(p.to(r_i.dtype)), r_i, r_v, PRECISION)
    _store(out_v, b, h, ov_b, ov_h, ov_t, columns, keys, r_v, W, PADDED)

    bent = t_p * d_p
    r_s = (bent + p * (r_p - tl.sum(bent + p * r_p, 1)[:, None])).to(k_j.dtype)
    d_s = (p * d_p).to(k_j.dtype)
    # q, k and their tangents once more: held until here, they would not leave room for another program on the chip.
    k_j = _load(k, b, h, k_b, k_h, k_t, columns, keys, N, PADDED)
    r_q = product(r_s, k_j, None, PRECISION)
    if HAS_K:
        tk_j = _load(t_k, b, h, tk_b, tk_h, tk_t, columns, keys, N, PADDED)
        r_q = product(d_s, tk_j, r_q, PRECISION)
    _store(out_q, b, h, oq_b, oq_h, oq_t, rows, queries, r_q * scale, N, PADDED)
    q_i = _load(q, b, h, q_b, q_h, q_t, rows, queries, N, PADDED)
    r_k = product(tl.trans(r_s), q_i, None, PRECISION)
    if HAS_Q:
        tq_i = _load(t_q, b, h, tq_b, tq_h, tq_t, rows, queries, N, PADDED)
        r_k = product(tl.trans(d_s), tq_i, r_k, PRECISION)
    _store(out_k, b, h, ok_b, ok_h, ok_t, columns, keys, r_k * scale, N, PADDED)


@triton.jit
def _bend_rows_kernel(
    q, k, v, t_q, t_k, t_v, d, r, out_q, sums,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, tq_b, tq_h, tq_t, tk_b, tk_h, tk_t, tv_b, tv_h, tv_t,
    d_b, d_h, d_t, r_b, r_h, r_t, oq_b, oq_h, oq_t,
    heads, queries, keys, scale,
    HAS_Q: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr, HAS_R: tl.constexpr, CAUSAL: tl.constexpr,
    N: tl.constexpr, W: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """R{d_q} of one block of queries; into sums, (4, heads, queries), log2 sum exp S, rho, D and R{D} of its rows."""
    b = (tl.program_id(0) // heads).to(tl.int64)
    h = (tl.program_id(0) % heads).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_i = _load(q, b, h, q_b, q_h, q_t, rows, queries, N, PADDED)
    d_i = _load(d, b, h, d_b, d_h, d_t, rows, queries, W, PADDED)
    tq_i, r_i = q_i, d_i
    if HAS_Q:
        tq_i = _load(t_q, b, h, tq_b, tq_h, tq_t, rows, queries, N, PADDED)
    if HAS_R:
        r_i = _load(r, b, h, r_b, r_h, r_t, rows, queries, W, PADDED)
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, (tl.program_id(1) + 1) * BLOCK_Q)

    peak = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    rho = tl.zeros((BLOCK_Q,), tl.float32)
    mean_d = tl.zeros((BLOCK_Q,), tl.float32)
    mean_r = tl.zeros((BLOCK_Q,), tl.float32)
    bent = tl.zeros((BLOCK_Q,), tl.float32)  # sum of p (t_S - rho) (d_P - D)
    for start in range(0, end, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        k_j = _load(k, b, h, k_b, k_h, k_t, columns, keys, N, PADDED)
        v_j = _load(v, b, h, v_b, v_h, v_t, columns, keys, W, PADDED)
        tk_j, tv_j = k_j, v_j
        if HAS_K:
            tk_j = _load(t_k, b, h, tk_b, tk_h, tk_t, columns, keys, N, PADDED)
        if HAS_V:
            tv_j = _load(t_v, b, h, tv_b, tv_h, tv_t, columns, keys, W, PADDED)
        s = product(q_i, tl.trans(k_j), None, PRECISION) * (scale * LOG2_E)
        s = tl.where(_visible(rows[:, None], columns[None, :], keys, CAUSAL), s, -float("inf"))
        higher = tl.maximum(peak, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(peak - higher)
        peak = higher
        before = total * shrink
        total = before + tl.sum(p, 1)
        t_s = _tangent_of_product(q_i, k_j, tq_i, tk_j, HAS_Q, HAS_K, PRECISION) * scale
        d_p = product(d_i, tl.trans(v_j), None, PRECISION)
        r_p = _tangent_of_product(d_i, v_j, r_i, tv_j, HAS_R, HAS_V, PRECISION)
        new_rho = (rho * before + tl.sum(p * t_s, 1)) / total
        new_d = (mean_d * before + tl.sum(p * d_p, 1)) / total
        mean_r = (mean_r * before + tl.sum(p * r_p, 1)) / total
        bent = bent * shrink + before * (rho - new_rho) * (mean_d - new_d)
        bent += tl.sum(p * (t_s - new_rho[:, None]) * (d_p - new_d[:, None]), 1)
        rho = new_rho
        mean_d = new_d
    lse = peak + tl.log2(total)
    mean_r += bent / total
    at = sums + tl.program_id(0).to(tl.int64) * queries + rows
    plane = tl.num_programs(0).to(tl.int64) * queries
    tl.store(at, lse, mask=rows < queries)
    tl.store(at + plane, rho, mask=rows < queries)
    tl.store(at + 2 * plane, mean_d, mask=rows < queries)
    tl.store(at + 3 * plane, mean_r, mask=rows < queries)

    acc = tl.zeros((BLOCK_Q, PADDED), tl.float32)
    for start in range(0, end, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        k_j = _load(k, b, h, k_b, k_h, k_t, columns, keys, N, PADDED)
        v_j = _load(v, b, h, v_b, v_h, v_t, columns, keys, W, PADDED)
        tk_j, tv_j = k_j, v_j
        if HAS_K:
            tk_j = _load(t_k, b, h, tk_b, tk_h, tk_t, columns, keys, N, PADDED)
        if HAS_V:
            tv_j = _load(t_v, b, h, tv_b, tv_h, tv_t, columns, keys, W, PADDED)
        s = product(q_i, tl.trans(k_j), None, PRECISION) * (scale * LOG2_E)
        s = tl.where(_visible(rows[:, None], columns[None, :], keys, CAUSAL), s, -float("inf"))
        p = tl.exp2(s - lse[:, None])
        t_p = p * (_tangent_of_product(q_i, k_j, tq_i, tk_j, HAS_Q, HAS_K, PRECISION) * scale - rho[:, None])
        d_p = product(d_i, tl.trans(v_j), None, PRECISION) - mean_d[:, None]
        r_p = _tangent_of_product(d_i, v_j, r_i, tv_j, HAS_R, HAS_V, PRECISION) - mean_r[:, None]
        acc = product((t_p * d_p + p * r_p).to(k_j.dtype), k_j, acc, PRECISION)
        if HAS_K:
            acc = product((p * d_p).to(k_j.dtype), tk_j, acc, PRECISION)
    _store(out_q, b, h, oq_b, oq_h, oq_t, rows, queries, acc * scale, N, PADDED)


@triton.jit
def _bend_columns_kernel(
    q, k, v, t_q, t_k, t_v, d, r, out_k, out_v, sums,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, tq_b, tq_h, tq_t, tk_b, tk_h, tk_t, tv_b, tv_h, tv_t,
    d_b, d_h, d_t, r_b, r_h, r_t, ok_b, ok_h, ok_t, ov_b, ov_h, ov_t,
    heads, queries, keys, scale,
    HAS_Q: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr, HAS_R: tl.constexpr, CAUSAL: tl.constexpr,
    N: tl.constexpr, W: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """R{d_k} and R{d_v} of one block of keys; P and the rest are transposed here: (keys, queries)."""
    b = (tl.program_id(0) // heads).to(tl.int64)
    h = (tl.program_id(0) % heads).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    k_j = _load(k, b, h, k_b, k_h, k_t, columns, keys, N, PADDED)
    v_j = _load(v, b, h, v_b, v_h, v_t, columns, keys, W, PADDED)
    tk_j, tv_j = k_j, v_j
    if HAS_K:
        tk_j = _load(t_k, b, h, tk_b, tk_h, tk_t, columns, keys, N, PADDED)
    if HAS_V:
        tv_j = _load(t_v, b, h, tv_b, tv_h, tv_t, columns, keys, W, PADDED)
    at = sums + tl.program_id(0).to(tl.int64) * queries
    plane = tl.num_programs(0).to(tl.int64) * queries
    acc_k = tl.zeros((BLOCK_K, PADDED), tl.float32)
    acc_v = tl.zeros((BLOCK_K, PADDED), tl.float32)
    first = 0
    if CAUSAL:
        first = (tl.program_id(1) * BLOCK_K // BLOCK_Q) * BLOCK_Q
    for start in range(first, queries, BLOCK_Q):
        rows = start + tl.arange(0, BLOCK_Q)
        q_i = _load(q, b, h, q_b, q_h, q_t, rows, queries, N, PADDED)
        d_i = _load(d, b, h, d_b, d_h, d_t, rows, queries, W, PADDED)
        tq_i, r_i = q_i, d_i
        if HAS_Q:
            tq_i = _load(t_q, b, h, tq_b, tq_h, tq_t, rows, queries, N, PADDED)
        if HAS_R:
            r_i = _load(r, b, h, r_b, r_h, r_t, rows, queries, W, PADDED)
        lse = tl.load(at + rows, mask=rows < queries, other=float("inf"))  # P = 0 after the last query
        rho = tl.load(at + plane + rows, mask=rows < queries, other=0.0)
        mean_d = tl.load(at + 2 * plane + rows, mask=rows < queries, other=0.0)
        mean_r = tl.load(at + 3 * plane + rows, mask=rows < queries, other=0.0)
        s = product(k_j, tl.trans(q_i), None, PRECISION) * (scale * LOG2_E)
        s = tl.where(_visible(rows[None, :], columns[:, None], keys, CAUSAL), s, -float("inf"))
        p = tl.exp2(s - lse[None, :])
        t_p = p * (_tangent_of_product(k_j, q_i, tk_j, tq_i, HAS_K, HAS_Q, PRECISION) * scale - rho[None, :])
        acc_v = product(t_p.to(d_i.dtype), d_i, acc_v, PRECISION)
        if HAS_R:
            acc_v = product(p.to(r_i.dtype), r_i, acc_v, PRECISION)
        d_p = product(v_j, tl.trans(d_i), None, PRECISION) - mean_d[None, :]
        r_p = _tangent_of_product(v_j, d_i, tv_j, r_i, HAS_V, HAS_R, PRECISION) - mean_r[None, :]
        acc_k = product((t_p * d_p + p * r_p).to(q_i.dtype), q_i, acc_k, PRECISION)
        if HAS_Q:
            acc_k = product((p * d_p).to(q_i.dtype), tq_i, acc_k, PRECISION)
    _store(out_k, b, h, ok_b, ok_h, ok_t, columns, keys, acc_k * scale, N, PADDED)
    _store(out_v, b, h, ov_b, ov_h, ov_t, columns, keys, acc_v, W, PADDED)


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a kernel is cut: queries and keys a block, warps a program, loads under way."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 1

    def within(self, queries: int, keys: int) -> "Blocks":
        return Blocks(min(self.queries, padded(queries)), min(self.keys, padded(keys)), self.warps, self.stages)

    def options(self) -> dict[str, int]:
        return {"BLOCK_Q": self.queries, "BLOCK_K": self.keys, "num_warps": self.warps, "num_stages": self.stages}


BendBlocks = Blocks | tuple[Blocks, Blocks]  # of the kernel for one tile of scores, or of those along rows and columns

TILE = 64  # the longest side of scores that one program keeps


def tangent_blocks(q: Tensor, k: Tensor, v: Tensor, precision: str) -> Blocks:
    """As large as registers allow (ptxas, for sm_80 and sm_90); three products for one take the most."""
    if q.dtype != torch.float32:
        return Blocks(64, 64 if max(q.shape[-1], v.shape[-1]) <= 64 else 32, stages=2)
    if precision != "tf32":
        return Blocks(64, 32)
    return Blocks(64, 64) if k.shape[-2] <= 64 else Blocks(64, 32, stages=2)


def bend_blocks(q: Tensor, k: Tensor, v: Tensor, precision: str) -> BendBlocks:
    wide = max(q.shape[-1], v.shape[-1]) > 64
    full = q.dtype == torch.float32
    if max(q.shape[-2], k.shape[-2]) <= TILE and not (full and precision != "tf32"):
        return Blocks(TILE, TILE, warps=8 if wide or full else 4)
    if full:
        return (Blocks(64, 32), Blocks(32, 32)) if precision == "tf32" else (Blocks(16, 32), Blocks(32, 32, warps=8))
    return (Blocks(64, 32), Blocks(32, 64)) if wide else (Blocks(64, 32, stages=2), Blocks(32, 64, stages=2))


@on_its_device
def launch_tangent(q, k, v, t_q, t_k, t_v, scale, causal, precision, by_token, blocks: Blocks | None = None) -> Tensor:
    """The tangent's kernel on these tensors; `blocks`: other than the usual ones."""
    (batch, heads, queries, n), (keys, w) = q.shape, v.shape[-2:]
    blocks = (blocks or tangent_blocks(q, k, v, precision)).within(queries, keys)
    q, k, v, *t = _rows_whole(q, k, v, t_q, t_k, t_v)
    out = empty(q, queries, w, by_token)
    given = [q, k, v, *_or_else(t, (q, k, v)), out]
    _tangent_kernel[(batch * heads, triton.cdiv(queries, blocks.queries))](
        *given, *_strides(given), heads, queries, keys, scale, *(s is not None for s in t), causal, keys <= blocks.keys,
        n, w, padded(max(n, w)), PRECISION=precision, **blocks.options(),
    )  # fmt: skip
    return out


@on_its_device
def launch_bend(
    q, k, v, t_q, t_k, t_v, d, r, scale, causal, precision, by_token=False, blocks: BendBlocks | None = None, out=None
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernels of exact mode on these tensors; `blocks`: other than the usual ones; `out`: where the results go."""
    (batch, heads, queries, n), (keys, w) = q.shape, v.shape[-2:]
    blocks = blocks or bend_blocks(q, k, v, precision)
    q, k, v, d, *rest = _rows_whole(q, k, v, d, t_q, t_k, t_v, r)
    *t, r = _or_else(rest, (q, k, v, d))
    given = [q, k, v, *t, d, r]
    out_q, out_k, out_v = out or (empty(q, z.shape[-2], z.shape[-1], by_token) for z in (q, k, v))
    common = (heads, queries, keys, scale, *(s is not None for s in rest), causal, n, w, padded(max(n, w)))
    if isinstance(blocks, Blocks):
        tensors = [*given, out_q, out_k, out_v]
        _bend_tile_kernel[(batch * heads,)](
            *tensors, *_strides(tensors), *common, PRECISION=precision, **blocks.within(queries, keys).options()
        )
        return out_q, out_k, out_v
    sums = q.new_empty((4, batch * heads, queries), dtype=torch.float32)
    rows, columns = (z.within(queries, keys) for z in blocks)
    _bend_rows_kernel[(batch * heads, triton.cdiv(queries, rows.queries))](
        *given, out_q, sums, *_strides([*given, out_q]), *common, PRECISION=precision, **rows.options()
    )
    _bend_columns_kernel[(batch * heads, triton.cdiv(keys, columns.keys))](
        *given, out_k, out_v, sums, *_strides([*given, out_k, out_v]), *common, PRECISION=precision, **columns.options()
    )
    return out_q, out_k, out_v


def _rows_whole(*tensors: Tensor | None) -> list:
    """The kernels take any strides but the last, which is 1."""
    return [z if z is None or z.stride(-1) == 1 else z.contiguous() for z in tensors]


def _or_else(tensors, others) -> list[Tensor]:
    """For what is None a tensor that the kernel is told not to read."""
    return [other if z is None else z for z, other in zip(tensors, others, strict=True)]


def _strides(tensors: list[Tensor]) -> list[int]:
    return [stride for z in tensors for stride in z.stride()[:3]]
