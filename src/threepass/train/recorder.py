"""Functions of a training run recorded for replay: traced, compiled, and on a GPU made into CUDA graphs.

What is recorded is a function of a counter, and works on tensors that stay where they are: the counter, parameters, the
optimizer's state, sums. Tracing it and warming it up run it, so a context from the caller puts all of these back.
"""

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..capture import capture, trace
from ..errors import UncompiledWarning

WARM_UP = 3
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
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
            for _ in range(WARM_UP):
                with restore():
                    f()
        torch.cuda.current_stream().wait_stream(stream)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = f()
        self._pool = graph.pool()
        self.bytes = (self.bytes or 0) + torch.cuda.memory_reserved() - before

        def replay() -> Any:
            graph.replay()
            return result

        return replay

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
            text = "compile=True: this step runs eagerly, with the same results, because it cannot be captured"
            warnings.warn(f"{text}: {type(error).__name__}: {reason}", UncompiledWarning, stacklevel=6)
