"""Time and peak memory of one training step's gradients: three passes beside plain training and what is used today.

    python benchmarks/step.py --model plain20 --batch 128 --threads 2 --out step.json

    plain               the gradient of the loss: forward and backward
    paper               three passes, as in the paper
    exact               three passes with the true gradient of the input loss
    SAM                 the gradient at w + rho g / |g|: forward and backward twice (Foret et al. 2020)
    finite differences  penalty 1/2 ((l(x + h v) - l(x)) / h)^2 with v = dl/dx / |dl/dx| (Finlay & Oberman 2019)
    double backward     autograd through dl/dx (create_graph=True): the same numbers as exact

Time: the methods take turns within every round, so that whatever else the machine does hits all alike. On a GPU a step
is timed with CUDA events, on a CPU with `perf_counter`. The table gives the median and the quartiles over rounds, the
ratio of medians, and the ratio of the best times, which other load disturbs least. Everything runs eagerly.

Memory: the most bytes that torch's allocator had handed out at once during a step, beyond those before it: activations,
errors, gradients and temporaries inside kernels, not the weights and the batch. On a GPU the allocator counts them
itself. On a CPU every allocation and release is read from a profiler's trace of one step; the process's resident size
(freed pages stay) and a count of tensors in Python (blind to temporaries and to resized storage) are not exact. Scratch
space that a vendor's library takes by its own malloc is not seen.

Limit: a layer with F operations forward takes 3 F in plain training (2 F for the first, whose input gradient nobody
needs), 4 F in paper mode and 6 F in exact mode (5 F for the first); attention is counted like a layer.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from nets import NETS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import threepass

ALPHA, RHO, H = 0.1, 0.05, 0.01
WARM_UP = 2
MIB = 2**20


def weights(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return torch.autograd.grad(F.cross_entropy(model(x), y), weights(model))


def paper(model: nn.Module, x: Tensor, y: Tensor, mode: str = "paper") -> Any:
    grads = threepass.three_pass(model, F.cross_entropy, x, y, alpha=ALPHA, mode=mode).grads
    return [grads[name] for name, _ in model.named_parameters()]


def exact(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return paper(model, x, y, mode="exact")


def sam(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    ascent = plain(model, x, y)
    with torch.no_grad():
        torch._foreach_mul_(ascent, RHO / nn.utils.get_total_norm(ascent))
        torch._foreach_add_(weights(model), ascent)
    grads = plain(model, x, y)
    with torch.no_grad():
        torch._foreach_sub_(weights(model), ascent)
    return grads


def finite_differences(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    x = x.detach().requires_grad_()
    losses = F.cross_entropy(model(x), y, reduction="none")
    (dx,) = torch.autograd.grad(losses.sum(), x, retain_graph=True)
    x = x.detach() + H * F.normalize(dx.flatten(1), dim=1).view_as(x)
    slope = (F.cross_entropy(model(x), y, reduction="none") - losses) / H
    return torch.autograd.grad((ALPHA * losses + (1 - ALPHA) / 2 * slope.square()).mean(), weights(model))


def double_backward(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    x = x.detach().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        loss = F.cross_entropy(model(x), y)
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(ALPHA * loss + (1 - ALPHA) / 2 * dx.square().sum(), weights(model))


METHODS = {
    "plain": plain,
    "paper": paper,
    "exact": exact,
    "SAM": sam,
    "finite differences": finite_differences,
    "double backward": double_backward,
}


def measure(model: nn.Module, x: Tensor, y: Tensor, rounds: int) -> dict[str, dict[str, Any]]:
    """For every method its times, peak memory and ratios to plain, or why it fails."""
    steps = {name: lambda f=f: f(model, x, y) for name, f in METHODS.items()}
    results: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in steps}
    clock, peak = (cuda_seconds, cuda_peak_bytes) if x.is_cuda else (cpu_seconds, cpu_peak_bytes)
    for name in list(steps):
        try:
            for _ in range(WARM_UP):
                steps[name]()
            results[name]["peak_bytes"] = peak(steps[name])
        except Exception as error:  # whatever a model does not allow, the others still count
            reason = str(error).strip() or type(error).__name__
            results[name] = {"fails": reason.splitlines()[0]}
            del steps[name]
    for _ in range(rounds):
        for name, step in steps.items():
            results[name]["seconds"].append(clock(step))
    base = summary(results["plain"]["seconds"]) | results["plain"]
    for name in steps:
        r = results[name]
        r |= summary(r["seconds"])
        r["ratio"], r["best_ratio"] = r["median"] / base["median"], r["best"] / base["best"]
        r["peak_ratio"] = r["peak_bytes"] / base["peak_bytes"]
    return results


def summary(seconds: list[float]) -> dict[str, Any]:
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return {"median": quartiles[1], "quartiles": [quartiles[0], quartiles[2]], "best": min(seconds)}


def cpu_seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def cuda_seconds(step: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def cpu_peak_bytes(step: Callable[[], Any]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes lines of its own
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    now = most = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["args"]["Ev Idx"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return most


def cuda_peak_bytes(step: Callable[[], Any]) -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def limits(model: nn.Module, x: Tensor) -> dict[str, float]:
    """The arithmetic limits of paper and exact mode, as ratios to plain training, from the forward's operations."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    counts = counter.get_flop_counts()
    name = next(name for name, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear)))
    total, first = (sum(counts[key].values()) for key in ("Global", f"{type(model).__name__}.{name}"))
    plain = 3 * total - first
    return {"paper": 4 * total / plain, "exact": (6 * total - first) / plain}


