"""Files of settings for `--config FILE`: TOML, or YAML where PyYAML is installed. A key is a flag without dashes."""

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def read(file: Path) -> dict[str, Any]:
    """The settings in a file, under their names with underscores."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--config: cannot read {file} ({error.strerror})") from error
    values = _parse_yaml(file, text) if file.suffix in (".yaml", ".yml") else _parse_toml(file, text)
    if not isinstance(values, dict):
        raise ValueError(f"{file}: expected settings, NAME = VALUE, got a {type(values).__name__}")
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def _parse_toml(file: Path, text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file} is not TOML ({error})") from error


def _parse_yaml(file: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ValueError(f"{file}: reading YAML needs PyYAML (pip install pyyaml); or use a TOML file") from error
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not YAML ({' '.join(str(error).split())})") from error


def as_flags(values: Mapping[str, Any], file: Path, known: Iterable[str], given: Iterable[str]) -> list[str]:
    """The settings as flags of the command line, without those that are given there.

    >>> as_flags({"lr": 0.1, "augment": False, "epochs": 3}, Path("a.toml"), ["lr", "augment", "epochs"], ["epochs"])
    ['--lr', '0.1', '--no-augment']
    """
    known, flags = sorted(known), []
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"{file}: unknown key {key!r}; {hint}")
        if key not in given:
            flags += _flag(key.replace("_", "-"), value)
    return flags


def _flag(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, dict):
        return [f"--{name}", json.dumps(value)]
    return [f"--{name}", *map(str, value if isinstance(value, list) else [value])]


def as_toml(values: Mapping[str, Any]) -> str:
    """Settings as the lines of a file that `read` takes; those that are None are comments.

    >>> print(as_toml({"lr": 0.1, "mode": "paper", "milestones": [0.5], "strength": None, "compile": False}))
    lr = 0.1
    mode = "paper"
    milestones = [0.5]
    # strength: not set
    compile = false
    """
    return "\n".join(f"# {key}: not set" if v is None else f"{key} = {_toml(v)}" for key, v in values.items())


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(v)}" for key, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)  # numbers, truth values and text are written alike in both
