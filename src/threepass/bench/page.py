"""The measurements of a folder as a page: how cost grows, and every case's table. It needs no network and no script."""

import json
from html import escape
from pathlib import Path
from typing import Any

from ..study import figure
from ..study.figure import DARK, LIGHT, Line, Panel, alone, number, svg, swatch
from .methods import NAMES
from .tables import reports, text

ACROSS = {
    "depth": "layers",
    "width": "channels of the first stage",
    "batch": "images in a batch",
    "image": "pixels across",
}
FORM = {"best": "at its best", "eager": "eager"}


def write(folder: Path) -> Path:
    """Writes folder/bench.html and, for every figure of it, figures/NAME.svg."""
    figures: dict[str, str] = {}
    parts = []
    for file in sorted(folder.glob("*-scaling.json")):
        parts.append(_scaling(json.loads(file.read_text(encoding="utf-8")), file.stem, figures))
    tables = "".join(f"<pre>{escape(text(r))}</pre>" for r in reports(folder))
    if tables:
        parts.append(f"<section><h2>Every case</h2>{_WORDS}{tables}</section>")
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for slug, drawing in figures.items():
        (folder / "figures" / f"{slug}.svg").write_text(alone(drawing), encoding="utf-8")
    page = folder / "bench.html"
    page.write_text(_page("\n".join(parts)), encoding="utf-8")
    return page


_WORDS = """<p>differs: the gradients against the same method's, eagerly and in full float32, as |g − g'| / |g'|. flops,
bytes: the share of the device's ceilings that the operations and the least possible bytes come to.</p>"""


def _scaling(report: dict[str, Any], stem: str, figures: dict[str, str]) -> str:
    drawn, rows = [], []
    for sweep, forms in report["sweeps"].items():
        for form, lines in forms.items():
            names = [NAMES[method] for method in lines]
            for what, panel in _panels(sweep, form, lines).items():
                slug = f"{stem}-{sweep}-{form}-{what}"
                figures[slug] = svg(panel._replace(slug=slug), names, _summary(panel, names))
                drawn.append(f"<figure><h3>{escape(panel.title)}</h3>{figures[slug]}</figure>")
            powers = [f"{number(z['seconds_exponent'])}, {number(z['bytes_exponent'])}" for z in lines.values()]
            rows.append([f"{sweep}, {FORM[form]}", *powers])
    methods = list(dict.fromkeys(NAMES[m] for forms in report["sweeps"].values() for z in forms.values() for m in z))
    keys = "".join(f"<li>{swatch(k)}{escape(name)}</li>" for k, name in enumerate(methods))
    machine = report["machine"] or {}
    return f"""<section><h2>How the cost grows: {escape(str(machine.get("gpu") or machine.get("cpu")))}</h2>
<p>Plain nets around plain-20 with batch {report["case"]["batch"]}, {escape(report["case"]["precision"])}; one size
grows at a time. The exponent p of time ~ size^p, and of memory, by least squares in logarithms.</p>
<ul class="legend">{keys}</ul><div class="panels">{"".join(drawn)}</div>
{_table(["exponents of time, memory", *methods], rows)}</section>"""


def _panels(sweep: str, form: str, lines: dict[str, Any]) -> dict[str, Panel]:
    """Time, on a logarithmic axis, and its ratio to plain training's."""
    sizes = sorted({size for line in lines.values() for size in line["sizes"]})
    times, ratios = [], []
    plain = dict(zip(lines["plain"]["sizes"], lines["plain"]["seconds"], strict=True)) if "plain" in lines else {}
    for k, line in enumerate(lines.values()):
        at = [(size, s) for size, s in zip(line["sizes"], line["seconds"], strict=True)]
        times.append(Line(k, [sizes.index(size) for size, _ in at], [1000 * s for _, s in at]))
        compared = [(size, s / plain[size]) for size, s in at if size in plain]
        ratios.append(Line(k, [sizes.index(size) for size, _ in compared], [r for _, r in compared]))
    ticks, note = [str(size) for size in sizes], "median of the rounds"
    return {
        "time": Panel("", f"{sweep}, {FORM[form]}: ms a step", ACROSS[sweep], times, note, True, ticks),
        "ratio": Panel("", f"{sweep}, {FORM[form]}: ratio to plain", ACROSS[sweep], ratios, note, False, ticks),
    }


def _summary(panel: Panel, names: list[str]) -> str:
    parts = [f"{names[z.series]} from {number(z.y[0])} to {number(z.y[-1])}" for z in panel.lines if z.y]
    return f"{panel.title}, by {panel.across}: {'; '.join(parts)}."


def _table(head: list[str], rows: list[list[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _page(body: str) -> str:
    style = Path(figure.__file__).with_name("report.css").read_text("utf-8")
    light, dark = ("".join(_paint(k, c) for k, c in enumerate(palette)) for palette in (LIGHT, DARK))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>What a step costs</title>
<link rel="icon" href="data:,">
<style>
{style}{light}
pre {{ white-space: pre; overflow-x: auto }}
.legend {{ list-style: none; gap: 1rem }}
@media (prefers-color-scheme: dark) {{ {dark} }}
</style>
</head>
<body>
<main>
<h1>What a step costs</h1>
{body}
</main>
</body>
</html>
"""


def _paint(k: int, colour: str) -> str:
    return f".s{k} .line,.s{k} .mark{{stroke:{colour}}}.s{k} .mark,.s{k} .band{{fill:{colour}}}"