def machine(device: str) -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def table(config: dict[str, Any], place: dict[str, Any], limit: dict[str, float], results: dict[str, Any]) -> str:
    where = place["gpu"] or f"{place['cpu']}, {place['threads']} threads"
    lines = [
        f"{config['model']}, batch {config['batch']}, {config['dtype']}, {config['layout']}, {config['rounds']} rounds",
        f"{where}; torch {place['torch']}, Python {place['python']}",
        f"arithmetic limit: paper {limit['paper']:.2f}x, exact {limit['exact']:.2f}x",
        "",
        f"{'':<18} {'median ms':>9} {'quartiles':>21} {'ratio':>6} {'best/best':>9} {'peak MiB':>9} {'ratio':>6}",
    ]
    for name, r in results.items():
        if "fails" in r:
            lines.append(f"{name:<18} fails: {r['fails']}")
            continue
        spread = " - ".join(f"{1000 * s:.2f}" for s in r["quartiles"])
        lines.append(
            f"{name:<18} {1000 * r['median']:9.2f} {spread:>21} {r['ratio']:6.2f} {r['best_ratio']:9.2f} "
            f"{r['peak_bytes'] / MIB:9.1f} {r['peak_ratio']:6.2f}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Time and peak memory of one training step's gradients, by method.")
    parser.add_argument("--model", choices=NETS, default="plain20")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--layout", choices=["contiguous", "channels_last"], default="channels_last")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="also write everything to this JSON file")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    if args.device == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")  # TF32, as in convolutions
    if args.model == "mlp":
        args.layout = "contiguous"  # it flattens its images
    layout = torch.channels_last if args.layout == "channels_last" else torch.contiguous_format
    dtype = getattr(torch, args.dtype)
    model = NETS[args.model]().to(args.device, dtype, memory_format=layout)
    x = torch.randn(args.batch, 3, 32, 32).to(args.device, dtype, memory_format=layout)
    y = torch.randint(10, (args.batch,)).to(args.device)

    config = {key: value for key, value in vars(args).items() if key != "out"}
    place, limit = machine(args.device), limits(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", threepass.NormalizationWarning)
        results = measure(model, x, y, args.rounds)
    print(table(config, place, limit, results))
    report = {"config": config, "machine": place, "limit": limit, "methods": results}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


if __name__ == "__main__":
    main()
