"""A case in a process of its own, so that a crash costs one result: `python -m threepass.bench.worker CASE OUT [LOCK]`.

Whoever holds the lock's file measures; the others compile meanwhile.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from .case import Case, run


def to_json(case: Case) -> str:
    return json.dumps(asdict(case))


def from_json(text: str) -> Case:
    values = json.loads(text)
    return Case(**values | {"methods": tuple(values["methods"])})


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    import fcntl

    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    described, out, lock = sys.argv[1:]
    found = run(from_json(described), alone(Path(lock)) if lock else None)
    Path(out).write_text(json.dumps(found), encoding="utf-8")
