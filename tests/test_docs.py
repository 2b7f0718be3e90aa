"""README and docs: their Python blocks run as a reader would type them, and their numbers are those of results/."""

import ast
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median

import pytest
import yaml
from processes import free_port

import threepass
from threepass.bench.tables import COSTS, fill
from threepass.cli import parse
from threepass.train.recipes import RECIPES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BENCH = ROOT / "results" / "bench"
OF_LIBRARIES = [  # of Lightning and transformers, which a page uses
    f"ignore::{kind}:{module}" for kind in ("DeprecationWarning", "UserWarning", "FutureWarning")
    for module in ("lightning", "torch", "transformers")
]  # fmt: skip


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning", *OF_LIBRARIES)
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "page"}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("name", ["ddp.py", "fsdp.py"])
def test_scripts_for_several_ranks_run(name, tmp_path):
    page = (ROOT / "docs" / "loops.md").read_text()
    (script,) = re.findall(rf'```python title="{name}"\n(.*?)```', page, re.S)
    (tmp_path / name).write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--master-port", free_port(), name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoint").exists() == (name == "fsdp.py")


def commands() -> list[str]:
    """Those of the program that pages show with their flags, as they are typed; N stands for a number."""
    texts = [page.read_text() for page in PAGES]
    shown = [line for text in texts for line in re.findall(r"^ {4}(?:\w+.* -m )?threepass (.*)$", text, re.M)]
    shown += [command for text in texts for command in re.findall(r"`threepass ([^`]*--[^`]*)`", text)]
    return sorted({re.sub(r"\bN\b", "2", command.partition("  #")[0]).strip() for command in shown})


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_pages_are_the_programs(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (page,) = (page for page in PAGES if page.name == "training.md")
    (settings,) = re.findall(r"```text\n# digits.toml\n(.*?)```", page.read_text(), re.S)
    (tmp_path / "digits.toml").write_text(settings)
    parse([word for word in shlex.split(command) if word != "..."])


def test_what_the_citation_and_the_badges_say_is_what_is_packaged():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    readme = (ROOT / "README.md").read_text()
    assert f"Python {project['requires-python'].removeprefix('>=')}+" in readme
    assert f"PyTorch {project['dependencies'][0].removeprefix('torch>=')}+" in readme


def test_files_that_pages_name_exist():
    for page in PAGES:
        named = re.findall(r"`((?:src|tests|docs|benchmarks|examples|results)/[\w./-]+)`", page.read_text())
        for name in {*named}:
            assert (ROOT / name).exists(), f"{page.name} names {name}"


BENCHMARKS = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks").glob("*/__main__.py")]


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda p: p.relative_to(ROOT / "benchmarks").as_posix())
def test_benchmarks_say_what_their_result_is_and_which_page_quotes_it(script):
    words = " ".join((ast.get_docstring(ast.parse(script.read_text())) or "").split())
    result = words[words.index("Result: ") :]
    folder = next(iter(re.findall(r"(results/[\w/-]+)/", result)), "results")
    files = [Path(name).name for name in re.findall(r"[\w/-]+\.jsonl?\b", result)]
    assert all((ROOT / folder / name).exists() for name in files)
    pages = [(ROOT / page).read_text() for page in re.findall(r"docs/[\w-]+\.md", result)]
    own = [script.name, *files, *re.findall(r"`(\w+\.py)`", result)]
    assert all(any(name in page for name in own) for page in pages)
    assert pages or "not measured yet" in result


def test_results_are_shown_by_a_page():
    """By the name of the file, or of a folder; the cases of `threepass bench` are all in one table."""
    cases = {path for path in BENCH.glob("*.json") if "methods" in json.loads(path.read_text())}
    text = "\n".join(page.read_text() for page in PAGES if page.name != "CONTRIBUTING.md").replace("/`", "`")
    of_claims = {*(ROOT / "results" / "paper").iterdir()}  # `threepass reproduce report` makes docs/claims.md of them
    for path in {*(ROOT / "results").rglob("*.*")} - cases - of_claims:
        parents = [p for p in path.relative_to(ROOT).parents if len(p.parts) > 1 and p.parts[-1] != "bench"]
        names = [path.name, *(f"`{p.as_posix()}`" for p in parents), *(f"<!-- {p.as_posix()} -->" for p in parents)]
        assert path.name == "README.md" or any(name in text for name in names), path.relative_to(ROOT)


