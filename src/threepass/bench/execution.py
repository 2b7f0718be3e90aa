"""How a method's step runs: eagerly, traced, or at its best.

Three passes also run as `threepass.ThreePass(compile="trace")`, with the kernels of an eager step. At its best, a step
is one program for its fixed shapes, replayed as a CUDA graph on a GPU:

    ThreePass       `threepass.ThreePass(compile=True)`, for the methods that it is
    capture         the whole step, traced with its derivatives into one graph and compiled (`compile/capture.py`)
    torch.compile   the model compiled as PyTorch's users do it, the derivatives by autograd
    CUDA graph      nothing compiled, only the launches recorded (on a GPU)

Plain training gets the faster of capture and torch.compile, every other method the first that works.
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..compile.capture import Build, Captured, capture
from ..compile.cuda_graph import CudaGraph
from ..core.options import Options
from ..errors import UncompiledWarning, reason_of
from ..step import ThreePass
from .methods import METHODS, OPTIONS, weights


class Form(NamedTuple):
    """A step ready to run.

    bare: without the CUDA graph, whose memory is a pool of its own; gives the gradients.
    call: the same as its user calls it, where that is more than `run`: ThreePass with its checks and `p.grad`.
    failed: the better forms that did not work, and why.
    parts: what a capture's seconds went to.
    """

    how: str
    run: Callable[[], Any]
    bare: Callable[[], Sequence[Tensor]]
    compile_seconds: float | None = None
    graph_bytes: int | None = None
    call: Callable[[], Any] | None = None
    failed: tuple[str, ...] = ()
    parts: dict[str, float] | None = None


class FormError(Exception):
    """Why a method has no form: a line for each that was tried."""


def eager(method: str, model: nn.Module, batch: Sequence[Tensor]) -> Form:
    def step() -> Sequence[Tensor]:
        return METHODS[method](model, *batch)

    return Form("eager", step, step)


def traced(method: str, model: nn.Module, batch: Sequence[Tensor]) -> Form:
    """Of three passes: the captured step without a compiler."""
    return _three_pass(method, copy.deepcopy(model), batch, "trace")


def best(method: str, model: nn.Module, batch: Sequence[Tensor]) -> list[Form]:
    """The candidates for a method's best form: for plain training all that work, else the first."""
    made: list[Form] = []
    reasons: list[str] = []
    for how, make in makers(method, batch[0].is_cuda):
        try:
            made.append(make(method, copy.deepcopy(model), batch)._replace(failed=tuple(reasons)))
        except Exception as error:  # whatever a compiler does not take is a result too
            reasons.append(f"{how}: {reason_of(error)}")
        if made and method != "plain":
            break
    if not made:
        raise FormError("; ".join(reasons))
    return made


Make = Callable[[str, nn.Module, Sequence[Tensor]], Form]


def makers(method: str, cuda: bool) -> Iterator[tuple[str, Make]]:
    """The forms that a method's best may have, the better ones first."""
    if method in OPTIONS:
        yield "ThreePass", _three_pass
    else:
        yield "capture", _captured
        yield "torch.compile", _compiled
    if cuda and method != "plain":
        yield "CUDA graph", _graphed


def _three_pass(method: str, model: nn.Module, batch: Sequence[Tensor], compile: str = "require") -> Form:
    x, y, _ = batch
    step = ThreePass(model, F.cross_entropy, compile=compile, **OPTIONS[method])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncompiledWarning)
        step(x, y)
    assert step.compiled is not None
    (made,) = step.compiled.programs
    program, steps = made.captured, step.compiled
    options = Options(**OPTIONS[method])
    inputs = [steps._weights_of((options.back, options.third)), steps._seed_for(program.program, 0), x, y]
    places = {id(p): i for i, p in enumerate(made.parameters)}
    order = [places[id(p)] for p in weights(model).values()]

    def bare() -> Sequence[Tensor]:
        grads = program.run_without_graph(*inputs)
        return [grads[i] for i in order]

    def call() -> None:
        model.zero_grad()
        step(x, y)

    run = bare if program.graph is None else program.graph.replay
    seconds, parts = program.compile_seconds, _parts(program)
    how = "traced" if compile == "trace" else "ThreePass"
    return Form(how, run, bare, seconds, program.graph_bytes, call, parts=parts)


def _captured(method: str, model: nn.Module, batch: Sequence[Tensor]) -> Form:
    program = capture(
        lambda *batch: list(METHODS[method](model, *batch)), list(batch), Build(kernels=False, graph=False)
    )
    form = _replayed("capture", lambda: program(*batch), program.compile_seconds, batch)
    return form._replace(parts=_parts(program))


def _parts(captured: Captured) -> dict[str, float]:
    """Seconds: of the trace, of the rewrites of its graph, of Inductor, and of the check of the compiled program."""
    program = captured.program
    inductor = captured.compile_seconds - program.trace_seconds - program.rewrite_seconds
    known = {"trace": program.trace_seconds, "rewrites": program.rewrite_seconds, "inductor": inductor}
    return known | {"check": captured.check_seconds}


def _compiled(method: str, model: nn.Module, batch: Sequence[Tensor]) -> Form:
    compiled = cast(nn.Module, torch.compile(model))
    begin = time.perf_counter()
    METHODS[method](compiled, *batch)
    took = time.perf_counter() - begin
    return _replayed("torch.compile", lambda: METHODS[method](compiled, *batch), took, batch)


def _graphed(method: str, model: nn.Module, batch: Sequence[Tensor]) -> Form:
    return _replayed("CUDA graph", lambda: METHODS[method](model, *batch), None, batch)


def _replayed(how: str, bare: Callable[[], Sequence[Tensor]], took: float | None, batch: Sequence[Tensor]) -> Form:
    if not batch[0].is_cuda:
        return Form(how, bare, bare, took)
    graph = CudaGraph(bare)
    return Form(how, graph.replay, bare, took, graph.bytes)
