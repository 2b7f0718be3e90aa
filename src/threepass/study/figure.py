"""A panel of lines with bands, as SVG: one drawing for the page, which styles it, and one that stands by itself."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM = 380, 250, 50, 12, 12, 38
# Okabe and Ito's palette for readers of every colour vision, on white and on near-black
LIGHT = ("#5b6067", "#0072b2", "#c84f00", "#007a5a", "#a64d86", "#8a6d00", "#3b3bb3", "#2b8aa8")
DARK = ("#a9afb6", "#56b4e9", "#f0894d", "#2fc198", "#e29cc7", "#e6c229", "#9b9bf5", "#7fd3ea")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "plus", "down", "bar")


class Line(NamedTuple):
    """A line of a series (its colour and marker; -1: of none), with a band around it."""

    series: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dashed: bool = False


class Panel(NamedTuple):
    """What a figure shows. `ticks` names the places 0, 1, ... across; `note` stands below a saved figure."""

    slug: str
    title: str
    across: str
    lines: list[Line]
    note: str
    logarithmic: bool = False
    ticks: Sequence[str] | None = None
    top: float | None = None


def svg(panel: Panel, names: Sequence[str], summary: str) -> str:
    """The panel as an svg element. The key lies below the view box: the page has its own, a saved figure shows it."""
    x_of, y_of, grid = _scales(panel)
    high = HIGH + 18 * len(names) + 42
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {WIDE} {HIGH}" '
        f'data-whole="0 0 {WIDE} {high}" role="img" aria-labelledby="{panel.slug}-t {panel.slug}-d">',
        f'<title id="{panel.slug}-t">{escape(panel.title)}</title><desc id="{panel.slug}-d">{escape(summary)}</desc>',
        f'<rect class="paper" width="{WIDE}" height="{high}"/>',
        *grid,
        f'<text class="name" x="{(LEFT + WIDE - RIGHT) / 2:g}" y="{HIGH - 4}" text-anchor="middle">',
        f"{escape(panel.across)}</text>",
    ]
    for line in panel.lines:
        points = [(x_of(x), y_of(y)) for x, y in zip(line.x, line.y, strict=True) if _drawable(panel, y)]
        if not points:
            continue
        kind = "dashed" if line.dashed else "solid"
        owner = 'class="start' if line.series < 0 else f'data-series="{line.series}" class="s{line.series % len(LIGHT)}'
        parts.append(f'<g {owner} {kind}">')
        if line.low is not None and line.high is not None:
            edge = [(x_of(x), y_of(y)) for x, y in zip(line.x, line.high, strict=True) if _drawable(panel, y)]
            edge += [(x_of(x), y_of(y)) for x, y in [*zip(line.x, line.low, strict=True)][::-1] if _drawable(panel, y)]
            parts.append(f'<path class="band" d="{_path(edge)}Z"/>')
        parts.append(f'<path class="line" d="{_path(points)}"/>')
        if not line.dashed:
            every = max(1, len(points) // 7)
            shift = line.series * every // max(1, len(names)) if len(points) > 14 else 0
            parts += [_marker(line.series, *point) for point in points[shift::every]]
        parts.append("</g>")
    return "".join(parts) + _key(panel, names) + "</svg>"


def alone(drawing: str) -> str:
    """The same drawing as a file of its own: light colours, with the key, and in view as a whole."""
    whole = drawing.split('data-whole="', 1)[1].split('"', 1)[0]
    wide, high = whole.split()[2:]
    drawing = drawing.replace(f'viewBox="0 0 {WIDE} {HIGH}"', f'viewBox="{whole}" width="{wide}" height="{high}"', 1)
    return drawing.replace("<title", f"<style>{STYLE}</style><title", 1) + "\n"


def swatch(series: int) -> str:
    """A small picture of a series for legends."""
    return (
        f'<svg class="swatch" viewBox="0 0 30 12" aria-hidden="true"><g class="s{series % len(LIGHT)}">'
        f'<path class="line" d="M1 6H29"/>{_marker(series, 15, 6)}</g></svg>'
    )


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _marker(series: int, x: float, y: float) -> str:
    shapes = {
        "circle": "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0Z",
        "square": "M-2.9-2.9h5.8v5.8h-5.8Z",
        "triangle": "M0-3.9L3.7 2.8H-3.7Z",
        "diamond": "M0-4.1L4.1 0L0 4.1L-4.1 0Z",
        "cross": "M-3-3L3 3M-3 3L3-3",
        "plus": "M-3.6 0H3.6M0-3.6V3.6",
        "down": "M0 3.9L3.7-2.8H-3.7Z",
        "bar": "M0-4V4",
    }
    shape = shapes[MARKERS[(series + series // len(MARKERS)) % len(MARKERS)]]
    return f'<path class="mark" transform="translate({x:.1f} {y:.1f})" d="{shape}"/>'


def _key(panel: Panel, names: Sequence[str]) -> str:
    parts, y = [], HIGH + 12
    for k, name in enumerate(names):
        parts.append(
            f'<g data-series="{k}" class="s{k % len(LIGHT)}"><path class="line" d="M{LEFT} {y}h28"/>'
            f'{_marker(k, LEFT + 14, y)}<text class="name" x="{LEFT + 36}" y="{y + 4}">{escape(name)}</text></g>'
        )
        y += 18
    for text in (panel.title, panel.note):
        parts.append(f'<text x="{LEFT - 40}" y="{y + 4}">{escape(text)}</text>')
        y += 16
    return f'<g class="key">{"".join(parts)}</g>'


def _drawable(panel: Panel, y: float) -> bool:
    return math.isfinite(y) and (y > 0 or not panel.logarithmic)


def _scales(panel: Panel) -> tuple[Callable[[float], float], Callable[[float], float], list[str]]:
    """Where x and y lie, and the grid with its numbers."""
    xs = [x for line in panel.lines for x in line.x] or [0.0, 1.0]
    seen = [y for z in panel.lines for ys in (z.y, z.low or (), z.high or ()) for y in ys if _drawable(panel, y)] or [
        1.0
    ]
    start, stop = min(xs), max(xs)
    if panel.ticks is not None:
        start, stop = start - 0.3, stop + 0.3
    bend: Callable[[float], float] = math.log10 if panel.logarithmic else float
    low, top = bend(min(seen)), bend(max(seen))
    if not panel.logarithmic:
        low = 0.0 if panel.top is not None or low < 0.5 * top else low
        top = top if panel.top is None else panel.top
    room = 0.04 * (top - low) or 0.5
    low, top = (
        (low, top + (0 if panel.top is not None else room))
        if low == 0 and not panel.logarithmic
        else (low - room, top + room)
    )

    def x_of(x: float) -> float:
        return LEFT + (x - start) / ((stop - start) or 1) * (WIDE - LEFT - RIGHT)

    def y_of(y: float) -> float:
        return HIGH - BOTTOM - (bend(y) - low) / (top - low) * (HIGH - TOP - BOTTOM)

    marks = _powers(low, top) if panel.logarithmic else _steps(low, top)
    grid = []
    for y in marks:
        at = y_of(y)
        grid.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDE - RIGHT}"/>')
        grid.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number(y)}</text>')
    whole = all(isinstance(x, int) for x in xs)
    named = enumerate(panel.ticks) if panel.ticks is not None else ((x, number(x)) for x in _steps(start, stop, whole))
    few = (
        1
        if panel.ticks is None
        else math.ceil(len(panel.ticks) * 7 * max(map(len, panel.ticks)) / (WIDE - LEFT - RIGHT))
    )
    for i, (x, name) in enumerate(named):
        if i % few == 0:
            grid.append(f'<path class="tick" d="M{x_of(x):.1f} {HIGH - BOTTOM}v4"/>')
            grid.append(f'<text x="{x_of(x):.1f}" y="{HIGH - BOTTOM + 16}" text-anchor="middle">{escape(name)}</text>')
    grid.append(f'<path class="axis" d="M{LEFT} {TOP}V{HIGH - BOTTOM}H{WIDE - RIGHT}"/>')
    return x_of, y_of, grid


def _steps(low: float, high: float, whole: bool = False) -> list[float]:
    """Round numbers from low to high.

    >>> _steps(0, 1), _steps(1, 30)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [5.0, 10.0, 15.0, 20.0, 25.0, 30.0])
    """
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Round numbers between 10^low and 10^high: powers of ten, with 2 and 5 between them where these are few."""
    factors = (1, 2, 5) if high - low < 1.5 else (1, 3) if high - low < 2.5 else (1,)
    every = max(1, math.ceil((high - low) / 7))
    tens = [e for e in range(math.floor(low), math.ceil(high) + 1) if e % every == 0]
    found = [f * 10.0**e for e in tens for f in factors if low <= math.log10(f * 10.0**e) <= high]
    return found or [10.0 ** ((low + high) / 2)]


def number(x: float, digits: int = 3) -> str:
    """So many digits, and a power of ten where that is shorter.

    >>> number(0.25), number(1e-7), number(1e4), number(0.001)
    ('0.25', '1e−7', '1e4', '0.001')
    """
    if math.isfinite(x) and x and not 1e-3 <= abs(x) < 1e4:
        mantissa, power = f"{x:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(power)}".replace("-", "−")
    return f"{x:.{digits}g}".replace("-", "−")


STYLE = (
    ".paper{fill:#fff}text{font:11px system-ui,sans-serif;fill:#444}.name{fill:#111}.grid{stroke:#e3e5e7}"
    ".axis,.tick{stroke:#888;fill:none}.line{fill:none;stroke-width:1.8}"
    ".dashed .line{stroke-dasharray:5 3;stroke-width:1.2}"
    ".start .line{stroke:#999}.band{opacity:.16;stroke:none}.mark{stroke-width:1.4}"
    + "".join(f".s{k} .line,.s{k} .mark{{stroke:{c}}}.s{k} .mark,.s{k} .band{{fill:{c}}}" for k, c in enumerate(LIGHT))
)
