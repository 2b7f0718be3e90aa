"""Many cases, each in a process of its own and written as soon as it is done."""

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .case import Case
from .tables import text
from .worker import READY, to_json

PATIENCE = 1800  # seconds for a case
AT_ONCE = 8  # cases
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
    """Measures one case after the other, into out/NAME.json; on a GPU they are compiled together before.

    Only one process at a time uses the GPU, though: cuDNN keeps the first kernel that it chose for a convolution, and
    one that it chose on a busy GPU made plain training up to 1.4x slower.
    """
    out.mkdir(parents=True, exist_ok=True)
    todo = list(cases.items())
    size = at_once or (AT_ONCE if any(case.settled().device == "cuda" for case in cases.values()) else 1)
    files = []
    for start in range(0, len(todo), size):
        with tempfile.TemporaryDirectory() as folder:
            group = [(name, case, _Worker(case, Path(folder, name))) for name, case in todo[start : start + size]]
            for _, _, worker in group:
                worker.prepared()
            for name, case, worker in group:
                report = worker.report()
                about = {"case": json.loads(to_json(case))} if "fails" in report else {}
                file = out / f"{name}.json"
                file.write_text(json.dumps(about | report | {"compiled_at_once": len(group)}, indent=1) + "\n")
                files.append(file)
                print(text(about | report), flush=True)
    return files


class _Worker:
    """A worker's process."""

    def __init__(self, case: Case, folder: Path):
        folder.mkdir()
        self.out, self.words = folder / "out.json", folder / "stderr"
        command = [
            sys.executable,
            "-m",
            "threepass.bench.worker",
            to_json(case),
            str(self.out),
            str(folder.parent / "lock"),
        ]
        with self.words.open("w") as words:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, text=True
            )
        self.timer = threading.Timer(PATIENCE, self.process.kill)
        self.timer.start()

    def prepared(self) -> None:
        """Waits until it is ready to measure, or dead."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == READY:
                return

    def report(self) -> dict[str, Any]:
        """What it measures now, or {"fails": its last words}."""
        with contextlib.suppress(BrokenPipeError):  # dead
            self.process.communicate("go\n")
        late = not self.timer.is_alive()
        self.timer.cancel()
        if late:
            return {"fails": f"not done after {PATIENCE} s"}
        if self.process.returncode or not self.out.exists():
            words = self.words.read_text().strip().splitlines()
            return {"fails": words[-1] if words else f"exit code {self.process.returncode}"}
        return json.loads(self.out.read_text(encoding="utf-8"))


def slug(case: Case) -> str:
    """A name for the case on this machine: h200-plain20-128-tf32."""
    case = case.settled()
    options = "".join(f"-{key}{value}" for key, value in case.options.items() if not isinstance(value, (list, dict)))
    return f"{place(case.device)}-{case.model.replace(':', '-')}{options}-{case.batch}-{case.precision}"


def place(device: str) -> str:
    """h200, or cpu."""
    return torch.cuda.get_device_name().split()[-1].lower() if device == "cuda" else "cpu"
