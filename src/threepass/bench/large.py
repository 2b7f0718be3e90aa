"""Nets of the sizes that people train, on one GPU: `threepass bench --suite large`.

A step of these takes gigabytes, so the forms of a net are made, measured and freed one after the other, in one process
for each net. What is known is written to the net's file at once, and rows that are in the file are not measured again:

    --prepare       compile every form (into Inductor's cache on disk, which later processes share), compare its
                    gradients with eager float32 ones, and measure its memory: other processes may use the GPU meanwhile
    (without it)    the same for what is not prepared yet, then times, profiles and the largest batches

`compile_seconds` are those of the first compilation, from an empty cache; those of a later one are in "again".

The largest batch is measured for eager steps, by doubling and bisection with one step each: compiling a program for
each batch that is tried would take hours. The memory of an eager step at the case's own batch is measured with it.
"""

import copy
import gc
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import NormalizationWarning, UncheckedWarning, reason_of
from ..train.device import find_device
from ..train.files import write_json
from .case import WARM_UP, Case, agreement, difference, machine, reference, settings
from .execution import Form, eager, makers
from .limits import layers, limits
from .suite import run_command, slug
from .timing import ceilings, kernel_times, peak_bytes, summary, take_turns
from .worker import from_json, to_json

METHODS = ("plain", "paper", "exact")
AMP: dict[str, Any] = {"precision": "amp", "methods": METHODS, "eager": False, "rounds": 5}
CASES = {
    "cuda": {
        "resnet50": Case("imagenet-resnet50", batch=256, image=224, **AMP),
        "vit": Case("vit-b16", batch=128, image=224, **AMP),
        "gpt2": Case("gpt2", batch=16, image=1, **AMP),
        "convnext": Case("convnext", batch=128, image=224, **AMP),
    },
    "cpu": {  # the same commands, tried in a minute or two
        "resnet50": Case("imagenet-resnet50", {"depths": (1, 1), "width": 8}, batch=4, **AMP),
        "vit": Case("vit-b16", {"width": 32, "depth": 2, "heads": 2}, batch=4, **AMP),
        "gpt2": Case("gpt2", {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2},
                     batch=4, image=1, **AMP),
        "convnext": Case("convnext", {"depths": (1, 1), "widths": (8, 16)}, batch=4, **AMP),
    },
}  # fmt: skip
FEW = 4  # samples of which exact mode is compared with double backward, which needs far more memory
MOST_ON_CPU = 16  # a CPU's memory is not filled
Report = dict[str, Any]
Save = Callable[[Report], None]


class Subject(NamedTuple):
    """What is measured: a case, its model, and a batch of it."""

    case: Case
    model: nn.Module
    batch: list[Tensor]


def large(
    nets: Sequence[str], out: Path, checkpointing: bool, prepare: bool, minutes: float | None, device: str = "auto"
) -> list[Path]:
    """Measures the nets, by default all, into out/NAME.json each; returns the files."""
    device = str(find_device(device))
    cases = CASES[device]
    unknown = [name for name in nets if name not in cases]
    if unknown:
        raise ValueError(f"unknown net {unknown[0]!r}: choose from {', '.join(cases)}")
    deadline = time.monotonic() + (math.inf if minutes is None else 60 * minutes)
    out.mkdir(parents=True, exist_ok=True)
    chosen = [replace(cases[name], device=device, checkpointing=checkpointing).settled() for name in nets or cases]
    files = [out / f"{slug(case)}.json" for case in chosen]
    for stage in ("prepare",) if prepare else ("time", "largest"):  # what `minutes` cuts off is the largest batches
        for case, file in zip(chosen, files, strict=True):
            left = deadline - time.monotonic()
            if left > 0:
                command = [sys.executable, "-m", "threepass.bench.large", to_json(case), str(file), stage]
                words = run_command(command, None if left == math.inf else left)
                print(f"{file.stem}, {stage}: {words or 'done'}", flush=True)
    return [file for file in files if file.exists()]


def run(case: Case, report: Report, stage: str, save: Save) -> None:
    """One stage for one net; every new part of the report is saved at once."""
    report.setdefault("case", asdict(case))
    with settings(case), warnings.catch_warnings():
        warnings.simplefilter("ignore", NormalizationWarning)
        report.setdefault("machine", machine(case.device))
        model = case.make_model()
        if stage == "largest":
            _largest_batches(case, model, report, save)
            return
        batch = case.make_batch(model)
        if "exact_against_double_backward" not in report:
            report["exact_against_double_backward"] = agreement(model, _few(batch))
            save(report)
        timed = stage == "time"
        if timed and "limits" not in report:
            report["ceilings"] = ceilings(case.device, case.product_dtype)
            report["limits"] = limits(layers(model, batch[0]), report["ceilings"])
            save(report)
        for method in case.methods:
            _measure(Subject(case, model, batch), method, report, timed, save)


