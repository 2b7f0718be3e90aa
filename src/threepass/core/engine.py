"""The three passes of Algorithm 1, through any model.

    pass 1   forward         a -> u, l                     operations recorded on a tape (`tape/record.py`)
    pass 2   backward        d = dl/du, to dl/dx           one `autograd.grad`, without weight gradients
    pass 3   forward again   t_0 = c dl_i/dx_i, t -> J t   operation by operation along the tape (`rules/`)

As soon as pass 3 knows t at a weight, one product gives both terms of the weight's gradient:
d (x) (alpha a + (1 - alpha) t). `plan.py` lists the other ways to combine the terms.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..numerics.precision import accumulate_dtype, initial_tangents, seed_op
from ..tape.checkpointed import BlockError
from ..tape.inputs import call_model, is_float, module_output_as_input, tracking_module_paths
from ..tape.intercept import eager_code, intercepting_functions
from ..tape.operation import Operation
from ..tape.record import Record
from ..tape.signals import ActivationMeta
from ..tape.state import autograd_enabled, unchanged_on_error, without_garbage_collection
from .exact import Propagated, backward_again
from .gradients import Gradients
from .options import ALPHA, InputOptions, Options, check_loss, check_model, check_weights, check_x, own_loss
from .penalty import Penalty, evaluate
from .plan import Operand, Plan, Scale, make_plan
from .propagation import Errors, check_hooks, errors_from, propagate, raise_problems
from .sharded import is_fully_sharded
from .warn import warn_of_norms, warn_of_other_leaves
from .wrt import Wrt, leaves_of, like_inputs, map_inputs, map_leaves, without_other_leaves


class Task(NamedTuple):
    """What the passes differentiate: loss_fn(model(x), y), or for `gradient_step` loss_fn(model(x), g, y)."""

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    x: Any
    y: Any


@dataclass(frozen=True, repr=False)
class Result:
    """The result of one step.

    Attributes:
        output: what the model returned, detached.
        loss: the loss, detached, so that it has no `backward()`: the gradients are computed already.
        input_loss: the mean over the samples of the penalty, 1/2 |dl_i/dx_i|^2 by default, whatever the reduction.
        input_grad: dl/dx of the batch's loss, structured like x, with None for everything but floating-point tensors;
            with `wrt` a tensor, or a dict where it names several entries.
        grads: a gradient for every parameter that the loss depends on, by name.
        backprop_grads: with separate=True, the gradients of backpropagation alone, unweighted; else None.
        third_grads: with separate=True, the gradients of the third pass alone, unweighted; else None.
    """

    GRADIENTS: ClassVar = ("grads", "backprop_grads", "third_grads")

    output: Any
    loss: Tensor
    input_loss: Tensor
    input_grad: Any
    grads: dict[str, Tensor]
    backprop_grads: dict[str, Tensor] | None
    third_grads: dict[str, Tensor] | None

    def __repr__(self) -> str:
        """In one line; tensors are attributes."""
        terms = "" if self.third_grads is None else ", backprop_grads, third_grads"
        losses = f"loss={self.loss.item():.4g}, input_loss={self.input_loss.item():.4g}"
        return f"Result({losses}, grads of {len(self.grads)} parameters; also output, input_grad{terms})"


def three_pass(
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
    separate: bool = False,
    penalty: Penalty = "l2",
    wrt: Wrt = None,
) -> Result:
    """One step of three-pass learning: alpha * backpropagation + (1 - alpha) * third pass, for every parameter.

    Does not change any `.grad`; buffers and random state advance as in one training forward.

    Args:
        model: any module; `model(x)`, `model(*x)` for a tuple or `model(**x)` for a dict gives the output.
        loss_fn: `loss_fn(output, y)`, a scalar mean over the samples; None: the loss that the model itself returns, as
            `output.loss`, `output["loss"]`, or the first entry of a tuple if it is a scalar.
        x: what the model takes; samples lie along dimension 0.
        y: what the loss takes.
        alpha: the weight of backpropagation, in [0, 1]; 1 is plain training.
        reduction: "batch": the input loss is 1/2 sum_i |dl/dx_i|^2 of the mean loss l; "sample": 1/2 mean_i
            |dl_i/dx_i|^2, which is B times as strong.
        mode: "paper": the derivatives of activations and norms, and the error at the output, are treated as constants;
            "exact": the true gradient of the input loss.
        strength: instead of alpha and reduction: backpropagation + strength * third pass of reduction="sample".
        input_at: the name of the module whose output is treated as the input. Default: the floating-point tensors of x
            or, if it has none, the output of the first embedding that is called.
        batch_size: the size of the whole batch if x is a micro-batch; the gradients of the micro-batches then add up to
            those of the whole batch. `three_pass` does not take other ranks into account; `ThreePass` does.
        separate: also give both terms, unweighted, as `backprop_grads` and `third_grads`.
        penalty: the input loss of a sample, a function of its gradient g_i = dl_i/dx_i: "l2", 1/2 |g_i|^2; "l1",
            sum |g_i|; "norm", |g_i|; or a callable that takes the g_i of all samples, structured like r.input_grad,
            and returns one number per sample. With reduction="batch" its mean over the samples is divided by B.
        wrt: the entry of a dict x (its name), or of a tuple x (its index), that counts as the input, or several of
            them in a tuple; default: all floating-point tensors of x. Gradients are then a tensor, or a dict.
    """
    check_weights(alpha, strength)
    options = Options(alpha, reduction, mode, strength, input_at, batch_size, separate, penalty, wrt)
    return run(Task(model, loss_fn or own_loss, x, y), options)


def run(
    task: Task,
    options: Options,
    *,
    runs_third_pass: bool = True,
    warn: bool = True,
    weights: tuple[Tensor, Tensor] | None = None,
    seed: Tensor | None = None,
) -> Result:
    """`three_pass` with its arguments in two objects; warn=False is for measurements.

    weights: in a compiled step, the terms' weights (back, third) as tensors, so that they can change from call to call;
    the gradients then have the parameters' own dtypes. seed: with weights, an int32 scalar on the model's device, the
    seed of the step's random numbers (stochastic rounding; in a captured step, dropout too).
    """
    if weights is not None:
        seed = torch.zeros((), dtype=torch.int32, device=weights[0].device) if seed is None else seed_op(seed)
    if isinstance(task.x, Mapping):
        task = task._replace(x=dict(task.x))
    request = _Request(task, options, runs_third_pass and options.has_third_term, warn, weights, seed)
    with without_garbage_collection():
        try:
            return _three_passes(request, module_paths=False, blocks=_has_blocks(request))
        except BlockError:
            return _three_passes(request, module_paths=False, blocks=False)
        except UnsupportedError:  # fails again, with the names of the modules
            return _three_passes(request, module_paths=True, blocks=False)


class _Request(NamedTuple):
    """The arguments of `run`; runs_third_pass: also False where the third pass has no weight."""

    task: Task
    options: Options
    runs_third_pass: bool
    warn: bool
    weights: tuple[Tensor, Tensor] | None
    seed: Tensor | None


def _has_blocks(request: _Request) -> bool:
    """Whether checkpointed blocks are recorded as one operation each."""
    return not is_fully_sharded(request.task.model)


def _three_passes(request: _Request, module_paths: bool, blocks: bool) -> Result:
    model, options = request.task.model, request.options
    parameters = check_model(model)
    samples = check_x(request.task.x, options)
    inputs = without_other_leaves(request.task.x, options.wrt, parameters)
    request = request._replace(task=request.task._replace(x=inputs))
    with autograd_enabled(), unchanged_on_error(model), eager_code(model):
        # Pass 1: l = loss(w(x), y). The tape records every operation that depends on the input. The options and the
        # tape then decide how the gradients of passes 2 and 3 are combined.
        tape = Record(next(iter(parameters.values())).device.type, module_paths, blocks)
        output, loss = forward(request.task, tape, options)
        tape.prune([tape.meta_of(loss)] if options.exact and request.runs_third_pass else [])
        with torch.no_grad():
            plan = make_plan(tape, options, samples, request.runs_third_pass, request.weights)

        # Pass 2: backward, to dl/dx and to the error d of every operation with weights; l_x is a function of dl/dx.
        # The gradient of l by a weight, d (x) a, is not taken yet.
        dx, errors = backward(tape, plan, loss)
        input_loss, penalty_grads = _input_loss(dx, plan, request, tape, samples)
        if options.exact:  # in calls without a third pass too, so that `every` changes nothing about what is refused
            check_hooks(tape, 'use mode="paper", or remove the hook')

        # Pass 3: forward again, from t_0 = dl_x/dg_i with g_i = dl_i/dx_i, t -> J t. As soon as t is known at a weight,
        # the gradient of l_x, d (x) t, is taken, together with that of l. Exact mode adds R{d} (x) a in one more
        # backward pass.
        if request.warn and request.runs_third_pass and not plan.exact:
            warn_of_norms(model, tape.operations)
        t_0, third_scale = _initial_tangents(plan, dx, penalty_grads, options.part(samples), tape)
        gradients = Gradients(plan, third_scale, request.seed)
        with torch.no_grad():
            steps = forward_again(tape, dx, t_0, errors, gradients)
            if plan.exact:
                backward_again(tape, steps, _start_of_backward(tape, plan, loss), gradients)
        raise_problems(tape)
        if request.warn:
            warn_of_other_leaves(model, gradients.count_other_leaves(parameters, tape.sources()))
        grads, backprop_grads, third_grads = gradients.finish(parameters)

    return Result(
        output=map_leaves(lambda z: z.detach() if isinstance(z, Tensor) else z, output),
        loss=loss.detach(),
        input_loss=input_loss,
        input_grad=_input_grad(dx, plan, request, tape),
        grads=grads,
        backprop_grads=backprop_grads,
        third_grads=third_grads,
    )


def forward(
    task: Task, tape: Record, options: InputOptions, check: Callable[[Any], None] = check_loss
) -> tuple[Any, Tensor]:
    """Pass 1: the model and the loss, once, as the user wrote them."""
    model, input_at = task.model, options.input_at
    x, y = map_leaves(_normal_tensor, task.x), map_leaves(_normal_tensor, task.y)
    with contextlib.ExitStack() as stack:
        if tape.module_paths:
            stack.enter_context(tracking_module_paths(model, tape))
        if input_at is None and any(map(is_float, leaves_of(x))):
            x = map_inputs(x, options.wrt, tape.add_input)
        else:
            tape.has_internal_input = True
            stack.enter_context(module_output_as_input(model, tape, input_at))
        tape.add_weights([z for z in leaves_of((x, y)) if isinstance(z, Tensor)])
        stack.enter_context(intercepting_functions())
        stack.enter_context(tape)
        output = call_model(model, x)
        loss = task.loss_fn(output, y)
    if not tape.inputs:
        reason = "no embedding was called" if input_at is None else f"input_at={input_at!r}: this module was not called"
        raise ValueError(f"{reason} in the forward pass, so there is no input to differentiate with respect to")
    check(loss)
    if tape.is_active(loss):
        tape.check_recorded("loss_fn", loss)
    if tape.problems and (not tape.is_active(loss) or not tape.operations):
        raise UnsupportedError(tape.problems)
    if not tape.is_active(loss):
        raise ValueError(
            "the loss does not depend on the input: is it computed under no_grad, or from detached tensors?"
        )
    return output, loss


def backward(tape: Record, plan: Plan, loss: Tensor) -> tuple[list[Tensor], dict[Operation, Errors]]:
    """Pass 2: dl/dx, and the errors of every operation with weights (in exact mode, also of every nonlinear one)."""
    if plan.frees_activations:
        for op in tape.operations:
            op.free_activation()
    return errors_from(tape, plan, loss, _times_ones(plan.loss_error, loss))


def forward_again(
    tape: Record, dx: list[Tensor], t_0: list[Tensor], errors: dict[Operation, Errors], gradients: Gradients
) -> list[Propagated]:
    """Pass 3: the tangent t or the mix, operation by operation, and the weights' gradients. Consumes tape and errors.

    Without t_0: the gradients of pass 2 alone. For exact mode, returns what its backward pass needs, by operation.
    """
    plan = gradients.plan
    signals = tape.signals()
    for (source, _, z), g, t in zip_longest(tape.inputs, dx, t_0):
        if source.requires_grad:  # computed from weights upstream of the input
            gradients.add(source, g, None)
        if t is not None:
            signals.put(z, gradients.mix(source.detach(), t) if plan.case.carried is Operand.MIX else t)
    return propagate(tape, signals, errors, gradients, keep=plan.exact)


def _initial_tangents(
    plan: Plan, dx: list[Tensor], penalty_grads: list[Tensor] | None, batch: float, tape: Record
) -> tuple[list[Tensor], Scale]:
    """t_0, and what the third pass's gradients are to be multiplied by to undo the scales of t_0 and d.

    penalty_grads: the derivative of the penalty at each dl_i/dx_i; None: it is dl_i/dx_i itself.
    """
    if plan.case.carried is None:
        return [], 1.0
    scale = plan.tangent_scale * plan.third if plan.case.backprop_in_last_pass else plan.tangent_scale
    max_over_ranks = tape.max_over_ranks() if plan.half else None
    if penalty_grads is None:
        return initial_tangents(dx, scale, plan.error_scale, plan.half, max_over_ranks)
    t_0, third_scale = initial_tangents(
        penalty_grads, scale * plan.error_scale / batch, plan.error_scale, plan.half, max_over_ranks
    )
    return [t.to(g.dtype) for t, g in zip(t_0, dx, strict=True)], third_scale


def _start_of_backward(tape: Record, plan: Plan, loss: Tensor) -> list[tuple[ActivationMeta, Tensor]]:
    """R{d} at the loss: zero, or with a joint backward pass the error of the loss."""
    if not plan.case.backprop_in_last_pass:
        return []
    return [(tape.meta_of(loss), _times_ones(plan.loss_error * plan.back, loss))]


def _times_ones(scale: Scale, z: Tensor) -> Tensor:
    return torch.ones_like(z) * scale if isinstance(scale, Tensor) else torch.full_like(z, scale)


def _input_loss(
    dx: list[Tensor], plan: Plan, request: _Request, tape: Record, samples: int
) -> tuple[Tensor, list[Tensor] | None]:
    """The mean of the penalty over the samples, and its derivative at each dl_i/dx_i, unless that is dl_i/dx_i itself.

    dl_i/dx_i is the batch's size times the rows of dl/dx, without the errors' scale.
    """
    batch, penalty = request.options.part(samples), request.options.penalty
    wide = [g.to(accumulate_dtype(g.dtype)) for g in dx]
    if penalty == "l2":
        has_scale = isinstance(plan.error_scale, Tensor) or plan.error_scale != 1
        squares = [(g.div(plan.error_scale) if has_scale else g).square().sum() for g in wide]
        total = squares[0] if len(squares) == 1 else torch.stack(squares).sum()
        return total * (0.5 * batch**2 / samples), None
    per_sample = [g * (batch / plan.error_scale) for g in wide]
    return evaluate(penalty, per_sample, samples, partial(like_x, request.task.x, request.options, tape))


def _input_grad(dx: list[Tensor], plan: Plan, request: _Request, tape: Record) -> Any:
    """dl/dx without the errors' scale, structured like x; of an input inside the model, a tensor or a tuple."""
    ranks = request.options.ranks
    scale = plan.error_scale if ranks == 1 else plan.error_scale * ranks  # of all ranks' loss, not of this rank's
    if isinstance(scale, Tensor) or scale != 1:
        dx = [g / scale for g in dx]
    return like_x(request.task.x, request.options, tape, dx)


def like_x(x: Any, options: InputOptions, tape: Record, tensors: list[Tensor]) -> Any:
    """A tensor for each input, structured like x (`wrt.py`); of inputs inside the model, a tensor or a tuple."""
    if tape.has_internal_input:
        return tensors[0] if len(tensors) == 1 else tuple(tensors)
    return like_inputs(x, options.wrt, tensors)


def _normal_tensor(z: Any) -> Any:
    """A copy of an inference tensor, which a backward pass cannot use; other objects as they are."""
    return z.clone() if isinstance(z, Tensor) and z.is_inference() else z
