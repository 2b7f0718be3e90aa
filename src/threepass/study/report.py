"""`report`: one page from any set of runs, built from their files alone; it needs no server, no network and no model.

A run is a folder of `threepass compare` (compare.json) or of `threepass train` (metrics.jsonl). Runs that differ in
their seed only are one series. Beside the page, figures/ holds every figure as an SVG file.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..page.figure import Figure, Line, Panel, number, over_runs
from ..page.images import HEAT, data_uri, heat, picture
from ..page.render import count
from ..page.writer import Cell, Table, write_page
from .gather import Group, Measure, Run, Study, differing, gather
from .intervals import Difference

CURVES = {
    "loss": ("Loss", "Cross-entropy, or the loss that was given."),
    "error": ("Error, %", "Examples classified wrongly; zero lies on the lower edge."),
    "input_loss": ("Input loss", "Mean over examples of the penalty, ½ |dl/dx|² by default, in the units of the net."),
}
ATTACKS = {"noise": "Gaussian noise", "fgsm": "FGSM", "pgd": "PGD"}
VARIANCES = {"pass2": "Variance of the error, pass 2", "pass3": "Variance of the tangent, pass 3"}


def report(runs: Sequence[Path], out: Path) -> Path:
    """Writes OUT/report.html, or OUT itself if it ends in .html, and figures/ beside it; returns the page's path."""
    study = gather([Path(run) for run in runs])
    page = Path(out) if Path(out).suffix == ".html" else Path(out) / "report.html"
    curves, attacked, layers = list(_curves(study)), list(_robustness(study)), list(_variances(study))
    measured = [run.robustness for group in study.groups for run in group.complete if run.robustness]
    return write_page(
        page,
        "report.html.j2",
        [*curves, *attacked, *layers],
        study=study,
        cards=list(_cards(study)),
        curves=curves,
        totals=_totals(study),
        differences=_differences(study),
        costs=list(_costs(study)),
        attacked=attacked,
        robustness=measured[0] if measured else None,
        galleries=list(_galleries(study)),
        heat=HEAT,
        layers=layers,
        settings=list(_settings(study)),
        loose=_loose(study),
    )


class Finding(NamedTuple):
    """What changed, and how sure that is."""

    what: str
    before: str
    after: str
    words: str
    shown: bool


class Card(NamedTuple):
    series: int
    name: str
    findings: list[Finding]


def _cards(study: Study) -> Iterator[Card]:
    """One for every series but the baselines."""
    for k, group in enumerate(study.groups):
        ratio = group.against(_log_input_loss)
        if group.baseline is None or ratio is None:
            continue
        findings = [_finding("Validation error, last epoch", group, _final_error)]
        words = _in_words(ratio, lambda v: f"× {number(math.exp(v))}", "")
        findings.append(Finding("Validation input loss", "", f"× {number(math.exp(ratio.mean))}", words, ratio.shown))
        for kind, size in {"pgd": "radius", "noise": "σ"}.items():
            at = _middle(group.baseline, kind)
            if at is not None:
                of = partial(Run.accuracy, kind=kind, at=at)
                findings.append(_finding(f"Accuracy under {ATTACKS[kind]}, {size} {at:g}", group, of))
        yield Card(k, group.name, [finding for finding in findings if finding is not None])


def _finding(what: str, group: Group, of: Measure) -> Finding | None:
    """Both means are over the seeds that the difference is taken over."""
    d = group.against(of)
    if d is None:
        return None
    before, after = (f"{fmean(values):.2f} %" for values in zip(*group.pairs(of), strict=True))
    return Finding(what, before, after, _in_words(d, lambda v: f"{v:+.2f}", " points"), d.shown)


def _in_words(d: Difference, write: Callable[[float], str], unit: str) -> str:
    bounds = _bounds(d, write)
    if not d.has_interval:
        return _minus(f"{write(d.mean)}{unit}; {bounds}")
    rest = "" if d.shown else ": no difference shown"
    return _minus(f"{write(d.mean)}{unit}, 95 % interval {bounds}{rest}")


def _bounds(d: Difference, write: Callable[[float], str]) -> str:
    """The ends of the interval, or why there is none."""
    if d.low is None or d.high is None:
        return f"{count(d.n, 'seed')}: no interval"
    return f"{write(d.low)} to {write(d.high)}" if d.has_interval else f"equal with {d.n} seeds: no interval"


def _minus(text: str) -> str:
    return text.replace("-", "−")


