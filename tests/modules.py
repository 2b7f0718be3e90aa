"""The modules of the package, by name."""

from pathlib import Path

import threepass

SOURCE = Path(threepass.__file__).parent


def name_of(path: Path) -> str:
    """The module in a file, without the package's own name."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(SOURCE.rglob("*.py"))}
