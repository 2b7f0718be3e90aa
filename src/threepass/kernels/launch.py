"""The device that a kernel is launched on, and how many programs it runs at once."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def on_its_device(launcher: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """Makes the device of the first operand the current one for the time of the call.

    Triton launches a kernel on the thread's current device, not on that of its operands: without this, a model on
    cuda:1 would be computed on cuda:0, in a new thread even where the caller has chosen cuda:1.
    """

    @functools.wraps(launcher)
    def launch(first: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device_of(first):
            return launcher(first, *args, **kwargs)

    return launch


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors the GPU has; of a CPU, where kernels are interpreted, one."""
    return _multiprocessors(device.index) if device.type == "cuda" else 1


def resident_warps(device: torch.device, registers: int) -> int:
    """How many warps of so many registers a thread the multiprocessors of a GPU hold at once, all together."""
    return multiprocessors(device) * (_registers(device.index if device.type == "cuda" else None) // (32 * registers))


@functools.cache
def _registers(index: int | None) -> int:
    """Of a multiprocessor; on a CPU, and where torch does not report it, the 65,536 of all GPUs with our kernels."""
    known = None if index is None else torch.cuda.get_device_properties(index)
    return getattr(known, "regs_per_multiprocessor", 2**16)


@functools.cache
def _multiprocessors(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
