"""What is printed about a case, and the tables of README and docs, made from the files under results/bench."""

import json
import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from .methods import NAMES

MIB = 2**20
TOLERANCE = {"float32": 1e-4, "tf32": 2e-2, "bf16": 0.2, "amp": 0.2}  # relative, of all gradients together
AS_PLAIN = 2  # times what the precision does to plain training itself: in a deep net it turns ReLUs
PRECISIONS = {"float32": "float32", "tf32": "TF32", "bf16": "bf16", "amp": "bf16 autocast"}
ENCODER = "nn.TransformerEncoder, width 128, 4 layers, 64 tokens"
LARGE = {
    "imagenet-resnet50": "ResNet-50", "vit-b16": "ViT-B/16", "gpt2": "GPT-2 124M", "convnext": "ConvNeXt-T",
}  # fmt: skip
RIVALS = {  # the columns of the tables of costs
    "paper mode": "paper", "exact mode": "exact", "SAM": "sam", "finite differences": "finite",
    "Jacobian penalty": "jacobian", "double backward": "double",
}  # fmt: skip
COSTS = {  # their rows: file and form
    "plain-20, GPU, eager": ("h200-plain20-128-tf32", "eager"),
    "plain-20, GPU, traced": ("h200-plain20-128-tf32", "traced"),
    "plain-20, GPU, compiled": ("h200-plain20-128-tf32", "best"),
    "ResNet-18, GPU, eager": ("h200-resnet18-256-tf32", "eager"),
    "ResNet-18, GPU, traced": ("h200-resnet18-256-tf32", "traced"),
    "ResNet-18, GPU, compiled": ("h200-resnet18-256-tf32", "best"),
    "ViT-Tiny, GPU, compiled": ("h200-vit-depth12-256-bf16", "best"),
    "plain-20, CPU, eager": ("cpu-plain20-128-float32", "eager"),
    "plain-20, CPU, traced": ("cpu-plain20-128-float32", "traced"),
    "plain-20, CPU, compiled": ("cpu-plain20-128-float32", "best"),
    "ResNet-20, CPU, eager": ("cpu-resnet20-64-float32", "eager"),
    "ResNet-20, CPU, traced": ("cpu-resnet20-64-float32", "traced"),
    "ResNet-20, CPU, compiled": ("cpu-resnet20-64-float32", "best"),
    "ResNet-50, CPU, eager": ("large/cpu-imagenet-resnet50-4-float32", "eager"),
    "nn.TransformerEncoder, CPU, eager": ("cpu-encoder-16-float32", "eager"),
    "nn.TransformerEncoder, CPU, traced": ("cpu-encoder-16-float32", "traced"),
    "nn.TransformerEncoder, CPU, compiled": ("cpu-encoder-16-float32", "best"),
}
SHORT = [name for name in COSTS if "plain-20" not in name and "ResNet-50" not in name]  # the README's
LARGE_METHODS = ("plain", "paper", "exact")
FORMS = {
    "best": "at its best: one compiled program",
    "traced": "captured, not compiled",
    "eager": "eager",
}


def text(report: dict[str, Any]) -> str:
    """A case as lines for a terminal."""
    case = report["case"]
    head = f"{title(case)}, {case['image']} x {case['image']} pixels"
    if "fails" in report:
        return f"{head}\n  fails: {report['fails']}\n"
    limits, ceiling, m = report["limits"], report["ceilings"], report["machine"]
    lines = [
        f"{head}, {'channels_last' if case['channels_last'] else 'contiguous'}, {case['rounds']} rounds",
        f"{where(m)}; torch {m['torch']}, Python {m['python']}",
        f"ceilings: {ceiling['operations_per_second'] / 1e12:.3g} Tflop/s in a large product, "
        f"{ceiling['bytes_per_second'] / 1e9:.4g} GB/s in a large copy",
    ]
    for mode in ("paper", "exact"):
        z = limits[mode]
        lines.append(
            f"limits of {mode}: {z['operations_ratio']:.2f}x plain's operations, {z['bytes_ratio']:.2f}x its bytes; "
            f"at the ceilings {z['seconds_ratio']:.2f}x ({1000 * z['seconds']:.3g} ms)"
        )
    check = report["exact_against_double_backward"]
    if check is not None:
        shown = check if isinstance(check, str) else f"{check:.1e}"
        lines.append(f"exact mode against double backward, float32: {shown}")
    for form in FORMS:
        if any(form in entry for entry in report["methods"].values()):
            lines += ["", *_block(form, report["methods"], _tolerance(report, form))]
    return "\n".join([*lines, ""])


