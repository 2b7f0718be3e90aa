"""Dynamic shapes: sizes that differ between calls are symbols in the trace, so that one program serves many sizes.

    varying = {(0, 0), (1, 0)}                dimension 0 of inputs 0 and 1: the batch, say
    symbolic = SymbolicInputs(inputs, varying)
    trace(fn, inputs, symbolic)               operations compute with the symbols
    symbolic.guards().hold(other_inputs)      whether the program is valid for these sizes too

A trace is right for all sizes for which every decision that it made (a branch on a size, a check that two sizes are
equal, a size that Python turned into a number) comes out the same. PyTorch's `ShapeEnv` records these decisions; they
are the guards, and are evaluated at each call. Sizes 0 and 1 are never symbols, because they broadcast.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._torch_compat import FakeTensor, fake_mode_with_symbols, with_symbols
from ..errors import CaptureError

Dimensions = frozenset[tuple[int, int]]  # the place of a tensor among the inputs, and a dimension of it


class SymbolicInputs:
    """Fake tensors like the inputs of a step, with symbols for their varying sizes."""

    def __init__(self, inputs: Sequence[Tensor], varying: Dimensions):
        self._mode = fake_mode_with_symbols()
        self.inputs = [
            with_symbols(self._mode, f"input_{i}", z, {k for j, k in varying if j == i}) for i, z in enumerate(inputs)
        ]

    def fixed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Fake tensors like parameters and buffers, whose sizes are numbers."""
        if any(isinstance(z, FakeTensor) for z in tensors):
            raise CaptureError(
                "the graph refers to a tensor that was created during the trace, and is not an input of the step: pass "
                "it in x or y, or register it as a buffer"
            )
        return [self._mode.from_tensor(z, static_shapes=True) for z in tensors]

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Around the trace and the compiler: no kernel is chosen by a size, which would be a guard.

        PyTorch uses NNPACK for convolutions of small batches.
        """
        with torch.backends.nnpack.flags(enabled=False):
            yield

    def guards(self) -> "Guards":
        """What the trace and the compiler assumed of the sizes; raises if no size is left that may change."""
        guards = Guards(self._mode.shape_env, self.inputs)
        if not guards.dynamic:
            raise CaptureError(
                "the step converts every dynamic size into a Python number (by int() or len(), say), so the program "
                "would be valid for these sizes only; use z.shape[0] without converting it"
            )
        return guards


class Guards:
    """Whether sizes are among those that a program was made for.

    dynamic: the dimensions whose sizes may change.
    """

    def __init__(self, env, inputs: Sequence[Tensor]):
        self._shapes = [[_number(size) for size in z.shape] for z in inputs]
        self.dynamic = frozenset(
            (i, k) for i, shape in enumerate(self._shapes) for k, size in enumerate(shape) if size is None
        )
        expression = env.produce_guards_expression(list(inputs)) or "True"
        self._env, self._code = env, compile(expression, "<guards>", "eval")

    def hold(self, inputs: Sequence[Tensor]) -> bool:
        """Of inputs with the dtypes, ranks and memory formats of the traced ones."""
        for shape, z in zip(self._shapes, inputs, strict=True):
            if any(known not in (None, size) for known, size in zip(shape, z.shape, strict=True)):
                return False
        try:
            return bool(self._env.evaluate_guards_expression(self._code, inputs))
        except ZeroDivisionError:  # a guard divides by n // 2, say, and n is 1: the one that forbids this comes later
            return False


def _number(size: int | torch.SymInt) -> int | None:
    """A size that is a number, or a symbol that was found to be equal to one; None for other symbols."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else None
