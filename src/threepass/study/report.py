"""`report`: one page from any set of runs, built from their files alone; it needs no server, no network and no model.

A run is a folder of `threepass compare` (compare.json) or of `threepass train` (metrics.jsonl). Runs that differ in
their seed only are one series. Beside the page, figures/ holds every figure as an SVG file.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from .figure import DARK, LIGHT, STYLE, Line, Panel, alone, number, svg, swatch
from .gather import Group, Measure, Run, Study, gather
from .images import HEAT, data_uri, heat, picture
from .intervals import Difference

CURVES = {
    "loss": ("Loss", "Cross-entropy, or the loss that was given."),
    "error": ("Error, %", "Examples classified wrongly; zero lies on the lower edge."),
    "input_loss": ("Input loss, ½ |dl/dx|²", "Mean over examples, in the units that the net sees."),
}
ATTACKS = {"noise": "Gaussian noise", "fgsm": "FGSM", "pgd": "PGD"}
VARIANCES = {"pass2": "Variance of the error, pass 2", "pass3": "Variance of the tangent, pass 3"}
Draw = Callable[[Panel, str], str]


def report(runs: Sequence[Path], out: Path) -> Path:
    """Writes OUT/report.html, or OUT itself if it ends in .html, and figures/ beside it; returns the page's path."""
    study = gather([Path(run) for run in runs])
    page = Path(out) if Path(out).suffix == ".html" else Path(out) / "report.html"
    figures: dict[str, str] = {}

    def draw(panel: Panel, caption: str) -> str:
        figures[panel.slug] = svg(panel, study.names, _summary(panel, study.names))
        return f"""<figure id="{panel.slug}"><h3>{escape(panel.title)}</h3>
{figures[panel.slug]}
<figcaption><span>{escape(caption)}</span>
<span class="save">{_save("svg", panel)}{_save("png", panel)}</span></figcaption></figure>"""

    parts = [_findings(study), _legend(study), _curves(study, draw), _tables(study), _cost(study)]
    parts += [_robustness(study, draw), _examples(study), _variances(study, draw), _settings(study)]
    (page.parent / "figures").mkdir(parents=True, exist_ok=True)
    for slug, drawing in figures.items():
        (page.parent / "figures" / f"{slug}.svg").write_text(alone(drawing), "utf-8")
    page.write_text(_page(study, "\n".join(filter(None, parts))), "utf-8")
    return page


def _page(study: Study, body: str) -> str:
    here = Path(__file__)
    light, dark = ("".join(_paint(k, c) for k, c in enumerate(palette)) for palette in (LIGHT, DARK))
    sets = ", ".join(dict.fromkeys(about["data"]["name"] for _, about in study.compared))
    title = f"Two and three passes on {escape(sets)}" if sets else "Training runs"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{here.with_suffix(".css").read_text("utf-8")}{light}
