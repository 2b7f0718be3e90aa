"""What differs between the versions of Python that the library runs on, 3.11 to 3.14."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["signature_of"]


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """`inspect.signature` without the values of annotations.

    From Python 3.14 on it evaluates them, and raises a NameError where a name is imported for type checkers only.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.STRING)
    return inspect.signature(function)
