"""A function recorded as a CUDA graph and replayed."""

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch

WARM_UP = 3  # runs before a CUDA graph is recorded


class CudaGraph:
    """f() recorded as a CUDA graph, after a warm-up on a stream of its own; `outputs` are overwritten by `replay`.

    restore: a context that restores what f writes to, around each run of the warm-up. pool: memory shared with graphs
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
