"""A grid of coloured cells with their values, as an SVG file of its own."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .render import render


class Shade(NamedTuple):
    """The text of a cell, its colour, and whether that is dark."""

    text: str
    colour: str
    dark: bool = False


def grid(title: str, rows: Mapping[str, Sequence[Shade]], columns: Sequence[str]) -> str:
    """A row of cells for every name, below the columns' names."""
    return render("grid.svg.j2", title=title, rows=rows, columns=columns, wide=74, high=40, left=110, top=44)
