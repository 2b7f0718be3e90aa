"""Templates: the text and markup of pages, separate from the code that computes their numbers."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

# Okabe and Ito's palette for readers of every colour vision, on white and on near-black
LIGHT = ("#5b6067", "#0072b2", "#c84f00", "#007a5a", "#a64d86", "#8a6d00", "#3b3bb3", "#2b8aa8")
DARK = ("#a9afb6", "#56b4e9", "#f0894d", "#2fc198", "#e29cc7", "#e6c229", "#9b9bf5", "#7fd3ea")


def count(n: int, what: str) -> str:
    """
    >>> count(1, "seed"), count(2, "seed")
    ('1 seed', '2 seeds')
    """
    return f"{n} {what}{'' if n == 1 else 's'}"


def render(template: str, **values: Any) -> Markup:
    return Markup(_TEMPLATES.get_template(template).render(**values))


_TEMPLATES = Environment(
    loader=PackageLoader("threepass.page"),
    autoescape=lambda name: not (name or "").endswith(".md.j2"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.globals |= {"count": count, "light": LIGHT, "dark": DARK}
