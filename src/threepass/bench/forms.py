"""How a method's step runs: eagerly, or at its best.

At its best, a step is one program for its fixed shapes, replayed as a CUDA graph on a GPU:

    capture         the whole step, traced with its derivatives into one graph and compiled (`threepass.capture`)
    torch.compile   the model compiled as PyTorch's users do it, the derivatives by autograd
    CUDA graph      nothing compiled, only the launches recorded (on a GPU)

Plain training gets the faster of the first two, every other method the first that works.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..capture import CudaGraph, capture
from .methods import METHODS


class Form(NamedTuple):
    """A step ready to run. bare: without the CUDA graph, whose memory is a pool of its own."""

    how: str
    run: Callable[[], Any]
    bare: Callable[[], Sequence[Tensor]]
    compile_seconds: float | None = None
    graph_bytes: int | None = None


class FormError(Exception):
    """Why a method has no form: a line for each that was tried."""


def eager(method: str, model: nn.Module, batch: Sequence[Tensor]) -> Form:
    def step() -> Sequence[Tensor]:
        return METHODS[method](model, *batch)

    return Form("eager", step, step)


def best(method: str, model: nn.Module, batch: Sequence[Tensor]) -> list[Form]:
    """The candidates for a method's best form: for plain training all that work, else the first."""
    made: list[Form] = []
    reasons = []
    for how, make in _makers(method, batch[0].is_cuda):
        try:
            made.append(_ready(how, make, copy.deepcopy(model), batch))
        except Exception as error:  # whatever a compiler does not take is a result too
            reasons.append(f"{how}: {reason(error)}")
        if made and method != "plain":
            break
    if not made:
        raise FormError("; ".join(reasons))
    return made


def reason(error: Exception) -> str:
    """An error in one line."""
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__


Make = Callable[[nn.Module, Sequence[Tensor]], Callable[[], Sequence[Tensor]]]


def _makers(method: str, cuda: bool) -> Iterator[tuple[str, Make]]:
    yield "capture", lambda model, batch: _captured(method, model, batch)
    yield "torch.compile", lambda model, batch: _compiled(method, model, batch)
    if cuda and method != "plain":
        yield "CUDA graph", lambda model, batch: lambda: METHODS[method](model, *batch)


def _captured(method: str, model: nn.Module, batch: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    program = capture(lambda *batch: list(METHODS[method](model, *batch)), list(batch), graph=False)
    return lambda: program(*batch)


def _compiled(method: str, model: nn.Module, batch: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    compiled = cast(nn.Module, torch.compile(model))
    return lambda: METHODS[method](compiled, *batch)


def _ready(how: str, make: Make, model: nn.Module, batch: Sequence[Tensor]) -> Form:
    begin = time.perf_counter()
    bare = make(model, batch)
    bare()
    took = None if how == "CUDA graph" else time.perf_counter() - begin
    if not batch[0].is_cuda:
        return Form(how, bare, bare, took)
    graph = CudaGraph(bare)
    return Form(how, graph.replay, bare, took, graph.bytes)