@media (prefers-color-scheme: dark) {{ {dark} }}
</style>
</head>
<body>
<a class="skip" href="#curves">Skip to the curves</a>
<main>
<h1>{title}</h1>
{"".join(_lede(study.heading(folder), about) for folder, about in study.compared)}
{body}
</main>
<script type="text/plain" id="figure-style">{STYLE}</script>
<script>
{here.with_suffix(".js").read_text("utf-8")}</script>
</body>
</html>
"""


def _paint(k: int, colour: str) -> str:
    return f".s{k} .line,.s{k} .mark{{stroke:{colour}}}.s{k} .mark,.s{k} .band{{fill:{colour}}}"


def _lede(heading: str, about: dict[str, Any]) -> str:
    data, config = about["data"], about["config"]
    which = f"<strong>{escape(heading)}.</strong> " if heading else ""
    return f"""<p>{which}{escape(about["about"])} {data["train"]:,} training and {data["val"]:,} validation examples of
{" × ".join(map(str, data["shape"]))}; {about["model"]["parameters"]:,} parameters; {config["optimizer"]}, batches of
{config["batch_size"]}, {_count(config["epochs"], "epoch")}, {_count(about["seeds"], "seed")}. For a seed, all methods
start from the same weights and see the same batches.</p>
"""


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _findings(study: Study) -> str:
    """A card for every series but the baselines: what it changed, and how sure that is."""
    cards = []
    for k, group in enumerate(study.groups):
        ratio = group.against(_log_input_loss)
        if group.baseline is None or ratio is None:
            continue
        items = [_finding("Validation error, last epoch", group, _final_error)]
        interval = _interval(ratio, lambda v: f"× {number(math.exp(v))}", "")
        items.append(_item("Validation input loss", f"<strong>× {number(math.exp(ratio.mean))}</strong>", interval))
        for kind, size in {"pgd": "radius", "noise": "σ"}.items():
            at = _middle(group.baseline, kind)
            if at is not None:
                of = partial(Run.accuracy, kind=kind, at=at)
                items.append(_finding(f"Accuracy under {ATTACKS[kind]}, {size} {at:g}", group, of))
        cards.append(f"<li><h2>{swatch(k)}{escape(group.name)}</h2><dl>{''.join(items)}</dl></li>")
    if not cards:
        return ""
    return f'<ul class="findings" aria-label="What changed">{"".join(cards)}</ul>'


def _finding(what: str, group: Group, of: Measure) -> str:
    d = group.against(of)
    if d is None or group.baseline is None:
        return ""
    before, after = fmean(group.baseline.values(of)), fmean(group.values(of))
    values = f"{before:.2f} % → <strong>{after:.2f} %</strong>"
    return _item(what, values, _interval(d, lambda v: f"{v:+.2f}", " points"))


def _item(what: str, values: str, interval: str) -> str:
    return f"<div><dt>{escape(what)}</dt><dd>{values}<span>{interval}</span></dd></div>"


def _interval(d: Difference, write: Callable[[float], str], unit: str) -> str:
    if d.low is None or d.high is None:
        return _minus(f"{write(d.mean)}{unit}; one seed, so no interval")
    rest = "" if d.shown else ": no difference shown"
    return _minus(f"{write(d.mean)}{unit}, 95 % interval {write(d.low)} to {write(d.high)}{rest}")


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


def _legend(study: Study) -> str:
    buttons = [(f'data-toggles="{k}"', swatch(k) + escape(name)) for k, name in enumerate(study.names)]
    buttons += [('data-what="training"', "training (dashed)"), ('data-what="spread"', "spread over seeds")]
    made = "".join(f'<button type="button" aria-pressed="true" {what}>{label}</button>' for what, label in buttons)
    return f'<div class="legend" role="group" aria-label="Show or hide in all figures">{made}</div>'


def _save(kind: str, panel: Panel) -> str:
    label = escape(f"Save {kind.upper()} of {panel.title}")
    return f'<button type="button" data-as="{kind}" aria-label="{label}">{kind.upper()}</button>'


def _summary(panel: Panel, names: Sequence[str]) -> str:
    """For readers who do not see the figure: where every solid line begins and ends."""
    lines = [z for z in panel.lines if z.series >= 0 and not z.dashed]
    parts = [f"{names[z.series]} from {number(z.y[0])} to {number(z.y[-1])}" for z in lines]
    return f"{panel.title}, by {panel.across}: {'; '.join(parts)}."


def _line(series: int, x: Sequence[float], rows: list[list[float]], dashed: bool = False) -> Line:
    """Mean over runs, with the band from the lowest to the highest."""
    columns = list(zip(*rows, strict=True))
    mean = [fmean(column) for column in columns]
    if len(rows) == 1:
        return Line(series, x, mean, dashed=dashed)
    return Line(series, x, mean, [min(c) for c in columns], [max(c) for c in columns], dashed)


def _curves(study: Study, draw: Draw) -> str:
    figures = []
    for key, (title, caption) in CURVES.items():
        lines, scale = [], 100 if key == "error" else 1
        for k, group in enumerate(study.groups):
            epochs = min((len(run.history) for run in group.complete), default=0)
            for part in ("train", "val") if epochs else ():
                rows = [[scale * m[f"{part}_{key}"] for m in run.history[:epochs]] for run in group.complete]
                lines.append(_line(k, range(1, epochs + 1), rows, part == "train"))
        note = "solid: validation; dashed: training; band: range over seeds"
        slug = f"curve-{key.replace('_', '-')}"
        figures.append(draw(Panel(slug, title, "epoch", _lifted(lines), note, logarithmic=True), caption))
    gone = [
        f"{group.name}: {n} of {_count(len(group.runs), 'run')} diverged and left out of all figures"
        for group in study.groups
        if (n := sum(run.diverged for run in group.runs))
    ]
    lost = f"<p><strong>{escape('; '.join(gone))}.</strong></p>" if gone else ""
    return f"""<section id="curves" class="curves"><h2>Loss, error and input loss</h2>
