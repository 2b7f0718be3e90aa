"""Clocks, peak memory, and what the device can do at most.

Time: methods take turns within every round, so that other load on the machine affects all of them alike. A sample is
the mean of as many consecutive steps as last 5 ms, between two CUDA events or two readings of `perf_counter`. One step
before them is not counted: as in training, each step then follows a step of the same method, with the memory and caches
that it left. On a GPU a sample has at least 4 steps, and the clock starts when the GPU has finished the uncounted step
while the host is already ahead, so that the host's work for a step overlaps with the GPU's work on the one before.

Memory: the most bytes that torch's allocator was asked for and held at once during a step, beyond those before it:
activations, errors, gradients and temporaries, not the weights and the batch. On a GPU the allocator counts them itself
(what it adds by its own rounding, up to a MiB for a tensor, depends on what ran before, and is left out). On a CPU
every allocation and release is read from a profiler's trace of one step; the process's resident size (freed pages
stay) and a count of tensors in Python (blind to temporaries) are not exact. Scratch space that a vendor's library takes
by its own malloc is not seen.
"""

import gc
import json
import operator
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

SAMPLE = 5e-3  # seconds
STEPS = 4  # at least, on a GPU
Run = Callable[[], Any]


def take_turns(steps: Mapping[Any, Run], rounds: int, cuda: bool) -> dict[Any, list[float]]:
    """Seconds a step, one sample a round."""
    repeats = {name: enough(step, cuda) for name, step in steps.items()}
    times: dict[Any, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(sample(step, repeats[name], cuda))
    return times


def enough(step: Run, cuda: bool) -> int:
    """How many steps make a sample."""
    count = STEPS if cuda else 1
    while (took := sample(step, count, cuda) * count) < SAMPLE:
        count = max(2 * count, int(1.2 * count * SAMPLE / max(took, 1e-9))) if took > SAMPLE / 10 else 4 * count
    return count


def sample(step: Run, repeats: int, cuda: bool) -> float:
    step()
    if not cuda:
        begin = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - begin) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / repeats


def summary(seconds: list[float]) -> dict[str, Any]:
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return {"median": quartiles[1], "quartiles": [quartiles[0], quartiles[2]], "best": min(seconds), "seconds": seconds}


def peak_bytes(step: Run, cuda: bool) -> int:
    gc.collect()
    return _cuda_peak_bytes(step) if cuda else _cpu_peak_bytes(step)


def _cuda_peak_bytes(step: Run) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    step()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def _cpu_peak_bytes(step: Run) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes lines of its own
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:  # else 2.10 warns
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


def kernel_times(step: Run, cuda: bool) -> list[dict[str, Any]]:
    """The 30 kernels of one step that take longest (on a CPU, the operations), all calls of one name together."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
        step()
        if cuda:
            torch.cuda.synchronize()
    microseconds = operator.attrgetter("self_device_time_total" if cuda else "self_cpu_time_total")
    longest = sorted(profile.key_averages(), key=microseconds, reverse=True)[:30]
    return [{"name": e.key[:120], "calls": e.count, "ms": microseconds(e) / 1e3} for e in longest]


def ceilings(device: str, dtype: torch.dtype) -> dict[str, float]:
    """The best that this device does, at the precision that is set.

    operations_per_second: of a square matrix product or a convolution with 64 channels, whichever is faster (vendors'
        libraries differ), two for each multiplication and addition.
    bytes_per_second: read and written by a copy.
    """
    cuda = device == "cuda"
    n, images, bytes_ = (8192, 256, 2**30) if cuda else (1024, 32, 2**27)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    x = torch.randn(images, 64, 64, 64, device=device).to(dtype=dtype, memory_format=torch.channels_last)
    w = torch.randn(64, 64, 3, 3, device=device).to(dtype=dtype, memory_format=torch.channels_last)
    source = torch.zeros(bytes_, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    steps = {
        "product": lambda: torch.mm(a, b),
        "convolution": lambda: torch.conv2d(x, w, padding=1),
        "copy": lambda: target.copy_(source),
    }
    best = {name: min(times) for name, times in take_turns(steps, 7, cuda).items()}
    operations = {"product": 2 * n**3, "convolution": 2 * 9 * 64 * x.numel()}
    return {
        "operations_per_second": max(count / best[name] for name, count in operations.items()),
        "bytes_per_second": 2 * bytes_ / best["copy"],
    }
