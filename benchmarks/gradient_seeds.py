"""The examples that train on gradients, over several seeds: how much the engines differ, beside how much seeds do.

    python benchmarks/gradient_seeds.py MNIST_FOLDER --seeds 3 --out results/gradient-losses/seeds.json

Runs examples/05_forces.py, 06_distance.py and 07_gan.py in processes of their own, one thread each, and keeps the last
line of each engine's history. Runs that are in the file are not repeated, so that more seeds can be added later.

Prints the table of docs/gradient-losses.md: mean and standard deviation over the seeds, and the difference between the
engines with its 95 % interval, seed by seed.

Result: results/gradient-losses/seeds.json, quoted by docs/gradient-losses.md: mean errors of forces of 58.0 meV/Å by
double backward and 58.1 by `GradientStep`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from threepass.study.intervals import paired
from threepass.train.files import write_json

ENGINES = ("double backward", "threepass")


class Example(NamedTuple):
    """script; what it trains; the measure in its history, its name and how it is written."""

    script: str
    title: str
    field: str
    measure: str
    form: str


EXAMPLES = (
    Example("05_forces", "forces of ethanol, 60 epochs", "forces", "mean absolute error of forces, meV/Å", ".1f"),
    Example("06_distance", "signed distance, 1000 steps", "error", "mean absolute error of f", ".4f"),
    Example("07_gan", "GAN with R1, 1500 steps", "distance", "Fréchet distance", ".2f"),
)


def run(example: Example, seed: int, data: Path) -> dict[str, Any]:
    """The last line of each engine's history."""
    root = Path(__file__).parents[1]
    arguments = [str(data)] if example.script == "07_gan" else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        script = root / "examples" / f"{example.script}.py"
        command = [sys.executable, str(script), *arguments, "--seed", str(seed), "--out", str(out)]
        path = os.pathsep.join(filter(None, (str(root / "src"), os.environ.get("PYTHONPATH"))))
        subprocess.run(command, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, check=True)
        history = json.loads(out.read_text(encoding="utf-8"))["history"]
    return {engine: history[engine][-1] for engine in ENGINES}


def table(runs: dict[str, dict[str, Any]]) -> str:
    """runs: by script, then by seed."""
    rows = [
        "| example | measure | double backward | threepass | difference | time, double backward | time, threepass |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for example in EXAMPLES:
        done = runs.get(example.script, {}).values()
        if not done:
            continue
        values = [[r[engine][example.field] for r in done] for engine in ENGINES]
        seconds = [statistics.fmean(r[engine]["seconds"] for r in done) for engine in ENGINES]
        cells = [_spread(v, example.form) for v in values]
        difference = _difference(values[1], values[0], example.form)
        times = [f"{s:.0f} s" for s in seconds]
        rows.append("| " + " | ".join([example.title, example.measure, *cells, difference, *times]) + " |")
    return "\n".join(rows)


def _spread(values: list[float], form: str) -> str:
    mean = format(statistics.fmean(values), form)
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):{form}}"


def _difference(after: list[float], before: list[float], form: str) -> str:
    found = paired(after, before)
    if found is None or not found.has_interval:
        return "-"
    return f"{found.mean:+{form}} ({found.low:+{form}} to {found.high:+{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the folder of MNIST")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="examples whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("results/gradient-losses/seeds.json"))
    given = parser.parse_args()
    results: dict[str, Any] = {"torch": torch.__version__, "runs": {}}
    if given.out.exists():
        results = json.loads(given.out.read_text(encoding="utf-8"))
    for seed in range(given.seeds):
        for example in [e for e in EXAMPLES if given.only in e.script]:
            runs = results["runs"].setdefault(example.script, {})
            if str(seed) not in runs:
                runs[str(seed)] = run(example, seed, given.data)
                write_json(given.out, results)
    print(table(results["runs"]))


if __name__ == "__main__":
    main()
