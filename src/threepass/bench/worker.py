"""Cases in a process of their own, so that a crash costs one result: `python -m threepass.bench.worker CASES OUT`.

CASES: an object of names and cases, as JSON. Each is written to OUT/NAME.json as soon as it is done. Without OUT, what
the cases need is compiled into the caches on disk, and nothing is measured.
"""

import gc
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..train.files import write_json
from .case import Case, compile_only, run


def to_json(case: Case) -> str:
    return json.dumps(asdict(case))


def from_json(text: str) -> Case:
    return _of(json.loads(text))


def _of(values: dict[str, Any]) -> Case:
    return Case(**values | {"methods": tuple(values["methods"])})


def write(out: Path, name: str, report: dict[str, Any]) -> None:
    write_json(out / f"{name}.json", report)


if __name__ == "__main__":
    described, *out = sys.argv[1:]
    for name, values in json.loads(described).items():
        if out:
            write(Path(out[0]), name, run(_of(values)))
        else:
            compile_only(_of(values))
        torch.compiler.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
