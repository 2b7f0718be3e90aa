"""Which mode and strength to start with on a model, and what they cost here."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.engine import Result, Task, forward, run
from ..core.misuse import warn_of_sum
from ..core.options import Options, check_model, check_x
from ..core.warn import curved_norms
from ..tape.inputs import call_model
from ..tape.operation import Operation
from ..tape.record import Record
from ..tape.state import autograd_enabled, unchanged_on_error
from .alignment import Alignment, alignment

START = 0.1  # the strength to begin with, where the gradients' norms give no reason for another
SHARE = 1e-3, 0.3  # of backpropagation's gradient norm: what the third pass may come to at the first strength
ENOUGH = 0.5  # the cosine from which paper mode is advised for a model without norms that has smooth activations
ROUNDS, SECONDS = 20, 1.0  # of the measurement of time, which ends with the first limit reached, after three rounds
SMOOTH = (  # curved activations and what contains them; paper mode treats their derivatives as constants
    "celu", "elu", "exp", "gelu", "glu", "gru", "log_softmax", "logsigmoid", "lstm", "mish", "rnn_tanh",
    "scaled_dot_product_attention", "selu", "sigmoid", "silu", "sin", "softmax", "softplus", "softsign", "tanh",
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class Advice:
    """A mode and a strength to start with, and why. Printing it gives a short report.

    Attributes:
        mode: "paper" or "exact".
        strength: to start with; then go up or down by factors of 3.
        alignment: paper mode's third pass compared with the exact one, on this batch.
        gradient_ratio: |third pass| / |backpropagation| in the advised mode at strength 1, over all parameters.
        norms: the normalisations whose curvature paper mode leaves out, by the names of their operations.
        activations: the smooth activations and attention in the model, likewise.
        step_seconds: seconds of an eager step: "plain", "paper" and "exact".
        reasons: why, in sentences.
    """

    mode: str
    strength: float
    alignment: Alignment
    gradient_ratio: float
    norms: tuple[str, ...]
    activations: tuple[str, ...]
    step_seconds: dict[str, float]
    reasons: tuple[str, ...]

    @property
    def cost(self) -> float:
        """The time of an eager step in the advised mode, relative to plain training."""
        return self.step_seconds[self.mode] / self.step_seconds["plain"]

    def __str__(self) -> str:
        plain = self.step_seconds["plain"]
        times = [
            f"{name} {f'{1000 * s:.3g} ms' if s < 1 else f'{s:.3g} s'}"
            + ("" if name == "plain" else f" ({s / plain:.2f}x)")
            for name, s in self.step_seconds.items()
        ]
        lines = [
            f'use mode="{self.mode}", strength={self.strength:g}',
            *(f"  why   {reason}" for reason in self.reasons),
            f'  cost  an eager step here takes: {", ".join(times)}; compile="trace" (ready within seconds) and '
            "compile=True (seconds to minutes) are usually faster",
            "  next  train, then change strength by factors of 3; if the loss jumps or diverges, divide the learning "
            "rate by 3",
        ]
        return "\n".join(lines)

    __repr__ = __str__


def advise(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], x: Any, y: Any, input_at: str | None = None
) -> Advice:
    """Says which mode and strength to start with, what a step costs here, and why; measured on one batch.

    It takes a second or two, and changes nothing: no `.grad`, no buffers, no random state. Use a batch as training has
    it. A model in eval mode is measured in training mode, where batch norm depends on the batch. Alignment falls as a
    net learns, so ask again after an epoch or two if the model has smooth activations and no norms.

    Examples:
        >>> from threepass import models
        >>> x, y = torch.rand(8, 64), torch.arange(8)
        >>> advice = advise(models.mlp(64, 32, 10), torch.nn.functional.cross_entropy, x, y)
        >>> advice.mode, advice.strength
        ('paper', 0.1)
    """
    check_model(model)
    with _training_mode(model):
        norms, activations = curved_operations(model, loss_fn, x, y, input_at)
        agreement = alignment(model, loss_fn, x, y, input_at)
        mode = "exact" if norms or (activations and not agreement.cosine >= ENOUGH) else "paper"
        options = Options(mode=mode, strength=1.0, input_at=input_at, separate=True)
        r = _measured(model, loss_fn, x, y, options)
        warn_of_sum(model, loss_fn, x, y, r.output, r.loss)
        ratio = _gradient_ratio(r)
        seconds = _step_seconds(model, loss_fn, x, y, input_at)
    strength = starting_strength(ratio)
    reasons = [*_about_mode(mode, norms, activations, agreement.cosine), _about_strength(strength, ratio)]
    if not model.training:
        reasons.append("the model is in eval mode; this was measured in training mode")
    return Advice(mode, strength, agreement, ratio, norms, activations, seconds, tuple(reasons))


@contextlib.contextmanager
def _training_mode(model: nn.Module) -> Iterator[None]:
    """In training mode if the model is in eval mode; submodules in eval mode stay so in a model that trains."""
    modes = {module: module.training for module in model.modules()}
    if not model.training:
        model.train()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def starting_strength(ratio: float) -> float:
    """The strength nearest to 0.1, of 0.1, 0.3, 1, 3, ..., for which the third pass is neither lost nor dominant.

    ratio: |third pass| / |backpropagation| at strength 1.

    >>> starting_strength(0.05), starting_strength(20.0), starting_strength(3e-7)
    (0.1, 0.01, 10000.0)
    """
    steps = [float(f"{digit}e{power}") for power in range(-12, 13) for digit in (1, 3)]
    allowed = [s for s in steps if SHARE[0] <= s * ratio <= SHARE[1]]
    return min(allowed or [START], key=lambda s: abs(math.log(s / START)))


def curved_operations(model, loss_fn, x, y, input_at: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The norms and the smooth activations between the input and the output; changes nothing."""
    options = Options(input_at=input_at)
    x = dict(x) if isinstance(x, Mapping) else x
    check_x(x, options)
    of_model: list[Operation] = []

    def loss(output: Any, y: Any) -> Tensor:
        of_model.extend(tape.operations)
        return loss_fn(output, y)

    with autograd_enabled(), unchanged_on_error(model, always=True):
        tape = Record(next(model.parameters()).device.type, module_paths=True)
        forward(Task(model, loss, x, y), tape, options)
    names = {op.name.removesuffix("_") for op in of_model}
    return tuple(curved_norms(of_model)), tuple(sorted(names & {*SMOOTH}))


