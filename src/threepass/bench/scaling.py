"""How the cost grows with depth, width, batch and image size: seconds ~ size^p, fitted for plain and three passes."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import linear_regression
from typing import Any

from ..train.files import write_json
from .case import Case
from .suite import device_slug, run_all
from .worker import to_json

METHODS = ("plain", "paper", "exact")
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {
        "depth": (20, 32, 56, 110),
        "width": (16, 32, 64, 128),
        "batch": (64, 256, 1024, 4096),
        "image": (16, 32, 64, 128),
    },
    "cpu": {"depth": (20, 32, 56, 110), "width": (8, 16, 32, 64), "batch": (8, 16, 32, 64), "image": (16, 32, 64)},
}
BATCH = {"cuda": 128, "cpu": 16}
WIDTH = 16  # of plain nets as they are


def scaling(sweeps: Sequence[str], base: Case, out: Path) -> Path:
    """Measures plain nets of growing sizes; returns out/PLACE-scaling.json, with times, memory and exponents.

    Sweeps that the file has already stay in it, so that one may be run at a time.
    """
    base = replace(base, model="plain20", options={}, methods=METHODS).settled()
    base = replace(base, batch=BATCH[base.device])
    sizes = SIZES[base.device]
    unknown = [name for name in sweeps if name not in sizes]
    if unknown:
        raise ValueError(f"unknown sweep {unknown[0]!r}: choose from {', '.join(sizes)}")
    points = {f"{sweep}-{size}": _at(base, sweep, size) for sweep in sweeps for size in sizes[sweep]}
    folder = out / f"{device_slug(base.device)}-scaling"
    first_of: dict[str, str] = {}  # the sweeps meet in one net
    twins = {name: first_of.setdefault(to_json(case), name) for name, case in points.items()}
    run_all({name: points[name] for name in first_of.values()}, folder, together=True)
    for name, twin in twins.items():
        if twin != name:
            shutil.copy(folder / f"{twin}.json", folder / f"{name}.json")
    measured = {sweep: _gather(folder, sweep, sizes[sweep]) for sweep in sweeps}
    first = json.loads((folder / f"{next(iter(points))}.json").read_text(encoding="utf-8"))
    file = folder.with_suffix(".json")
    known = json.loads(file.read_text(encoding="utf-8"))["sweeps"] if file.exists() else {}
    report = {"case": first["case"], "machine": first.get("machine"), "sweeps": known | measured}
    write_json(file, report)
    return file


def _at(base: Case, sweep: str, size: int) -> Case:
    if sweep == "depth":
        return replace(base, model=f"plain{size}")
    if sweep == "width":
        return replace(base, options={} if size == WIDTH else {"width": size})
    return replace(base, batch=size) if sweep == "batch" else replace(base, image=size)


def _gather(folder: Path, sweep: str, sizes: Sequence[int]) -> dict[str, Any]:
    """By form and method: seconds, bytes and their exponents, over the sizes that worked."""
    reports = [json.loads((folder / f"{sweep}-{size}.json").read_text(encoding="utf-8")) for size in sizes]
    lines: dict[str, Any] = {}
    for form in ("eager", "best"):
        for method in METHODS:
            rows = [r.get("methods", {}).get(method, {}).get(form, {}) for r in reports]
            measured = [(size, row) for size, row in zip(sizes, rows, strict=True) if "median" in row]
            if not measured:
                continue
            line: dict[str, Any] = {"sizes": [size for size, _ in measured]}
            for key, name in (("median", "seconds"), ("peak_bytes", "bytes")):
                line[name] = [row[key] for _, row in measured]
                line[f"{name}_exponent"] = exponent(line["sizes"], line[name])
            lines.setdefault(form, {})[method] = line
    return lines


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    """p of the best fit values ~ size^p, by least squares of the logarithms.

    >>> round(exponent([1, 2, 4, 8], [3, 12, 48, 192]), 6)
    2.0
    """
    if len(set(sizes)) < 2:
        return None
    x, y = [math.log(s) for s in sizes], [math.log(z) for z in values]
    return linear_regression(x, y).slope