def test_links_of_pages_outside_the_site_lead_somewhere():
    """mkdocs checks those between the pages of the site."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert link.startswith("https://") or (ROOT / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", ["README.md", "docs/speed.md", "docs/speed-details.md"])
def test_measured_figures_are_those_of_the_result_files(page, tmp_path):
    """After new results: threepass bench --table results/bench --into README.md docs/speed.md docs/speed-details.md"""
    filled = tmp_path / "page.md"
    filled.write_text((ROOT / page).read_text())
    fill(filled, BENCH)
    assert filled.read_text() == (ROOT / page).read_text()


EARLIER = ("h200-vit", "cpu-")  # rows that a page says were measured before the others


def test_the_table_of_costs_was_measured_at_one_commit():
    """But for the large nets, which are measured by a command of their own."""
    commits = {
        stem: json.loads((BENCH / f"{stem}.json").read_text())["machine"]["commit"] for stem, _ in COSTS.values()
    }
    (_,) = {commit for stem, commit in commits.items() if not stem.startswith(("large/", *EARLIER))}
    text = (ROOT / "docs" / "speed-details.md").read_text()
    assert all(commit[:7] in text for commit in commits.values())


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_exponents_are_those_of_the_result_files(device):
    sweeps = json.loads((BENCH / f"{device}-scaling.json").read_text())["sweeps"]
    page = (ROOT / "docs" / "speed-details.md").read_text()
    table = page[page.index(f"`results/bench/{device}-scaling.json`") :]
    for sweep, forms in sweeps.items():
        exponents = [f"{forms['best'][method]['seconds_exponent']:.2f}" for method in ("plain", "paper", "exact")]
        row = re.search(rf"\| {sweep}, [^|]*\| (.*) \|", table)
        assert row is not None
        assert row[1].split(" | ") == exponents


def test_costs_of_gradient_losses_are_those_of_the_result_files():
    page = (ROOT / "docs" / "gradient-losses.md").read_text()
    for name in ("cpu-schnet", "cpu-schnet-small"):
        report = json.loads((ROOT / "results" / "gradient-losses" / f"{name}.json").read_text())
        plain, *others = report["seconds"].values()
        size = f"{report['settings']['atoms']} atoms, {report['settings']['edges']:,} edges"
        assert f"| {size} | {' | '.join(f'{seconds / plain:.1f}x' for seconds in others)} |" in page
    repeats = json.loads((ROOT / "results" / "gradient-losses" / "cpu-schnet-repeats.json").read_text())["runs"]
    ratios = [run["gradient_step"] / run["double backward"] for run in repeats]
    assert f"gave {min(ratios):.2f} to {max(ratios):.2f} of double backward's time" in " ".join(page.split())


def test_costs_of_batches_of_many_sizes_are_those_of_the_result_file():
    page = (ROOT / "docs" / "gradient-losses.md").read_text()
    found = json.loads((ROOT / "results" / "gradient-losses" / "cpu-sizes.json").read_text())
    seconds = {name: sum(each) for name, each in found["later_cpu_seconds"].items()}
    for name, title in {
        "double backward": "double backward",
        "gradient_step": "`gradient_step`, eager",
        "traced": '`GradientStep(compile="trace")`, dynamic',
        "dynamic": "`GradientStep(compile=True)`, dynamic",
    }.items():
        captures = sorted(found["first_wall_seconds"].get(name, ()), reverse=True)[:2]
        form = ".0f" if name == "dynamic" else ".1f"
        captured = " and ".join(f"{each:{form}}" for each in captures) + " s" if captures else ""
        assert f"| {title} | {seconds[name]:.2f} s | {captured} |".replace("|  |", "| |") in page
    own, shared = (1e3 * sum(found["later_cpu_seconds"][name][:2]) / 2 for name in ("static", "dynamic"))
    assert f"these steps took {own:.1f} ms on average, the same by the dynamic program {shared:.1f} ms" in page


def test_the_cost_of_losses_is_that_of_the_result_file():
    """After new results of benchmarks/loss.py, put the sentence that this expects into the page."""
    rows = json.loads((BENCH / "cpu-loss.json").read_text())["rows"]
    compiled = " and ".join(f"{row['compiled']['ratio']:.2f}x ({row['net']})" for row in rows)
    eager = " and ".join(f"{row['eager']['ratio']:.2f}x" for row in rows)
    text = " ".join((ROOT / "docs" / "loops.md").read_text().split())
    assert f"{compiled} of the time of `step(x, y)`, eager steps {eager}" in text


def test_the_cost_of_exchanging_gradients_is_that_of_the_result_file():
    text = (ROOT / "docs" / "loops.md").read_text()
    for row in json.loads((BENCH / "cpu-ranks.json").read_text())["rows"]:
        for method in ("three passes", "plain"):
            whole, without = (1e3 * row["methods"][method][kind]["best"] for kind in ("with", "without"))
            assert f"{whole - without:.0f} of {whole:.0f} ms" in text


def test_memory_with_checkpoints_is_that_of_the_result_file():
    rows = json.loads((BENCH / "cpu-checkpointing.json").read_text())["rows"]
    page = (ROOT / "docs" / "speed-details.md").read_text()
    for row in [row for row in rows if row["checkpointed"]]:
        ratios = [row[mode].get(form) for mode in ("paper", "exact") for form in ("eager", "traced", "compiled")]
        cells = " | ".join("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios)
        assert f"| {row['blocks']} | {cells} |" in page


def test_memory_of_eager_steps_is_that_of_the_result_file():
    page = (ROOT / "docs" / "speed-details.md").read_text()
    forms = ("paper, eager", "paper, traced", "exact, eager", "exact, traced", "double backward")
    for row in json.loads((BENCH / "cpu-eager-memory.json").read_text())["rows"]:
        assert f"| {row['net']} | {' | '.join(f'{row[form]:.2f}x' for form in forms)} |" in page


def test_the_engines_over_seeds_are_those_of_the_result_file():
    """If not: python benchmarks/gradient_seeds.py prints the table."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from gradient_seeds import table
    finally:
        sys.path.pop(0)
    runs = json.loads((ROOT / "results" / "gradient-losses" / "seeds.json").read_text())["runs"]
    assert table(runs) in (ROOT / "docs" / "gradient-losses.md").read_text()