<p>Solid: validation. Dashed: training, measured during the epoch. Lines are means over seeds, bands go from the lowest
seed to the highest. The vertical axes are logarithmic.</p>{lost}
<div class="panels">{"".join(figures)}</div></section>"""


def _lifted(lines: list[Line]) -> list[Line]:
    """Zeros put a bit below the smallest other value: a logarithmic axis has no place for them."""
    floor = 0.6 * min((y for z in lines for y in (*z.y, *(z.low or ())) if y > 0), default=1.0)

    def lift(ys: Sequence[float]) -> list[float]:
        return [y or floor for y in ys]

    return [
        z._replace(
            y=lift(z.y), low=None if z.low is None else lift(z.low), high=None if z.high is None else lift(z.high)
        )
        for z in lines
    ]


def _tables(study: Study) -> str:
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
    rows = [[escape(g.name), *(_spread(g.values(of)) for of in columns.values())] for g in study.groups]
    best = _table(
        "On validation examples, but for the training loss: mean ± standard deviation over seeds.", columns, rows
    )
    columns["final input loss"] = _log_input_loss
    rows = [
        [escape(g.name), *(_cell(g.against(of), of is _log_input_loss) for of in columns.values())]
        for g in study.groups
        if g.baseline is not g
    ]
    bases = " and ".join(dict.fromkeys(g.baseline.name for g in study.groups if g.baseline is not None))
    text = f"Difference to {bases}, with its 95 % interval; bold where the interval leaves out no difference."
    return f"""<section><h2>Best and final figures</h2>{best}</section>
<section><h2>Differences</h2>{_table(text, columns, rows) if rows else ""}
<p>Intervals are Student's t over the differences of runs with the same seed; one seed gives none. They say how much
seeds matter, not how much the choice of validation examples does. Input loss is compared as a ratio. Best is the lowest
validation error of any epoch, which flatters all methods. Of noise and attacks the middle size is shown. Among so many
comparisons, some intervals miss zero by chance.</p></section>"""


def _cell(d: Difference | None, ratio: bool) -> str:
    def write(v: float) -> str:
        return f"× {number(math.exp(v))}" if ratio else f"{'+' if v >= 0 else ''}{number(v)}"

    if d is None:
        return "–"
    if d.low is None or d.high is None:
        return _minus(f"{write(d.mean)}<small>one seed</small>")
    mean = f'<span class="clear">{write(d.mean)}</span>' if d.shown else write(d.mean)
    return _minus(f"{mean}<small>{write(d.low)} to {write(d.high)}</small>")


def _spread(values: list[float]) -> str:
    if not values:
        return "–"
    return number(fmean(values)) + (f" ± {number(stdev(values), 2)}" if len(values) > 1 else "")


def _table(caption: str, columns: Iterable[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Columns and caption are text, cells are HTML; the first of a row is its header."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>' for name, *cells in rows
    )
    return f"""<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="{kind}">
<caption><span>{escape(caption)}</span></caption><thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table></div>"""


def _cost(study: Study) -> str:
    tables = []
    for folder, about in study.compared:
        seconds = about.get("cost", {}).get("seconds", {})
        rows = []
        for name, s in seconds.items():
            width = 6 * s / max(seconds.values())
            bar = f'<span class="bar" style="width: {width:.2f}rem" aria-hidden="true"></span>'
            label = "PyTorch's own two passes" if name == "plain" else escape(name)
            ratios = [f"{s / seconds['plain']:.2f} ×", f"{s / seconds[about['baseline']]:.2f} ×"]
            rows.append([label, f"{1000 * s:.2f}", *ratios, bar])
        if rows:
            which = study.heading(folder) and f"{study.heading(folder)}: "
            text = f"{which}A step on one batch: median of {about['cost']['rounds']}, the methods taking turns."
            columns = ["ms a step", "to PyTorch's own", f"to {about['baseline']}, as trained", "in proportion"]
            tables.append(_table(text, columns, rows, "bars"))
    if not tables:
        return ""
    return f"""<section><h2>Cost of a step</h2>{"".join(tables)}
