"""`make demo` installs the program alone, in the environment that `make test` then adds to."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


def installs(target: str, folder: Path) -> list[str]:
    """What `make TARGET` would install with its environment in the folder, in order."""
    command = ["make", "--dry-run", f"VENV={folder}", target]
    environment = {**os.environ, "MAKEFLAGS": ""}  # these tests are run by make themselves
    made = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    return [line.split("constraints.txt ")[1] for line in made.stdout.splitlines() if " pip install " in line]


def test_the_demo_needs_the_program_and_the_tests_what_they_add(tmp_path):
    program = ["torch numpy", "--editable '.[train]'"]
    assert installs("demo", tmp_path) == program
    assert installs("test", tmp_path) == [*program, "--editable '.[dev]'"]
    (tmp_path / "program").touch()
    assert installs("demo", tmp_path) == []
    assert installs("test", tmp_path) == ["--editable '.[dev]'"]
    (tmp_path / "ready").touch()
    assert installs("demo", tmp_path) == installs("test", tmp_path) == []
