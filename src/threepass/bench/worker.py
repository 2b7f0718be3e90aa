"""A case in a process of its own, so that a crash costs one result: `python -m threepass.bench.worker JOB CASE OUT`."""

import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import NormalizationWarning
from .case import Case, run, settings
from .forms import best


def measure(case: Case) -> dict[str, Any]:
    return run(case)


def compile_only(case: Case) -> dict[str, float | None]:
    """Fills Inductor's cache on disk for the case's last method; returns the seconds of each form."""
    case = case.settled()
    with settings(case), warnings.catch_warnings():
        warnings.simplefilter("ignore", NormalizationWarning)
        model, batch = case.make()
        return {form.how: form.compile_seconds for form in best(case.methods[-1], model, batch)}


def to_json(case: Case) -> str:
    return json.dumps(asdict(case))


def from_json(text: str) -> Case:
    values = json.loads(text)
    return Case(**values | {"methods": tuple(values["methods"])})


if __name__ == "__main__":
    job, described, out = sys.argv[1:]
    found = (measure if job == "measure" else compile_only)(from_json(described))
    Path(out).write_text(json.dumps(found), encoding="utf-8")