def _measured(model, loss_fn, x, y, options: Options) -> Result:
    with unchanged_on_error(model, always=True):
        r = run(Task(model, loss_fn, x, y), options, warn=False)
    if not math.isfinite(r.loss.item()):
        raise ValueError(
            f"the loss is {r.loss.item()} on this batch: look for NaN or infinity in x, y and the model's parameters"
        )
    return r


def _gradient_ratio(r: Result) -> float:
    norms = [
        torch.stack([g.double().norm() for g in (t or {}).values()]).norm() for t in (r.third_grads, r.backprop_grads)
    ]
    return (norms[0] / norms[1]).item()


def _about_mode(mode: str, norms: tuple[str, ...], activations: tuple[str, ...], cosine: float) -> list[str]:
    measured = f"on this batch the cosine of paper mode's third pass with the exact one is {cosine:.2f}"
    if norms:
        falls = ", and often falls during training of a net with norms" if cosine >= ENOUGH else ""
        return [f"the model has {', '.join(norms)}, whose curvature paper mode leaves out; {measured}{falls}"]
    if mode == "exact":
        return [f"{measured}, below {ENOUGH}: paper mode's third pass is far from the gradient of the input loss"]
    if activations:
        return [
            f"the model has no norms but smooth operations ({', '.join(activations)}); {measured}; the cosine can fall "
            "during training: call advise again after an epoch or two"
        ]
    return [
        "the model has neither norms nor smooth activations: such nets trained well in paper mode, which costs less, "
        f"even with a low cosine between the two modes' third passes (docs/choose.md); {measured}"
    ]


def _about_strength(strength: float, ratio: float) -> str:
    if not 0 < ratio < math.inf:
        return (
            f"the gradient norm of the third pass, relative to backpropagation's, is {ratio:g} on this batch, so no "
            f"strength can be derived from it; {strength:g} is the default"
        )
    size = f"{strength * ratio:.2g} times that of backpropagation"
    return f"at strength {strength:g} the gradient norm of the third pass is {size}"


def _step_seconds(model, loss_fn, x, y, input_at: str | None) -> dict[str, float]:
    """Medians over rounds in which plain training and both modes take turns, after one round that does not count."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = parameters[0].device
    x = dict(x) if isinstance(x, Mapping) else x

    def plain() -> None:
        torch.autograd.grad(loss_fn(call_model(model, x), y), parameters, allow_unused=True)

    def three(mode: str) -> Callable[[], Any]:
        options = Options(mode=mode, strength=START, input_at=input_at)
        return lambda: run(Task(model, loss_fn, x, y), options, warn=False)

    def seconds(step: Callable[[], Any]) -> float:
        began = _now(device)
        step()
        return _now(device) - began

    steps = {"plain": plain, "paper": three("paper"), "exact": three("exact")}
    with autograd_enabled(), unchanged_on_error(model, always=True):
        for step in steps.values():
            step()
        rounds: list[list[float]] = []
        while len(rounds) < 3 or (len(rounds) < ROUNDS and sum(map(sum, rounds)) < SECONDS):
            rounds.append([seconds(step) for step in steps.values()])
    return dict(zip(steps, map(statistics.median, zip(*rounds, strict=True)), strict=True))


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter()
