"""The three passes, through any model.

    pass 1   forward           a -> u                      kept on a tape (`tape/record.py`)
    pass 2   backward          d = dl/du, down to dl/dx    one `autograd.grad`, no weight gradients
    pass 3   forward again     t_0 = c dl_i/dx_i, t -> J t  rule by rule along the tape (`rules/`)

and at every weight, as soon as its t is there, one product serves passes 2 and 3: d (x) (alpha a + (1 - alpha) t).
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .._torch_compat import tree_leaves, tree_map
from ..errors import UnsupportedError
from ..numerics.precision import accumulate_dtype, error_gain, seed_op, start
from ..tape.inputs import inputs_inside, paths_kept
from ..tape.intercept import functions_seen
from ..tape.operation import Operation
from ..tape.record import Program, Record
from ..tape.state import trainable_surroundings, unchanged_on_error
from . import exact as exact_mode
from .gradients import Gradients
from .options import Options, check_loss, check_model, check_x
from .penalty import Penalty, evaluate
from .visit import Visit
from .warn import warn_left_out, warn_of_norms
from .wrt import Wrt, is_float, like_inputs, map_inputs

Errors = dict[Operation, list[Tensor | None]]


@dataclass(frozen=True)
class Result:
    """The result of one step.

    Attributes:
        output: what the model returned, detached.
        loss: the loss, detached.
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


