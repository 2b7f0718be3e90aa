"""Checks and times the convolution kernels on a GPU, layer by layer of plain-20, beside cuDNN.

    PYTHONPATH=src python benchmarks/kernels_conv.py --out results/bench/h200-kernels-conv.json

For every layer shape, at batch 128 (float32 with TF32, bfloat16) and 1024 (bfloat16), in microseconds:

    best    the fastest of the block sizes below, which it names;   table   that of the table in `triton_kernel.py`
    cudnn   the convolution alone;   +ops   with its ReLU, mask or mix as separate kernels
    errors  |z - z64| / |z64| against float64 on the same inputs / slope - 1 = <z, z64> / <z64, z64> - 1; then cuDNN's,
            and for a tangent that of what the mix adds to a

A time is the median over replays of a CUDA graph of 20 calls; what fits the L2 cache stays there, for cuDNN too.
Kernels are compiled beforehand by worker processes, into Triton's cache.

Result: results/bench/h200-kernels-conv.json, quoted by docs/speed-details.md. In plain-20
they take 0.31 to 0.65 of the time of cuDNN with separate kernels.
"""

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from threepass.kernels import conv
from threepass.kernels.conv import triton_kernel as conv_triton
from threepass.kernels.conv.triton_kernel import Blocks

LAYERS = [(3, 16, 32, 1), (16, 16, 32, 1), (16, 32, 32, 2), (32, 32, 16, 1), (32, 64, 16, 2), (64, 64, 8, 1)]
SETTINGS = [(128, torch.float32), (128, torch.bfloat16), (1024, torch.bfloat16)]
ODD = [(5, 3, 16, 7, 9, 1), (3, 24, 40, 9, 7, 2), (2, 64, 64, 5, 5, 1), (2, 50, 64, 6, 5, 2)]
OPS = ("forward", "tangent", "input", "weight")
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 1e-2}
SWEEP_SECONDS = 75
CALLS, REPLAYS = 20, 7
RATIO, SEED = 1e-3, 5
BROKEN: list[str] = []

PRODUCT = {
    4: [(64, 32, 2), (64, 32, 4), (128, 32, 4), (128, 32, 8), (256, 32, 4), (256, 32, 8)],
    16: [(64, 16, 2), (64, 16, 4), (128, 16, 4), (128, 32, 4), (128, 64, 4), (256, 16, 4), (256, 64, 8),
         (128, 16, 4, 3), (128, 64, 4, 3), (256, 16, 8, 3)],
    32: [(64, 32, 2), (64, 32, 4), (128, 32, 4), (64, 128, 4), (128, 128, 8), (64, 32, 4, 3), (128, 32, 4, 3),
         (128, 32, 8, 4), (64, 64, 4, 3)],
    64: [(32, 64, 2), (64, 64, 4), (128, 64, 8), (32, 64, 2, 3), (32, 64, 4, 3), (64, 64, 4, 3), (64, 32, 4, 4),
         (64, 64, 8, 3), (128, 64, 8, 3), (64, 128, 4, 2)],
}  # fmt: skip
# (pixels, k, warps, stages, tiles) x splits
WEIGHT = {
    4: ([(64, 32, 4, 1, 1), (128, 32, 4, 1, 1), (128, 32, 8, 1, 1), (128, 32, 4, 2, 1)], [1, 2, 4]),
    16: ([(32, 64, 4, 1, 3), (64, 64, 4, 1, 3), (128, 64, 4, 1, 3), (64, 64, 8, 1, 3), (128, 64, 8, 1, 3),
          (64, 64, 4, 2, 3), (64, 16, 4, 1, 3), (64, 256, 8, 1, 1), (64, 64, 4, 2, 1)], [1 / 2, 1, 2, 4]),
    32: ([(32, 32, 4, 1, 3), (64, 32, 4, 1, 3), (64, 32, 4, 2, 3), (64, 128, 8, 1, 3), (128, 32, 8, 1, 3),
          (64, 64, 4, 2, 1), (64, 128, 4, 2, 1), (64, 128, 8, 2, 1)], [1 / 6, 1 / 3, 2 / 3, 1, 2]),
    64: ([(32, 64, 4, 1, 3), (64, 64, 4, 1, 3), (64, 64, 8, 1, 3), (64, 64, 4, 2, 1), (64, 64, 4, 3, 1),
          (32, 64, 4, 3, 1), (64, 128, 8, 2, 1)], [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]),
}  # fmt: skip


