"""A step as one graph: `trace` runs the engine once under `make_fx`, which records every ATen operation.

The three passes become a straight, first-order program without autograd. Views that autograd made for itself (detach,
alias) and results without readers are dropped, and the tensors that the program refers to (parameters, buffers) become
inputs of it, so that it sees them as they are at each call and may write to them.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import make_fx, make_symbolic_fx
from ..errors import CaptureError, UnsupportedError
from ..tape.intercept import intercepting_functions
from ..tracing import one_node_each, tracing_for
from . import rewrite
from .dynamic import SymbolicInputs
from .functional import functional
from .randomness import seed_draws
from .rewrite.simplify import simplify
from .rewrite.strides import copy_returned_inputs, dense_before_scatter, reshape_instead_of_view
from .user_code import in_trace

Fn = Callable[..., Sequence[Tensor]]

_aten = torch.ops.aten
_recompute_from = torch.ops.threepass.recompute_from.default

_OF_SIZES = {
    _aten.sym_size.int, _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default,
    _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default,
}  # fmt: skip
_VIEWS = {_aten.detach.default, _aten.alias.default}


class Program:
    """A traced function: its graph, whose first inputs are `state`, the tensors that it refers to.

    graph is rewritten, `plain` is what it was before. draws: the model or the loss draws random numbers; is_seeded: the
    step's seed is used, for those or for random rounding. symbolic: where shapes are dynamic, the inputs of the trace.
    """

    def __init__(
        self,
        graph: GraphModule,
        plain: GraphModule,
        state: list[Tensor],
        draws: bool,
        symbolic: SymbolicInputs | None = None,
    ):
        self.graph, self.plain, self.state, self.draws, self.symbolic = graph, plain, state, draws, symbolic
        self.trace_seconds = self.rewrite_seconds = 0.0
        self.written = {  # the storages of tensors of `state` that the program writes to
            z.untyped_storage().data_ptr()
            for z, node in zip(state, plain.graph.find_nodes(op="placeholder"), strict=False)
            if any(user.target is _aten.copy_.default and user.args[0] is node for user in node.users)
        }
        self.recomputes_blocks = bool(plain.graph.find_nodes(op="call_function", target=_recompute_from))
        self.is_seeded = any(node.target is torch.ops.threepass.seeds.default for node in plain.graph.nodes)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return list(self.graph(*self.state, *inputs))

    def are_constant(self, count: int) -> list[bool]:
        """Of the last outputs: whether they depend on no contents of an input or of `state`, but on sizes at most."""
        dependent: set[Node] = set()
        for node in self.plain.graph.nodes:
            if node.op == "placeholder" or (node.target not in _OF_SIZES and dependent & {*node.all_input_nodes}):
                dependent.add(node)
        outputs: Any = self.plain.graph.output_node().args[0]
        return [z not in dependent for z in outputs[len(outputs) - count :]]


def trace(
    fn: Fn,
    inputs: Sequence[Tensor],
    kernels: bool = True,
    symbolic: SymbolicInputs | None = None,
    compiled: bool = True,
) -> Program:
    """fn as one graph of ATen operations, with fused kernels of our own where they are faster, unless kernels=False.

    fn runs once: what it changes besides its results, the caller restores. symbolic: fn gets these fake tensors in
    place of the inputs, and computes with their sizes as symbols; it then changes nothing but attributes. compiled:
    False: the graph is for running operation by operation, with the kernels of an eager step.
    """

    def recorded(eager_modules: frozenset[str]) -> GraphModule:
        def watched(*inputs: Tensor) -> Sequence[Tensor]:
            with in_trace(eager_modules), intercepting_functions(), one_node_each(kernels), tracing_for(compiled):
                return fn(*inputs)

        return (make_fx if symbolic is None else make_symbolic_fx)(watched)(*inputs)

    began = time.perf_counter()
    inputs = inputs if symbolic is None else symbolic.inputs
    graph = _with_eager_code(recorded)
    for node in list(graph.graph.nodes):
        if node.target in _VIEWS:
            node.replace_all_uses_with(node.args[0])
    state = _lift(graph)
    graph = functional(graph, [*(state if symbolic is None else symbolic.fixed(state)), *inputs])
    draws = seed_draws(graph.graph)
    for place, node in enumerate(graph.graph.find_nodes(op="call_function", target=_recompute_from)):
        node.args = (node.args[0], place)  # no two are the same value
    graph.recompile()
    plain = GraphModule({}, Graph())
    plain.graph.output(plain.graph.graph_copy(graph.graph, {}))
    reshape_instead_of_view(plain.graph)
    plain.recompile()
    traced = time.perf_counter()
    if compiled:
        rewrite.apply(graph, kernels)
        dense_before_scatter(graph.graph)
    reshape_instead_of_view(graph.graph)
    if not compiled:
        simplify(graph.graph)
    copy_returned_inputs(graph.graph)
    graph.graph.lint()
    graph.recompile()
    program = Program(graph, plain, state, draws, symbolic)
    program.trace_seconds, program.rewrite_seconds = traced - began, time.perf_counter() - traced
    return program


def _with_eager_code(recorded: Callable[[frozenset[str]], GraphModule]) -> GraphModule:
    """The trace of the model's code for compilers; of a module where that is not supported, of its eager code.

    Libraries run other operations if `is_compiling()` is true, such as scans and custom operations (Mamba and mixtures
    of experts of transformers).
    """
    try:
        return recorded(frozenset())
    except UnsupportedError as error:
        try:
            return recorded(frozenset(place.module for place in error.places))
        except (CaptureError, UnsupportedError):
            raise error from None


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
