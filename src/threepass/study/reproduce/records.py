"""The records of finished runs: results/paper/STUDY.json, one line a run.

Several processes may work on one folder: a run that is being trained is locked, and so is a file that is being written.
The operating system releases a process's locks when it ends, however it ends.
"""

import dataclasses
import json
import math
import platform
from pathlib import Path
from typing import Any

import torch

from ..._version import code_version, commit
from ...train.files import locked_file, replacing
from ...train.runs import Run
from ..gather import is_finite
from .plan import Job, command_line

FORMAT = 1
Record = dict[str, Any]
CURVES = {  # columns of a record's history, and how many digits they keep
    "train_error": 5, "val_error": 5, "train_loss": 4, "val_loss": 4, "train_input_loss": 4, "val_input_loss": 4,
    "grad_norm": 3, "third_norm": 3, "grad_cosine": 3, "alignment_cosine": 3, "alignment_ratio": 3,
}  # fmt: skip


class Records:
    """The records in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def read(self) -> dict[str, Record]:
        """All records by their key."""
        runs: dict[str, Record] = {}
        for file in sorted(self.folder.glob("*.json")):
            content = json.loads(file.read_text(encoding="utf-8"))
            if content.get("format") != FORMAT:
                raise ValueError(f"{file}: format {content.get('format')!r}, but this version reads {FORMAT}")
            runs |= content["runs"]
        return runs

    def add(self, study: str, key: str, record: Record) -> None:
        """Adds a record to the study's file, which is replaced as a whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{study}.json"
        with locked_file(self.folder / f".{study}.lock", wait=True):
            runs = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.exists() else {}
            lines = [f"{json.dumps(k)}: {compact(r)}" for k, r in sorted((runs | {key: record}).items())]
            text = f'{{"format": {FORMAT}, "runs": {{\n' + ",\n".join(lines) + "\n}}\n"
            with replacing(file) as beside:
                beside.write_text(text, encoding="utf-8")


def compact(record: Record) -> str:
    return json.dumps(record, separators=(",", ":"), allow_nan=False)


def make_record(job: Job, run: Run, history: list[dict[str, Any]], measured: dict[str, Any]) -> Record:
    """A run's record. Numbers that are not finite are null; the run has diverged if its last epoch has such losses."""
    run = dataclasses.replace(run, data_dir=None)  # where the data lay on that machine
    curves = {
        name: [_rounded(epoch.get(name), digits) for epoch in history]
        for name, digits in CURVES.items()
        if any(name in epoch for epoch in history)
    }
    return {
        "study": job.study,
        "cell": job.cell,
        "seed": job.seed,
        "status": "complete" if is_finite(history[-1]) else "diverged",
        "epochs": len(history),
        "best": {part: _percent(min(epoch[f"{part}_error"] for epoch in history)) for part in ("train", "val")},
        "final": {part: _percent(history[-1][f"{part}_error"]) for part in ("train", "val")},
        "seconds": round(sum(epoch["seconds"] for epoch in history), 1),
        "history": curves,
        "measured": measured,
        "run": dataclasses.asdict(run) | {"config": run.config.to_dict(), "examples": job.examples},
        "command": command_line(run, job.key),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threepass": code_version(),
        "commit": commit(),
        "device": device_name(run),
    }


def device_name(run: Run) -> str:
    on_gpu = torch.cuda.is_available() and run.device != "cpu"
    return torch.cuda.get_device_name() if on_gpu else "CPU"


def _percent(error: float) -> float:
    return round(100 * (1 - error), 3)


def _rounded(value: float | None, digits: int) -> float | None:
    """So many significant digits; errors are multiples of 1 / 50,000 at most, which 5 keep."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")
