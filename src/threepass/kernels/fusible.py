"""Formulas that a captured step shows as one operation each, so that a kernel can take their place.

A rule writes a formula as a function of tensors:

    @fusible("norm_jacobian")
    def jacobian(z: Tensor, x_hat: Tensor, rstd: Tensor, dims: Sequence[int]) -> Tensor: ...

Called eagerly, it is that function. While a step is traced for a device that our kernels run on, a call becomes one
node of the graph, with the target `jacobian.op`. `compile/rewrite` finds it by this target, and replaces it, together
with its neighbours, by a kernel; what no kernel replaces becomes the formula again, and Inductor fuses that as usual.
"""

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from .._torch_compat import OpOverload, overload_of
from ..tracing import has_one_node_each
from . import runs_on

P = ParamSpec("P")
R = TypeVar("R")

FORMULAS: dict[OpOverload, Callable[..., Any]] = {}  # by the operation that stands for it


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


def _is_one_node(args: tuple[Any, ...]) -> bool:
    return has_one_node_each() and any(isinstance(z, Tensor) and runs_on(z.device) for z in args)
