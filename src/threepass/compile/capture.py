"""The whole step as one compiled function: forward, backward, third pass and mix in one graph.

The engine is its own compiler front end: `trace` records one run of it as a graph, Inductor compiles the graph, and on
a GPU the program is recorded as a CUDA graph and replayed, with inputs and outputs at fixed addresses.

    captured = capture(fn, inputs)      fn: tensors -> list of tensors
    outputs = captured(*inputs)
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch_compat import tree_leaves
from ..errors import CaptureError, UncheckedWarning, warn_caller
from ..tape.replay import is_random_node
from . import inductor
from .check import NOTHING, Outputs, check
from .cuda_graph import CudaGraph
from .dynamic import Dimensions, Guards, SymbolicInputs
from .eager_program import eager_program
from .indices import IndexRanges
from .rewrite.graph import is_ours
from .trace import Fn, Program, trace

_ours = torch.ops.threepass
# Of a result's size: far more than rounding; in other dtypes 0.2.
_TRACE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
_NO_KERNELS = (
    _ours.convolution,
    _ours.materialized,
    _ours.norm_numbers,
    _ours.pack,
    _ours.recompute_from,
    _ours.seeds,
)


class Captured:
    """A traced and compiled function, replayed as a CUDA graph where its inputs are on a GPU.

    With a CUDA graph the outputs are the same tensors at every call, overwritten by the next one.
    """

    def __init__(self, program: Program, run: Callable[..., Any]):
        self.program, self.run = program, run
        self.compile_seconds = self.check_seconds = 0.0
        self.weights: int | None = None  # which of the graph's inputs has the weights of the two terms
        self.known = NOTHING  # what the check knows of the outputs
        self.guards: Guards | None = None  # of a program with dynamic shapes
        self._checked: list[list[torch.Size]] = []  # the sizes that it was checked with
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.graph: CudaGraph | None = None
        on_cpu = all(z.device.type == "cpu" for z in program.state)
        self._ranges = IndexRanges(program.plain.graph, len(program.state)) if on_cpu else None

    @property
    def has_kernels(self) -> bool:
        """Whether the program calls Triton kernels of this library."""
        ours = {node.target for node in self.program.graph.graph.nodes if is_ours(node)}
        return not ours <= {op.default for op in _NO_KERNELS}

    @property
    def graph_bytes(self) -> int | None:
        """The memory that belongs to the CUDA graph: everything between its inputs and outputs."""
        return None if self.graph is None else self.graph.bytes

    def overwrites(self, inputs: Any) -> bool:
        """Whether a tensor in x or y shares memory with one that the program writes to.

        The program reads all of its inputs before it writes; an eager step may read them afterwards.
        """
        written = self.program.written
        if not written:
            return False
        leaves = (z for z in tree_leaves(inputs) if isinstance(z, Tensor) and z.layout == torch.strided)
        return any(z.untyped_storage().data_ptr() in written for z in leaves)

    def serves(self, inputs: Sequence[Tensor]) -> bool:
        """Whether a program with dynamic shapes is right for the sizes of these inputs.

        It is checked at capture, and once more with the first other sizes that come: raises if it is wrong then.
        """
        if self.guards is None or not self.guards.hold(inputs):
            return False
        if len(self._checked) == 1 and [z.shape for z in inputs] not in self._checked:
            self.check(inputs)
        return True

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Raises a `CaptureError` if the compiled program is wrong; adds to `check_seconds`."""
        self._checked.append([z.shape for z in inputs])
        self.check_seconds += _checked(self, inputs)

    def check_indices(self, *inputs: Tensor) -> None:
        """Raises an `IndexError` if an index in the inputs is out of range. To be called before each run."""
        if self._ranges is not None:
            self._ranges.check([*self.program.state, *inputs])

    def run_without_graph(self, *inputs: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return list(self.run([*self.program.state, *inputs]))

    def record(
        self, inputs: Sequence[Tensor], restore: Callable[[], Any] = contextlib.nullcontext, pool: Any = None
    ) -> None:
        """Makes the CUDA graph; `restore` restores what the function writes to while it warms up."""
        self.inputs = [z.clone() for z in inputs]
        with _on_device_of(inputs):
            self.graph = CudaGraph(lambda: self.run_without_graph(*self.inputs), restore, pool)
        self.outputs = self.graph.outputs

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        if self.graph is None:
            return self.run_without_graph(*inputs)
        with _on_device_of(self.inputs):
            for mine, theirs in zip(self.inputs, inputs, strict=True):
                mine.copy_(theirs, non_blocking=True)
            self.graph.replay()
        return self.outputs


class Build(NamedTuple):
    """How a program is made.

    kernels: False: no fused kernels of our own, only those that an eager step calls too.
    compiled: False: the traced graph runs operation by operation, with the kernels of an eager step.
    graph: replay it as a CUDA graph; default: if the inputs are on a GPU.
    pool: memory shared with CUDA graphs that never run at the same time.
    varying: the dimensions of the inputs whose sizes may change from call to call. The program then has neither kernels
        of our own, which are chosen by sizes, nor a CUDA graph, which is of one size.
    """

    kernels: bool = True
    compiled: bool = True
    graph: bool | None = None
    pool: Any = None
    varying: Dimensions | None = None


def capture(
    fn: Fn,
    inputs: Sequence[Tensor],
    build: Build = Build(),  # noqa: B008  (it cannot be changed)
    restore: Callable[[], Any] = contextlib.nullcontext,
    weights: Tensor | None = None,
    known: Outputs = NOTHING,
) -> Captured:
    """Traces fn for inputs of these shapes, compiles it, and checks the compiled program (`check.py`).

    Args:
        restore: a context that restores what fn writes to (buffers), because tracing and warming up run it.
        weights: the tensor, one of the inputs or one that fn refers to, that has the weights of the two terms as the
            first two entries of its last dimension: the check then tells the terms apart.
        known: the names of outputs, for the error if one is wrong, and which of them are penalties.
    """
    started = time.perf_counter()
    on_gpu, varying = any(z.is_cuda for z in inputs), build.varying
    if varying is not None:
        build = build._replace(graph=False, kernels=False)
    if not build.compiled:
        build = build._replace(kernels=False)
    places = [i for i, z in enumerate(inputs) if z is weights]
    inputs = [z.detach().clone() for z in inputs]  # fn may write to them, and one given twice is two inputs
    symbolic = None if varying is None else SymbolicInputs(inputs, varying)
    with _on_device_of(inputs), contextlib.nullcontext() if symbolic is None else symbolic.tracing():
        with restore():
            program = trace(fn, [z.clone() for z in inputs], build.kernels, symbolic, build.compiled)
        if build.kernels and on_gpu:
            inductor.warm_up(program.graph.graph)
        captured = Captured(program, inductor.compiled(program, inputs) if build.compiled else eager_program(program))
        if symbolic is not None:
            captured.guards = symbolic.guards()
            _compare_with_eager(program, fn, inputs, restore)
        captured.compile_seconds = time.perf_counter() - started
        captured.weights, captured.known = _place_of(weights, program, places), known
        captured.check(inputs)
        if on_gpu if build.graph is None else build.graph:
            captured.record(inputs, restore, build.pool)
    return captured


def _place_of(weights: Tensor | None, program: Program, places: list[int]) -> int | None:
    """Which of the graph's inputs is the tensor of weights: one of the program's state, or of the function's inputs."""
    if weights is None:
        return None
    states = [i for i, z in enumerate(program.state) if z.data_ptr() == weights.data_ptr()]
    return next(iter([*states, *(len(program.state) + i for i in places)]), None)


def _compare_with_eager(program: Program, fn: Fn, inputs: Sequence[Tensor], restore: Callable[[], Any]) -> None:
    """Raises a `CaptureError` if a trace with dynamic shapes is far from the function itself.

    Python code may treat a symbolic size unlike a number, by `isinstance(n, int)` or `str(n)`, and no guard records it.
    A step that draws random numbers is not compared: an eager step draws others.
    """
    if program.draws:
        return
    with restore():
        expected = fn(*(z.clone() for z in inputs))
    with torch.no_grad():
        found = program.plain(*(z.clone() for z in (*program.state, *inputs)))
    largest = max(z.double().norm() for z in expected if z.is_floating_point())
    for traced, eager in zip(found, expected, strict=True):
        if traced.is_floating_point():
            difference = (traced.double() - eager.double()).norm()
            rounding = min(100 * torch.finfo(eager.dtype).eps, 0.02) * largest  # a bias before batch norm has no more
            if difference > _TRACE_TOLERANCE.get(eager.dtype, 0.2) * eager.double().norm() + rounding:
                raise CaptureError(
                    "with dynamic shapes the traced model gives different results than the eager one: its code may use "
                    "isinstance(n, int) or str(n) of a size n, which guards do not record"
                )


def _checked(captured: Captured, inputs: Sequence[Tensor]) -> float:
    """Checks the compiled program; gives the seconds that this took."""
    program = captured.program
    if any(is_random_node(node) for node in program.plain.graph.nodes):  # no step of three passes: it has no seed
        return 0.0
    values = [*program.state, *inputs]
    try:
        return check(program.plain, captured.run, values, captured.weights, captured.known)
    except CaptureError as error:
        raise CaptureError(
            str(error), step_seconds=_seconds(lambda: captured.run([z.clone() for z in values]))
        ) from error
    except torch.OutOfMemoryError:
        text = "there is not enough memory to compare the captured step with a float64 reference: it is used unchecked"
        warn_caller(text, UncheckedWarning)
        return 0.0


def _seconds(run: Callable[[], Any]) -> float:
    """The time of one run, after others."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.no_grad():
        run()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _on_device_of(inputs: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """CUDA's streams and graphs are the current device's."""
    device = next((z.device for z in inputs if z.is_cuda), None)
    return contextlib.nullcontext() if device is None else torch.cuda.device(device)
