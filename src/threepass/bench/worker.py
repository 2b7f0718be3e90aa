"""A case in a process of its own, so that a crash costs one result: `python -m threepass.bench.worker CASE OUT`.

With a method behind that it is only compiled, into the caches on disk.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .case import Case, compile_times, run


def to_json(case: Case) -> str:
    return json.dumps(asdict(case))


def from_json(text: str) -> Case:
    values = json.loads(text)
    return Case(**values | {"methods": tuple(values["methods"])})


def main(described: str, out: str, method: str | None = None) -> None:
    case = from_json(described)
    found: dict[str, Any] = run(case) if method is None else compile_times(case, method)
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
