"""The operations that have rules, as a table: `python -m threepass.inspect.operations docs/operations.md`."""

import sys
from pathlib import Path

from ..rules import linearity
from ..rules.table import name_of, registered

BEGIN, END = "<!-- operations: begin -->", "<!-- operations: end -->"


def markdown() -> str:
    """Every operation with a fast rule of this package, by family, and those that are known to be linear or affine."""
    families: dict[str, set[str]] = {}
    for operation, rule in registered().items():
        package, _, family = rule.make.__module__.rpartition(".")
        if package == linearity.__package__:  # not a user's own rule
            families.setdefault(family, set()).add(_plain(name_of(operation)))
    lines = ["| family | operations | file |", "| --- | --- | --- |"]
    lines += [f"| {name} | {_listed(found)} | `src/threepass/rules/{name}.py` |" for name, found in families.items()]
    fast = set().union(*families.values())
    known = {_plain(name) for name in linearity.OPERATIONS} - fast
    lines.append(f"| (piecewise) linear or affine | {_listed(known)} | `src/threepass/rules/linearity.py` |")
    return "\n".join(lines)


def fill(page: Path) -> None:
    """Puts the table between the page's two marks."""
    head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(f"{head}{BEGIN}\n{markdown()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def _plain(name: str) -> str:
    """Without the underscore of an in-place variant."""
    return name if name.endswith("__") else name.removesuffix("_")


def _listed(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


if __name__ == "__main__":
    fill(Path(sys.argv[1]))
