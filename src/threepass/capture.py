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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from . import passes
from .errors import CaptureError
from .precision import HALF

WARM_UP = 3  # runs before a CUDA graph is recorded
Fn = Callable[..., Sequence[Tensor]]

_aten = torch.ops.aten
_VIEWS = {_aten.detach.default, _aten.alias.default}
_VALUES = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}


class _ValuesUnread(TorchDispatchMode):
    """In a trace, a number read out of a tensor would stay what it was: refuses it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in _VALUES:
            raise CaptureError(f"a number is read out of a tensor ({func}), which may be another one at the next call")
        return func(*args, **(kwargs or {}))


class Program:
    """A traced function: its graph, whose first inputs are `state`, the tensors that it refers to.

    results: what the function returned while it was traced.
    """

    def __init__(self, graph: GraphModule, state: list[Tensor], results: list[Tensor]):
        self.graph, self.state, self.results = graph, state, results

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return list(self.graph(*self.state, *inputs))


def trace(fn: Fn, inputs: Sequence[Tensor], kernels: bool = True) -> Program:
    """fn as one graph of ATen operations, with kernels of our own where they are faster, unless kernels=False.

    fn runs once: what it changes besides its results, the caller puts back.
    """
    results: list[Tensor] = []

    def watched(*inputs: Tensor) -> Sequence[Tensor]:
        with _ValuesUnread():
            outputs = fn(*inputs)
        results[:] = outputs
        return outputs

    graph = make_fx(watched)(*inputs)
    for node in list(graph.graph.nodes):
        if node.target in _VIEWS:
            node.replace_all_uses_with(node.args[0])
    graph.graph.eliminate_dead_code()
    state = _lift(graph)
    passes.apply(graph, kernels)
    graph.graph.lint()
    graph.recompile()
    return Program(graph, state, [z.detach() for z in results])


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

    def __init__(self, program: Program, run: Callable[..., Any], compile_seconds: float):
        self.program, self.run, self.compile_seconds = program, run, compile_seconds
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.graph: CudaGraph | None = None
        self.check_seconds = 0.0  # of compile_seconds

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
        """Makes the CUDA graph; `restore` puts back what the function writes to while it warms up.

        pool: memory shared with graphs that never run at the same time.
        """
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
    pool: Any = None,
) -> Captured:
    """Traces and compiles fn for inputs of these shapes.

    graph: replay it as a CUDA graph; default: if the inputs are on a GPU. restore: a context that puts back what fn
    writes to (buffers), because tracing and warming up run it. kernels=False: the framework's kernels alone.
    pool: of a CUDA graph with which this one shares its memory, because the two never run at the same time.
    """
    started = time.perf_counter()
    on_gpu = any(z.is_cuda for z in inputs)
    inputs = [z.detach().clone() for z in inputs]  # fn may write to them, and one given twice is two inputs
    with _on_device_of(inputs):
        with restore():
            program = trace(fn, [z.clone() for z in inputs], kernels)
        if kernels and on_gpu:
            from .kernels.fuse import warm_up

            warm_up(program.graph.graph)
        captured = Captured(program, _compiled(program, inputs), 0.0)
        with restore():
            _check(program, captured.ungraphed(*(z.clone() for z in inputs)))
        captured.compile_seconds = time.perf_counter() - started
        if on_gpu if graph is None else graph:
            captured.record(inputs, restore, pool)
    return captured


def _on_device_of(inputs: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """CUDA's streams and graphs are the current device's."""
    device = next((z.device for z in inputs if z.is_cuda), None)
    return contextlib.nullcontext() if device is None else torch.cuda.device(device)


def _check(program: Program, got: list[Tensor]) -> None:
    """Refuses a program whose compiled results are grossly different from the function's own.

    Compilers have bugs: this one catch is for those that would spoil a training run. Where random numbers are drawn,
    the two have different ones.
    """
    expected, program.results = program.results, []
    if any(passes.is_random(node) for node in program.graph.graph.nodes):
        return
    apart = total = 0.0
    for ours, theirs in zip(got, expected, strict=True):
        if theirs.is_floating_point():
            apart += float((ours.double() - theirs.double()).square().sum())
            total += float(theirs.double().square().sum())
    tolerance = max((_tolerance(z) for z in expected if z.is_floating_point()), default=0.0)
    if apart > tolerance**2 * total:
        size = (apart / (total or 1.0)) ** 0.5
        raise CaptureError(f"the compiled step differs from the eager one by {size:.1e} of its size")


def _tolerance(z: Tensor) -> float:
    if z.dtype == torch.float64:
        return 1e-6
    return 0.5 if z.dtype in HALF else 0.2 if z.is_cuda else 1e-2  # TF32 may be on


def _compiled(program: Program, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Share(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            passes.share_sums(graph)
            passes.take_sums_early(graph)

        def uuid(self) -> str:
            return "threepass.sums.2"  # the key of Inductor's cache on disk: another number for another pass

    _introduce({n.target for n in program.graph.graph.nodes if passes.is_ours(n)})
    # Combined: a step has dozens of small kernels that do not depend on each other, a microsecond or two each.
    combined = any(z.is_cuda for z in inputs)
    with torch.no_grad(), config.patch(post_grad_custom_pre_pass=Share(), combo_kernels=combined):
        run: Any = compile_fx(program.graph, [*program.state, *inputs])
    return lambda values: run(*values)


def _introduce(operations: set[Any]) -> None:
    """Tells Inductor that it calls these operations as they are, before it meets them.

    By itself it finds out when it meets the first of a kind: too late to know that the tensors before it have to be in
    memory, so that it computes them once more for each reader; and before torch 2.13 it then writes down everything
    that the operands are made of, of which there is twice as much with every layer.
    """
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import constrain_to_fx_strides, lowerings, make_fallback

    def in_memory(node: Node, *args: Any, **kwargs: Any) -> Any:
        tree_map_only(TensorBox, lambda z: z.realize(), (args, kwargs))
        return constrain_to_fx_strides(node, *args, **kwargs)

    for operation in operations - lowerings.keys():
        make_fallback(operation, layout_constraint=in_memory, warn=False)


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
        with torch.cuda.graph(self._graph, pool=pool):
            self.outputs = f()
        self.pool = self._graph.pool()
        self.bytes = torch.cuda.memory_reserved() - before

    def replay(self) -> Any:
        self._graph.replay()
        return self.outputs
