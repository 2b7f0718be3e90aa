"""Files of a run: replaced as a whole, locked, and read with errors that name the file and what is wrong in it."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

WORDS = {
    dict: "a JSON object", list: "a list", int: "an integer", float: "a number", str: "text", type(None): "null",
}  # fmt: skip
Kinds = tuple[type, ...]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside `path` to write to. At the end it replaces `path`; after an error it is deleted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    try:
        yield beside
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    beside.replace(path)


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all."""
    with replacing(path) as beside:
        beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@contextlib.contextmanager
def locked_file(path: Path, wait: bool = False) -> Iterator[tuple[TextIO, bool]]:
    """The file, open, and whether this process has the lock on it; the operating system releases it on exit.

    Without fcntl (Windows) there are no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        yield file, _lock(file, wait)


def _lock(file: TextIO, wait: bool) -> bool:
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def read_object(path: Path, expected: Mapping[str, Kinds]) -> dict[str, Any]:
    """The object in a JSON file, which has at least the expected keys, each of one of its types."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also what is no UTF-8
        raise ValueError(f"{path} is damaged: it is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {content!r:.40}")
    for key, kinds in expected.items():
        if key not in content:
            raise ValueError(f"{path} lacks the key {key!r}")
        check_kind(path, key, content[key], kinds)
    return content


def check_kind(path: Path, key: str, value: Any, kinds: Kinds) -> None:
    kinds = (*kinds, int) if float in kinds else kinds
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        words = " or ".join(WORDS[kind] for kind in dict.fromkeys(kinds) if not (kind is int and float in kinds))
        raise ValueError(f"{path}: {key}: expected {words}, got {value!r:.40}")