def _few(batch: Sequence[Tensor]) -> list[Tensor]:
    """The first samples; of tokens, y has a row for each token."""
    x, y, v = batch
    return [x[:FEW], y[: FEW * (len(y) // len(x))], v[:FEW]]


def _measure(subject: Subject, method: str, report: Report, timed: bool, save: Save) -> None:
    """The rows of a method: of plain training each form, of others the first that works."""
    case, model, batch = subject
    expected: Sequence[Tensor] | None = None  # the reference, computed once
    for how, make in makers(method, case.device == "cuda"):
        row = report.setdefault("rows", {}).setdefault(f"{method}, {how}", {})
        if "fails" not in row and ("median" if timed else "peak_bytes") not in row:
            try:
                if row.get("difference") is None and expected is None:
                    expected = _reference(method, model, batch)
                _fill(row, partial(make, method, copy.deepcopy(model), batch), expected, timed, case)
            except Exception as error:  # whatever a net does not allow, the others still count
                row["fails"] = reason_of(error)
            save(report)
            torch.compiler.reset()
            _free()
        if "fails" not in row and method != "plain":
            break


def _reference(method: str, model: nn.Module, batch: list[Tensor]) -> Sequence[Tensor] | None:
    try:
        return reference(method, model, batch)
    except torch.OutOfMemoryError:
        return None
    finally:
        _free()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _fill(row: Report, make: Callable[[], Form], expected: Sequence[Tensor] | None, timed: bool, case: Case) -> None:
    """Makes a form, and adds to its row what is not there yet."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UncheckedWarning)
        form = make()
        for _ in range(WARM_UP):
            form.run()
    seconds = {"compile_seconds": form.compile_seconds, "parts": form.parts}
    if "compile_seconds" in row:
        row["again"] = seconds
    else:
        row |= seconds
    row["unchecked"] = next((str(w.message) for w in caught if issubclass(w.category, UncheckedWarning)), None)
    if row.get("difference") is None:  # or there was not enough memory, beside others
        row["difference"] = None if expected is None else difference(form.bare(), expected)
        row["graph_bytes"], row["peak_bytes"] = form.graph_bytes, peak_bytes(form.bare, case.device == "cuda")
    if timed:
        _times(form, row, case)


def _times(form: Form, row: Report, case: Case) -> None:
    cuda = case.device == "cuda"
    steps = {"run": form.run} | ({} if form.call is None else {"call": form.call})
    times = take_turns(steps, case.rounds, cuda)
    row |= summary(times["run"])
    row["samples_per_second"] = case.batch / row["median"]
    if "call" in times:
        row["call"] = summary(times["call"])
    row["kernels"] = kernel_times(form.run, cuda)


def _largest_batches(case: Case, model: nn.Module, report: Report, save: Save) -> None:
    torch.backends.cudnn.benchmark = False  # no search for kernels at sizes that come once
    sizes, peaks = report.setdefault("largest_batch", {"form": "eager"}), report.setdefault("eager_peak_bytes", {})
    for method in case.methods:
        if method not in sizes:
            sizes[method] = largest(partial(_fits, case, model, method), case.batch)
            if sizes[method] >= case.batch:
                step = eager(method, model, case.make_batch(model)).run
                peaks[method] = peak_bytes(step, case.device == "cuda")
            save(report)


def _fits(case: Case, model: nn.Module, method: str, size: int) -> bool:
    if case.device == "cpu" and size > MOST_ON_CPU:
        return False
    try:
        eager(method, model, replace(case, batch=size).make_batch(model)).run()
    except torch.OutOfMemoryError:
        return False
    finally:
        _free()
    return True


def largest(fits: Callable[[int], bool], start: int) -> int:
    """The largest size that fits, to a sixteenth of it, by doubling or halving from `start` and then bisection.

    >>> [largest(lambda size: size <= most, 16) for most in (16, 100, 5, 0)]
    [16, 100, 5, 0]
    """
    low = start
    while low and not fits(low):
        low //= 2
    high = 2 * low if low >= start else 2 * low + 1
    while low >= start and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


if __name__ == "__main__":
    described, file, stage = sys.argv[1:]
    path = Path(file)
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    run(from_json(described), known, stage, partial(write_json, path))
