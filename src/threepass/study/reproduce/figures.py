"""The figures of the claims page, as SVG that stands by itself: curves as the paper draws them, grids, Table 2."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from statistics import fmean

from ..figure import Line, Panel, alone, svg
from . import paper
from .claims import ALIGNED, NAMES, NETS, curve_cells, grid, grid_value
from .plan import CIFAR, GRID_ALPHAS
from .rules import Cell, Evidence, best_val, stalled

POINTS = 100  # at most so many on a line
COLUMNS = {"loss": "loss", "error": "error", "input_loss": "input loss"}
Figures = dict[str, str]  # the file's stem, and the drawing


def all_figures(e: Evidence) -> Figures:
    """What can be drawn from the records that there are."""
    made: Figures = {}
    if any(e.cell("table2", n, d, m) for n in NETS for d in CIFAR for m in ("alpha 0.1", "kaiming")):
        made["table2"] = table2(e)
    made |= curves("mnist", curve_cells(e, "mnist", "mlp", "mnist"))
    for data in CIFAR:
        made |= curves(data, curve_cells(e, "curves", "plain20", data))
    made |= curves("alpha0-mnist", {"alpha 0": e.cell("alpha0", "mlp", "mnist", "alpha 0")})
    for data in CIFAR:
        cells = {
            f"alpha 0, eta {lr}": e.cell("alpha0", "plain20", data, f"alpha 0, eta {lr}") for lr in ("0.1", "0.01")
        }
        made |= curves(f"alpha0-{data}", cells)
    for study, across in (("rates", "learning rate"), ("batches", "batch size")):
        if any(grid(e, study).values()):
            made[study] = heat_map(grid(e, study), across)
    made |= alignment(e)
    return made


def curves(slug: str, cells: Mapping[str, Cell]) -> Figures:
    """Loss, error and input loss over the epochs, as the paper's figures: solid in training, dashed in validation."""
    complete = {
        name: [r["history"] for r in cell.records.values() if r["status"] == "complete"] for name, cell in cells.items()
    }
    complete = {name: runs for name, runs in complete.items() if runs}
    if not complete:
        return {}
    made = {}
    for column, title in COLUMNS.items():
        lines = []
        for k, runs in enumerate(complete.values()):
            lines += [_line(k, [run[f"{part}_{column}"] for run in runs], part == "val") for part in ("train", "val")]
        note = "solid: training; dashed: validation; band: from the lowest seed to the highest"
        panel = Panel(f"{slug}-{column.replace('_', '-')}", title, "epoch", lines, note, column == "input_loss")
        made[panel.slug] = alone(svg(panel, list(complete), f"{title} over the epochs"))
    return made


def alignment(e: Evidence) -> Figures:
    """The cosine of pass 3 with the gradient of the input loss over the epochs."""
    runs: dict[str, list[dict]] = {}
    for net in ALIGNED:
        for method in ("two passes", "alpha 0.1"):
            found = e.cell("alignment", net, "cifar10", method).records.values()
            columns = [r["history"] for r in found if "alignment_cosine" in r["history"]]
            if columns:
                runs[f"{NAMES[net]}, {method}"] = columns
    if not runs:
        return {}
    lines = [_line(k, [h["alignment_cosine"] for h in found], False) for k, found in enumerate(runs.values())]
    panel = Panel("alignment", "cosine of pass 3 with the gradient of the input loss", "epoch", lines, "CIFAR-10")
    made = {"alignment": alone(svg(panel, list(runs), panel.title))}
    for net in ALIGNED:
        records = e.cell("alignment", net, "cifar10", "two passes").records
        if "alignment" in records.get(0, {"measured": {}})["measured"]:
            made[f"alignment-{net}"] = layers(net, records[0]["measured"]["alignment"])
    return made


def layers(net: str, measured: dict[str, dict]) -> str:
    """The cosine in every layer, from the input on, at the start and at every quarter of the training."""
    times = ["start", *sorted((t for t in measured if t.isdigit()), key=int)]
    lines = []
    for k, time in enumerate(times):
        cosines = [v for name, v in measured[time]["layers"].items() if name.endswith("weight")]
        lines.append(Line(k, list(range(len(cosines))), cosines))
    title = f"{NAMES[net]}, two passes: cosine by layer"
    panel = Panel(f"alignment-{net}", title, "weight, from the input on", lines, "CIFAR-10, seed 0")
    return alone(svg(panel, [t if t == "start" else f"epoch {t}" for t in times], title))


