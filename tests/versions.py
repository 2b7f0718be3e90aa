"""Runs the tests on each torch that is promised, in a virtual environment each: `make test-versions`.

    python tests/versions.py                          # all of them: gigabytes to fetch, and the whole suite four times
    python tests/versions.py 2.11                     # one
    python tests/versions.py 2.11 -- tests/core/test_grid.py   # part of the suite; not recorded
    python3.12 tests/versions.py 2.13                # the same with another Python: that which runs this script

What passed, failed and was skipped on which torch goes into results/versions.json, as soon as a version is done; those
not run again keep their entry. Pythons other than the oldest that is promised have entries and environments of their
own, such as 2.13-python-3.12. Exits with 1 if a test failed.
"""

import datetime
import json
import platform
import subprocess
import sys
import tempfile
import venv
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)  # pyproject's requires-python
VERSIONS = ["2.10", "2.11", "2.12", "2.13"]  # pyproject's torch>=2.10, and the newest
RESULTS = ROOT / "results" / "versions.json"


def name_of(version: str) -> str:
    """The name of a version's environment and results."""
    python = sys.version_info[:2]
    return version if python == OLDEST else f"{version}-python-{'.'.join(map(str, python))}"


def python_with(version: str) -> Path:
    """The interpreter of an environment with the newest torch of that version and everything that the tests need."""
    place = ROOT / ".venvs" / f"torch-{name_of(version)}"
    python, asked, installed = place / "bin" / "python", place / "asked.txt", place / "installed.txt"
    if not installed.exists() or installed.read_text() != pins():
        venv.create(place, with_pip=True)
        asked.write_text(pins())
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", asked]
        subprocess.run([*install, f"torch=={version}.*", "--editable", f"{ROOT}[dev]"], check=True)
        asked.replace(installed)
    return python


def pins() -> str:
    """constraints.txt without torch, and without Triton, of which every torch asks for its own version."""
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(("torch==", "triton==")))


def run(version: str, selection: list[str]) -> dict:
    """The outcome of the tests, by what pytest writes down."""
    python = python_with(version)
    asked = [python, "-c", "import torch, platform; print(torch.__version__, platform.python_version())"]
    torch_version, python_version = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.xml")
        command = [python, "-m", "pytest", "--junit-xml", report, "-m", "not slow"]
        done = subprocess.run([*command, *(selection or ["--numprocesses", "auto", "--maxprocesses", "4"])], cwd=ROOT)
        if not report.exists():
            raise SystemExit(f"torch {torch_version}: pytest ended with {done.returncode} before it ran a test")
        counts = ET.parse(report).getroot().find("testsuite").attrib
    failed, skipped = int(counts["failures"]) + int(counts["errors"]), int(counts["skipped"])
    return {
        "torch": torch_version,
        "python": python_version,
        "platform": f"{platform.system()} {platform.machine()}",
        "passed": int(counts["tests"]) - failed - skipped,
        "failed": failed,
        "skipped": skipped,
        "date": datetime.date.today().isoformat(),
    }


def record(version: str, outcome: dict) -> None:
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(dict(sorted((found | {name_of(version): outcome}).items())), indent=1) + "\n")


def main(arguments: list[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    versions, selection = arguments[:at] or VERSIONS, arguments[at + 1 :]
    if unknown := [v for v in versions if v not in VERSIONS]:
        raise SystemExit(f"not among the versions that are promised, {', '.join(VERSIONS)}: {', '.join(unknown)}")
    failed = 0
    for version in versions:
        outcome = run(version, selection)
        print(*(f"{key} {value}" for key, value in outcome.items()), sep=", ", flush=True)
        failed += outcome["failed"]
        if not selection:
            record(version, outcome)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
