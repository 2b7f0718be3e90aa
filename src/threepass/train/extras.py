"""Optional packages that training needs, imported when they are first used."""

from importlib import import_module
from typing import Any


def require(module: str, purpose: str) -> Any:
    """The module, or an ImportError that says what wants it and what to install."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{purpose} needs {package}: pip install 'threepass[train]'", name=package) from error
