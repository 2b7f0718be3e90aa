"""The tables of a report: means over seeds, differences to the baseline, the cost of a step, and settings."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from ..page.figure import Figure
from ..page.render import count
from ..page.writer import Cell, Table
from ..train.config import NOT_WITH_STRENGTH
from .gather import Group, Measure, Study, differing
from .intervals import Difference
from .report_columns import columns, log_input_loss


def totals(study: Study) -> Table:
    measures = columns(study)
    cells: list[list[Cell]] = [[] for _ in study.groups]
    for of, better in measures.values():
        values = [group.values(of) for group in study.groups]
        write = same_digits([z for seeds in values for z in seeds])
        for row, group, seeds in zip(cells, study.groups, values, strict=True):
            spread = f"±\N{NO-BREAK SPACE}{write(stdev(seeds))}" if len(seeds) > 1 else ""
            is_best = better is not None and _is_best(group, study.groups, of, better)
            row.append(Cell(write(fmean(seeds)), spread, best=is_best) if seeds else Cell("–"))
    caption = "On validation examples, but for the training loss: mean ± standard deviation over seeds; ★: best mean."
    return Table(caption, list(measures), list(zip(study.names, cells, strict=True)))


def in_lines(study: Study) -> list[str]:
    """What came of every series in one line each, under one of headings, for a terminal: means over seeds."""
    table = totals(study)
    shown = [
        i for i, name in enumerate(table.columns) if name.startswith(("final error", "final input", "accuracy at PGD"))
    ]
    count_of = [len(group.complete) for group in study.groups]
    heads = ["", *(table.columns[i] for i in shown), "seeds"]
    rows = [
        [name, *(f"{cells[i].text} {cells[i].below}".replace("\N{NO-BREAK SPACE}", " ").strip() for i in shown), str(n)]
        for (name, cells), n in zip(table.rows, count_of, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = []
    for first, *rest in [heads, *rows]:
        numbers = (f"{text:>{width}}" for text, width in zip(rest, widths[1:], strict=True))
        lines.append("  ".join([f"{first:<{widths[0]}}", *numbers]))
    return lines


def _is_best(group: Group, groups: Sequence[Group], of: Measure, better: str) -> bool:
    """Whether a series has the best mean of those that are compared with the same baseline."""
    means = {g.name: fmean(g.values(of)) for g in groups if g.baseline is group.baseline and g.values(of)}
    best = {"low": min, "high": max}[better](means.values(), default=None)
    return len({*means.values()}) > 1 and means.get(group.name) == best


def same_digits(values: Sequence[float]) -> Callable[[float], str]:
    """A format for all numbers of a column: as many decimals as give the largest three digits and the smallest two.

    >>> write = same_digits([1.346, 0.0131])
    >>> write(1.346), write(0.0131)
    ('1.346', '0.013')
    >>> same_digits([56.25, 70.3])(56.25), same_digits([3e-7])(3e-7)
    ('56.2', '3.00e−7')
    """
    sizes = [abs(v) for v in values if v and math.isfinite(v)] or [1.0]
    powers = [math.floor(math.log10(size)) for size in (max(sizes), min(sizes))]
    places = max(0, 2 - powers[0], min(1 - powers[1], 3 - powers[0]))
    if places > 6 or powers[0] > 5:
        return lambda v: minus(f"{v:.2e}").replace("e−0", "e−").replace("e+0", "e")
    return lambda v: minus(f"{v:.{places}f}")


def differences(study: Study) -> Table | None:
    bases = list(dict.fromkeys(g.baseline.name for g in study.groups if g.baseline not in (None, g)))
    compared = [g for g in study.groups if g.baseline is not None and g.baseline is not g]
    names = [f"{g.name}, against {g.baseline.name}" if g.baseline and len(bases) > 1 else g.name for g in compared]
    measures = columns(study)
    cells: list[list[Cell]] = [[] for _ in compared]
    for name, (of, _) in measures.items():
        ratio = name == "final input loss"
        each = [g.against(log_input_loss if ratio else of) for g in compared]
        for row, cell in zip(cells, _difference_cells(each, ratio), strict=True):
            row.append(cell)
    caption = (
        f"Difference to {' and '.join(bases)}, with its 95 % interval; bold where the interval, over at least three "
        "seeds, excludes zero."
    )
    return Table(caption, list(measures), list(zip(names, cells, strict=True))) if compared else None


def _difference_cells(each: Sequence[Difference | None], ratio: bool) -> list[Cell]:
    """A column of differences, or of ratios given by the differences of logarithms."""
    means = [d.mean for d in each if d is not None]
    digits = same_digits([math.exp(m) for m in means] if ratio else means)

    def write(v: float) -> str:
        return f"× {digits(math.exp(v))}" if ratio else f"{'+' if v >= 0 else ''}{digits(v)}"

    return [Cell("–") if d is None else Cell(write(d.mean), bounds(d, write), d.shown) for d in each]


def bounds(d: Difference, write: Callable[[float], str]) -> str:
    """The ends of the interval, or why there is none."""
    if d.low is None or d.high is None:
        return f"{count(d.n, 'seed')}: no interval"
    return f"{write(d.low)} to {write(d.high)}" if d.has_interval else f"equal with {d.n} seeds: no interval"


def minus(text: str) -> str:
    return text.replace("-", "−")


def of_one_epoch(study: Study, figures: Sequence[Figure]) -> Table:
    """The values of figures over epochs as a table, where no series has more than one epoch."""
    cells: list[list[Cell]] = [[] for _ in study.groups]
    for figure in figures:
        values = {line.series: line.y[0] for line in figure.panel.lines}
        write = same_digits(list(values.values()))
        for k, row in enumerate(cells):
            row.append(Cell(write(values[k])) if k in values else Cell("–"))
    heads = [figure.panel.title for figure in figures]
    return Table("In the only epoch, means over seeds.", heads, list(zip(study.names, cells, strict=True)))


def costs(study: Study) -> Iterator[Table]:
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
            heads = ["ms a step", "to PyTorch's own", f"to {about['baseline']}, as trained", "in proportion"]
            yield Table(text, heads, rows, "bars")


class Settings(NamedTuple):
    """How a comparison was made."""

    heading: str
    about: dict[str, Any]
    methods: Table
    config: str
    machine: str


def settings(study: Study) -> Iterator[Settings]:
    for folder, about in study.compared:
        rows = [(v["name"], [Cell(_listed(v["settings"]))]) for v in about["variants"]]
        shared = common_settings(about["config"], about["variants"])
        table = Table("What the methods differ in.", ["settings"], rows, "words")
        machine = "; ".join(f"{name} {value}" for name, value in (about["versions"] | about["machine"]).items())
        yield Settings(study.heading(folder), about, table, json.dumps(shared, indent=1), machine)


def common_settings(config: dict[str, Any], variants: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The settings that all variants of a comparison share: without those that one has a value of its own for.

    >>> common_settings(
    ...     {"lr": 0.1, "alpha": 0.1, "reduction": "batch", "mode": "paper", "strength": None, "seed": 0},
    ...     [{"settings": {"alpha": 1.0}}, {"settings": {"strength": 0.3, "mode": "exact"}}],
    ... )
    {'lr': 0.1}
    """
    own = {name for v in variants for name in v["settings"]} | {"seed"}
    third = [v["settings"] for v in variants if v["settings"].get("alpha") != 1.0]
    if all(settings.get("strength") is not None for settings in third):
        own |= {*NOT_WITH_STRENGTH}
    return {name: value for name, value in config.items() if name not in own}


def loose(study: Study) -> Table | None:
    """What single runs were trained on, their seeds, and the settings in which their series differ."""
    if not study.loose:
        return None
    names, rows = differing(study.loose), []
    for group in study.loose:
        run = group.runs[0]
        task = {} if run.task.keys() & {"comparison", "unknown"} else run.task
        seeds = ", ".join(str(r.seed) for r in group.runs)
        own = {name: run.settings.get(name) for name in names}
        rows.append((group.name, [Cell(_listed(task)), Cell(seeds), Cell(_listed(own))]))
    return Table("What the series differ in.", ["data and model", "seeds", "settings"], rows, "words")


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in settings.items() if value not in (None, {}))
