"""Attention's kernels on a GPU: are they right, and what do they cost beside the formulas written out?

    PYTHONPATH=src python benchmarks/kernels_attention.py
    PYTHONPATH=src python benchmarks/kernels_attention.py --tune
    PYTHONPATH=src compute-sanitizer --tool memcheck python benchmarks/kernels_attention.py --quick

Errors are relative, in norm, against the formulas in float64 on the same rounded operands; `plain error`: what the
formulas make in the operands' own format. Times are medians over replays of a CUDA graph: no launch is waited for. The
yardsticks are torch's fused attention, forward, and forward and backward together. q, k and v are views of one
tensor (batch, tokens, 3, heads, width), as a transformer has them. With --tune: every kernel's time by its blocks.
With --quick: every call once, of two samples, checked and not timed, its name printed before it starts.

With --out FILE: all numbers, as JSON. Exits with 1 if an error is too large, and with 2, naming the call, if one leaves
the GPU unusable, as an illegal memory access does: nothing that comes after it could be trusted.

Result: none is recorded, because this is a check and not a measurement; docs/speed-details.md names it.
"""

import argparse
import functools
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from triton.testing import do_bench_cudagraph

import threepass
from threepass.kernels.attention import attention_bend, attention_bend_packed, attention_tangent
from threepass.kernels.attention import triton_kernel as kernels
from threepass.rules.attention import Scores, curved, tangent
from threepass.rules.table import rule_for

START = time.perf_counter()
SECONDS = 45  # after which what is left of the slow yardsticks is not begun

# batch, heads, tokens, width
SHAPES = [(256, 3, 64, 64), (16, 12, 1024, 64)]
FORMATS = [(torch.bfloat16, "tf32", 1e-2), (torch.float32, "tf32", 2e-3), (torch.float32, "tf32x3", 1e-5)]

# queries, keys, width of q, width of v, causal, which of t_q, t_k, t_v and r there are, format
ODD = [
    (64, 64, 64, 64, True, "qkvr", torch.bfloat16),
    (200, 200, 64, 64, True, "qkvr", torch.bfloat16),
    (197, 77, 40, 24, False, "qr", torch.float16),
    (197, 77, 40, 24, False, "qk", torch.bfloat16),
    (50, 50, 40, 24, False, "qkvr", torch.float16),
    (50, 50, 64, 32, False, "qkvr", torch.bfloat16),
    (33, 50, 64, 64, False, "kv", torch.bfloat16),
    (300, 300, 128, 128, True, "qkvr", torch.bfloat16),
    (130, 130, 64, 64, True, "qkvr", torch.float32),
]

