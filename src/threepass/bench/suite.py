"""Many cases, in processes of their own, each written as soon as it is done."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from .case import Case
from .methods import METHODS
from .tables import text
from .worker import write

PATIENCE = 1800  # seconds for a case
PEERS = tuple(name for name in METHODS if name != "alpha1")  # which says what recording costs: once is enough
COMPILED: dict[str, Any] = {"eager": False, "rounds": 9, "methods": PEERS}
ON_CPU: dict[str, Any] = {"precision": "float32", "device": "cpu", "threads": 2, "rounds": 15}
VIT_TINY = {"depth": 12}
SUITES = {
    "gpu": (  # what takes longest to compile first, for prepare_all
        Case("vit", VIT_TINY, batch=256, precision="bf16", rounds=9, methods=PEERS),
        Case("resnet18", batch=256, precision="tf32", rounds=9, methods=PEERS),
        Case("plain20", batch=128, precision="tf32", rounds=9),
    ),
    "gpu-more": (
        Case("mlp", batch=256, precision="tf32", **COMPILED),
        Case("resnet18", batch=256, precision="bf16", **COMPILED),
        Case("plain20", batch=128, precision="bf16", **COMPILED),
        Case("plain20", batch=1024, precision="bf16", **COMPILED),
    ),
    "cpu": (
        Case("encoder", batch=16, methods=PEERS, **ON_CPU),
        Case("resnet20", batch=64, methods=PEERS, **ON_CPU),
        Case("plain20", batch=128, **ON_CPU),
    ),
}


def suite(which: str, out: Path, prepare: bool = False) -> list[Path]:
    """Measures all cases of a suite; returns the files. prepare: only compiles, see `prepare_all`."""
    if which not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {which!r}")
    cases = {slug(case): case for case in SUITES[which]}
    if prepare:
        prepare_all(cases)
        return []
    return run_all(cases, out)


def prepare_all(cases: Mapping[str, Case], processes: int | None = None) -> None:
    """Compiles every method of every case into the caches on disk, several at a time, and measures nothing."""
    jobs = [(name, method, replace(case, methods=(method,))) for name, case in cases.items() for method in case.methods]

    def job(name: str, method: str, case: Case) -> str:
        began = time.monotonic()
        command = [sys.executable, "-m", "threepass.bench.worker", json.dumps({name: asdict(case)})]
        words = run_command(command, PATIENCE) or "done"
        return f"{name}, {method}: {words}, {time.monotonic() - began:.0f} s"

    with ThreadPoolExecutor(processes or max(1, (os.cpu_count() or 1) - 2)) as pool:
        for line in pool.map(lambda each: job(*each), jobs):
            print(line, flush=True)


def run_all(cases: Mapping[str, Case], out: Path, together: bool = False) -> list[Path]:
    """Measures one case after the other, into out/NAME.json.

    Not several at a time, though compiling takes longest: cuDNN keeps the first kernel that it chose for a convolution,
    and one that it chose on a busy GPU made plain training up to 1.4x slower. together: in one process, where all but
    the first are compiled faster, and what is left goes on in another if it dies.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = {name: out / f"{name}.json" for name in cases}
    for file in files.values():
        file.unlink(missing_ok=True)
    left = list(cases)
    while left:
        group = left if together else left[:1]
        words = _in_a_process({name: cases[name] for name in group}, out)
        lost = next((name for name in group if not files[name].exists()), None)
        if lost is not None:
            write(out, lost, {"case": asdict(cases[lost]), "fails": words})
        for name in [name for name in group if files[name].exists()]:
            print(text(json.loads(files[name].read_text(encoding="utf-8"))), flush=True)
            left.remove(name)
    return list(files.values())


def _in_a_process(cases: Mapping[str, Case], out: Path) -> str:
    """Runs the worker, and returns its last words."""
    described = json.dumps({name: asdict(case) for name, case in cases.items()})
    command = [sys.executable, "-m", "threepass.bench.worker", described, str(out)]
    return run_command(command, PATIENCE * len(cases)) or "exit code 0"


def run_command(command: list[str], patience: float | None) -> str:
    """Runs a command for so many seconds at most; returns the last line of its errors, or how it ended if not well."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        return f"not done after {patience:.0f} s"
    words = done.stderr.strip().splitlines()
    return words[-1] if words else f"exit code {done.returncode}" if done.returncode else ""


def slug(case: Case) -> str:
    """A name for the case on this machine: h200-plain20-128-tf32."""
    case = case.settled()
    listed = {key: value for key, value in case.options.items() if not isinstance(value, (list, tuple, dict))}
    options = "".join(f"-{key}{value}" for key, value in listed.items())
    name = f"{device_slug(case.device)}-{case.model.replace(':', '-')}{options}-{case.batch}-{case.precision}"
    return name + "-checkpointing" * case.checkpointing


def device_slug(device: str) -> str:
    """h200, or cpu."""
    return torch.cuda.get_device_name().split()[-1].lower() if device == "cuda" else "cpu"
