"""A case in a process of its own, so that a crash costs one result: `python -m threepass.bench.worker CASE OUT LOCK`.

Compiling takes longest, and needs no GPU. Workers may therefore start together: the one that holds the lock on the file
LOCK uses the GPU, and gives it away while its compiler works. One that has compiled everything prints `READY` and waits
for a line before it measures.
"""

import contextlib
import fcntl
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from .. import capture
from .case import Case, run

READY = "ready to measure"


def to_json(case: Case) -> str:
    return json.dumps(asdict(case))


def from_json(text: str) -> Case:
    values = json.loads(text)
    return Case(**values | {"methods": tuple(values["methods"])})


def main(described: str, out: str, lock: str) -> None:
    with open(lock, "w", encoding="utf-8") as file:

        @contextlib.contextmanager
        def given_away() -> Iterator[None]:
            fcntl.flock(file, fcntl.LOCK_UN)
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_EX)

        def ready() -> None:
            with given_away():
                print(READY, flush=True)
                if not sys.stdin.readline():
                    sys.exit("nobody waits for the result")

        fcntl.flock(file, fcntl.LOCK_EX)
        capture.compiling = given_away
        Path(out).write_text(json.dumps(run(from_json(described), ready)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