def _middle(group: Group, kind: str) -> float | None:
    """The middle of the sizes: a choice that does not look at the results."""
    sizes = [run.robustness[kind]["at"] for run in group.complete if run.robustness]
    return sorted(sizes[0])[len(sizes[0]) // 2] if sizes else None


def _best_error(run: Run) -> float:
    return 100 * min(m["val_error"] for m in run.history)


def _final_error(run: Run) -> float:
    return 100 * run.last("val_error")


def _log_input_loss(run: Run) -> float | None:
    return math.log(run.last("val_input_loss")) if run.last("val_input_loss") > 0 else None


def _curves(study: Study) -> Iterator[Figure]:
    for key, (title, caption) in CURVES.items():
        lines, scale = [], 100 if key == "error" else 1
        for k, group in enumerate(study.groups):
            epochs = min((len(run.history) for run in group.complete), default=0)
            for part in ("train", "val") if epochs else ():
                rows = [[scale * m[f"{part}_{key}"] for m in run.history[:epochs]] for run in group.complete]
                lines.append(over_runs(k, range(1, epochs + 1), rows, part == "train"))
        note = "solid: validation; dashed: training; band: range over seeds"
        slug = f"curve-{key.replace('_', '-')}"
        yield Figure(Panel(slug, title, "epoch", _lifted(lines), note, logarithmic=True), study.names, caption)


def _lifted(lines: list[Line]) -> list[Line]:
    """Zeros put a bit below the smallest other value: a logarithmic axis has no place for them."""
    floor = 0.6 * min((y for z in lines for y in (*z.y, *(z.low or ())) if y > 0), default=1.0)

    def lift(ys: Sequence[float] | None) -> list[float] | None:
        return None if ys is None else [y or floor for y in ys]

    return [z._replace(y=[y or floor for y in z.y], low=lift(z.low), high=lift(z.high)) for z in lines]


def _columns(study: Study) -> dict[str, Measure]:
    columns: dict[str, Measure] = {
        "best error, %": _best_error,
        "final error, %": _final_error,
        "final loss": partial(Run.last, key="val_loss"),
        "final input loss": partial(Run.last, key="val_input_loss"),
        "final training loss": partial(Run.last, key="train_loss"),
    }
    for kind, name in ATTACKS.items():
        at = next((at for group in study.groups if (at := _middle(group, kind)) is not None), None)
        if at is not None:
            columns[f"right at {name.removeprefix('Gaussian ')} {at:g}, %"] = partial(Run.accuracy, kind=kind, at=at)
    return columns


def _totals(study: Study) -> Table:
    columns = _columns(study)
    rows = [(g.name, [Cell(_spread(g.values(of))) for of in columns.values()]) for g in study.groups]
    caption = "On validation examples, but for the training loss: mean ± standard deviation over seeds."
    return Table(caption, list(columns), rows)


def _spread(values: list[float]) -> str:
    if not values:
        return "–"
    return number(fmean(values)) + (f" ± {number(stdev(values), 2)}" if len(values) > 1 else "")


def _differences(study: Study) -> Table | None:
    columns = _columns(study) | {"final input loss": _log_input_loss}
    bases = list(dict.fromkeys(g.baseline.name for g in study.groups if g.baseline not in (None, g)))
    rows = []
    for group in study.groups:
        if group.baseline is not None and group.baseline is not group:
            name = f"{group.name}, against {group.baseline.name}" if len(bases) > 1 else group.name
            rows.append((name, [_cell(group.against(of), of is _log_input_loss) for of in columns.values()]))
    caption = (
        f"Difference to {' and '.join(bases)}, with its 95 % interval; bold where the interval, over at least three "
        "seeds, excludes zero."
    )
    return Table(caption, list(columns), rows) if rows else None


def _cell(d: Difference | None, ratio: bool) -> Cell:
    def write(v: float) -> str:
        return _minus(f"× {number(math.exp(v))}" if ratio else f"{'+' if v >= 0 else ''}{number(v)}")

    return Cell("–") if d is None else Cell(write(d.mean), _bounds(d, write), d.shown)


def _costs(study: Study) -> Iterator[Table]:
    for folder, about in study.compared:
        seconds = about.get("cost", {}).get("seconds", {})
        rows = []
        for name, s in seconds.items():
            ratios = [f"{s / seconds['plain']:.2f} ×", f"{s / seconds[about['baseline']]:.2f} ×"]
            cells = [Cell(text) for text in (f"{1000 * s:.2f}", *ratios)]
            label = "PyTorch's own two passes" if name == "plain" else name
            rows.append((label, [*cells, Cell("", bar=s / max(seconds.values()))]))
        if rows:
            which = study.heading(folder) and f"{study.heading(folder)}: "
            text = f"{which}A step on one batch: median of {about['cost']['rounds']}, the methods taking turns."
            columns = ["ms a step", "to PyTorch's own", f"to {about['baseline']}, as trained", "in proportion"]
            yield Table(text, columns, rows, "bars")


def _robustness(study: Study) -> Iterator[Figure]:
    found = {k: [r.robustness for r in g.complete if r.robustness] for k, g in enumerate(study.groups)}
    found = {k: curves for k, curves in found.items() if curves}
    for kind, title in ATTACKS.items() if found else ():
        lines = []
        for k, curves in found.items():
            at = curves[0][kind]["at"]
            rows = [[100 * a for a in c[kind]["accuracy"]] for c in curves if c[kind]["at"] == at]
            lines.append(over_runs(k, at, rows))
        across = "standard deviation of the noise, pixels 0 to 1" if kind == "noise" else "radius, pixels 0 to 1"
        title, note = f"Accuracy under {title}, %", "band: range over seeds"
        panel = Panel(f"robust-{kind}", title, across, lines, note, top=100.0)
        yield Figure(panel, study.names, "Validation accuracy with the last epoch's weights.")


class Gallery(NamedTuple):
    """Images and |dl/dx| under every method, all on one scale, and the same in numbers over all examples."""

    heading: str
    examples: int
    lengths: list[tuple[str, str]]
    table: Table


def _galleries(study: Study) -> Iterator[Gallery]:
    for folder, about in study.compared:
        file = folder / "examples.safetensors"
        kept = load_file(file) if file.exists() else {}
        names = [v["name"] for v in about["variants"] if f"gradient/{v['name']}" in kept]
        if names and kept["pixels"].dim() == 4:
            lengths = _lengths(kept, names, about["baseline"])
            examples = len(kept[f"norm/{names[0]}"])
            yield Gallery(study.heading(folder), examples, lengths, _tiles(kept, names, about["data"]["classes"]))


def _tiles(kept: dict[str, Tensor], names: Sequence[str], classes: Sequence[str]) -> Table:
    labels = [classes[i] for i in kept["label"].tolist()]
    sizes = [kept[f"gradient/{name}"].abs().sum(1) for name in names]  # images x height x width, of every method
    top = torch.stack(sizes).max().item()
    images = zip(kept["pixels"], labels, strict=True)
    rows = [("image", [Cell("", image=data_uri(picture(z)), alt=f"image of class {label}") for z, label in images])]
    for name, maps in zip(names, sizes, strict=True):
        lengths = kept[f"gradient/{name}"].flatten(1).norm(dim=1).tolist()
        cells = []
        for label, said, size, length in zip(labels, kept[f"said/{name}"].tolist(), maps, lengths, strict=True):
            wrong = "" if classes[said] == label else f"read as {classes[said]}"
            alt = f"input gradient under {name}, class {label}: length {number(length)} {wrong}".rstrip()
            cells.append(Cell(number(length), wrong, image=data_uri(heat(size, top)), alt=alt))
        rows.append((name, cells))
    return Table("Images and input gradients.", labels, rows, "examples")


def _lengths(kept: dict[str, Tensor], names: Sequence[str], base: str) -> list[tuple[str, str]]:
    """Over all examples, because eight images prove nothing: of every method, in words."""
    texts = []
    for name in names if base in names else ():
        if name != base:
            shorter = (kept[f"norm/{name}"] < kept[f"norm/{base}"]).double().mean().item()
            before, after = (number(kept[f"norm/{n}"].square().mean().sqrt().item()) for n in (base, name))
            texts.append((name, f"root mean square {after} against {before} with {base}, shorter in {shorter:.0%}"))
    return texts


def _variances(study: Study) -> Iterator[Figure]:
    found = {k: [r.variances for r in g.complete if r.variances] for k, g in enumerate(study.groups)}
    found = {k: tables for k, tables in found.items() if tables}
    shapes = {tuple(row["layer"] for row in t["end"]) for tables in found.values() for t in tables}
    if len(shapes) != 1 or shapes == {()}:  # none, or several models: their layers have no common axis
        return
    (layers,) = shapes
    places = range(len(layers))
    for key, title in VARIANCES.items():
        lines = [over_runs(k, places, [[row[key] for row in t["end"]] for t in tables]) for k, tables in found.items()]
        start = [[row[key] for row in t["start"]] for t in next(iter(found.values()))]
        lines.append(over_runs(-1, places, start, dashed=True)._replace(low=None, high=None))
        panel = Panel(f"variance-{key}", title, "layer", lines, "grey, dashed: before training", True, layers)
        yield Figure(panel, study.names, "At the input of every layer; grey and dashed: before training.")


class Settings(NamedTuple):
    """How a comparison was made."""

    heading: str
    about: dict[str, Any]
    methods: Table
    config: str
    machine: str


def _settings(study: Study) -> Iterator[Settings]:
    for folder, about in study.compared:
        rows = [(v["name"], [Cell(_listed(v["settings"]))]) for v in about["variants"]]
        table = Table("What the methods differ in.", ["settings"], rows, "words")
        machine = "; ".join(f"{name} {value}" for name, value in (about["versions"] | about["machine"]).items())
        yield Settings(study.heading(folder), about, table, json.dumps(about["config"], indent=1), machine)


def _loose(study: Study) -> Table | None:
    """What single runs were trained on, their seeds, and the settings in which their series differ."""
    if not study.loose:
        return None
    names, rows = differing(study.loose), []
    for group in study.loose:
        run = group.runs[0]
        task = {} if run.task.keys() & {"comparison", "unknown"} else run.task
        seeds = ", ".join(str(r.seed) for r in group.runs)
        settings = {name: run.settings.get(name) for name in names}
        rows.append((group.name, [Cell(_listed(task)), Cell(seeds), Cell(_listed(settings))]))
    return Table("What the series differ in.", ["data and model", "seeds", "settings"], rows, "words")


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in settings.items() if value not in (None, {}))
