"""The Python blocks of README and docs run, in order, as a reader would type them."""

import json
import re
from pathlib import Path
from statistics import mean

import pytest

from threepass.bench.tables import BEGIN, END, markdown

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    namespace: dict = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)


def test_files_that_pages_name_exist():
    for page in PAGES:
        for name in re.findall(r"`((?:src|tests|docs|benchmarks|examples|results)/[\w./-]+\.\w+)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_measured_figures_are_those_of_the_result_files():
    """After new results: threepass bench --table results/bench --into README.md docs/speed.md"""
    made = markdown(ROOT / "results" / "bench")
    for page in (ROOT / "README.md", ROOT / "docs" / "speed.md"):
        assert f"{BEGIN}\n{made}\n{END}\n" in page.read_text()


def test_demo_figures_are_those_of_the_result_files():
    table = re.search(r"<!-- results/demo -->\n((?:\|.*\n)+)", (ROOT / "README.md").read_text())
    assert table is not None
    shown = [
        re.findall(r"[\d.]+(?= %? ?\|)", row.partition("|")[2].partition("|")[2]) for row in table[1].splitlines()[2:]
    ]
    for figures, variant in zip(shown, ("two-passes", "alpha-0.1", "alpha-0.03", "strength-3-exact"), strict=True):
        runs = sorted((ROOT / "results" / "demo" / variant).glob("seed-*"))
        last = [json.loads((run / "result.json").read_text())["last"] for run in runs]
        attacked = [json.loads((run / "robustness.json").read_text())["pgd"] for run in runs]
        under = mean(r["accuracy"][r["at"].index(0.1)] for r in attacked)
        error, input_loss = mean(m["val_error"] for m in last), mean(m["val_input_loss"] for m in last)
        assert figures == [f"{100 * error:.2f}", f"{input_loss:.3f}", f"{100 * under:.1f}"]


def test_the_refusal_in_add_a_rule_is_real(capsys):
    text = (ROOT / "docs" / "add-a-rule.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    exec("\n".join(blocks[:2]).replace("ScaleShift", "Other"), {"__name__": "page"})
    assert "Other - its backward" in capsys.readouterr().out