def _tolerance(report: dict[str, Any], form: str) -> float:
    plain = report["methods"].get("plain", {}).get(form, {})
    return max(TOLERANCE[report["case"]["precision"]], AS_PLAIN * plain.get("difference", 0.0))


def _block(form: str, methods: dict[str, Any], tolerance: float) -> Iterable[str]:
    heads = f"{'img/s':>8} {'MiB':>8} {'ratio':>6} {'flops':>6} {'bytes':>6} {'differs':>8}"
    captured = " form, seconds to compile, MiB of the graph" * (form != "eager")
    yield f"{FORMS[form]:<34} {'ms':>8} {'quartiles':>17} {'ratio':>6} {heads}{captured}"
    for name, entry in methods.items():
        for place in (form, "second") if form == "best" else (form,):
            if place in entry:
                yield _row(NAMES[name] + (", slower form" if place == "second" else ""), entry[place], tolerance)


def _row(name: str, row: dict[str, Any], tolerance: float) -> str:
    if "fails" in row:
        return f"  {name:<32} fails: {row['fails']}"
    mark = "!" if row["difference"] > tolerance else " "
    low, high = (f"{1000 * s:.3f}" for s in row["quartiles"])
    share = f"{row['bytes_share']:6.0%}" if "bytes_share" in row else " " * 6
    words = (
        f"  {name:<32} {1000 * row['median']:8.3f} {low + ' - ' + high:>17} {row.get('ratio', math.nan):6.2f} "
        f"{row['samples_per_second']:8.0f} {row['peak_bytes'] / MIB:8.1f} {row.get('peak_ratio', math.nan):6.2f} "
        f"{row['operations_share']:6.0%} {share} {row['difference']:8.0e}{mark}"
    )
    failed = "".join(f"; {why}" for why in row.get("failed", ()))
    if row["compile_seconds"] is None:
        return words + (row["how"] + failed if row["how"] != "eager" else "")
    pool = "" if row["graph_bytes"] is None else f", {row['graph_bytes'] / MIB:.0f}"
    seconds = row["compile_seconds"]
    whole = row.get("call")
    call = f"; a whole call {1000 * whole['median']:.3f} ms, {whole.get('ratio', math.nan):.2f}x" if whole else ""
    return words + f"{row['how']}, {seconds:.0f}{pool}{call}{failed}"


def title(case: dict[str, Any]) -> str:
    """The net as a reader would name it, with batch and precision."""
    names = {"mlp": "MLP 3072-2048-2048-10", "resnet18": "ResNet-18", "vit": "ViT-Tiny/4", "encoder": ENCODER} | LARGE
    plain = re.fullmatch(r"(plain|resnet)(\d+)", case["model"])
    known = names.get(case["model"]) if case["options"] in ({}, {"depth": 12}) else None
    name = known or (f"{plain[1]}-{plain[2]}" if plain else case["model"])
    extra = "".join(f", {k} {v}" for k, v in case["options"].items()) if known is None else ""
    precision = PRECISIONS.get(case["precision"], case["precision"])
    return f"{name}{extra}, batch {case['batch']}, {precision}"


def where(machine: dict[str, Any]) -> str:
    return machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"


