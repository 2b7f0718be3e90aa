"""Training by several processes, as `torchrun` starts them: what they exchange, and who writes.

Every process has the model and the data set, draws the same order of examples and takes its part of every batch. The
gradients are averaged before each update, and the sums that metrics are made of are added up after each step, so that
weights, metrics and every decision that follows from them are the same on all ranks. The first rank alone reads and
writes the run's folder.
"""

import contextlib
import importlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ..numerics.rounding import seed_of
from .folder import RunFolder


@dataclass(frozen=True)
class Ranks:
    """This process and the others. Alone, by default: then nothing is exchanged."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def part_of(self, drawn: Tensor) -> Tensor:
        """This rank's columns of a batch's places."""
        return drawn if self.size == 1 else drawn.tensor_split(self.size, dim=1)[self.rank]

    def seed_step(self, seed: int, position: int) -> None:
        """Each rank draws random numbers of its own (dropout), by the step's position."""
        if self.size > 1:
            torch.manual_seed(seed_of(position, seed) * self.size + self.rank)

    def add_up(self, z: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            with _exchanging():
                dist.all_reduce(z)
        return z

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replaces `p.grad` by its mean over the ranks; one exchange for all gradients of a dtype."""
        if self.size == 1:
            return
        with torch.no_grad():
            for grads in _by_dtype(p.grad for p in parameters if p.grad is not None):
                mean = self.add_up(torch.cat([g.reshape(-1) for g in grads])).div_(self.size)
                for g, part in zip(grads, mean.split([g.numel() for g in grads]), strict=True):
                    g.copy_(part.view(g.shape))

    def take_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Replaces the contents of tensors by the first rank's."""
        if self.size == 1:
            return
        with torch.no_grad(), _exchanging():
            for group in _by_dtype(tensors):
                flat = torch.cat([z.reshape(-1) for z in group])
                dist.broadcast(flat, 0)
                for z, part in zip(group, flat.split([z.numel() for z in group]), strict=True):
                    z.copy_(part.view(z.shape))

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is set on some rank."""
        if self.size == 1:
            return flags
        return tuple(self.add_up(torch.tensor(flags, dtype=torch.int32, device=self.device)).bool().tolist())

    def share(self, value: Any = None) -> Any:
        """The first rank's value."""
        if self.size == 1:
            return value
        values = [value]
        with _exchanging():
            dist.broadcast_object_list(values, 0, device=self.device)
        return values[0]


ALONE = Ranks()


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """The ranks of the `torchrun` job that this process belongs to; outside of one, or with one rank, this one alone.

    NCCL connects GPUs, one for each process of a machine, and gloo connects CPUs.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or not dist.is_torchelastic_launched():
        yield ALONE
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if device.index is None else device)
        device = torch.device("cuda", torch.cuda.current_device())
    # Imported while a group exists, this module keeps it in its functions' default arguments (seen in 2.10 to 2.13):
    # gloo's threads then outlive the group, and abort a Python that is exiting if they release a tensor.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        with warnings.catch_warnings():
            if dist.get_rank() > 0:  # the first rank gives the same ones
                warnings.simplefilter("ignore")
            yield Ranks(dist.get_rank(), size, device)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def folder_of_first(ranks: Ranks, opened: Callable[[], AbstractContextManager[RunFolder]]) -> Iterator[RunFolder]:
    """The run's folder on the first rank; on the others one that writes nothing."""
    with contextlib.ExitStack() as stack:
        folder: RunFolder | None = None
        try:
            folder = stack.enter_context(opened()) if ranks.is_first else None
        finally:
            opened_by_first = ranks.share(None if folder is None else (folder.path, folder.has_checkpoint))
        if folder is None and opened_by_first is None:
            raise SystemExit(1)  # the first rank could not open it, and says why
        yield _NoFolder(*opened_by_first) if folder is None else folder


class _NoFolder(RunFolder):
    """Stands for the folder on ranks that do not write."""

    def __init__(self, path: Path, has_checkpoint: bool):
        self.path, self._has_checkpoint, self.has_begun = path, has_checkpoint, False

    @property
    def has_checkpoint(self) -> bool:
        return self._has_checkpoint

    def save(self, *args: Any) -> None: ...
    def save_best(self, *args: Any) -> None: ...
    def write_metrics(self, *args: Any) -> None: ...
    def write_events(self, *args: Any) -> None: ...


@contextlib.contextmanager
def _exchanging() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConnectionError(
            f"another rank of this job has ended or cannot be reached ({reason}); the run stops here, and "
            "`threepass train --resume` with its folder resumes from the last checkpoint, with any number of ranks"
        ) from error


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for z in tensors:
        groups.setdefault(z.dtype, []).append(z)
    return list(groups.values())
