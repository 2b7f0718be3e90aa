"""Functions of a training run recorded for replay: traced, compiled, and on a GPU made into CUDA graphs.

What is recorded is a function of a counter, and works on tensors that stay where they are: the counter, parameters, the
optimizer's state, sums. Tracing it and warming it up run it, so a context from the caller puts all of these back.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..capture import CudaGraph, capture, trace
from ..errors import warn_uncompiled

Restore = Callable[[], contextlib.AbstractContextManager[None]]


class Recorder:
    """Makes the replays of one run. Its graphs share a pool of memory, because no two of them run at once."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds = 0.0  # spent on recording
        self.bytes: int | None = None  # of the graphs, where there are any
        self._pool: Any = None
        self._warned = False

    def record(
        self,
        program: Callable[[Tensor], Sequence[Tensor]],
        counter: Tensor,
        then: Callable[[Sequence[Tensor]], Any],
        restore: Restore,
        compiled: bool = True,
    ) -> Callable[[], Any] | None:
        """A replay of `then(program(counter))`, which gives its result; None, and one warning, if that cannot be.

        The program is traced, and compiled if it is to be; `then` (an optimizer's fused kernels) runs as it is written.
        """
        began = time.perf_counter()
        try:
            run = self._traced(program, counter, restore, compiled)

            def step() -> Any:
                return then(run(counter))

            return self._graphed(step, restore) if self.device.type == "cuda" else step
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._warn(error)
            return None
        finally:
            self.seconds += time.perf_counter() - began

    @staticmethod
    def _traced(program: Callable[..., Sequence[Tensor]], counter: Tensor, restore: Restore, compiled: bool):
        if compiled:
            return capture(program, [counter], graph=False, restore=restore).ungraphed
        with restore():
            return trace(program, [counter])

    def _graphed(self, f: Callable[[], Any], restore: Restore) -> Callable[[], Any]:
        with torch.cuda.device(self.device), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
            graph = CudaGraph(f, restore, self._pool)
        self._pool = graph.pool
        self.bytes = (self.bytes or 0) + graph.bytes
        return graph.replay

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warn_uncompiled(error, stacklevel=7)