def test_captures_are_those_of_the_result_file():
    report = json.loads((BENCH / "h200-captures.json").read_text())
    checks = [check for row in report["rows"] for check in row["checks"]]
    seconds = [row["check_seconds"] for row in report["rows"]]
    page = " ".join((ROOT / "docs" / "compile.md").read_text().split())
    assert not report["refused"]
    assert f"{len(checks)} checks, none refused" in page
    assert f"the largest error was {max(check['worst'] for check in checks):.2f} of the allowed one" in page
    assert f"took {min(seconds):.1f} to {max(seconds):.0f} s" in page
    cpu = json.loads((BENCH / "cpu-captures.json").read_text())
    worst = max(check["worst"] for row in cpu["rows"] for check in row["checks"])
    assert not cpu["refused"]
    assert not cpu["failed"]
    assert f"{cpu['captures']} checks, none refused, the largest error {worst:.2f} of the allowed one" in page


def test_ratios_of_repeated_runs_on_a_cpu_are_those_of_the_result_file():
    text = " ".join((ROOT / "docs" / "speed-details.md").read_text().split())
    runs = [run["methods"] for run in json.loads((BENCH / "cpu-again.json").read_text())["runs"]]
    assert len(runs) == 7
    for mode, words in {"paper": "paper mode took {}", "exact": "exact mode {}"}.items():
        ratios = [run[mode]["best"]["median"] / run["plain"]["best"]["median"] for run in runs]
        span = f"{min(ratios):.2f}x to {max(ratios):.2f}x, with a median of {median(ratios):.2f}x"
        assert words.format(span) in text