def _line(series: int, runs: Sequence[Sequence[float | None]], dashed: bool) -> Line:
    length = min(map(len, runs))
    each = max(1, length // POINTS)
    epochs = [i for i in range(length) if (i + 1) % each == 0 and all(run[i] is not None for run in runs)]
    values = [[float(run[i] or 0.0) for run in runs] for i in epochs]
    x, y = [i + 1 for i in epochs], [fmean(v) for v in values]
    if dashed or len(runs) == 1:
        return Line(series, x, y, dashed=dashed)
    return Line(series, x, y, [min(v) for v in values], [max(v) for v in values])


def heat_map(cells: Mapping[tuple[str, str], Cell], across: str) -> str:
    """Mean final validation accuracy of every cell, with "diverged" and "stalled" where all its runs were."""
    columns = list(dict.fromkeys(x for _, x in cells))
    wide, high, left, top = 74, 40, 110, 44
    parts = []
    for i, alpha in enumerate(f"{a:g}" for a in GRID_ALPHAS):
        y = top + i * high
        label = "two passes" if alpha == "1" else f"alpha {alpha}"
        parts.append(_text(left - 8, y + 25, label, "end"))
        for j, x in enumerate(columns):
            text, colour, dark = _shade(cells[alpha, x])
            place = f'x="{left + j * wide}" y="{y}" width="{wide - 2}" height="{high - 2}"'
            parts.append(f'<rect {place} fill="{colour}" stroke="#999"/>')
            parts.append(_text(left + j * wide + wide / 2, y + 24, text, "middle", "#fff" if dark else "#111"))
    heads = [_text(left + j * wide + wide / 2, top - 8, x, "middle") for j, x in enumerate(columns)]
    title = f"Final validation accuracy (%) of plain-20 on CIFAR-10, by alpha and {across}"
    size = left + len(columns) * wide + 10, top + len(GRID_ALPHAS) * high + 10
    return _document(title, size, [_text(10, 18, title), *heads, *parts])


def _shade(cell: Cell) -> tuple[str, str, bool]:
    """The text of a cell, its colour, and whether that is dark."""
    if not cell:
        return "not run", "#ffffff", False
    runs = list(cell.records.values())
    if all(r["status"] == "diverged" for r in runs):
        return "diverged", "#f2d5c4", False
    if all(stalled(r) for r in runs):
        return "stalled", "#ece6d8", False
    value = fmean(grid_value(r) for r in runs)
    part = min(1.0, max(0.0, (value - 10) / 85))
    red, green, blue = (round(255 + part * (end - 255)) for end in (0, 90, 150))
    return f"{value:.1f}", f"#{red:02x}{green:02x}{blue:02x}", part > 0.55


def table2(e: Evidence) -> str:
    """Best validation accuracy of two and three passes: the paper's, and ours with a ring for every seed."""
    groups = [(net, data) for data in CIFAR for net in NETS]
    wide, high, left, top = 560, 250, 50, 60
    values = [paper.TABLE2[n, d, m].val for n, d in groups for m in ("kaiming", "alpha 0.1")]
    values += [
        v for n, d in groups for m in ("kaiming", "alpha 0.1") for v in e.cell("table2", n, d, m).values(best_val)
    ]
    low, top_value = min(values) - 2, max(values) + 2

    def y_of(value: float) -> float:
        return top + (top_value - value) / (top_value - low) * high

    parts = [
        _text(left, 18, "Best validation accuracy (%): two passes to three"),
        _text(left, 36, "grey: the paper"), _text(left + 110, 36, "blue: two passes", fill="#0072b2"),
        _text(left + 230, 36, "orange: three passes, alpha 0.1; ring: a seed, bar: their mean", fill="#c84f00"),
    ]  # fmt: skip
    for value in range(int(low / 10) * 10 + 10, int(top_value) + 1, 10):
        parts.append(f'<path d="M{left} {y_of(value):.1f}H{left + wide}" stroke="#e3e5e7"/>')
        parts.append(_text(left - 6, y_of(value) + 4, str(value), "end"))
    for i, (net, data) in enumerate(groups):
        x = left + (i + 0.5) * wide / len(groups)
        parts.append(_text(x, top + high + 20, f"{NAMES[net]}, {NAMES[data]}", "middle"))
        ends = [y_of(paper.TABLE2[net, data, m].val) for m in ("kaiming", "alpha 0.1")]
        parts.append(
            f'<path d="M{x - 30:.1f} {ends[0]:.1f}L{x - 10:.1f} {ends[1]:.1f}" stroke="#777" stroke-width="2"/>'
        )
        parts += [
            f'<circle cx="{x + at:.1f}" cy="{y:.1f}" r="3.5" fill="#777"/>'
            for at, y in zip((-30, -10), ends, strict=True)
        ]
        parts += _ours(e, net, data, x, y_of)
    return _document("Table 2: the paper's accuracies and ours", (left + wide + 10, top + high + 34), parts)


def _ours(e: Evidence, net: str, data: str, x: float, y_of) -> Iterator[str]:
    for at, method, colour in ((10, "kaiming", "#0072b2"), (30, "alpha 0.1", "#c84f00")):
        found = e.cell("table2", net, data, method).values(best_val)
        for value in found:
            yield f'<circle cx="{x + at}" cy="{y_of(value):.1f}" r="3.5" fill="none" stroke="{colour}"/>'
        if found:
            yield f'<path d="M{x + at - 8} {y_of(fmean(found)):.1f}h16" stroke="{colour}" stroke-width="2"/>'


def _document(title: str, size: tuple[float, float], parts: Sequence[str]) -> str:
    wide, high = size
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}" width="{wide:g}" height="{high:g}" '
        f'role="img" font-family="system-ui,sans-serif" font-size="11"><title>{escape(title)}</title>'
        f'<rect width="{wide:g}" height="{high:g}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _text(x: float, y: float, text: str, anchor: str = "start", fill: str = "#222") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
