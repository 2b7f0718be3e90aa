"""Many cases, each in a process of its own and written as soon as it is done."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .case import Case
from .tables import text
from .worker import to_json

PATIENCE = 1800  # seconds for a case
THREE: dict[str, Any] = {"methods": ("plain", "paper", "exact"), "eager": False, "rounds": 9}
FOUR: dict[str, Any] = THREE | {"methods": ("plain", "paper", "exact", "alpha1")}
VIT_TINY = {"depth": 12}
SUITES = {
    "gpu": (
        Case("plain20", batch=128, precision="tf32", rounds=9),
        Case("plain20", batch=128, precision="bf16", **FOUR),
        Case("plain20", batch=1024, precision="bf16", **THREE),
        Case("resnet18", batch=256, precision="tf32", **THREE),
        Case("resnet18", batch=256, precision="bf16", **THREE),
        Case("vit", VIT_TINY, batch=256, precision="bf16", **THREE),
        Case("mlp", batch=256, precision="tf32", **FOUR),
    ),
    "cpu": (Case("plain20", batch=128, precision="float32", device="cpu", threads=2, rounds=9),),
}


def suite(which: str, out: Path) -> list[Path]:
    """The README's list for a machine; returns the files."""
    if which not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {which!r}")
    return run_all({slug(case): case for case in SUITES[which]}, out)


def run_all(cases: Mapping[str, Case], out: Path, at_once: int | None = None) -> list[Path]:
    """Measures one case after the other, into out/NAME.json; on a GPU their methods are compiled at once before.

    That fills the compilers' caches on disk, and gives the seconds that compiling takes (beside others). Measuring is
    for one process at a time: cuDNN keeps the first kernel that it chose for a convolution, and one that it chose on a
    busy GPU made plain training up to 1.4x slower.
    """
    out.mkdir(parents=True, exist_ok=True)
    cases = {name: case.settled() for name, case in cases.items()}
    if at_once is None:
        at_once = (os.cpu_count() or 1) // 2 if any(case.device == "cuda" for case in cases.values()) else 0
    took = compiled(cases, at_once) if at_once else {}
    files = []
    for name, case in cases.items():
        report = _in_a_process(case)
        if "fails" in report:
            report = {"case": json.loads(to_json(case)), **report}
        for method, rows in report.get("methods", {}).items():
            for row in (rows[place] for place in ("best", "second") if "how" in rows.get(place, {})):
                row["compile_seconds"] = took.get((name, method), {}).get(row["how"], row["compile_seconds"])
        report["compiled_at_once"] = at_once or 1
        file = out / f"{name}.json"
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        files.append(file)
        print(text(report), flush=True)
    return files


def compiled(cases: Mapping[str, Case], at_once: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Compiles every method's best form, several processes at a time; the seconds by case and method, and by form."""
    todo = [(name, method) for name, case in cases.items() if case.best for method in case.methods]
    with ThreadPoolExecutor(at_once) as pool:
        return dict(zip(todo, pool.map(lambda key: _in_a_process(cases[key[0]], key[1]), todo), strict=True))


def _in_a_process(case: Case, *method: str) -> dict[str, Any]:
    """What the worker wrote, or {"fails": its last words}."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-m", "threepass.bench.worker", to_json(case), str(out), *method]
        few = {"TORCHINDUCTOR_COMPILE_THREADS": "2"} if method else {}  # others compile at the same time
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=os.environ | few)
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
