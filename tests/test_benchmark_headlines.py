"""The headline figure in the docstring of every benchmark is that of its result file.

After new results, put the sentence that the test expects into the docstring.
"""

import ast
import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def results(name: str) -> Any:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def captures() -> str:
    report = results("bench/h200-captures")
    worst = max(check["worst"] for row in report["rows"] for check in row["checks"])
    refused = report["refused"] or "none"
    return (
        f"On an H200: {report['captures']} checks, {refused} refused, the largest error {worst:.2f} of the allowed one"
    )


def checkpointing() -> str:
    row = next(r for r in results("bench/cpu-checkpointing")["rows"] if r["checkpointed"] and r["blocks"] == 48)
    paper = row["paper"]
    return (
        f"with 48 blocks, paper mode takes {paper['eager']:.2f}x of the memory of plain training with the same "
        f"checkpoints, traced {paper['traced']:.2f}x"
    )


def eager_forces() -> str:
    seconds = results("gradient-losses/cpu-schnet")["seconds"]
    eager, traced = (seconds[m] / seconds["double backward"] for m in ("gradient_step", "GradientStep, traced"))
    return f"Relative to double backward `gradient_step` takes {eager:.2f}x, traced {traced:.2f}x"


def eager_memory() -> str:
    row = next(row for row in results("bench/cpu-eager-memory")["rows"] if row["net"] == "ResNet-20")
    return f"ResNet-20 takes {row['paper, eager']:.2f}x in paper mode and {row['exact, eager']:.2f}x in exact mode"


def eager_overhead() -> str:
    rows = results("bench/cpu-eager-overhead")["runs"]["tiny"]["rows"]
    ratios = {row["step"]: row["ratio"] for row in rows if row["net"] == "plain-20"}
    return f"paper mode takes {ratios['paper, strength']:.2f}x of a plain step, traced {ratios['paper, traced']:.2f}x"


def epoch() -> str:
    report = results("bench/h200-epoch-table-tf32")
    share = min(run["share"] for run in report["runs"] if "share" in run)
    return (
        f"the table takes {report['table_minutes']:.0f} minutes, and its three-pass steps alone are {share:.0%} of wall"
    )


def gradient_losses() -> str:
    nets = results("gradient-losses/h200")["nets"]
    ratios = []
    for name in ("discriminator", "siren", "schnet"):
        methods = nets[name]["methods"]
        ratios.append(f"{methods['threepass-compiled']['median'] / methods['traced-graph']['median']:.2f}x")
    return f"compiled steps take {ratios[0]} (discriminator), {ratios[1]} (SIREN) and {ratios[2]} (SchNet)"


def gradient_seeds() -> str:
    runs = results("gradient-losses/seeds")["runs"]
    of = {e: mean(run[e]["forces"] for run in runs["05_forces"].values()) for e in ("double backward", "threepass")}
    return f"{of['double backward']:.1f} meV/Å by double backward and {of['threepass']:.1f} by `GradientStep`"


def gradient_sizes() -> str:
    seconds = {name: sum(each) for name, each in results("gradient-losses/cpu-sizes")["later_cpu_seconds"].items()}
    return f"{seconds['dynamic']:.2f} s by a dynamic program, {seconds['double backward']:.2f} s by double backward"


def kernels_conv() -> str:
    ratios = [row["table"] / row["cudnn_and_ops"] for row in results("bench/h200-kernels-conv")["plain-20"].values()]
    return f"they take {min(ratios):.2f} to {max(ratios):.2f} of the time of cuDNN with separate kernels"


def kernels_rows() -> str:
    rows = results("bench/h200-kernels-rows")["rows"]
    ratios = [row["ms"] / row["compiled ms"] for row in rows if row["dtype"] == "bfloat16"]
    return f"in bfloat16 they take {min(ratios):.2f} to {max(ratios):.2f} of the time of Inductor's kernels"


def loss() -> str:
    rows = results("bench/cpu-loss")["rows"]
    return " and ".join(f"{row['compiled']['ratio']:.2f}x ({row['net']})" for row in rows)


def ranks() -> str:
    row = results("bench/cpu-ranks")["rows"][0]
    whole, without = (1e3 * row["methods"]["three passes"][kind]["best"] for kind in ("with", "without"))
    return f"the exchange takes {whole - without:.0f} of {whole:.0f} ms of a step of three passes"


def recipes() -> str:
    rows = [row for row in results("recipes/mnist-search") if not row["diverged"]]
    plain, best = (min(each, key=lambda row: row["val_error"]) for each in (
        [row for row in rows if "mode" not in row["settings"]], rows
    ))  # fmt: skip
    s = best["settings"]
    return f"{best['val_error']:.2%} by {s['mode']} mode at strength {s['strength']:g}, {plain['val_error']:.2%} by two"


def regression() -> str:
    rows = [row for row in results("recipes/regression") if row["standardised"]]
    diverged = {lr: sum(row["diverged"] for row in rows if row["lr"] == lr) for lr in (0.1, 0.03)}
    runs = sum(row["runs"] for row in rows if row["lr"] == 0.1)
    return f"{diverged[0.1]} of {runs} runs diverged at lr 0.1, and {diverged[0.03]} at 0.03"


def signature() -> str:
    return f"{results('bench/signature')['microseconds'][0]['call']:.0f} microseconds per call on plain-20"


HEADLINES = [
    captures, checkpointing, eager_forces, eager_memory, eager_overhead, epoch, gradient_losses, gradient_seeds,
    gradient_sizes, kernels_conv, kernels_rows, loss, ranks, recipes, regression, signature,
]  # fmt: skip


@pytest.mark.parametrize("headline", HEADLINES, ids=lambda f: f.__name__)
def test_the_docstring_has_the_headline_of_the_result_file(headline: Callable[[], str]):
    script = ROOT / "benchmarks" / f"{headline.__name__}.py"
    words = " ".join((ast.get_docstring(ast.parse(script.read_text())) or "").split())
    assert headline() in words