def means_of_methods(summary: Path, radius: float) -> Iterator[tuple[str, float, float, float]]:
    """The methods of a comparison: their validation errors, input losses, and accuracies under PGD, as means."""
    compared = json.loads(summary.read_text())
    for variant in compared["variants"]:
        runs = [run for run in compared["runs"] if run["variant"] == variant["name"]]
        errors, losses = ([run["last"][name] for run in runs] for name in ("val_error", "val_input_loss"))
        attacks = [run["robustness"]["pgd"] for run in runs]
        accuracies = [attack["accuracy"][attack["at"].index(radius)] for attack in attacks]
        yield variant["name"], mean(errors), mean(losses), mean(accuracies)


def test_demo_figures_are_those_of_the_result_files():
    table = re.search(r"<!-- results/demo.json -->\n((?:\|.*\n)+)", (ROOT / "docs" / "index.md").read_text())
    assert table is not None
    shown = [
        re.findall(r"[\d.]+(?= %? ?\|)", row.partition("|")[2].partition("|")[2]) for row in table[1].splitlines()[2:]
    ]
    for figures, (_, *means) in zip(shown, means_of_methods(ROOT / "results" / "demo.json", radius=0.1), strict=True):
        error, input_loss, under = means
        assert figures == [f"{100 * error:.2f}", f"{input_loss:.3f}", f"{100 * under:.1f}"]


def test_the_refusal_in_add_a_rule_is_real(capsys):
    source = "\n".join(blocks(ROOT / "docs" / "add-a-rule.md")[:2])
    exec(source.replace("ScaleShift", "Other"), {"__name__": "page"})
    assert "Other - its backward" in capsys.readouterr().out


def test_the_api_reference_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    entries = re.findall(r"^::: threepass\.([\w.]+)", page, re.M)
    listed = {name for names in re.findall(r"members: \[(.*)\]", page) for name in names.split(", ")}
    for name in threepass.__all__:
        assert {name, f"train.loop.{name}", f"train.trained.{name}"} & {*entries} or name in listed, (
            f"docs/api.md lacks {name}"
        )
    for entry in entries:
        module, _, name = entry.rpartition(".")
        assert hasattr(importlib.import_module(f"threepass.{module}".rstrip(".")), name)