def reports(folder: Path) -> list[dict[str, Any]]:
    """The cases in a folder: GPUs first, those with the most methods first."""
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    cases = [r for r in contents if "case" in r and "methods" in r]
    return sorted(cases, key=lambda r: (r["machine"]["gpu"] is None, r["case"]["model"] != "plain20"))


def markdown(folder: Path) -> str:
    """The tables of all cases: their ratios beside their limits, and every method's for the cases that have all."""
    parts = []
    cases = reports(folder)
    if not cases:
        raise FileNotFoundError(f"no results of threepass bench in {folder}")
    for machine in dict.fromkeys(where(r["machine"]) for r in cases):
        here = [r for r in cases if where(r["machine"]) == machine]
        versions = here[0]["machine"]
        parts.append(f"{machine}, torch {versions['torch']}:\n\n{_cases(here)}")
        parts += [_methods(r) for r in here if len(r["methods"]) == len(NAMES)]
    return "\n\n".join(parts)


def _cases(cases: list[dict[str, Any]]) -> str:
    """One row a case."""
    lines = [
        "| net | plain, ms | paper, ms | its limit | exact, ms | its limit | memory of paper | of exact |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in cases:
        cells = [title(r["case"]), _ms(r["methods"]["plain"])]
        for mode in ("paper", "exact"):
            z = r["limits"][mode]
            entry = r["methods"].get(mode, {})
            cells += [
                f"{_ms(entry)}, {_ratio(entry, 'ratio')}"
                if "median" in entry.get("best", {})
                else _ratio(entry, "ratio"),
                f"{z['operations_ratio']:.2f}x, {z['bytes_ratio']:.2f}x",
            ]
        cells += [_ratio(r["methods"].get(mode, {}), "peak_ratio") for mode in ("paper", "exact")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _methods(r: dict[str, Any]) -> str:
    lines = [
        f"| {title(r['case'])} | time | memory | time, eager | memory, eager | form | s to compile |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, entry in r["methods"].items():
        cells = [NAMES[name]]
        for form in ("best", "eager"):
            cells += [_ratio(entry, "ratio", form), _ratio(entry, "peak_ratio", form)]
        row = entry.get("best", {})
        seconds = row.get("compile_seconds")
        cells += [row.get("how", "fails"), "" if seconds is None else f"{seconds:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ms(entry: dict[str, Any]) -> str:
    row = entry.get("best", {})
    return f"{1000 * row['median']:.3g}" if "median" in row else ""


def _ratio(entry: dict[str, Any], key: str, form: str = "best") -> str:
    row = entry.get(form, {})
    return f"{row[key]:.2f}x" if key in row else "fails" if "fails" in row else ""


def costs(folder: Path, what: str, names: Iterable[str] | None = None) -> str:
    """The table of time or memory: a row for every net that was measured, relative to plain training."""
    key = {"time": "ratio", "memory": "peak_ratio"}[what]
    lines = [f"| {what} | {' | '.join(RIVALS)} |", "| --- |" + " --- |" * len(RIVALS)]
    for name in COSTS if names is None else names:
        stem, form = COSTS[name]
        file = folder / f"{stem}.json"
        report = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        methods = report.get("methods")
        if methods and any(form in entry for entry in methods.values()):  # a case that failed has no methods
            cells = [_ratio(methods.get(method, {}), key, form) or "-" for method in RIVALS.values()]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def large_nets(folder: Path) -> str:
    """Time, memory, seconds to compile and largest batch of the large nets, beside those of plain training."""
    nets = [json.loads(file.read_text(encoding="utf-8")) for file in sorted((folder / "large").glob("*.json"))]
    measured = [r for r in nets if any("median" in row for row in r.get("rows", {}).values())]
    if not measured:
        return "Not measured yet."
    lines = [
        "| net | plain, ms | paper | exact | memory of paper | of exact "
        "| seconds to compile: plain, paper, exact | largest batch, eager: plain, paper, exact |",
        "| --- |" + " --- |" * 7,
    ]
    return "\n".join([*lines, *map(_large_net, measured)])


def _of_large(r: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The methods of a large net as those of other cases; of a method's forms, the fastest is "best"."""
    methods: dict[str, dict[str, Any]] = {}
    for name in LARGE_METHODS:
        forms = [row for key, row in r["rows"].items() if key.startswith(f"{name},")]
        row = dict(min(forms, key=lambda row: row.get("median", math.inf), default={}))
        plain = methods["plain"]["best"] if methods else row
        for key, ratio in (("median", "ratio"), ("peak_bytes", "peak_ratio")):
            if key in row and key in plain:
                row[ratio] = row[key] / plain[key]
        methods[name] = {"best": row}
    return methods


def _large_net(r: dict[str, Any]) -> str:
    methods = _of_large(r)
    cells = [title(r["case"]) + ", activation checkpointing" * r["case"]["checkpointing"], _ms(methods["plain"])]
    cells += [_ratio(methods[name], key) for key in ("ratio", "peak_ratio") for name in LARGE_METHODS[1:]]
    largest = r.get("largest_batch", {})
    cells.append(", ".join(_compile_seconds(methods[name]["best"]) for name in LARGE_METHODS))
    cells.append(", ".join(str(largest.get(name, "-")) for name in LARGE_METHODS))
    return f"| {' | '.join(cells)} |"


def _compile_seconds(row: dict[str, Any]) -> str:
    """With the check of the compiled program."""
    if row.get("compile_seconds") is None:
        return "-"
    return f"{row['compile_seconds'] + (row['parts'] or {}).get('check', 0.0):.0f}"


def overhead(folder: Path) -> str:
    """Steps with next to no arithmetic, eager and traced, relative to plain training (benchmarks/eager_overhead.py)."""
    runs = json.loads((folder / "cpu-eager-overhead.json").read_text(encoding="utf-8"))["runs"]
    found = {(row["net"], row["step"]): row for run in runs.values() for row in run["rows"]}
    lines = [
        "| net | paper: eager | traced | its kernels | exact: eager | traced | its kernels | seconds to capture |",
        "| --- |" + " --- |" * 7,
    ]
    for net in dict.fromkeys(net for net, _ in found):
        cells = [net]
        for mode in ("paper", "exact"):
            eager, traced = found[net, f"{mode}, strength"], found[net, f"{mode}, traced"]
            kernels = traced["kernels"] / found[net, "plain"]["kernels"]
            cells += [f"{row['ratio']:.2f}x" for row in (eager, traced)] + [f"{kernels:.2f}x"]
        seconds = (found[net, f"{mode}, traced"]["capture_seconds"] for mode in ("paper", "exact"))
        lines.append(f"| {' | '.join(cells)} | {', '.join(f'{s:.1f}' for s in seconds)} |")
    return "\n".join(lines)


MARKS: dict[str, Callable[[Path], str]] = {  # the first line of a table's place in a page
    "<!-- threepass bench --table results/bench -->": markdown,
    "<!-- time in short, from results/bench -->": partial(costs, what="time", names=SHORT),
    "<!-- time, from results/bench -->": partial(costs, what="time"),
    "<!-- memory, from results/bench -->": partial(costs, what="memory"),
    "<!-- overhead, from results/bench/cpu-eager-overhead.json -->": overhead,
    "<!-- large nets, from results/bench/large -->": large_nets,
}
END = "<!-- end -->"


def fill(page: Path, folder: Path) -> None:
    """Puts the tables of a folder between the marks that a page has."""
    words = page.read_text(encoding="utf-8")
    places = [mark for mark in MARKS if mark in words and END in words.split(mark, 1)[1]]
    if not places:
        marks = " or ".join(MARKS)
        raise ValueError(f"{page} has no markers for the tables: add a line {marks}, and {END} below it")
    for mark in places:
        head, rest = words.split(mark, 1)
        words = f"{head}{mark}\n{MARKS[mark](folder)}\n{END}{rest.split(END, 1)[1]}"
    page.write_text(words, encoding="utf-8")
