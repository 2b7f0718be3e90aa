"""The whole step as one compiled function: forward, backward, third pass and mix in one graph.

The engine is its own compiler front end. `trace` runs it once under `make_fx`, which writes down every ATen operation
of the three passes: a straight, first-order program without autograd. Views that autograd made for itself (detach,
alias) and what nobody reads are dropped, and the tensors that the program refers to (parameters, buffers) become inputs
of it, so that it sees them as they are at each call and may write to them. Inductor compiles that program, and on a GPU
it is recorded as a CUDA graph and replayed: its inputs and outputs then have fixed places in memory.

    captured = capture(fn, inputs)      fn: tensors -> list of tensors
    outputs = captured(*inputs)
"""

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from . import passes
from ._torch_compat import compile_by_inductor, keep_for_inductor, make_fx
from .check import check
from .errors import CaptureError, UncheckedWarning
from .functional import functional
from .randomness import seed_draws
from .rewrites import dense_before_scatter, reshape_instead_of_view
from .tracing import in_trace

WARM_UP = 3  # runs before a CUDA graph is recorded
Fn = Callable[..., Sequence[Tensor]]

_aten = torch.ops.aten
_VIEWS = {_aten.detach.default, _aten.alias.default}


class Program:
    """A traced function: its graph, whose first inputs are `state`, the tensors that it refers to.

    graph is rewritten, `plain` is what it was before. draws: the model or the loss draws random numbers; is_seeded: the
    step's seed is used, for those or for random rounding.
    """

    def __init__(self, graph: GraphModule, plain: GraphModule, state: list[Tensor], draws: bool):
        self.graph, self.plain, self.state, self.draws = graph, plain, state, draws
        self.is_seeded = any(node.target is torch.ops.threepass.seeds.default for node in plain.graph.nodes)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return list(self.graph(*self.state, *inputs))


