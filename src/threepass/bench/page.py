"""The measurements of a folder as a page: how cost grows, and every case's table. It needs no network."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..page.figure import Figure, Line, Panel, number
from ..page.writer import Cell, Table, write_page
from .methods import NAMES
from .tables import reports, text

ACROSS = {
    "depth": "layers",
    "width": "channels of the first stage",
    "batch": "images in a batch",
    "image": "pixels across",
}
FORM = {"best": "at its best", "eager": "eager"}


class Scaling(NamedTuple):
    """The sweeps of one machine."""

    machine: str
    case: dict[str, Any]
    figures: list[Figure]
    exponents: Table


def write(folder: Path) -> Path:
    """Writes folder/bench.html and, for every figure of it, figures/NAME.svg."""
    contents = {
        file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*-scaling.json"))
    }
    measured = {
        m for r in contents.values() for forms in r["sweeps"].values() for lines in forms.values() for m in lines
    }
    methods = [m for m in NAMES if m in measured]
    scalings = [_scaling(report, stem, methods) for stem, report in contents.items()]
    return write_page(
        folder / "bench.html",
        "bench.html.j2",
        [figure for scaling in scalings for figure in scaling.figures],
        scalings=scalings,
        methods=[NAMES[m] for m in methods],
        cases=[text(r) for r in reports(folder)],
    )


def _scaling(report: dict[str, Any], stem: str, methods: list[str]) -> Scaling:
    figures: list[Figure] = []
    rows = []
    for sweep, forms in report["sweeps"].items():
        for form, lines in forms.items():
            figures += _figures(f"{stem}-{sweep}-{form}", sweep, form, lines, methods)
            rows.append((f"{sweep}, {FORM[form]}", [_exponents(lines[m]) if m in lines else Cell("") for m in methods]))
    machine = report["machine"] or {}
    table = Table("Exponents of time, memory.", [NAMES[m] for m in methods], rows)
    return Scaling(str(machine.get("gpu") or machine.get("cpu")), report["case"], figures, table)


def _exponents(line: dict[str, Any]) -> Cell:
    return Cell(f"{number(line['seconds_exponent'])}, {number(line['bytes_exponent'])}")


def _figures(stem: str, sweep: str, form: str, lines: dict[str, Any], methods: list[str]) -> Iterator[Figure]:
    """Time, on a logarithmic axis, and its ratio to plain training's."""
    sizes = sorted({size for line in lines.values() for size in line["sizes"]})
    plain = dict(zip(lines["plain"]["sizes"], lines["plain"]["seconds"], strict=True)) if "plain" in lines else {}
    times, ratios = [], []
    for method, line in lines.items():
        k, at = methods.index(method), list(zip(line["sizes"], line["seconds"], strict=True))
        times.append(Line(k, [sizes.index(size) for size, _ in at], [1000 * s for _, s in at]))
        compared = [(sizes.index(size), s / plain[size]) for size, s in at if size in plain]
        ratios.append(Line(k, [i for i, _ in compared], [r for _, r in compared]))
    title, names, ticks = f"{sweep}, {FORM[form]}", [NAMES[m] for m in methods], [str(size) for size in sizes]
    for what, heading, drawn in (("time", "ms a step", times), ("ratio", "ratio to plain", ratios)):
        across, note = ACROSS[sweep], "median of the rounds"
        panel = Panel(f"{stem}-{what}", f"{title}: {heading}", across, drawn, note, what == "time", ticks)
        yield Figure(panel, names)
