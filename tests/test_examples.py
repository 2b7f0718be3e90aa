"""Every example runs to its end, as a user would run it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
ELSEWHERE = ("09_fine_tune",)  # it needs data and weights: tests/test_fine_tuning.py runs it with small ones
EXAMPLES = sorted(e for e in (*FOLDER.glob("*.py"), *FOLDER.glob("*.ipynb")) if e.stem not in ELSEWHERE)
ARGUMENTS = {
    "05_forces": ["--quick", "--out", "forces.json"],
    "06_distance": ["--quick", "--out", "distance.json"],
    "07_gan": ["--quick", "--out", "gan.json"],
    "forces_data": ["ethanol.npz", "2"],
}
SLOW = ("06_distance", "07_gan")
CASES = [pytest.param(e, id=e.stem, marks=pytest.mark.slow if e.stem in SLOW else ()) for e in EXAMPLES]


def as_script(example: Path, folder: Path) -> Path:
    """A script, or the cells of a notebook as one."""
    if example.suffix == ".py":
        return example
    cells = [cell for cell in json.loads(example.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "clear the notebook's outputs"
    script = folder / f"{example.stem}.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells))
    return script


@pytest.mark.parametrize("example", CASES)
def test_example(example, tmp_path):
    script = as_script(example, tmp_path)
    source = Path(__file__).parents[1] / "src"
    done = subprocess.run(
        [sys.executable, str(script), *ARGUMENTS.get(script.stem, ())],
        cwd=tmp_path,
        env={"PYTHONPATH": str(source), "PATH": "", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Warning" not in done.stderr, done.stderr
    for name in ("forces.json", "distance.json", "gan.json"):
        if (file := tmp_path / name).exists():
            assert_engines_agree(json.loads(file.read_text())["history"])
    if example.stem == "03_report":
        assert_it_shows_what_it_says(done.stdout)


def assert_it_shows_what_it_says(said):
    """The stronger the penalty, the higher the accuracy under attack, while the error does not rise."""
    found = re.findall(r"^(.*\S)\s+error ([\d.]+)%, accuracy under PGD at radius 0.1 ([\d.]+)%$", said, re.MULTILINE)
    names, errors, attacked = zip(*found, strict=True)
    assert names == ("two passes", "strength 0.3, exact", "strength 1, exact", "strength 3, exact")
    assert float(errors[-1]) <= float(errors[0])
    assert [float(a) for a in attacked] == sorted(map(float, attacked))


def assert_engines_agree(history):
    """In the first steps, before rounding has grown, both engines reach the same errors, and these have changed."""
    first, second = ([{k: v for k, v in row.items() if k != "seconds"} for row in rows] for rows in history.values())
    assert first[0] != first[-1]
    for ours, theirs in zip(first, second, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-2)
