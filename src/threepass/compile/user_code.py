"""The user's code in a trace: reads of tensor contents are refused, and errors name the line of the user's code.

A trace runs the model once and keeps the torch operations. What Python decides from the contents of a tensor (a branch,
a loop, a number from `.item()`, the shape of `x[mask]`) would stay as it was in that one run, so it is refused. Code
that reads contents only to save work or to check its arguments skips that if `torch.compiler.is_compiling()` is true.
"""

import contextlib
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .._torch_compat import TorchDispatchMode, local_scalar_dense, nested_from_mask, tree_leaves, unsafe_index
from ..errors import CaptureError
from ..rules.table import name_of
from ..tape.intercept import reporting_compilation, running_eager_code_in

_KEEP = "use torch.where instead of a branch and tensor indices instead of .item()"
_SHAPE = "use torch.where, masked_fill or a product with the mask instead of indexing by it"
_ELSE = "or compute it outside the model and pass it in x, or skip it if torch.compiler.is_compiling()"

_aten = torch.ops.aten
_VALUES = {_aten.is_nonzero.default, nested_from_mask.default}  # and those with a tag
_BY_INDEX = {_aten.index.Tensor, unsafe_index.Tensor}  # of a shape that is known unless an index is a mask
_TO_PYTHON = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
_FROM_PYTHON = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}

_NOT_USERS = {"torch", "threepass", "functorch", "typing_extensions", *sys.stdlib_module_names}


class _Functions(TorchFunctionMode):
    """Refuses reads that no dispatch mode sees, and leaves out those of `one_hot`, which checks its argument."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _TO_PYTHON or (func in _FROM_PYTHON and _lists_tensors((*args, *kwargs.values()))):
            raise _read(name_of(func))
        return (_one_hot if func is F.one_hot else func)(*args, **kwargs)


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 1:  # as many as the largest index says
        return F.one_hot(tensor)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)


class _Operations(TorchDispatchMode):
    """Refuses operations that give Python a value, those whose shapes depend on values, and generators of one's own."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _VALUES or torch.Tag.data_dependent_output in func.tags:
            raise _read("item, bool, int or float" if func is local_scalar_dense.default else name_of(func))
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise CaptureError(
                "the step draws random numbers from a torch.Generator, and a captured program computes them from one "
                "seed per call. Leave generator= out, so that torch.manual_seed determines them, or draw them outside "
                "of the model and the loss, and pass them in x or y"
            )
        if torch.Tag.dynamic_output_shape in func.tags and _has_unknown_shape(func, args, kwargs):
            raise CaptureError(
                f"the shape of a result depends on the contents of a tensor ({name_of(func)}), which may be different "
                f"at the next call; {_SHAPE}, {_ELSE}"
            )
        return func(*args, **kwargs)


def _read(by: str) -> CaptureError:
    return CaptureError(
        f"a value is read out of a tensor ({by}), which may be different at the next call; {_KEEP}, {_ELSE}"
    )


def _lists_tensors(values: tuple[Any, ...]) -> bool:
    """Whether there are tensors in lists: torch.tensor([u, v]) reads them, torch.tensor(u) is a copy in the graph."""
    return any(isinstance(z, Tensor) for v in values if not isinstance(v, Tensor) for z in tree_leaves(v))


def _has_unknown_shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func in _BY_INDEX:
        return any(z is not None and z.dtype in (torch.bool, torch.uint8) for z in args[1])
    return kwargs.get("output_size") is None  # only repeat_interleave has it


@contextlib.contextmanager
def in_trace(eager_modules: frozenset[str] = frozenset()) -> Iterator[None]:
    """Around the code that is traced: `is_compiling()` is true, reading tensors is refused, errors name its line.

    eager_modules: the modules of the model in which `is_compiling()` is false.

    An error with a line of the user's in its traceback becomes a `CaptureError`; others stay as they are.
    """
    try:
        with reporting_compilation(), running_eager_code_in(eager_modules), _Functions(), _Operations():
            yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        place = culprit(error)
        if place is None:
            raise
        words = (str(error).strip() or "no message").splitlines()[0]
        kind = "" if isinstance(error, CaptureError) else f"{type(error).__name__}: "
        raise CaptureError(f"{place}: {kind}{words}") from error


@dataclass(frozen=True)
class Line:
    """A line of the user's code, or of a library other than torch."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.number).strip()
        return f"{self.file}:{self.number}, in {self.function}" + (f": `{text}`" if text else "")


def culprit(error: BaseException) -> Line | None:
    """The innermost line in an error's traceback that belongs to neither torch, nor Python itself, nor this package.

    None if there is none: the error arose in the compiler, or in a pass that runs no code of the user's. A traceback
    begins where the error is caught, so lines that called the step do not count.
    """
    found, step = None, error.__traceback__
    while step is not None:
        frame = step.tb_frame
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_USERS:
            found = Line(frame.f_code.co_filename, step.tb_lineno, frame.f_code.co_qualname)
        step = step.tb_next
    return found
