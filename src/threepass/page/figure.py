"""A panel of lines with bands, as SVG: on a page, which styles it, or as a file that carries its own style and key."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

from markupsafe import Markup

from .render import LIGHT, render

HIGH, LEFT, RIGHT, TOP, BOTTOM = 250, 50, 12, 12, 38
MARKERS = (  # circle, square, triangle, diamond, cross, plus, triangle downwards, bar
    "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0Z",
    "M-2.9-2.9h5.8v5.8h-5.8Z",
    "M0-3.9L3.7 2.8H-3.7Z",
    "M0-4.1L4.1 0L0 4.1L-4.1 0Z",
    "M-3-3L3 3M-3 3L3-3",
    "M-3.6 0H3.6M0-3.6V3.6",
    "M0 3.9L3.7-2.8H-3.7Z",
    "M0-4V4",
)


class Line(NamedTuple):
    """A line of a series (its colour and marker; -1: of none), with a band around it.

    style: solid (with markers on it), dashed, bare (solid, without markers), or points (hollow markers alone).
    label: what it is called under the pointer, if not by its series' name.
    """

    series: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    style: Literal["solid", "dashed", "bare", "points"] = "solid"
    label: str = ""


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
    wide: int = 380


@dataclass(frozen=True)
class Figure:
    """A panel with the names of its series, and its caption on a page."""

    panel: Panel
    names: Sequence[str]
    caption: str = ""

    @property
    def on_page(self) -> Markup:
        """The svg element. The key lies below the view box: the page has its own, a saved figure shows it."""
        return self._draw(alone=False)

    @property
    def alone(self) -> Markup:
        """The same drawing as a file of its own: light colours, with the key, and in view as a whole."""
        return self._draw(alone=True)

    @property
    def has_both_scales(self) -> bool:
        """Whether a reader may switch between a logarithmic and a linear axis."""
        values = [y for line in self.panel.lines for y in line.y if math.isfinite(y)]
        return self.panel.top is None and min(values, default=-1.0) >= 0 and max(values) > 0

    @property
    def data(self) -> Markup:
        """What plot.js draws the figure from, as JSON for a script element."""

        def finite(values: Sequence[float] | None) -> list[float | None] | None:
            return None if values is None else [float(f"{v:.6g}") if math.isfinite(v) else None for v in values]

        lines = [
            {"series": z.series, "x": list(z.x), "y": finite(z.y), "low": finite(z.low), "high": finite(z.high),
             "style": z.style, "label": z.label or self.names[z.series], "marker": marker(z.series)}
            for z in self.panel.lines
        ]  # fmt: skip
        described = {
            "lines": lines, "series": len(self.names), "across": self.panel.across, "log": self.panel.logarithmic,
            "ticks": None if self.panel.ticks is None else list(self.panel.ticks), "top": self.panel.top,
            "high": HIGH, "margins": [LEFT, RIGHT, TOP, BOTTOM], "colours": len(LIGHT),
        }  # fmt: skip
        return Markup(json.dumps(described, separators=(",", ":")).replace("<", "\\u003c"))

    @property
    def summary(self) -> str:
        """For readers who do not see the figure: where every line with markers begins and ends."""
        lines = [z for z in self.panel.lines if z.series >= 0 and z.style in ("solid", "points") and z.y]
        parts = [f"{self.names[z.series]} from {number(z.y[0])} to {number(z.y[-1])}" for z in lines]
        return f"{self.panel.title}, by {self.panel.across}: {'; '.join(parts)}."

    def _draw(self, alone: bool) -> Markup:
        axes = Axes(self.panel)
        key = [(k, name, HIGH + 12 + 18 * k) for k, name in enumerate(self.names)]
        return render(
            "figure.svg.j2",
            figure=self,
            panel=self.panel,
            axes=axes,
            lines=[drawn for line in self.panel.lines if (drawn := _drawn(line, axes, len(self.names)))],
            key=key,
            size=(self.panel.wide, HIGH, HIGH + 18 * len(key) + 42),
            margins=(LEFT, RIGHT, TOP, BOTTOM),
            marker=marker,
            alone=alone,
        )


class _Drawn(NamedTuple):
    owner: str  # the element's classes
    series: int
    path: str
    band: str
    marks: list[tuple[float, float]]


def _drawn(line: Line, axes: "Axes", names: int) -> _Drawn | None:
    points = axes.points(line.x, line.y)
    if not points:
        return None
    band = ""
    if line.low is not None and line.high is not None:
        band = _path([*axes.points(line.x, line.high), *axes.points(line.x, line.low)[::-1]]) + "Z"
    marks = points if line.style == "points" else []
    if line.style == "solid":
        every = max(1, len(points) // 7)
        shift = line.series * every // max(1, names) if len(points) > 14 else 0
        marks = points[shift::every]
    owner = f"{'start' if line.series < 0 else f's{line.series % len(LIGHT)}'} {line.style}"
    return _Drawn(owner, line.series, "" if line.style == "points" else _path(points), band, marks)


def over_runs(series: int, x: Sequence[float], rows: Sequence[Sequence[float]], dashed: bool = False) -> Line:
    """The mean over runs, with the band from the lowest to the highest."""
    columns = list(zip(*rows, strict=True))
    line = Line(series, x, [fmean(column) for column in columns], style="dashed" if dashed else "solid")
    return line if len(rows) == 1 else line._replace(low=[*map(min, columns)], high=[*map(max, columns)])


def marker(series: int) -> str:
    """The path of a series' marker; when colours come again, it is another one."""
    return MARKERS[(series + series // len(MARKERS)) % len(MARKERS)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


class Axes:
    """Where x and y lie on a panel, and the numbers along its edges; plot.js has the same rules.

    A logarithmic axis has no place for zeros: they lie a bit below the smallest other value.
    """

    def __init__(self, panel: Panel):
        self.panel = panel
        self.xs = [x for line in panel.lines for x in line.x] or [0.0, 1.0]
        self.start, self.stop = min(self.xs), max(self.xs)
        if panel.ticks is not None:
            self.start, self.stop = -0.3, max(self.stop, len(panel.ticks) - 1) + 0.3
        self.bend: Callable[[float], float] = math.log10 if panel.logarithmic else float
        values = [y for z in panel.lines for ys in (z.y, z.low or (), z.high or ()) for y in ys]
        self.floor = 0.6 * min((y for y in values if y > 0 and math.isfinite(y)), default=1.0)
        seen = [self._lifted(y) for y in values if self._has(y)] or [1.0]
        low, top = self.bend(min(seen)), self.bend(max(seen))
        if panel.top is not None:
            self.low, self.top = 0.0, panel.top
            return
        if panel.logarithmic and top - low < 0.5:  # a factor of three at least, or noise fills the panel
            low, top = (low + top) / 2 - 0.25, (low + top) / 2 + 0.25
        room = 0.04 * (top - low) or 0.5
        from_zero = not panel.logarithmic and 0 <= low < 0.5 * top
        self.low, self.top = 0.0 if from_zero else low - room, top + room

    def points(self, x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
        """On the drawing; what has no place on the axes is left out."""
        return [(self.x_of(a), self.y_of(b)) for a, b in zip(x, y, strict=True) if self._has(b)]

    def x_of(self, x: float) -> float:
        return LEFT + (x - self.start) / ((self.stop - self.start) or 1) * (self.panel.wide - LEFT - RIGHT)

    def y_of(self, y: float) -> float:
        return HIGH - BOTTOM - (self.bend(self._lifted(y)) - self.low) / (self.top - self.low) * (HIGH - TOP - BOTTOM)

    def rows(self) -> Iterator[tuple[float, str]]:
        """The height and text of every number on the left."""
        for y in _powers(self.low, self.top) if self.panel.logarithmic else _steps(self.low, self.top):
            yield self.y_of(y), number(y)

    def columns(self) -> Iterator[tuple[float, str]]:
        """The place and text of every number or name below, as many as there is room for."""
        names = self.panel.ticks
        if names is None:
            whole = all(isinstance(x, int) for x in self.xs)
            yield from ((self.x_of(x), number(x)) for x in _steps(self.start, self.stop, whole))
            return
        every = math.ceil(len(names) * 7 * max(map(len, names)) / (self.panel.wide - LEFT - RIGHT))
        yield from ((self.x_of(i), names[i]) for i in range(0, len(names), every))

    def _has(self, y: float) -> bool:
        return math.isfinite(y) and (y >= 0 or not self.panel.logarithmic)

    def _lifted(self, y: float) -> float:
        return self.floor if self.panel.logarithmic and y == 0 else y


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
