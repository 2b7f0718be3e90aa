"""A case in a process of its own, so that a crash costs one result: `python -m threepass.bench.worker CASE OUT`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from .case import Case, run


def to_json(case: Case) -> str:
    return json.dumps(asdict(case))


def from_json(text: str) -> Case:
    values = json.loads(text)
    return Case(**values | {"methods": tuple(values["methods"])})


if __name__ == "__main__":
    described, out = sys.argv[1:]
    Path(out).write_text(json.dumps(run(from_json(described))), encoding="utf-8")
