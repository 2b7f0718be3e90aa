"""The figures of the claims page, as SVG that stands by itself: curves as the paper draws them, grids, Table 2."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from ...page.figure import Figure, Line, Panel, over_runs
from ...page.grid import Shade
from ...page.grid import grid as draw_grid
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
    made: Figures = {}
    for column, title in COLUMNS.items():
        lines = []
        for k, runs in enumerate(complete.values()):
            lines += [_line(k, [run[f"{part}_{column}"] for run in runs], part == "val") for part in ("train", "val")]
        note = "solid: training; dashed: validation; band: range over seeds"
        panel = Panel(f"{slug}-{column.replace('_', '-')}", title, "epoch", lines, note, column == "input_loss")
        made[panel.slug] = Figure(panel, list(complete)).alone
    return made


def alignment(e: Evidence) -> Figures:
    """The cosine of pass 3 with the gradient of the input loss over the epochs."""
    runs: dict[str, list[dict]] = {}
    for net in ALIGNED:
        for method in ("two passes", "alpha 0.1"):
            cell = e.cell("alignment", net, "cifar10", method)
            columns = [r["history"] for r in cell.records.values() if "alignment_cosine" in r["history"]]
            if columns:
                runs[f"{NAMES[net]}, {method}"] = columns
    if not runs:
        return {}
    lines = [_line(k, [h["alignment_cosine"] for h in histories], False) for k, histories in enumerate(runs.values())]
    panel = Panel("alignment", "cosine of pass 3 with the gradient of the input loss", "epoch", lines, "CIFAR-10")
    made: Figures = {"alignment": Figure(panel, list(runs)).alone}
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
    return Figure(panel, [t if t == "start" else f"epoch {t}" for t in times]).alone


def _line(series: int, runs: Sequence[Sequence[float | None]], dashed: bool) -> Line:
    length = min(map(len, runs))
    each = max(1, length // POINTS)
    epochs = [i for i in range(length) if (i + 1) % each == 0 and all(run[i] is not None for run in runs)]
    return over_runs(series, [i + 1 for i in epochs], [[float(run[i] or 0.0) for i in epochs] for run in runs], dashed)


def heat_map(cells: Mapping[tuple[str, str], Cell], across: str) -> str:
    """Mean final validation accuracy of every cell, with "diverged" and "stalled" where all its runs were."""
    columns = list(dict.fromkeys(x for _, x in cells))
    rows = {}
    for alpha in (f"{a:g}" for a in GRID_ALPHAS):
        rows["two passes" if alpha == "1" else f"alpha {alpha}"] = [_shade(cells[alpha, x]) for x in columns]
    return draw_grid(f"Final validation accuracy (%) of plain-20 on CIFAR-10, by alpha and {across}", rows, columns)


def _shade(cell: Cell) -> Shade:
    if not cell:
        return Shade("not run", "#ffffff")
    runs = list(cell.records.values())
    if all(r["status"] == "diverged" for r in runs):
        return Shade("diverged", "#f2d5c4")
    if all(stalled(r) for r in runs):
        return Shade("stalled", "#ece6d8")
    value = fmean(grid_value(r) for r in runs)
    part = min(1.0, max(0.0, (value - 10) / 85))
    red, green, blue = (round(255 + part * (end - 255)) for end in (0, 90, 150))
    return Shade(f"{value:.1f}", f"#{red:02x}{green:02x}{blue:02x}", part > 0.55)


def table2(e: Evidence) -> str:
    """Best validation accuracy of two and three passes: the paper's, and ours with a point for every seed."""
    groups = [(net, data) for data in CIFAR for net in NETS]
    lines = []
    for i, (net, data) in enumerate(groups):
        theirs = [paper.TABLE2[net, data, m].val for m in ("kaiming", "alpha 0.1")]
        lines.append(Line(0, [i - 0.2, i - 0.07], theirs))
        lines += _ours(e, net, data, i)
    names = ["the paper, two passes and three", "ours, two passes", "ours, three passes, alpha 0.1"]
    title, ticks = "Best validation accuracy (%)", [f"{NAMES[net]}, {NAMES[data]}" for net, data in groups]
    panel = Panel("table2", title, "", lines, "points: seeds; bars: their means", ticks=ticks, wide=620)
    return Figure(panel, names).alone


def _ours(e: Evidence, net: str, data: str, place: float) -> Iterator[Line]:
    for series, method, x in ((1, "kaiming", place + 0.07), (2, "alpha 0.1", place + 0.2)):
        accuracies = e.cell("table2", net, data, method).values(best_val)
        yield Line(series, [x] * len(accuracies), accuracies, style="points")
        if accuracies:
            yield Line(series, [x - 0.05, x + 0.05], [fmean(accuracies)] * 2, style="bare")
