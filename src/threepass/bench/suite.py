"""Many cases, each in a process of its own and written as soon as it is done."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .case import Case
from .methods import METHODS
from .tables import text
from .worker import to_json

PATIENCE = 1800  # seconds for a case
THREE = ("plain", "paper", "exact", "alpha1")
VIT_TINY = {"depth": 12}
SUITES = {
    "gpu": (
        Case("plain20", batch=128, precision="tf32"),
        Case("plain20", batch=128, precision="bf16", methods=THREE),
        Case("plain20", batch=1024, precision="bf16", methods=THREE),
        Case("resnet18", batch=256, precision="tf32"),
        Case("resnet18", batch=256, precision="bf16", methods=THREE),
        Case("vit", VIT_TINY, batch=256, precision="bf16", methods=THREE),
        Case("mlp", batch=256, precision="tf32", methods=THREE),
    ),
    "cpu": (Case("plain20", batch=128, precision="float32", device="cpu", threads=2, rounds=9),),
}


def suite(which: str, out: Path, warm: bool) -> list[Path]:
    """The README's list for a machine; returns the files."""
    if which not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {which!r}")
    return run_all({slug(case): case for case in SUITES[which]}, out, warm)


def run_all(cases: Mapping[str, Case], out: Path, warm: bool) -> list[Path]:
    """Measures one case after the other, into out/NAME.json. warm: compile them all first, at the same time.

    Compiling at the same time fills a cache that starts empty, and takes the cold compile times as it does so.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = []
    with tempfile.TemporaryDirectory() as cache:
        env = dict(os.environ) | ({"TORCHINDUCTOR_CACHE_DIR": cache} if warm else {})
        cold = _compile_all(cases, env) if warm else {}
        for name, case in cases.items():
            report = _in_a_process("measure", case, env)
            if "fails" in report:
                report = {"case": json.loads(to_json(case)), **report}
            for method, seconds in cold.get(name, {}).items():
                for row in report.get("methods", {}).get(method, {}).values():
                    if isinstance(row, dict) and row.get("how") in seconds:
                        row["cold_compile_seconds"] = seconds[row["how"]]
            file = out / f"{name}.json"
            file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            files.append(file)
            print(text(report), flush=True)
    return files


def _compile_all(cases: Mapping[str, Case], env: dict[str, str]) -> dict[str, dict[str, Any]]:
    """By case and method: the seconds that compiling took, with as many processes at work as there are cores."""
    jobs = [(name, method) for name, case in cases.items() if case.best for method in _methods(case)]
    env = env | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}

    def compiled(job: tuple[str, str]) -> dict[str, Any]:
        name, method = job
        return _in_a_process("compile", replace(cases[name], methods=(method,)), env)

    cold: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (name, method), seconds in zip(jobs, pool.map(compiled, jobs), strict=True):
            cold.setdefault(name, {})[method] = seconds
    return cold


def _methods(case: Case) -> Iterable[str]:
    return [name for name in METHODS if name == "plain" or name in case.methods]


def _in_a_process(job: str, case: Case, env: dict[str, str]) -> dict[str, Any]:
    """What the worker wrote, or {"fails": its last words}."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-m", "threepass.bench.worker", job, to_json(case), str(out)]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            return {"fails": f"not done after {PATIENCE} s"}
        if done.returncode or not out.exists():
            words = done.stderr.strip().splitlines()
            return {"fails": words[-1] if words else f"exit code {done.returncode}"}
        return json.loads(out.read_text(encoding="utf-8"))


def slug(case: Case) -> str:
    """A name for the case on this machine: h200-plain20-128-tf32."""
    case = case.settled()
    options = "".join(f"-{key}{value}" for key, value in case.options.items() if not isinstance(value, (list, dict)))
    return f"{place(case.device)}-{case.model.replace(':', '-')}{options}-{case.batch}-{case.precision}"


def place(device: str) -> str:
    """h200, or cpu."""
    return torch.cuda.get_device_name().split()[-1].lower() if device == "cuda" else "cpu"
