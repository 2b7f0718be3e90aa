"""The kernels of layer norms and activations on a GPU, beside the same formulas compiled by Inductor.

    PYTHONPATH=src python benchmarks/kernels_rows.py [--out FILE] [--tune]

Signals are (batch, tokens, width), as in ViT-Tiny at batch 256: 192 columns in the stream, 768 after the first weight
of a block. Times are medians over replays of a CUDA graph. `share`: bytes read and written once each, over the time,
as a share of what a copy of such a tensor reaches. With --tune: the kernels by their blocks.

Result: results/bench/h200-kernels-rows.json, quoted by docs/speed-details.md: in bfloat16
they take 0.47 to 0.78 of the time of Inductor's kernels.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.testing import do_bench_cudagraph

from threepass.kernels import activation, layer_norm
from threepass.kernels.activation import half_gelu
from threepass.kernels.activation import triton_kernel as activation_triton
from threepass.kernels.launch import multiprocessors
from threepass.kernels.layer_norm import triton_kernel as layer_norm_triton
from threepass.numerics.precision import mix_of

BATCH, TOKENS, STREAM, HIDDEN = 256, 64, 192, 768


def draw(width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(BATCH, TOKENS, width, device="cuda").to(dtype)


def milliseconds(call: Callable[[], object]) -> float:
    return do_bench_cudagraph(call, rep=50, return_mode="median")


def moved(*tensors: Tensor) -> int:
    return sum(z.numel() * z.element_size() for z in tensors)


def cases(dtype: torch.dtype) -> dict[str, tuple[Callable, Callable, list[Tensor], tuple]]:
    """Name: operation, formula, signals, and the other arguments."""
    t, t_2, a, d = (draw(STREAM, dtype) for _ in range(4))
    w, b = torch.randn(2, STREAM, device="cuda").to(dtype)
    ratio, seed = torch.tensor(0.1, device="cuda"), torch.tensor(5, dtype=torch.int32, device="cuda")
    r, h, e, s = (draw(HIDDEN, dtype) for _ in range(4))

    def plain_tangent(t, t_2, a, d):
        t_u, _, g, t_sum = layer_norm._plain(t, t_2, a, d, w, b, ratio, 1e-5, dtype, seed, False, True)
        return t_u, mix_of(F.layer_norm(a, [STREAM], w, b), t_u, ratio, seed), g, t_sum

    def pushed(t, a, f, backward):
        t_u = backward(t, a)
        return t_u, mix_of(f(a), t_u, ratio, seed)

    def plain_bend(a, t, d, r):
        return layer_norm._plain_bend(a, t, d, r, None, w, 1e-5, dtype, True)

    return {
        "layer norm, pass 3": (
            lambda *z: layer_norm.tangent(*z, w, b, ratio, 1e-5, dtype, seed), plain_tangent, [t, t_2, a, d], (t, t, t),
        ),
        "layer norm, exact mode's last backward pass": (
            lambda *z: layer_norm.bend(*z, None, w, 1e-5, dtype, True), plain_bend, [a, t, d, t_2], (t,),
        ),
        "gelu, pass 3, as an expression": (
            torch.compile(lambda t, a: pushed(t, a, half_gelu.gelu, half_gelu.gelu_backward), dynamic=False),
            lambda t, a: pushed(t, a, F.gelu, torch.ops.aten.gelu_backward.default), [s, h], (r, r),
        ),
        "gelu, pass 2": (
            lambda r, a: activation.error(r, a, "gelu"),
            lambda r, a: activation._plain(r, a, "gelu", None, None, False), [r, h], (r,),
        ),
        "gelu, exact mode's last backward pass": (
            lambda r, a, d, t: activation.error(r, a, "gelu", d, t, True),
            lambda r, a, d, t: activation._plain(r, a, "gelu", d, t, True), [r, h, e, s], (r, r),
        ),
    }  # fmt: skip


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The relative difference, in norm; of bfloat16 some is rounding at random."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def measure(dtype: torch.dtype) -> list[dict]:
    x = draw(HIDDEN, dtype)
    y = torch.empty_like(x)
    speed = 2 * moved(x) / milliseconds(lambda: y.copy_(x))
    rows = []
    for name, (operation, formula, signals, results) in cases(dtype).items():
        compiled = torch.compile(formula, dynamic=False)
        ours, theirs = (milliseconds(partial(f, *signals)) for f in (operation, compiled))
        share = moved(*signals, *results) / ours / speed
        error = max(
            relative_error(g, e) for g, e in zip(operation(*signals), compiled(*signals), strict=True) if g.numel()
        )
        rows.append({"case": name, "dtype": str(dtype)[6:], "ms": ours, "compiled ms": theirs, "share": share,
                     "difference": error})  # fmt: skip
        print(f"{name:35} {dtype} {ours:.4f} ms, compiled {theirs:.4f}, share {share:.2f}, {error:.1e}", flush=True)
    return rows


def _warps(each: int, device: torch.device, registers: int) -> int:
    """So many on each multiprocessor, in place of what fits."""
    return each * multiprocessors(device)


def tune() -> None:
    """The kernels by the sizes of their blocks."""
    of_rows, of_tiles = layer_norm_triton, activation_triton
    for dtype in (torch.bfloat16, torch.float32):
        calls = [partial(operation, *signals) for operation, _, signals, _ in cases(dtype).values()]
        for of_rows.BLOCK in (256, 512):
            for of_rows.ROW in (128, 256):
                for each in (12, 16, 24, 32):
                    of_rows.resident_warps = partial(_warps, each)
                    times = " ".join(f"{milliseconds(call):.4f}" for call in calls[:2])
                    print("layer norm", dtype, of_rows.BLOCK, of_rows.ROW, each, times, flush=True)
        for of_tiles.COLUMNS in (128, 256):
            for of_tiles.BYTES in (2048, 4096):
                for each in (4, 6, 8):
                    of_tiles.resident_warps = partial(_warps, each * of_tiles.WARPS)
                    times = " ".join(f"{milliseconds(call):.4f}" for call in calls[-2:])
                    print("gelu", dtype, of_tiles.COLUMNS, of_tiles.BYTES, each, times, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    if args.tune:
        tune()
        return
    rows = [row for dtype in (torch.bfloat16, torch.float32) for row in measure(dtype)]
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
             "signals": [BATCH, TOKENS, STREAM, HIDDEN], "rows": rows}  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
