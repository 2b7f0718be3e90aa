"""What a step is traced for: rules choose between formulas and PyTorch's own kernels by it."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_for_compiler: ContextVar[bool] = ContextVar("_for_compiler", default=False)
_with_kernels: ContextVar[bool] = ContextVar("_with_kernels", default=False)


def is_for_compiler() -> bool:
    """Whether a step is traced for a compiler, which fuses formulas; otherwise PyTorch's own kernels are faster."""
    return _for_compiler.get()


@contextlib.contextmanager
def tracing_for(compiler: bool) -> Iterator[None]:
    """Around a trace, whose graph is to be compiled or, with False, to run operation by operation."""
    before = _for_compiler.set(compiler)
    try:
        yield
    finally:
        _for_compiler.reset(before)


def has_one_node_each() -> bool:
    """Whether fusible formulas are traced as one node each (`kernels/fusible.py`)."""
    return _with_kernels.get()


@contextlib.contextmanager
def one_node_each(kernels: bool) -> Iterator[None]:
    """Around a trace: with `kernels`, calls of fusible formulas become one node each, on devices that have kernels."""
    before = _with_kernels.set(kernels)
    try:
        yield
    finally:
        _with_kernels.reset(before)