BLOCKS = {
    "tangent": [(64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (64, 32, 4, 2), (64, 32, 4, 3)],
    "tile": [(64, 64, 4, 1), (64, 64, 8, 1)],
    "rows": [(64, 32, 4, 1), (64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 4, 2), (128, 32, 8, 2), (32, 32, 4, 2)],
    "columns": [(32, 64, 4, 1), (32, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 2), (32, 128, 8, 2), (32, 32, 4, 2)],
}


def late() -> bool:
    return time.perf_counter() - START > SECONDS


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def operands(batch: int, heads: int, tokens: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, t_q, t_k, t_v, d, r, each (batch, heads, tokens, width)."""
    values = draw(batch, tokens, 3, heads, width, dtype=dtype).permute(2, 0, 3, 1, 4)
    tangents = draw(batch, tokens, 3, heads, width, dtype=dtype).permute(2, 0, 3, 1, 4)
    errors = draw(2, batch, tokens, heads, width, dtype=dtype).transpose(2, 3)
    return [*values, *tangents, *errors]


def wide(signals) -> list[Tensor | None]:
    return [None if z is None else z.double() for z in signals]


def worst(got, expected) -> float:
    """The largest relative error of several results."""
    return max(((g.double() - e).norm() / e.norm()).item() for g, e in zip(got, expected, strict=True))


def both(signals, scale: float, causal: bool, precision: str):
    """t_u, R{d_q}, R{d_k}, R{d_v} by the kernels."""
    how = (scale, causal, precision, True)
    return [attention_tangent(*signals[:6], *how), *attention_bend(*signals, *how)]


def both_plain(signals, scale: float, causal: bool):
    scores = Scores(scale, causal)
    return [tangent(*signals[:6], scores), *curved(*signals, scores)]


def milliseconds(call) -> float:
    return do_bench_cudagraph(call, rep=20, return_mode="median")


def forward_and_backward(q: Tensor, k: Tensor, v: Tensor, d: Tensor):
    leaves = [z.detach().requires_grad_() for z in (q, k, v)]
    return torch.autograd.grad(F.scaled_dot_product_attention(*leaves), leaves, d)


def set_precision(precision: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"


def measure(shape, dtype: torch.dtype, precision: str, limit: float) -> dict:
    set_precision("tf32x3")
    signals, scale = operands(*shape, dtype), shape[-1] ** -0.5
    expected = both_plain(wide(signals), scale, False)
    set_precision(precision)
    how, scores = (scale, False, precision, True), Scores(scale)
    calls = {
        "tangent": lambda: attention_tangent(*signals[:6], *how),
        "bend": lambda: attention_bend(*signals, *how),
        "tangent plain": lambda: tangent(*signals[:6], scores),
        "bend plain": lambda: curved(*signals, scores),
        "sdpa": lambda: F.scaled_dot_product_attention(*signals[:3]),
        "sdpa fwd+bwd": lambda: forward_and_backward(*signals[:3], signals[6]),
    }
    row = {"shape": list(shape), "dtype": str(dtype).removeprefix("torch."), "precision": precision, "limit": limit}
    where = f"{shape} {row['dtype']} {precision}"
    for name in ("tangent", "tangent plain"):
        row[f"{name} error"] = attempt(f"{name} {where}", lambda name=name: worst([calls[name]()], expected[:1]))
    for name in ("bend", "bend plain"):
        row[f"{name} error"] = attempt(f"{name} {where}", lambda name=name: worst(calls[name](), expected[1:]))
    expected.clear()
    for name, call in calls.items():
        row[name] = attempt(f"{name} {where}, timed in a CUDA graph", milliseconds, call)
    return row


def measure_compiled(row: dict) -> None:
    """Adds the formulas' times under torch.compile."""
    dtype, scale = getattr(torch, row["dtype"]), row["shape"][-1] ** -0.5
    set_precision(row["precision"])
    signals, scores = operands(*row["shape"], dtype), Scores(scale)
    for name, formula, count in (("tangent", tangent, 6), ("bend", curved, 8)):
        if late():
            return
        torch._dynamo.reset()
        compiled = torch.compile(functools.partial(formula, scores=scores), dynamic=False)
        call = functools.partial(compiled, *signals[:count])
        row[f"{name} compiled"] = attempt(f"{name} compiled {row['shape']} {row['dtype']}", milliseconds, call)


def attempt(name: str, function, *args):
    """What a call gives, or why it fails: the other measurements still count, unless the GPU is lost."""
    try:
        result = function(*args)
        torch.cuda.synchronize()
        return result
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        print(f"GPU LOST in {name}: {text}", flush=True)
        os._exit(2)  # what is left of torch's own clean-up would wait for the GPU, or hide the message
    return text


def odd(queries, keys, n, w, causal, present, dtype) -> float:
    """The error of calls with masks, lengths, widths and missing signals of all sorts."""
    sizes = {"q": (queries, n), "k": (keys, n), "v": (keys, w), "r": (queries, w)}
    values = [draw(2, 3, *sizes[z], dtype=dtype) for z in "qkv"]
    t_q, t_k, t_v, r = (draw(2, sizes[z][0], 3, sizes[z][1], dtype=dtype).transpose(1, 2) if z in present else None
                        for z in "qkvr")  # fmt: skip
    signals = [*values, t_q, t_k, t_v, draw(2, 3, queries, w, dtype=dtype), r]
    return worst(both(signals, 0.2, causal, "tf32x3"), both_plain(wide(signals), 0.2, causal))


def rule_compiled() -> float:
    """The rule traced by make_fx and compiled, between a product and a reshape, against the same in eager."""
    z = operands(2, 3, 64, 64, torch.bfloat16)
    u = torch.empty_like(z[6], device="meta")

    def passes(q, k, v, t_q, t_k, t_v, d, r):
        m = rule_for(F.scaled_dot_product_attention).make(u, q * 1.5, k, v)
        signals = [m.push(t_q, t_k, t_v), *m.bend([r], [d], [t_q, t_k, t_v])]
        return [s.transpose(1, 2).flatten(2).relu() for s in signals]

    graph = make_fx(passes)(*z)
    assert "threepass.attention_bend" in graph.code
    return worst(torch.compile(graph, dynamic=False)(*z), [s.double() for s in passes(*z)])


class Net(nn.Module):
    """One block of a transformer: (batch, 64, 96) -> (batch, 10)."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(96, 288), nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).view(len(x), -1, 3, 3, 32).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2)).mean(1)


def engine(mode: str) -> float:
    """Pass 3's gradients on the GPU in float32 against those on the CPU in float64."""
    set_precision("tf32x3")
    torch.manual_seed(0)
    model, x, y = Net().double(), torch.randn(8, 64, 96, dtype=torch.float64), torch.arange(8)
    run = functools.partial(threepass.three_pass, loss_fn=F.cross_entropy, mode=mode, separate=True)
    expected = run(model, x=x, y=y).third_grads
    got = run(model.float().cuda(), x=x.float().cuda(), y=y.cuda()).third_grads
    return worst([got[name].cpu() for name in expected], expected.values())


def tune() -> None:
    for shape in SHAPES:
        for dtype, precision, _ in FORMATS[:2]:
            signals, scale = operands(*shape, dtype), shape[-1] ** -0.5
            how = (scale, False, precision, True)
            usual = kernels.bend_blocks(*signals[:3], precision)
            rows, columns = usual if isinstance(usual, tuple) else (kernels.Blocks(32, 32), kernels.Blocks(32, 32))
            for kernel, candidates in BLOCKS.items():
                if kernel == "tile" and shape[2] > kernels.TILE:
                    continue
                for candidate in candidates:
                    cut = kernels.Blocks(*candidate)
                    if kernel == "tangent":
                        call = functools.partial(kernels.launch_tangent, *signals[:6], *how, cut)
                    else:
                        cuts = {"tile": cut, "rows": (cut, columns), "columns": (rows, cut)}[kernel]
                        call = functools.partial(kernels.launch_bend, *signals, *how, cuts)
                    name = f"{shape} {dtype} {precision} {kernel} {candidate}"
                    print(name, attempt(name, milliseconds, call), flush=True)


def quick_calls(shape, dtype: torch.dtype, precision: str, limit: float):
    """Name, call, what it should give and how near, for the kernels and the yardsticks on two samples."""
    batch, heads, tokens, width = shape
    signals, scale = operands(min(2, batch), heads, tokens, width, dtype), width**-0.5
    (q, k, v, *t, d, _), how = signals, (scale, False, precision)
    set_precision("tf32x3")
    t_u, *bent = both_plain(wide(signals), scale, False)
    exact = [z for z in wide((q, k, v, d)) if z is not None]
    fused, errors = F.scaled_dot_product_attention(*exact[:3]), forward_and_backward(*exact)
    set_precision(precision)
    where = f"{(heads, tokens, width)} {dtype} {precision}"
    return [
        (f"tangent {where}", lambda: [attention_tangent(q, k, v, *t, *how, True)], [t_u], limit),
        (f"bend {where}", lambda: attention_bend(*signals, *how, True), bent, limit),
        (f"bend packed {where}", lambda: attention_bend_packed(*signals, *how), bent, limit),
        (f"sdpa {where}", lambda: [F.scaled_dot_product_attention(q, k, v)], [fused], 1e-2),
        (f"sdpa fwd+bwd {where}", lambda: forward_and_backward(q, k, v, d), errors, 1e-2),
    ]


def quick() -> int:
    """Every call once, its name before it starts; the number of those that are wrong."""

    def wrong(name: str, limit: float, function, *args) -> bool:
        print(name, end=" ", flush=True)
        error = attempt(name, function, *args)
        good = isinstance(error, float) and error <= limit
        print(f"{error:.1e}" if isinstance(error, float) else error, "ok" if good else "FAILED", flush=True)
        return not good

    failed = 0
    for shape in SHAPES:
        for form in FORMATS:
            for name, call, expected, limit in quick_calls(shape, *form):
                failed += wrong(name, limit, lambda call, expected: worst(call(), expected), call, expected)
    failed += sum(wrong(f"odd {case}", 1e-5 if case[-1] == torch.float32 else 1e-2, odd, *case) for case in ODD)
    failed += sum(wrong(f"engine, {mode}", 1e-4, engine, mode) for mode in ("paper", "exact"))
    print(f"{failed} failed; {time.perf_counter() - START:.0f} s")
    return failed


def show(row: dict) -> None:
    print(f"{row['shape']} {row['dtype']} {row['precision']}")
    for key, value in row.items():
        if isinstance(value, float) and key != "limit":
            print(f"    {key:18s} {value:.1e}" if "error" in key else f"    {key:18s} {value:.4f} ms")
        elif isinstance(value, str) and key not in ("dtype", "precision"):
            print(f"    {key:18s} {value}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time every kernel by its blocks, and nothing else")
    parser.add_argument("--quick", action="store_true", help="every call once and not timed: for compute-sanitizer")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.tune:
        tune()
        return 0
    if options.quick:
        return int(quick() > 0)
    rows = []
    for shape in SHAPES:
        for how in FORMATS:
            rows.append(measure(shape, *how))
            show(rows[-1])
    checks = {
        f"odd {case}": (attempt(f"odd {case}", odd, *case), 1e-5 if case[-1] == torch.float32 else 1e-2) for case in ODD
    }
    checks["rule, compiled"] = (attempt("rule, compiled", rule_compiled), 1e-2)
    checks |= {f"engine, {mode}": (attempt(f"engine, {mode}", engine, mode), 1e-4) for mode in ("paper", "exact")}
    for row in rows:
        if row["precision"] == "tf32":
            measure_compiled(row)
        show(row)
        checks |= {f"{row['shape']} {row['dtype']} {row['precision']} {k}": (row[k], row["limit"])
                   for k in ("tangent error", "bend error")}  # fmt: skip
    failed = 0
    for name, (error, limit) in checks.items():
        good = isinstance(error, float) and error <= limit
        failed += not good
        print("ok    " if good else "FAILED", f"{error:.1e}" if isinstance(error, float) else error, name)
    print(f"{failed} failed; {time.perf_counter() - START:.0f} s")
    if options.out is not None:
        found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows, "checks": checks}
        options.out.write_text(json.dumps(found, indent=1))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
