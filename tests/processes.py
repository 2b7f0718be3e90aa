"""Two processes that compute a table each, for tests of several ranks."""

import io
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing as mp

RANKS = 2


def spawned(results: Callable[[int], dict], folder: Path, *ignored: type[Warning]) -> list[dict]:
    """What `results(rank)` returns in each of the processes, which form a group; warnings but `ignored` are errors."""
    mp.spawn(_work, (results, str(folder), ignored), nprocs=RANKS)
    return [torch.load(io.BytesIO((folder / f"{rank}.pt").read_bytes())) for rank in range(RANKS)]


def _work(rank: int, results: Callable[[int], dict], folder: str, ignored: tuple[type[Warning], ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*torch.jit.script.*", DeprecationWarning)
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # by checkpoints of torch 2.10
    for category in ignored:
        warnings.simplefilter("ignore", category)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        torch.save(results(rank), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def leave_group() -> None:
    """For the end of a script: gloo's threads abort a Python that is exiting if they release a tensor only then."""
    dist.destroy_process_group()
    time.sleep(1)
