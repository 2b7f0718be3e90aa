"""A page with its figures beside it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .figure import Figure, marker
from .render import render


class Cell(NamedTuple):
    """A cell of a table: text (clear: bold, best: marked) with a smaller one below it, an image, or a bar up to 1."""

    text: str
    below: str = ""
    clear: bool = False
    image: str = ""
    alt: str = ""
    bar: float | None = None
    best: bool = False


class Table(NamedTuple):
    """The rows are pairs of a head and its cells; `kind` is a class of the style sheet."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    kind: str = ""


def write_page(page: Path, template: str, drawn: Iterable[Figure], **values: Any) -> Path:
    """Renders the template to `page`, one file that needs no network; figures/ beside it gets every figure as SVG."""
    folder = page.parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    for figure in drawn:
        (folder / f"{figure.panel.slug}.svg").write_text(figure.alone, encoding="utf-8")
    page.write_text(render(template, marker=marker, **values), encoding="utf-8")
    return page
