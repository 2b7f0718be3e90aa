"""`ThreePass` and `GradientStep`: steps of a training loop, in place of the forward and `loss.backward()`."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from ._torch_compat import is_wrapped_by_compile
from .compile.programs import check_compile
from .compile.step import AnyResult, Call, CompiledSteps, gradient_call, three_pass_call
from .core import engine, gradient_loss
from .core.deepspeed import is_engine
from .core.engine import Result, Task
from .core.gradient_loss import GradientOptions, GradientResult, check_loss_fn
from .core.misuse import (
    AccumulationWatch,
    BackwardWatch,
    warn_of_fewer_targets,
    warn_of_labels,
    warn_of_masks,
    warn_of_samples_along_dimension_1,
    warn_of_sum,
)
from .core.options import ALPHA, Options, check_roles, check_weights, check_x, own_loss
from .core.penalty import Penalty
from .core.precomputed_loss import PrecomputedLoss, rounded
from .core.ranks import count_ranks, is_wrapper, loss_through, reduces_gradients
from .core.scaler import scaled, times
from .core.wrt import Wrt
from .errors import UncompiledWarning, warn_caller
from .numerics.precision import accumulate_dtype
from .tape.state import named_parameters

Run = Callable[[nn.Module, Any], AnyResult]  # the passes of a model on x
Capture = Callable[[nn.Module], Call]  # what is captured in their place


@cache
def _log_default_alpha() -> None:
    """Says once in a process that alpha has its default value, at which plain training's learning rate is too low."""
    logging.getLogger("threepass").warning(
        "neither strength nor alpha was given, so alpha is 0.1, as in the paper. This multiplies backpropagation's "
        "gradient by 0.1, so with SGD and the learning rate of plain training, updates are about a tenth as large. "
        "Pass strength=0.1 to keep that learning rate, or alpha=0.1 if this is intended."
    )


class _TrainingStep:
    """What `ThreePass` and `GradientStep` share: a call runs eagerly or as a captured program, and adds to `p.grad`."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Tensor], compile: bool | str):
        check_roles(model, loss_fn)
        check_compile(compile)
        self.model, self.loss_fn, self.calls = model, loss_fn, 0
        self.scaler: GradScaler | None = None
        self.result: Any = None  # of the last call of `loss`
        inner: Any = model.module if is_wrapper(model) else model
        self.compiled = CompiledSteps(inner, loss_fn, compile) if compile else None
        if is_wrapped_by_compile(model) and not compile:
            warn_caller(
                f"the model is wrapped by torch.compile, which a {type(self).__name__} step does not use: it runs the "
                f"original module eagerly. {type(self).__name__}(model, ..., compile=True) compiles the whole step",
                UncompiledWarning,
            )

    def _step(self, x: Any, y: Any, run: Run, call: Capture) -> Any:
        """One call. run: the passes of a model on x; call: what is captured in their place."""
        if is_engine(self.model):
            raise TypeError(
                "call loss = step.loss(x, y); engine.backward(loss); engine.step(): a DeepSpeed engine has to run the "
                "backward pass itself"
            )
        if reduces_gradients(self.model):
            loss, r = self._reduced(x, y, run, call)
            loss.backward()
        else:
            r = self._alone(x, y, run, call)
        self.calls += 1
        return r

    def _alone(self, x: Any, y: Any, run: Run, call: Capture) -> Any:
        def eager() -> AnyResult:
            r = run(self.model, x)
            add_to_grad(self.model, r, self.scaler, self.calls)
            return r

        if self.compiled is None:
            return eager()
        return self.compiled(x, y, call(self.model), eager, self.calls, self.scaler)

    def _loss(self, x: Any, y: Any, run: Run, call: Capture, mean: float = 1.0) -> Tensor:
        """One call as a loss, whose backward adds the gradients times mean. Arguments as for `_step`."""
        if reduces_gradients(self.model):
            loss, self.result = self._reduced(x, y, run, call, mean)
        else:
            self.result = self._passes(self.model, x, y, run, call)
            with torch.inference_mode(False), torch.enable_grad():
                loss = self._precomputed_loss(self.model, self.result, mean).loss()
        self.calls += 1
        return loss

    def _reduced(self, x: Any, y: Any, run: Run, call: Capture, mean: float = 1.0) -> tuple[Tensor, Any]:
        """The loss of a model that reduces gradients itself, and the result under the names of its parameters."""
        results: list[AnyResult] = []

        def passes(module: nn.Module, x: Any) -> PrecomputedLoss:
            results.append(self._passes(module, x, y, run, call))
            return self._precomputed_loss(module, results[0], mean)

        loss = loss_through(self.model, x, passes)
        (r,) = results
        if not is_wrapper(self.model):
            return loss, r
        named: dict[str, Any] = {n: grads and _prefixed(grads) for n in r.GRADIENTS for grads in [getattr(r, n)]}
        return loss, replace(r, **named)

    def _passes(self, model: nn.Module, x: Any, y: Any, run: Run, call: Capture) -> Any:
        """The passes, eagerly or as a captured program, without adding to `p.grad`."""
        steps, eager = self.compiled, partial(run, model, x)
        return eager() if steps is None else steps(x, y, call(model), eager, self.calls, add=False)

    def _precomputed_loss(self, model: nn.Module, r: AnyResult, mean: float) -> PrecomputedLoss:
        """mean: what the gradients are multiplied by, to be those of a mean over the samples."""
        named = dict(model.named_parameters())
        grads = scaled(list(r.grads.values()), self.scaler)
        if mean != 1 and grads:
            grads = times(grads, grads[0].new_full((), mean, dtype=accumulate_dtype(grads[0].dtype)))
        elif self.compiled is not None and r.loss.is_cuda:  # the next replay of a CUDA graph overwrites them
            grads = [g.clone() for g in grads]
        return PrecomputedLoss(r.loss, [named[name] for name in r.grads], grads, self.calls)

    def state_dict(self) -> dict[str, int]:
        """The number of calls, on which schedules and random rounding depend."""
        return {"calls": self.calls}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restores what `state_dict` returned."""
        if not isinstance(state, Mapping) or set(state) != {"calls"}:
            actual = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"expected the state_dict() of a {type(self).__name__}, {{'calls': number}}, got {actual}")
        calls = state["calls"]
        if isinstance(calls, bool) or not isinstance(calls, int) or calls < 0:
            raise ValueError(f"calls must be an integer >= 0, got {calls!r}")
        self.calls = calls


