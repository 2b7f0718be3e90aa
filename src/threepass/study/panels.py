"""Small multiples on a logarithmic axis, as one SVG file that needs nothing else."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

WIDE, HIGH, LEFT, TOP = 250, 180, 160, 70  # of a panel with its labels, and the margins
PLOT = WIDE - 42, HIGH - 40


class Series(NamedTuple):
    """Values over 0, 1, 2, ...: rings of a radius, or, without one, a line, dashed or not. Zeros are left out."""

    colour: str
    values: Sequence[float]
    radius: float = 0.0
    dashed: bool = False


Grid = dict[tuple[str, str], list[Series]]  # the series of the panel in a row and a column


def svg(grid: Grid, legend: dict[str, str], caption: str) -> str:
    """One panel for every (row, column); legend: the colour of every name."""
    rows, columns = (list(dict.fromkeys(key[i] for key in grid)) for i in (0, 1))
    wide, high = LEFT + len(columns) * WIDE, TOP + len(rows) * HIGH + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="11">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
        *(_text(LEFT + 100 * i, 20, name, fill=colour) for i, (name, colour) in enumerate(legend.items())),
        _text(LEFT, 38, caption),
        *(_text(LEFT + i * WIDE, TOP - 8, column) for i, column in enumerate(columns)),
        *(_text(8, TOP + i * HIGH + PLOT[1] // 2, row) for i, row in enumerate(rows)),
    ]
    for (row, column), series in grid.items():
        lines += _panel(series, LEFT + columns.index(column) * WIDE, TOP + rows.index(row) * HIGH)
    return "\n".join([*lines, "</svg>", ""])


def _panel(series: list[Series], left: int, top: int) -> Iterator[str]:
    points = [[(i, math.log10(z)) for i, z in enumerate(s.values) if z > 0] for s in series]
    heights = [z for line in points for _, z in line] or [0.0]
    low, high = math.floor(min(heights)), math.floor(max(heights)) + 1
    last = max(1, max(len(s.values) for s in series) - 1)

    def place(i: float, z: float) -> tuple[float, float]:
        return left + 8 + i * (PLOT[0] - 16) / last, top + PLOT[1] * (high - z) / (high - low)

    yield f'<rect x="{left}" y="{top}" width="{PLOT[0]}" height="{PLOT[1]}" fill="none" stroke="#999"/>'
    yield _text(left - 4, top + 9, f"1e{high}", anchor="end")
    yield _text(left - 4, top + PLOT[1], f"1e{low}", anchor="end")
    for i in (0, last):
        yield _text(place(i, 0)[0], top + PLOT[1] + 13, str(i), anchor="middle")
    for s, line in zip(series, points, strict=True):
        spots = [place(*point) for point in line]
        if s.radius:
            for x, y in spots:
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{s.radius:.1f}" fill="none" stroke="{s.colour}"/>'
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
            dash = ' stroke-dasharray="4 3"' if s.dashed else ""
            yield f'<polyline points="{path}" fill="none" stroke="{s.colour}"{dash}/>'


def _text(x: float, y: float, text: str, fill: str = "#222", anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{fill}" text-anchor="{anchor}">{escape(text)}</text>'