def test_the_site_loads_nothing_from_a_network(tmp_path):
    mkdocs = shutil.which("mkdocs", path=Path(sys.executable).parent)
    assert mkdocs is not None
    command = [mkdocs, "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240, env={"NO_MKDOCS_2_WARNING": "1", "PATH": ""})
    for page in (tmp_path / "site").glob("*.html"):
        text = page.read_text()
        assert not re.findall(r"<(?:script|img|iframe)[^>]+src=\"?(?:https?:)?//[^>]*", text), page.name
        assert not re.findall(r"<link[^>]+rel=\"?(?:stylesheet|preconnect)[^>]+href=\"?(?:https?:)?//[^>]*", text)
    assert (tmp_path / "site" / "search" / "search_index.json").exists()


def table_of(page: Path, mark: str) -> str:
    found = re.search(rf"<!-- {re.escape(mark)} -->\n(.*?)\n<!-- end -->", page.read_text(), re.S)
    assert found is not None
    return found[1]


def test_learning_rates_are_those_of_the_search():
    """After new results, put the table that this expects between the page's marks."""
    rows = json.loads((ROOT / "results" / "recipes" / "mnist-search.json").read_text())
    head = ["mode", "strength", "lr", "schedule", "validation error", "accuracy under PGD, radius 0.1"]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for row in sorted(rows, key=lambda row: [row["settings"].get(name, "") for name in ("mode", "schedule")]):
        s = row["settings"]
        if s["lr"] == 0.1 and s.get("strength", 1.0) >= 1:
            schedule = s["schedule"] + (f", warm-up {s['warmup']} epoch" if "warmup" in s else "")
            end = ["diverged", ""] if row["diverged"] else [f"{row['val_error']:.2%}", f"{row['pgd']['0.1']:.1%}"]
            cells = [
                s.get("mode", "two passes"),
                f"{s['strength']:g}" if "strength" in s else "",
                str(s["lr"]),
                schedule,
            ]
            lines.append(f"| {' | '.join([*cells, *end])} |".replace("|  |", "| |"))
    assert table_of(ROOT / "docs" / "choose.md", "results/recipes/mnist-search.json") == "\n".join(lines)


def test_diverged_regressions_are_those_of_the_search():
    rows = json.loads((ROOT / "results" / "recipes" / "regression.json").read_text())
    rates = list(dict.fromkeys(row["lr"] for row in rows))
    lines = [f"| lr | {' | '.join(map(str, rates))} |", "| --- " * (len(rates) + 1) + "|"]
    for standardised, name in ((True, "standardised targets"), (False, "targets as they come")):
        alike = [[row for row in rows if (row["standardised"], row["lr"]) == (standardised, lr)] for lr in rates]
        (runs,) = {sum(row["runs"] for row in some) for some in alike}
        lines.append(f"| {name}, {runs} runs | {' | '.join(str(sum(row['diverged'] for row in s)) for s in alike)} |")
    assert table_of(ROOT / "docs" / "choose.md", "results/recipes/regression.json") == "\n".join(lines)


def test_recipes_are_those_of_the_code():
    lines = ["| model and data | settings | third pass | results |", "| --- | --- | --- | --- |"]
    for (model, data), recipe in RECIPES.items():
        common, third = (", ".join(f"{k} {v}" for k, v in z.items()) for z in (recipe.common, recipe.third))
        results = f"`{recipe.results}`"
        methods = "; ".join(
            f"compare: {k} {', '.join(f'{v:g}' for v in values)}" for k, values in recipe.methods.items()
        )
        lines.append(f"| {model}, {data} | {common} | {third}; {methods} | {results} |")
    assert table_of(ROOT / "docs" / "choose.md", "recipes") == "\n".join(lines)


def test_the_comparison_on_mnist_is_that_of_the_result_files():
    lines = ["| method | validation error | input loss | accuracy under PGD, radius 0.08 |", "| --- " * 4 + "|"]
    methods = [*means_of_methods(ROOT / "results" / "recipes" / "mnist.json", radius=0.08)]
    for name, error, input_loss, under in methods:
        lines.append(f"| {name} | {100 * error:.2f} % | {input_loss:.4f} | {100 * under:.1f} % |")
    assert table_of(ROOT / "docs" / "index.md", "results/recipes/mnist.json") == "\n".join(lines)
    plain, three = methods[0], methods[-1]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert three[0] == "strength 3, paper"
    assert f"a validation error of {three[1]:.2%} where plain training has {plain[1]:.2%}".replace("%", " %") in text
    assert f"{three[3]:.1%} where plain training has {plain[3]:.1%}".replace("%", " %") in text


def test_accuracies_of_plain20_are_those_of_the_result_file():
    runs = json.loads((ROOT / "results" / "paper" / "table2.json").read_text())["runs"].values()
    ours = [run for run in runs if (run["cell"]["net"], run["cell"]["data"]) == ("plain20", "cifar10")]
    two, three = ([r["best"]["val"] for r in ours if r["cell"]["method"] == name] for name in ("kaiming", "alpha 0.1"))
    text = " ".join((ROOT / "README.md").read_text().split())
    seeds = {2: "two", 3: "three"}[len(two)]
    assert len(two) == len(three)
    assert f"{mean(two):.1f} % by two passes and {mean(three):.1f} % by three, means of {seeds} seeds" in text


@pytest.mark.parametrize(("file", "traced", "digits"), [("h200", "traced-graph", 2), ("cpu", "traced", 1)])
def test_costs_of_published_nets_are_those_of_the_result_files(file, traced, digits):
    nets = json.loads((ROOT / "results" / "gradient-losses" / f"{file}.json").read_text())["nets"]
    page = (ROOT / "docs" / "gradient-losses.md").read_text()
    measured = [net["methods"] for net in nets.values() if "threepass-compiled" in net["methods"]]
    assert len(measured) >= 3
    for methods in measured:
        captured = [methods[name] for name in ("threepass-captured", "threepass-compiled") if name in methods]
        rows = [methods["double"], methods[traced], methods["threepass"], *captured]
        cells = [f"{1000 * row['median']:.{digits}f} ms, {row['peak_bytes'] / 2**20:.0f} MiB" for row in rows]
        fastest = min(rows[:2], key=lambda row: row["median"])
        for row in captured:
            cells.append(", ".join(f"{row[figure] / fastest[figure]:.2f}x" for figure in ("median", "peak_bytes")))
        assert f"| {' | '.join(cells)} |" in page