def compiled_only(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    return lambda *args, **constants: kernel.warmup(*args, grid=grid, **constants)


class Layer:
    """One layer's signals, and its four operations: by the kernels, by cuDNN, with the elementwise kernels, exactly."""

    def __init__(self, batch: int, i: int, o: int, height: int, width: int, stride: int, dtype: torch.dtype):
        torch.manual_seed(0)
        self.shape, self.dtype, self.stride = (batch, i, o, height, width, stride), dtype, stride
        self.size = (height, width)
        out = tuple((s - 1) // stride + 1 for s in self.size)
        self.a = self.signal(batch, i, *self.size).relu_()
        self.t = self.signal(batch, i, *self.size)
        self.w = self.signal(o, i, 3, 3) * (2 / (9 * i)) ** 0.5
        self.b = torch.randn(o, device="cuda")
        self.u = self.signal(batch, o, *out).relu_()
        self.d = torch.where(self.u > 0, self.signal(batch, o, *out), -0.0).to(memory_format=torch.channels_last)
        self.ratio = torch.tensor(RATIO, device="cuda")
        self.seed = torch.tensor(SEED, dtype=torch.int32, device="cuda")

    def signal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(self.dtype, memory_format=torch.channels_last)

    def kernel(self, op: str, blocks: Blocks | None = None) -> Any:
        if op == "forward":
            return conv_triton.forward(self.a, self.w, self.b, self.stride, True, blocks=blocks)
        if op == "gate":
            return conv_triton.forward(self.a, self.w, self.b, self.stride, False, self.d, blocks=blocks)
        if op == "tangent":
            return conv_triton.forward_tangent(self.t, self.w, self.stride, self.u, self.ratio, self.seed, blocks)
        if op == "input":
            return conv_triton.backward_input(self.d, self.w, self.stride, self.size, self.a, blocks=blocks)
        return conv_triton.backward_weight(self.d, self.a, self.stride, True, blocks=blocks)

    def cudnn(self, op: str, w: Tensor, d: Tensor, a: Tensor, t: Tensor) -> Any:
        if op in ("forward", "gate", "tangent"):
            return F.conv2d(t if op == "tangent" else a, w, None, self.stride, 1)
        mask = (op == "input", op == "weight", False)
        grads = torch.ops.aten.convolution_backward(
            d, a, w, None, [self.stride] * 2, [1, 1], [1, 1], False, [0, 0], 1, mask
        )
        return grads[mask.index(True)]

    def cudnn_alone(self, op: str) -> Any:
        return self.cudnn(op, self.w, self.d, self.a, self.t)

    def cudnn_and_ops(self, op: str) -> Any:
        if op == "forward":
            return F.conv2d(self.a, self.w, self.b.to(self.dtype), self.stride, 1).relu_()
        z = self.cudnn_alone(op)
        if op == "gate":
            return torch.ops.aten.threshold_backward(z, self.u, 0)
        if op == "tangent":
            t = torch.ops.aten.threshold_backward(z, self.u, 0)
            return t, torch.add(self.u, t, alpha=RATIO)
        return torch.ops.aten.threshold_backward(z, self.a, 0) if op == "input" else (z, self.d.sum((0, 2, 3)))

    def exact(self, op: str) -> tuple[Tensor, Tensor]:
        """The operation in float64, and its convolution alone."""
        w, d, a, t, u = (z.double() for z in (self.w, self.d, self.a, self.t, self.u))
        z = self.cudnn(op, w, d, a, t)
        if op == "forward":
            return (z + self.b.double().view(-1, 1, 1)).relu(), z
        if op == "gate":
            return (z + self.b.double().view(-1, 1, 1)) * (u > 0), z
        if op == "tangent":
            return z * (u > 0), z
        return (z * (a > 0) if op == "input" else z), z


def accuracy(z: Tensor, exact: Tensor) -> tuple[float, float]:
    z = z.double()
    square = exact.square().sum()
    return float((z - exact).norm() / square.sqrt()), float((z * exact).sum() / square - 1)


def check(layer: Layer, op: str, blocks: Blocks | None) -> dict[str, tuple[float, float]]:
    """Errors of the kernel and of cuDNN; a broken contract is printed and counted."""
    got, again = (z if isinstance(z, tuple) else (z,) for z in (layer.kernel(op, blocks), layer.kernel(op, blocks)))
    exact, alone = layer.exact(op)
    result = {"kernel": accuracy(got[0], exact), "cudnn": accuracy(layer.cudnn_alone(op), alone)}
    contracts = {
        "the same bits twice": all(map(torch.equal, got, again)),
        "near float64": result["kernel"][0] < TOLERANCE[layer.dtype],
    }
    if op == "input":
        contracts["marks"] = torch.equal((got[0] == 0) & torch.signbit(got[0]), layer.a <= 0)
    if op == "weight":
        contracts["sum of d"] = accuracy(got[1], layer.d.double().sum((0, 2, 3)))[0] < 1e-5
    if op == "tangent":
        result["mix"] = accuracy(got[1].double() - layer.u.double(), RATIO * exact)
        few = layer.dtype == torch.bfloat16 and exact.numel() < 100_000  # too few to see the slope through the noise
        contracts["slope of the mix"] = few or abs(result["mix"][1]) < 0.05
    for name, holds in contracts.items():
        if not holds:
            BROKEN.append(f"{name}: {op} {layer.shape} {layer.dtype} {blocks} {result}")
            print("BROKEN", BROKEN[-1])
    return result


def microseconds(call: Callable[[], Any]) -> float:
    """Of one call, by replays of a CUDA graph of many."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return statistics.median(times)


def host_microseconds(call: Callable[[], Any], calls: int = 300) -> float:
    """What one eager call costs the CPU."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def candidates(op: str, i: int, o: int) -> list[Blocks]:
    def of(table: dict[int, Any], channels: int) -> Any:
        return table[4 if channels < 16 else channels]

    if op != "weight":
        return [Blocks(*c) for c in of(PRODUCT, o if op == "input" else i)]
    configurations, splits = of(WEIGHT, i)
    return [Blocks(*c, s) for c, s in itertools.product(configurations, splits)]


def compile_job(job: tuple[tuple[int, ...], torch.dtype, str, Blocks | None]) -> str | None:
    shape, dtype, op, blocks = job
    type(conv_triton._forward_kernel).__getitem__ = compiled_only
    try:
        Layer(*shape, dtype).kernel(op, blocks)
    except Exception as error:
        return f"{shape} {dtype} {op} {blocks}: {type(error).__name__} {str(error)[:200]}"
    return None


def compile_all() -> None:
    """Every kernel that will run, by worker processes; what does not compile is named."""
    jobs: list[Any] = []
    dtypes = (torch.float32, torch.bfloat16)
    for (i, o, size, stride), dtype, op in itertools.product(LAYERS, dtypes, OPS):
        blocks = {Blocks(b.pixels, b.k, b.warps, b.stages, b.tiles, 64) for b in candidates(op, i, o)}
        swept = op != "tangent"  # its product is forward's
        jobs += [((16, i, o, size, size, stride), dtype, op, b) for b in [*(blocks if swept else ()), None]]
        if op == "forward":
            jobs.append(((16, i, o, size, size, stride), dtype, "gate", None))
    jobs += [(shape, dtype, op, None) for shape, dtype, op in itertools.product(ODD, dtypes, (*OPS, "gate"))]
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(min(14, max(1, (os.cpu_count() or 2) - 1))) as pool:
        for failure in filter(None, pool.imap_unordered(compile_job, jobs)):
            print("does not compile:", failure)
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - start:.0f} s")


def best_of(layer: Layer, op: str, i: int, o: int, deadline: float) -> tuple[Blocks | None, float]:
    """The fastest block sizes, None being the table's."""
    best, least = None, microseconds(lambda: layer.kernel(op))
    for blocks in candidates(op, i, o):
        if time.perf_counter() > deadline:
            print("out of time: the sweep is not complete")
            break
        try:
            took = microseconds(lambda blocks=blocks: layer.kernel(op, blocks))
        except Exception as error:
            print(f"{layer.shape} {op} {blocks}: {type(error).__name__} {str(error)[:120]}")
            continue
        if took < least:
            best, least = blocks, took
    return best, least


def measure(deadline: float) -> list[dict[str, Any]]:
    print(f"{'':38}{'best':>7}{'table':>7}{'cudnn':>7}{'+ops':>7}  errors of kernel and cuDNN; best blocks")
    rows = []
    for (batch, dtype), (i, o, size, stride) in itertools.product(SETTINGS, LAYERS):
        layer = Layer(batch, i, o, size, size, stride, dtype)
        forward, took = best_of(layer, "forward", i, o, deadline)
        rows.append(measured(layer, "forward", forward, took))
        for op in ("gate", "tangent"):
            rows.append(measured(layer, op, forward, microseconds(functools.partial(layer.kernel, op, forward))))
        for op in ("input", "weight"):
            rows.append(measured(layer, op, *best_of(layer, op, i, o, deadline)))
    return rows


def measured(layer: Layer, op: str, blocks: Blocks | None, took: float) -> dict[str, Any]:
    batch, i, o, size, _, stride = layer.shape
    row = {
        "batch": batch, "dtype": str(layer.dtype), "in": i, "out": o, "size": size, "stride": stride, "op": op,
        "best": took, "blocks": str(blocks), "table": microseconds(lambda: layer.kernel(op)),
        "cudnn": microseconds(lambda: layer.cudnn_alone(op)),
        "cudnn_and_ops": microseconds(lambda: layer.cudnn_and_ops(op)),
    }  # fmt: skip
    row |= {"errors": check(layer, op, blocks)} if batch == 128 else {}
    show(row)
    return row


def show(row: dict[str, Any]) -> None:
    name = "{batch:5} {dtype:9} {in:3}>{out:<3}{size:3}/{stride} {op:8}".format(
        **{**row, "dtype": row["dtype"].removeprefix("torch.")}
    )
    errors = " ".join(f"{e:.0e}/{slope:+.0e}" for e, slope in row.get("errors", {}).values())
    blocks = row["blocks"].replace("pixels=", "p").replace("warps=", "w").replace("stages=", "s")
    times = "".join(f"{row[key]:7.1f}" for key in ("best", "table", "cudnn", "cudnn_and_ops"))
    print(f"{name:38}{times}  {errors:44} {blocks.removeprefix('Blocks')}", flush=True)


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of plain-20's 19 convolutions: microseconds a step by operation."""
    count = dict(zip(LAYERS, (1, 6, 1, 5, 1, 5), strict=True))
    found: dict[str, Any] = {}
    for row in rows:
        weight = count[row["in"], row["out"], row["size"], row["stride"]]
        start = dict.fromkeys(("best", "table", "cudnn", "cudnn_and_ops"), 0.0)
        sums = found.setdefault(f"{row['batch']} {row['dtype']} {row['op']}", start)
        for key in sums:
            sums[key] += weight * row[key]
    for name, sums in found.items():
        print(f"plain-20 {name:30}", "  ".join(f"{key} {value:7.1f}" for key, value in sums.items()))
    return found


def check_odd_shapes() -> None:
    for shape, dtype in itertools.product(ODD, (torch.float32, torch.bfloat16)):
        layer = Layer(*shape, dtype)
        worst = max(check(layer, op, None)["kernel"][0] for op in (*OPS, "gate"))
        print(f"odd shape {shape} {dtype}: worst error {worst:.0e}")


def check_compiled() -> dict[str, float]:
    """The operations inside torch.compile: seen through (`triton_op`) and opaque (`custom_op`); same numbers, times."""
    layer = Layer(128, 16, 16, 32, 32, 1, torch.float32)

    def opaque_forward(a: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return conv_triton.forward(a, w, b, 1, True, None)

    def opaque_input(d: Tensor, w: Tensor, a: Tensor) -> Tensor:
        return conv_triton.backward_input(d, w, 1, (32, 32), a)

    forward = torch.library.custom_op("bench::forward", opaque_forward, mutates_args=())
    backward = torch.library.custom_op("bench::input", opaque_input, mutates_args=())
    forward.register_fake(lambda a, w, b: torch.empty_like(a))
    backward.register_fake(lambda d, w, a: torch.empty_like(a))

    def seen(a: Tensor, w: Tensor, b: Tensor) -> Tensor:
        u = a
        for _ in range(4):
            u = conv.forward(u, w, b, 1, True, None) * 0.5
        return conv.backward_input(u, w, 1, (32, 32), a) + 1

    def opaque(a: Tensor, w: Tensor, b: Tensor) -> Tensor:
        u = a
        for _ in range(4):
            u = forward(u, w, b) * 0.5
        return backward(u, w, a) + 1

    result = {"eager": microseconds(lambda: seen(layer.a, layer.w, layer.b))}
    expected = seen(layer.a, layer.w, layer.b)
    for name, function in (("triton_op", seen), ("custom_op", opaque)):
        start = time.perf_counter()
        compiled = torch.compile(function, fullgraph=True)
        got = compiled(layer.a, layer.w, layer.b)
        result[f"{name} compile s"] = time.perf_counter() - start
        if not torch.allclose(got, expected, rtol=1e-5, atol=1e-5):
            BROKEN.append(f"{name}: compiled and eager differ")
        result[name] = microseconds(lambda compiled=compiled: compiled(layer.a, layer.w, layer.b))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all numbers to this file")
    out: Path | None = parser.parse_args().out
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    compile_all()
    start = time.perf_counter()
    check_odd_shapes()
    report: dict[str, Any] = {"rows": measure(start + SWEEP_SECONDS)}
    report["plain-20"] = totals(report["rows"])
    layer = Layer(128, 16, 16, 32, 32, 1, torch.float32)
    report["host"] = {
        "operation": host_microseconds(lambda: conv.forward(layer.a, layer.w, layer.b, 1, True, None)),
        "F.conv2d and relu": host_microseconds(lambda: layer.cudnn_and_ops("forward")),
    }
    print("one eager call, microseconds of the CPU:", {k: round(v, 1) for k, v in report["host"].items()})
    report["compiled"] = check_compiled()
    print("four layers and an input gradient, microseconds:", {k: round(v, 1) for k, v in report["compiled"].items()})
    print(f"{time.perf_counter() - start:.0f} s after compiling; device {torch.cuda.get_device_name()}")
    if out is not None:
        out.write_text(json.dumps(report | {"broken": BROKEN}, indent=1))
    if BROKEN:
        raise SystemExit("\n".join(["BROKEN:", *BROKEN]))
    print("every check holds")


if __name__ == "__main__":
    main()