def three_pass(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    x: Any,
    y: Any,
    alpha: float = 0.1,
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

    Pure: no `.grad` changes; buffers and random state move as in one training forward.

    Args:
        model: any module; `model(x)`, `model(*x)` for a tuple or `model(**x)` for a dict gives the output.
        loss_fn: `loss_fn(output, y)`, a scalar mean over the samples.
        x: what the model takes; samples lie along dimension 0.
        y: what the loss takes.
        alpha: the weight of backpropagation, in [0, 1]; 1 is plain training.
        reduction: "batch": the input loss is 1/2 sum_i |dl/dx_i|^2 of the mean loss l; "sample": 1/2 mean_i
            |dl_i/dx_i|^2, which is B times as strong.
        mode: "paper": pass 3 with f' and the output error frozen; "exact": the true gradient of the input loss.
        strength: instead of alpha and reduction: backpropagation + strength * third pass of reduction="sample".
        input_at: the module whose output counts as the input; by default the floating-point tensors of x are, or, where
            there are none, the output of the first embedding that runs.
        batch_size: the effective batch, where x is only a part of it: the parts' gradients then add up to the whole's.
            Samples of other ranks do not count by themselves; in `ThreePass` they do.
        separate: also give both terms, unweighted, as `backprop_grads` and `third_grads`.
        penalty: the input loss of a sample, a function of its gradient g_i = dl_i/dx_i: "l2", 1/2 |g_i|^2; "l1",
            sum |g_i|; "norm", |g_i|; or a callable that takes the g_i of all samples, structured like r.input_grad,
            and returns one number a sample. With reduction="batch" its mean over the samples is divided by B.
        wrt: the entry of a dict x (its name), or of a tuple x (its index), that counts as the input, or several of
            them in a tuple; default: all floating-point tensors of x. Gradients are then a tensor, or a dict.
    """
    options = Options(alpha, reduction, mode, strength, input_at, batch_size, separate, penalty, wrt)
    return run(model, loss_fn, x, y, options)


def run(
    model: nn.Module,
    loss_fn,
    x: Any,
    y: Any,
    options: Options,
    *,
    third: bool = True,
    warn: bool = True,
    weights: tuple[Tensor, Tensor] | None = None,
    seed: Tensor | None = None,
) -> Result:
    """`three_pass` with its options in one object; third=False leaves pass 3 out, warn=False is for measurements.

    weights: in a compiled step, the terms' weights (back, third) as tensors, so that they can move from call to call;
    the gradients then are in the parameters' own formats. seed: an int32 scalar on the model's device, with weights:
    what the step's random numbers (rounding; in a captured step, dropout too) are made from.
    """
    if weights is not None:
        seed = torch.zeros((), dtype=torch.int32, device=weights[0].device) if seed is None else seed_op(seed)
    try:
        return _passes(model, loss_fn, x, y, options, third, warn, weights, seed, paths=False)
    except UnsupportedError:  # fails again, and says in which modules
        return _passes(model, loss_fn, x, y, options, third, warn, weights, seed, paths=True)


def _passes(model, loss_fn, x, y, options: Options, third: bool, warn: bool, weights, seed, paths: bool) -> Result:
    check_model(model)
    x = dict(x) if isinstance(x, Mapping) else x
    samples = check_x(x, options)
    batch = options.part(samples)
    with trainable_surroundings(), unchanged_on_error(model):
        # Pass 1: forward. The tape keeps every operation that the input runs through.
        tape = Record(next(model.parameters()).device.type)
        output, loss = forward(model, loss_fn, x, y, options, tape, paths)

        # How the two terms will meet at a weight. apart: in a product each, because they were asked for, or because
        # half formats would lose t. joined: exact mode's way back carries both. relative: in a compiled step, in one
        # product with the mix a + k t; but in half formats a has to wait in memory for that, so that products which are
        # cheap stay apart. mixed: pass 3 carries the mix itself.
        third = third and (options.third > 0 or options.separate)
        half = bool(tape.half)
        program = tape.program(to_the_end=options.exact and third)
        joined = options.exact and third and not (half or options.separate)
        cheap = weights is not None and half and third and not options.exact and tape.has_cheap_products(program)
        relative = weights is not None and options.back > 0 and not (options.separate or joined or cheap)
        apart = options.separate or (half and not relative)
        mixed = third and not (options.exact or apart or half) and tape.carries_mix(program)
        end = tape.place(loss)
        if mixed and weights is None:  # a compiler sees by itself what is needed
            for op, _, _ in program:
                op.keep_gates()

        # Pass 2: backward, down to the input. Of the effective batch's mean loss, this part has samples / batch. Where
        # the terms meet in products with a + k t, the errors carry their weight, so that no gradient needs a factor;
        # half formats would round it.
        back, weight_of_third = weights or (options.back, options.third)
        gain = unit = error_gain(tape.half, batch)
        if relative and not half:
            gain, back = gain * back, 1.0
        share = gain * (samples / batch)
        dx, d = backward(tape, program, loss, share, everything=options.exact)
        if options.exact and any(op.bent for op, _, _ in program):
            tape.problem("register_hook", "a tensor's hook changes its error", 'use mode="paper", or remove the hook')

        # Pass 3: forward again, from t_0 = c dl_i/dx_i. A weight's gradient is taken as soon as its tangent is there.
        if third and warn and not options.exact:
            warn_of_norms(model, [op for op, _, _ in program])
        scale = options.scale(batch) * weight_of_third if joined else options.scale(batch)
        if options.penalty == "l2":
            t_0, unscale = start(dx, scale, gain, tape.half)
        else:
            g = [z.to(accumulate_dtype(z.dtype)) * (batch / gain) for z in dx]
            input_loss, slopes = evaluate(options.penalty, g, samples, partial(like_x, x, options, tape))
            t_0, unscale = start(slopes, scale * gain / batch, gain, tape.half)
            t_0 = [t.to(z.dtype) for t, z in zip(t_0, dx, strict=True)]
        gradients = Gradients(
            back,
            1.0 if joined else weight_of_third,
            apart,
            relative=relative,
            compiled=weights is not None,
            joined=joined,
            unscale=(1 / unit, unscale),
            seed=seed,
        )
        with torch.no_grad():
            visits = forward_again(tape, program, dx, t_0 if third else None, d, gradients, options.exact, mixed)
            if options.exact and third:
                starts = [(end, torch.ones_like(loss) * (share * back))] if joined else []
                exact_mode.pull(tape, visits, gradients, starts)
        if tape.problems:
            raise UnsupportedError(tape.problems)
        if warn and (count := gradients.left_out(model)):
            warn_left_out(model, count)
        grads, *terms = gradients.finish(model)
        backprop_grads, third_grads = terms if options.separate else (None, None)

    whole = gain if options.ranks == 1 else gain * options.ranks  # dx of all ranks' loss, not of this rank's
    if options.penalty == "l2":
        squares = torch.stack([g.to(accumulate_dtype(g.dtype)).div(gain).square().sum() for g in dx]).sum()
        input_loss = 0.5 * squares * (batch**2 / samples)
    return Result(
        output=tree_map(lambda z: z.detach() if isinstance(z, Tensor) else z, output),
        loss=loss.detach(),
        input_loss=input_loss,
        input_grad=like_x(x, options, tape, [g if whole is unit and unit == 1 else g / whole for g in dx]),
        grads=grads,
        backprop_grads=backprop_grads,
        third_grads=third_grads,
    )


def forward(
    model,
    loss_fn,
    x,
    y,
    options: Any,
    tape: Record,
    paths: bool,
    check: Callable[[Any], None] = check_loss,
) -> tuple[Any, Tensor]:
    """Pass 1: the model and the loss, once, as the user wrote them."""
    x, y = tree_map(_usable, (x, y))
    with contextlib.ExitStack() as stack:
        if paths:
            stack.enter_context(paths_kept(model, tape))
        if options.input_at is None and any(map(is_float, tree_leaves(x))):
            x = map_inputs(x, options.wrt, tape.add_input)
        else:
            tape.inside = True
            stack.enter_context(inputs_inside(model, tape, options.input_at))
        stack.enter_context(functions_seen())
        stack.enter_context(tape)
        output = model(*x) if isinstance(x, tuple) else model(**x) if isinstance(x, Mapping) else model(x)
        loss = loss_fn(output, y)
    if not tape.inputs:
        where = "no embedding" if options.input_at is None else f"input_at={options.input_at!r}: that module did not"
        raise ValueError(f"{where} run, so there is no input to go back to")
    check(loss)
    if tape.is_active(loss):
        tape.check_known("loss_fn", loss)
    if tape.problems and (not tape.is_active(loss) or not tape.operations):
        raise UnsupportedError(tape.problems)
    if not tape.is_active(loss):
        raise ValueError(
            "the loss does not depend on the input: is it computed under no_grad, or from detached tensors?"
        )
    return output, loss


def backward(
    tape: Record, program: Program, loss: Tensor, factor: float | Tensor, everything: bool
) -> tuple[list[Tensor], Errors]:
    """Pass 2: dl/dx, and the error d of every operation that has weights (for exact mode, also of every curved one).

    Of a tapped operation it is the error of a, and behind it stand the gradients of the weights.
    """
    ops = [op for op, _, _ in program if op.weights or (everything and op.needs_error)]
    leaves = [leaf for _, leaf, _ in tape.inputs]
    wanted: list[Any] = [*leaves, *(z for op in ops for z in (*op.edges, *(leaf for _, leaf in op.leaves)))]
    with tape.rerunning():
        errors = list(torch.autograd.grad(loss, wanted, torch.ones_like(loss) * factor, allow_unused=True))
    dx = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, errors, strict=False)]
    rest = iter(errors[len(leaves) :])
    d = {op: [op.error_at_output(next(rest)) for _ in op.edges] + [next(rest) for _ in op.leaves] for op in ops}
    for op in ops:
        for i, changed in op.bent.items() if not op.leaves else ():
            d[op][i] = changed
    return dx, d


def forward_again(
    tape: Record,
    program: Program,
    dx: list[Tensor],
    t_0: list[Tensor] | None,
    d: Errors,
    gradients: Gradients,
    exact: bool = False,
    mixed: bool = False,
) -> list[Visit]:
    """Pass 3: the tangent, operation by operation, and the weights' gradients. Without t_0: those of pass 2 alone.

    mixed: the net is piecewise linear, so that the mix m = back * a + third * t obeys one recursion, m -> W m +
    back * b and then the same gates: it runs in place of t, and a is not needed. exact: returns the visits, for the way
    back.
    """
    for (source, _, _), g in zip(tape.inputs, dx, strict=True):
        if source.requires_grad:  # weights before input_at
            gradients.add(source, g, None)
    whole = exact and t_0 is not None
    signals = tape.signals()
    for (source, _, z), t in zip(tape.inputs, t_0 or (), strict=False):
        signals.put(z, gradients.mix(source.detach(), t) if mixed else t)
    visits = []
    while program:
        op, pushes, last = program.pop()
        out: list[Tensor | None] = []
        with tape.explaining(op):
            visit = Visit(op, d.pop(op, [None] * len(op.outputs)), [signals.get(z) for _, z in op.active])
            done = not whole or visit.flat
            if done and gradients.joined:  # first, so that d is free before t grows; mixes are made with t
                visit.collect(gradients)
                visit.forget_error()
            if pushes and t_0 is not None:
                out = visit.carry(gradients.back) if mixed else visit.push()
            if done and not gradients.joined:
                visit.collect(gradients, mixed)
                visit.forget_error()
            if done:
                visit.forget_tangent()
            if whole:
                visits.append(visit)
        for z in last:
            signals.put(z, None)
        if pushes and t_0 is not None:
            for u, s in zip(op.outputs, out or [u.zeros() for u in op.outputs], strict=True):
                signals.put(u, s)
    return visits


def _usable(z: Any) -> Any:
    """A tensor made under inference_mode cannot take part in a backward pass; a copy of it can."""
    return z.clone() if isinstance(z, Tensor) and z.is_inference() else z


def like_x(x: Any, options: Any, tape: Record, dx: list[Tensor]) -> Any:
    """Gradients in the structure of x (`wrt.py`); of an input inside the model, as it comes."""
    if tape.inside:
        return dx[0] if len(dx) == 1 else tuple(dx)
    return like_inputs(x, options.wrt, dx)
