"""Formulas that a captured step shows as one operation each, so that a kernel can take their place.

A rule writes a formula as a function of tensors:

    @fusible("norm_jacobian")
    def jacobian(z: Tensor, x_hat: Tensor, rstd: Tensor, dims: Sequence[int]) -> Tensor: ...

Called eagerly, it is that function. While a step is traced for a device that our kernels run on, a call becomes one
node of the graph, with the target `jacobian.op`. `compile/rewrite` finds it by this target, and replaces it, together
with its neighbours, by a kernel; what no kernel replaces becomes the formula again, and Inductor fuses that as usual.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from .._torch_compat import OpOverload, overload_of
from . import runs_on

P = ParamSpec("P")
R = TypeVar("R")

FORMULAS: dict[OpOverload, Callable[..., Any]] = {}  # by the operation that stands for it

_in_trace: ContextVar[bool] = ContextVar("_in_trace", default=False)
_for_compiler: ContextVar[bool] = ContextVar("_for_compiler", default=False)


class Fusible(Generic[P, R]):
    """A formula, and `op`, the operation that stands for it in a graph."""

    def __init__(self, name: str, formula: Callable[P, R]):
        definition = torch.library.custom_op(f"threepass::{name}", formula, mutates_args=())
        definition.register_fake(formula)
        self.formula, self.op = formula, overload_of(definition)
        FORMULAS[self.op] = formula
        functools.update_wrapper(self, formula)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return (self.op if _is_one_node(args) else self.formula)(*args, **kwargs)


def fusible(name: str) -> Callable[[Callable[P, R]], Fusible[P, R]]:
    """Makes a formula fusible. It returns new tensors: none of its arguments, and no view of one."""
    return functools.partial(Fusible, name)


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


@contextlib.contextmanager
def one_node_each(kernels: bool) -> Iterator[None]:
    """Around a trace: with `kernels`, calls of fusible formulas become one node each, on devices that have kernels."""
    before = _in_trace.set(kernels)
    try:
        yield
    finally:
        _in_trace.reset(before)


def _is_one_node(args: tuple[Any, ...]) -> bool:
    return _in_trace.get() and any(isinstance(z, Tensor) and runs_on(z.device) for z in args)