<p>Forward, backward and update. “PyTorch's own” is loss.backward(); two passes as trained here also find the gradient
at the input, to report the input loss. On a small net much of the time is overhead, and the ratio says little about
large ones.</p></section>"""


def _robustness(study: Study, draw: Draw) -> str:
    found = {k: [r.robustness for r in g.complete if r.robustness] for k, g in enumerate(study.groups)}
    found = {k: curves for k, curves in found.items() if curves}
    if not found:
        return ""
    figures = []
    for kind, title in ATTACKS.items():
        lines = []
        for k, curves in found.items():
            at = curves[0][kind]["at"]
            rows = [[100 * a for a in c[kind]["accuracy"]] for c in curves if c[kind]["at"] == at]
            lines.append(_line(k, at, rows))
        across = "standard deviation of the noise, pixels 0 to 1" if kind == "noise" else "radius, pixels 0 to 1"
        panel = Panel(
            f"robust-{kind}", f"Accuracy under {title}, %", across, lines, "band: range over seeds", top=100.0
        )
        figures.append(draw(panel, "Validation accuracy with the last epoch's weights."))
    first = next(iter(found.values()))[0]
    return f"""<section><h2>What a smaller input gradient buys</h2>
<p>Accuracy on {first["examples"]} validation examples with noise, and under attacks that move every pixel by at most
the radius: FGSM in one step along the sign of the gradient, PGD in {first["steps"]} smaller ones. All in float64,
because the gradients of a confident net round to zero in float32. Every net is attacked along its own gradients.</p>
<div class="panels">{"".join(figures)}</div></section>"""


def _examples(study: Study) -> str:
    """Images, and |dl/dx| under every method, all on one scale."""
    parts = []
    for folder, about in study.compared:
        file = folder / "examples.safetensors"
        kept = load_file(file) if file.exists() else {}
        names = [v["name"] for v in about["variants"] if f"gradient/{v['name']}" in kept]
        if names and kept["pixels"].dim() == 4:
            heading = study.heading(folder)
            parts.append((f"<h3>{escape(heading)}</h3>" if heading else "") + _gallery(kept, names, about))
    if not parts:
        return ""
    colours = ", ".join(f"rgb{c}" for c in HEAT)
    return f"""<section><h2>What it looks like</h2>