def trace(fn: Fn, inputs: Sequence[Tensor], kernels: bool = True) -> Program:
    """fn as one graph of ATen operations, with kernels of our own where they are faster, unless kernels=False.

    fn runs once: what it changes besides its results, the caller puts back.
    """

    def watched(*inputs: Tensor) -> Sequence[Tensor]:
        with in_trace():
            return fn(*inputs)

    graph = make_fx(watched)(*inputs)
    for node in list(graph.graph.nodes):
        if node.target in _VIEWS:
            node.replace_all_uses_with(node.args[0])
    state = _lift(graph)
    graph = functional(graph, [*state, *inputs])
    draws = seed_draws(graph.graph)
    graph.recompile()
    plain = GraphModule({}, Graph())
    plain.graph.output(plain.graph.graph_copy(graph.graph, {}))
    reshape_instead_of_view(plain.graph)
    plain.recompile()
    passes.apply(graph, kernels)
    dense_before_scatter(graph.graph)
    reshape_instead_of_view(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return Program(graph, plain, state, draws)


def _lift(graph: GraphModule) -> list[Tensor]:
    """Makes the tensors that the graph refers to its first inputs; returns them, detached."""
    state: list[Tensor] = []
    lifted: dict[int, Node] = {}
    first = next(iter(graph.graph.nodes))
    for node in list(graph.graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(graph, node.target)
        if id(value) not in lifted:
            with graph.graph.inserting_before(first):
                lifted[id(value)] = graph.graph.placeholder(f"state_{len(state)}")
            lifted[id(value)].meta = {**node.meta, "val": value.detach()}
            state.append(value.detach())
        node.replace_all_uses_with(lifted[id(value)])
        graph.graph.erase_node(node)
    return state


class Captured:
    """A traced and compiled function, replayed as a CUDA graph where its inputs are on a GPU.

    With a CUDA graph the outputs are the same tensors at every call, overwritten by the next one.
    """

    def __init__(self, program: Program, run: Callable[..., Any]):
        self.program, self.run = program, run
        self.compile_seconds = self.check_seconds = 0.0
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.graph: CudaGraph | None = None

    @property
    def graph_bytes(self) -> int | None:
        """The memory that belongs to the CUDA graph: everything between its inputs and outputs."""
        return None if self.graph is None else self.graph.bytes

    def ungraphed(self, *inputs: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return list(self.run([*self.program.state, *inputs]))

    def record(
        self, inputs: Sequence[Tensor], restore: Callable[[], Any] = contextlib.nullcontext, pool: Any = None
    ) -> None:
        """Makes the CUDA graph; `restore` puts back what the function writes to while it warms up."""
        self.inputs = [z.clone() for z in inputs]
        with _on_device_of(inputs):
            self.graph = CudaGraph(lambda: self.ungraphed(*self.inputs), restore, pool)
        self.outputs = self.graph.outputs

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        if self.graph is None:
            return self.ungraphed(*inputs)
        with _on_device_of(self.inputs):
            for mine, theirs in zip(self.inputs, inputs, strict=True):
                mine.copy_(theirs, non_blocking=True)
            self.graph.replay()
        return self.outputs


def capture(
    fn: Fn,
    inputs: Sequence[Tensor],
    graph: bool | None = None,
    restore: Callable[[], Any] = contextlib.nullcontext,
    kernels: bool = True,
    weights: Tensor | None = None,
    pool: Any = None,
    compiled: bool = True,
) -> Captured:
    """Traces fn for inputs of these shapes, compiles it, and checks the compiled program (`check.py`).

    Args:
        graph: replay it as a CUDA graph; default: if the inputs are on a GPU.
        restore: a context that puts back what fn writes to (buffers), because tracing and warming up run it.
        kernels: False: the framework's kernels alone.
        weights: the tensor, one of the inputs or one that fn refers to, that has the weights of the two terms as the
            first two entries of its last dimension: the check then tells the terms apart.
        pool: memory shared with CUDA graphs that never run at the same time.
        compiled: False: the traced graph runs operation by operation.
    """
    started = time.perf_counter()
    on_gpu = any(z.is_cuda for z in inputs)
    places = [i for i, z in enumerate(inputs) if z is weights]
    inputs = [z.detach().clone() for z in inputs]  # fn may write to them, and one given twice is two inputs
    with _on_device_of(inputs):
        with restore():
            program = trace(fn, [z.clone() for z in inputs], kernels)
        if kernels and on_gpu:
            from .kernels.fuse import warm_up

            warm_up(program.graph.graph)
        captured = Captured(program, _compiled(program, inputs) if compiled else lambda values: program.graph(*values))
        captured.compile_seconds = time.perf_counter() - started
        if weights is not None:
            states = [i for i, z in enumerate(program.state) if z.data_ptr() == weights.data_ptr()]
            places = [*states, *(len(program.state) + i for i in places)]
        captured.check_seconds = _checked(captured, inputs, places)
        if on_gpu if graph is None else graph:
            captured.record(inputs, restore, pool)
    return captured


def _checked(captured: Captured, inputs: Sequence[Tensor], places: Sequence[int]) -> float:
    """Checks the compiled program; gives the seconds that this took."""
    program = captured.program
    if any(passes.is_random(node) for node in program.plain.graph.nodes):  # no step of three passes: it has no seed
        return 0.0
    values = [*program.state, *inputs]
    try:
        return check(program.plain, captured.run, values, places[0] if places else None)
    except CaptureError as error:
        raise CaptureError(
            str(error), step_seconds=_seconds(lambda: captured.run([z.clone() for z in values]))
        ) from error
    except torch.OutOfMemoryError:
        text = "there is not enough memory to compare the compiled step with a float64 reference: it is used unchecked"
        warnings.warn(text, UncheckedWarning, stacklevel=2)
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


def _compiled(program: Program, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    def share(graph: Graph) -> None:
        passes.share_sums(graph)
        passes.take_sums_early(graph)

    key = "threepass.sums.2"  # in Inductor's cache on disk: another number for another `share`
    keep_for_inductor({n.target for n in program.graph.graph.nodes if passes.is_ours(n)})
    # Combined: a step has dozens of small kernels that do not depend on each other, a microsecond or two each.
    combined = any(z.is_cuda for z in inputs)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # the user's choice
        run = compile_by_inductor(program.graph, [*program.state, *inputs], share, key, combined)
    return lambda values: run(*values)


class CudaGraph:
    """f() recorded as a CUDA graph, after a warm-up on a stream of its own; `outputs` are overwritten by `replay`.

    restore: a context that puts back what f writes to, around each run of the warm-up. pool: memory shared with graphs
    that never run at the same time.
    """

    def __init__(
        self,
        f: Callable[[], Any],
        restore: Callable[[], Any] = contextlib.nullcontext,
        pool: Any = None,
    ):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                with restore():
                    f()
        torch.cuda.current_stream().wait_stream(stream)
        gc.collect()  # garbage goes before a graph is recorded, not while it is
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA meanwhile (a DataLoader that pins memory): only this one's calls are restricted.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.outputs = f()
        self.pool = self._graph.pool()
        self.bytes = torch.cuda.memory_reserved() - before

    def replay(self) -> Any:
        self._graph.replay()
        return self.outputs
