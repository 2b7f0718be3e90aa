"""Functions of a training run, captured for replay: traced, compiled, and on a GPU made into CUDA graphs.

A captured function takes a counter and works on tensors at fixed addresses: the counter, parameters, the optimizer's
state, sums. Tracing and warming up run the function, so the caller passes a context that restores these tensors.
They are looked up by the signature of the model and the loss, as `ThreePass(compile=True)` does it with its programs:
after a change between two steps the step is captured again.
"""

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compile.capture import Build, capture
from ..compile.check import NOTHING, Outputs
from ..compile.cuda_graph import CudaGraph
from ..compile.programs import Programs
from ..compile.signature import Signature


@dataclass(frozen=True)
class CapturedFunction:
    """One call is one replay, which gives what the captured function returned."""

    replay: Callable[[], Any]
    check_seconds: float
    graph_bytes: int | None

    def __call__(self) -> Any:
        return self.replay()


class Function(NamedTuple):
    """A function of a counter that can be captured: then(program(counter)).

    program: traced, compiled if it is to be, and checked. then: runs as it is written (an optimizer's fused kernels).
    restore: a context that puts back what both write to. weights: as for `capture`. known: what is known of the
    program's results.
    """

    program: Callable[[Tensor], Sequence[Tensor]]
    then: Callable[[Sequence[Tensor]], Any]
    restore: Callable[[], contextlib.AbstractContextManager[None]]
    weights: Tensor | None = None
    known: Outputs = NOTHING


class GraphCapture:
    """Makes and keeps the captured functions of one run. Its graphs share a memory pool, since no two run at once."""

    def __init__(self, device: torch.device, model: nn.Module, loss_fn: Callable[..., Tensor], compile: bool | str):
        self.device = device
        self.programs: Programs[CapturedFunction] = Programs(Signature(model, loss_fn), compile)
        self._newest: CudaGraph | None = None  # keeps the graphs' memory pool alive when others make room

    def find(self, kind: Hashable, rows: int, make: Callable[[], CapturedFunction]) -> CapturedFunction | None:
        """The captured function of a kind of step over a number of rows; None: it runs eagerly, by `programs.eagerly`.

        Both batch sizes of an epoch come again in the next one: each is captured when it comes first.
        """
        return self.programs.find(kind, rows, make, lambda: f"{kind}, batches of {rows}", recurring=True)

    def capture(self, function: Function, counter: Tensor, compiled: bool = True) -> CapturedFunction:
        """A replay of the function; compiled=False: its program runs operation by operation, whatever the option."""
        program, then, restore, weights, known = function

        @contextlib.contextmanager
        def restored() -> Iterator[None]:
            with restore(), self.programs.signature.restored():
                yield

        build = Build(compiled=compiled and self.programs.compile != "trace", graph=False)
        captured = capture(program, [counter], build, restored, weights, known)
        self.programs.signature.settle(captured.program.state)

        def step() -> Any:
            captured.check_indices(counter)
            return then(captured.run_without_graph(counter))

        if self.device.type != "cuda":
            return CapturedFunction(step, captured.check_seconds, None)
        graph = self._graphed(step, restored)
        return CapturedFunction(graph.replay, captured.check_seconds, graph.bytes)

    def _graphed(self, f: Callable[[], Any], restore: Callable[[], Any]) -> CudaGraph:
        with torch.cuda.device(self.device), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
            self._newest = CudaGraph(f, restore, None if self._newest is None else self._newest.pool)
        return self._newest