<p>|dl/dx| at every pixel: how the loss would answer to a change there. All are on one scale,
<span class="scale" style="background: linear-gradient(90deg, {colours})"></span> from 0 to the largest; the number is
the length of the gradient. Seed 0. The first images are those with the longest gradients in the geometric mean over all
methods: a choice that favours none of them. The last two are the first in the set, whatever they show: a net that is
sure of an image, and right, has next to no gradient there.</p>{"".join(parts)}</section>"""


def _gallery(kept: dict[str, Tensor], names: Sequence[str], about: dict[str, Any]) -> str:
    classes = about["data"]["classes"]
    labels = [classes[i] for i in kept["label"].tolist()]
    sizes = [kept[f"gradient/{name}"].abs().sum(1) for name in names]  # images x height x width, of every method
    top = torch.stack(sizes).max().item()
    images = zip(kept["pixels"], labels, strict=True)
    rows = [["image", *(_tile(picture(image), f"image of class {label}") for image, label in images)]]
    for name, maps in zip(names, sizes, strict=True):
        lengths = kept[f"gradient/{name}"].flatten(1).norm(dim=1).tolist()
        tiles = []
        for label, said, size, length in zip(labels, kept[f"said/{name}"].tolist(), maps, lengths, strict=True):
            wrong = "" if classes[said] == label else f"read as {classes[said]}"
            alt = f"input gradient under {name}, class {label}: length {number(length)} {wrong}".rstrip()
            tiles.append(_tile(heat(size, top), alt, number(length), wrong))
        rows.append([escape(name), *tiles])
    return _over_all(kept, names, about["baseline"]) + _table("Images and input gradients.", labels, rows, "examples")


def _tile(image: Tensor, alt: str, text: str = "", below: str = "") -> str:
    return f'<img src="{data_uri(image)}" alt="{escape(alt)}">{escape(text)}<small>{escape(below)}</small>'


def _over_all(kept: dict[str, Tensor], names: Sequence[str], base: str) -> str:
    """The same in numbers over all examples, because eight images prove nothing."""
    texts = []
    for name in names if base in names else ():
        if name != base:
            shorter = (kept[f"norm/{name}"] < kept[f"norm/{base}"]).double().mean().item()
            before, after = (number(kept[f"norm/{n}"].square().mean().sqrt().item()) for n in (base, name))
            texts.append(
                f"<strong>{escape(name)}</strong>: root mean square {after} against {before} with {escape(base)}, "
                f"shorter in {shorter:.0%} of them"
            )
    count = len(kept[f"norm/{names[0]}"])
    return f"<p>Lengths over all {count} examples that were looked at: {'; '.join(texts)}.</p>" if texts else ""


def _variances(study: Study, draw: Draw) -> str:
    found = {k: [r.variances for r in g.complete if r.variances] for k, g in enumerate(study.groups)}
    found = {k: tables for k, tables in found.items() if tables}
    shapes = {tuple(row["layer"] for row in t["end"]) for tables in found.values() for t in tables}
    if len(shapes) != 1 or shapes == {()}:  # none, or several models: their layers have no common axis
        return ""
    (layers,) = shapes
    places, figures = range(len(layers)), []
    for key, title in VARIANCES.items():
        lines = [_line(k, places, [[row[key] for row in t["end"]] for t in tables]) for k, tables in found.items()]
        start = [[row[key] for row in t["start"]] for t in next(iter(found.values()))]
        lines.append(_line(-1, places, start, dashed=True)._replace(low=None, high=None))
        panel = Panel(f"variance-{key}", title, "layer", lines, "grey, dashed: before training", True, layers)
        figures.append(draw(panel, "At the input of every layer; grey and dashed: before training."))
    return f"""<section><h2>Gradient variances by layer</h2>
<p>Over all units of a layer's input and the first validation batch, after the last epoch: of the error dl/dv that pass
2 brings back, and of the tangent that pass 3 sends forward from dl/dx.</p>
<div class="panels">{"".join(figures)}</div></section>"""


def _settings(study: Study) -> str:
    parts = []
    for folder, about in study.compared:
        heading = study.heading(folder)
        rows = []
        for v in about["variants"]:
            settings = [f"{name} {json.dumps(value)}" for name, value in v["settings"].items() if value is not None]
            rows.append([escape(v["name"]), escape(", ".join(settings))])
        command = f"<p>Made by</p><pre>{escape(about['command'])}</pre>" if about.get("command") else ""
        where = "; ".join(f"{name} {value}" for name, value in (about["versions"] | about["machine"]).items())
        parts.append(f"""{f"<h3>{escape(heading)}</h3>" if heading else ""}{command}
{_table("What the methods differ in.", ["settings"], rows, "words")}
<details><summary>All settings</summary><pre>{escape(json.dumps(about["config"], indent=1))}</pre></details>
<details><summary>The model</summary><pre>{escape(about["model"]["layers"])}</pre></details>
<p>{escape(where)}.</p>""")
    for group in study.groups if not study.compared else ():
        text = escape(json.dumps(group.runs[0].config, indent=1))
        parts.append(f"<details><summary>Settings of {escape(group.name)}</summary><pre>{text}</pre></details>")
    return f"""<section><h2>Settings, and how to make it again</h2>{"".join(parts)}
<p>All numbers are in the folders of the runs: metrics.jsonl, robustness.json and variances.json, and compare.json above
them. figures/ beside this page holds the figures as SVG.</p></section>"""
