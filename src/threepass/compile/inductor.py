"""Compiling a traced program: the graph by Inductor, the kernels of our own that it calls by Triton."""

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .._torch_compat import compile_by_inductor, keep_for_inductor
from .rewrite.graph import is_ours, value_of
from .rewrite.sums import add_early, share_sums, take_sums_early
from .trace import Program


def compiled(program: Program, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    def share(graph: Graph) -> None:
        share_sums(graph)
        take_sums_early(graph)
        if program.recomputes_blocks:
            add_early(graph)

    key = f"threepass.sums.3, {program.recomputes_blocks}"  # in Inductor's cache on disk: another for another `share`
    keep_for_inductor({n.target for n in program.graph.graph.nodes if is_ours(n)})
    settings = {
        # A step has dozens of small kernels that do not depend on each other, a microsecond or two each.
        "combo_kernels": any(z.is_cuda for z in inputs),
        # Checkpointed blocks are recomputed where the graph has them; moved to other readers, they take memory again.
        "reorder_for_locality": not program.recomputes_blocks,
    }
    examples = [*program.state, *inputs]
    if program.symbolic is not None:
        examples = [*program.symbolic.fixed(program.state), *program.symbolic.inputs]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # the user's choice
        run = compile_by_inductor(program.graph, examples, share, key, settings)
    return lambda values: run(*values)


def warm_up(graph: Graph) -> None:
    """Compiles the kernels that the graph calls, several at a time."""
    calls = {}
    for node in graph.nodes:
        if is_ours(node):
            calls[str(node.target), str(torch.fx.map_arg((node.args, node.kwargs), _shape))] = node

    def run(node: Any) -> None:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: _zeros(value_of(n)))
        node.target(*args, **kwargs)

    if calls:
        with ThreadPoolExecutor(min(8, len(calls))) as pool:
            list(pool.map(run, calls.values()))


def _zeros(like: Tensor) -> Tensor:
    """Zeros with the metadata of a tensor that may be a fake one."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()


def _shape(node: Node) -> Any:
    return tuple(value_of(node).shape), value_of(node).stride(), value_of(node).dtype