class ThreePass(_TrainingStep):
    """A training step by three passes, which adds its gradients to `p.grad`.

        step = threepass.ThreePass(model, loss_fn, strength=0.1)
        r = step(x, y)      # in place of loss = loss_fn(model(x), y); loss.backward()
        optimizer.step()

    Options that are not listed here are those of `three_pass`. Gradients go through autograd's own accumulation, so
    hooks on parameters fire as they do in `backward()`.

    Args:
        strength: the weight of the third pass. Backpropagation's gradient keeps weight 1, so with a small strength the
            learning rate of plain training can be kept; start with 0.1.
        alpha: the paper's weights, used where no strength is given: alpha for backpropagation and 1 - alpha for the
            third pass. With the default of 0.1 backpropagation's gradient is a tenth of plain training's, so that SGD
            needs ten times the learning rate, lr / alpha: where neither alpha nor strength is given, the logger
            "threepass" says so once. A number, or a function of the number of calls so far.
        batch_size: the effective batch; it counts the samples of all ranks and micro-batches.
        every: run the third pass in every k-th call, starting with the first. The other calls add backpropagation's
            gradient alone, times alpha, or times 1 with strength.
        compile: capture the whole step, compile it, and on a GPU replay it as a CUDA graph: the same numbers to
            rounding. A step that cannot be captured runs eagerly, with a warning that says why and what that costs;
            "require" makes it an error. "trace" captures the step without compiling it: slower than compiled and faster
            than eager, and ready within seconds. See the page on compiled steps.
        scaler: the `torch.amp.GradScaler` of the loop. `p.grad` gets r.grads times its scale, as from
            `scaler.scale(loss).backward()`; `scaler.unscale_`, `scaler.step` and `scaler.update` follow as usual.
        process_group: without `DistributedDataParallel` or `fully_shard`, the ranks that share the batch; default: all
            ranks.

    Loops that call `backward()` themselves use `step.loss(x, y)`, which returns a loss.

    Several ranks: the batch is that of all ranks, and the gradients are expected to be averaged over them.
    `DistributedDataParallel` and `fully_shard` do it; otherwise averaging `p.grad` is up to you. r.loss, r.input_loss
    and r.output belong to this rank's samples; r.input_grad is dl/dx of the loss of the whole batch; the mean of
    r.grads over the ranks is the gradient of the whole batch.

    Compiled steps: r.grads have the parameters' dtypes and may share memory with `p.grad`. On a GPU the next call
    overwrites all gradients in the result (r.grads, r.input_grad and, with separate=True, both terms): clone what you
    keep. Hooks on parameters fire; hooks on autograd nodes do not.
    `print(step.compiled)` lists the captured programs, `step.compiled.compile_seconds` and `.graph_bytes` say what they
    cost, and `step.compiled.reset()` discards them.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        alpha: float | Callable[[int], float] = ALPHA,
        reduction: str = "batch",
        mode: str = "paper",
        strength: float | None = None,
        input_at: str | None = None,
        batch_size: int | None = None,
        separate: bool = False,
        every: int = 1,
        compile: bool | str = False,
        scaler: GradScaler | None = None,
        process_group: Any = None,
        penalty: Penalty = "l2",
        wrt: Wrt = None,
    ):
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a positive integer, got {every!r}")
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
        check_weights(alpha, strength)
        self.every, self.process_group = every, process_group
        self.alpha = alpha if callable(alpha) else partial(_constant, alpha)
        self.options: dict[str, Any] = {
            "reduction": reduction, "mode": mode, "strength": strength, "input_at": input_at,
            "batch_size": batch_size, "separate": separate, "penalty": penalty, "wrt": wrt,
        }  # fmt: skip
        Options(self.alpha(0), **self.options)
        super().__init__(model, loss_fn or own_loss, compile)
        if alpha is ALPHA and strength is None:
            _log_default_alpha()
        self.scaler = scaler
        self._watch, self._loss_watch, self._is_first = AccumulationWatch(), BackwardWatch(), True

    def __repr__(self) -> str:
        """With the options that are not the defaults."""
        strength = self.options["strength"]
        weight = f"alpha={self.alpha(self.calls):g}" if strength is None else f"strength={strength:g}"
        rest = {name: z for name, z in self.options.items() if name not in ("mode", "strength")}
        others = "".join(f", {name}={z!r}" for name, z in rest.items() if z != getattr(Options, name))
        return f"ThreePass({type(self.model).__name__}, mode={self.options['mode']!r}, {weight}{others})"

    def __call__(self, x: Any, y: Any = None) -> Result:
        """Runs one step on a batch and adds its gradients to `p.grad`."""
        options, third = self._options()
        if options.batch_size is None:
            self._watch.before_call(self.model.parameters())

        def run(model: nn.Module, x: Any) -> Result:
            return self._run(model, x, y, options, third)

        r = self._step(x, y, run, partial(self._call, options=options, third=third))
        self._watch.after_call(self.model.parameters())
        self._look_at_first(x, y, r, options)
        return r

    def loss(self, x: Any, y: Any = None) -> Tensor:
        """Runs one step on a batch; returns the loss, whose `backward()` adds the step's gradients.

        For loops that call `backward()` themselves. The gradients are multiplied by whatever the loss is multiplied
        with, and go through autograd's own accumulation: loss scaling, division by the number of micro-batches,
        `no_sync` and hooks work as for any loss. `step.result` is the `Result` of the call.

        With batch_size=B, backward gives B / n times what the call itself adds, n being the samples of x and of all
        ranks: the gradient of a mean over x, so that a loop which divides the losses of its k micro-batches by k, as
        usual, arrives at the gradient of the whole batch.
        """
        if self.scaler is not None:
            raise ValueError(
                "step.loss() does not take the scaler of ThreePass: create ThreePass without scaler= and call "
                "scaler.scale(loss).backward()"
            )
        options, third = self._options()
        mean = 1.0 if options.batch_size is None else options.part(0) / check_x(x, options)
        is_watched = options.batch_size is None and options.depends_on_batch
        if is_watched:
            self._loss_watch.before_loss(self.model.parameters())

        def run(model: nn.Module, x: Any) -> Result:
            return self._run(model, x, y, options, third)

        loss = self._loss(x, y, run, partial(self._call, options=options, third=third), mean)
        if is_watched:
            self._loss_watch.follow(loss, self.model.parameters())
        self._look_at_first(x, y, self.result, options)
        return loss

    def _look_at_first(self, x: Any, y: Any, r: Result, options: Options) -> None:
        """Warns, after the first call, of a summed loss, samples that are not first, masks or labels as the input."""
        if not self._is_first:
            return
        self._is_first = False
        warn_of_sum(self.model, self.loss_fn, x, y, r.output, r.loss)
        if not warn_of_samples_along_dimension_1(self.model, x, y):
            warn_of_fewer_targets(self.model, x, y, r.output, options)
        if options.input_at is None and options.wrt is None:
            warn_of_masks(self.model, x)
            warn_of_labels(self.model, x)

    def _options(self) -> tuple[Options, bool]:
        """The options of the next call, and whether it runs the third pass."""
        ranks = count_ranks(self.model, self.process_group)
        return Options(self.alpha(self.calls), ranks=ranks, **self.options), self.calls % self.every == 0

    def _run(self, model: nn.Module, x: Any, y: Any, options: Options, third: bool) -> Result:
        return engine.run(Task(model, self.loss_fn, x, y), _inside(self.model, model, options), runs_third_pass=third)

    def _call(self, model: nn.Module, options: Options, third: bool) -> Call:
        return three_pass_call(model, self.loss_fn, _inside(self.model, model, options), third)


def loss(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor] | None,
    x: Any,
    y: Any = None,
    alpha: float = ALPHA,
    reduction: str = "batch",
    mode: str = "paper",
    strength: float | None = None,
    input_at: str | None = None,
    batch_size: int | None = None,
    penalty: Penalty = "l2",
    wrt: Wrt = None,
) -> Tensor:
    """`ThreePass(model, loss_fn, ...).loss(x, y)`: the loss of a batch, whose `backward()` adds three-pass gradients.

        loss = threepass.loss(model, loss_fn, x, y, strength=0.1)   # in place of loss = loss_fn(model(x), y)
        loss.backward()                                             # or accelerator.backward(loss), scaler.scale(loss)

    For compiled steps, `every`, and alpha as a schedule, make a `ThreePass` and call its `loss`.
    """
    step = ThreePass(model, loss_fn, alpha, reduction, mode, strength, input_at, batch_size, penalty=penalty, wrt=wrt)
    step._is_first = False  # every call makes an object: none looks for mistakes
    return step.loss(x, y)


class GradientStep(_TrainingStep):
    """A training step on a loss of the model's input gradient (`gradient_step`), which adds to `p.grad`.

        step = threepass.GradientStep(energy, lambda output, g, y: (-g - y).square().mean(), wrt="positions")
        r = step(x, forces)     # in place of autograd.grad(..., create_graph=True) and loss.backward()
        optimizer.step()

    Args:
        model, loss_fn, value_fn, wrt, input_at: those of `gradient_step`.
        compile: as for `ThreePass`. Compiled steps do not look for NaN and infinite derivatives of the loss.

    Several ranks: each computes the gradients of its own loss, which are to be averaged, as in plain training;
    `DistributedDataParallel` and `fully_shard` do it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any, Any], Tensor],
        value_fn: Callable[[Any], Tensor] | None = None,
        wrt: Wrt = None,
        input_at: str | None = None,
        compile: bool | str = False,
    ):
        self.options = GradientOptions(value_fn, wrt, input_at)
        super().__init__(model, loss_fn, compile)
        check_loss_fn(loss_fn)

    def __call__(self, x: Any, y: Any = None) -> GradientResult:
        """Runs one step on a batch and adds its gradients to `p.grad`."""
        return self._step(x, y, partial(self._run, y=y), self._call)

    def loss(self, x: Any, y: Any = None) -> Tensor:
        """Runs one step on a batch; returns the loss, whose `backward()` adds the step's gradients: see `ThreePass`."""
        return self._loss(x, y, partial(self._run, y=y), self._call)

    def _run(self, model: nn.Module, x: Any, y: Any) -> GradientResult:
        return gradient_loss.run(Task(model, self.loss_fn, x, y), _inside(self.model, model, self.options))

    def _call(self, model: nn.Module) -> Call:
        return gradient_call(model, self.loss_fn, _inside(self.model, model, self.options))


def _constant(alpha: float, calls: int) -> float:
    return alpha


def _inside(outer: nn.Module, model: nn.Module, options: Any) -> Any:
    """The options for the model inside of a wrapper, where module names have no prefix."""
    if outer is model or options.input_at is None:
        return options
    return replace(options, input_at=options.input_at.removeprefix("module."))


def add_to_grad(model: nn.Module, r: AnyResult, scaler: GradScaler | None = None, calls: int = 0) -> None:
    """Adds r.grads to `p.grad` by autograd's own accumulation; rounding differs from call to call."""
    named = named_parameters(model)
    parameters = [named[name] for name in r.grads]
    grads = rounded(scaled(list(r.grads.values()), scaler), [p.dtype for p in parameters], calls)
    with torch.inference_mode(False), torch.enable_grad():
        if any(p.grad is None for p in parameters):
            PrecomputedLoss(r.loss, parameters, grads, calls).loss().backward()  # copies them in one launch
        else:
            torch.autograd.backward(parameters, grads)


def _prefixed(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"module.{name}": g for name, g in grads.items()}
