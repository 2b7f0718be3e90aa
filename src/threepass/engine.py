"""The three passes, through any model.

    pass 1   forward           a -> u                      kept on a tape (`tape.py`)
    pass 2   backward          d = dl/du, down to dl/dx    one `autograd.grad`, no weight gradients
    pass 3   forward again     t_0 = c dl_i/dx_i, t -> J t  rule by rule along the tape (`rules/`)

and at every weight, as soon as its t is there, one product serves passes 2 and 3: d (x) (alpha a + (1 - alpha) t).
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from . import exact
from .errors import NormalizationWarning, UnsupportedError
from .gradients import Gradients
from .options import Options, check_loss, check_model, check_x
from .precision import accumulate_dtype, error_gain, start
from .replay import random_state, set_random_state
from .tape import Operation, Record, functions_seen
from .visit import Visit

Errors = dict[Operation, list[Tensor | None]]

_NORMS = ("batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm")
_warned: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


@dataclass(frozen=True)
class Result:
    """What three passes give; `grads` has an entry for every parameter that the loss depends on."""

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
) -> Result:
    """One step of three-pass learning: alpha * backpropagation + (1 - alpha) * third pass, for every parameter.

    Pure: no `.grad` changes; buffers and random state move as in one training forward.

    Args:
        model: any module; `model(x)`, `model(*x)` for a tuple or `model(**x)` for a dict gives the output.
        loss_fn: `loss_fn(output, y)`, a scalar mean over the samples.
        x: what the model takes; samples lie along dimension 0.
        y: what the loss takes.
        alpha: the weight of backpropagation, in [0, 1]; 1 is plain training.
        reduction: "batch": the input loss is 1/2 sum_i |dl/dx_i|^2 of the mean loss l; "sample": 1/2 mean_i |dl_i/dx_i|^2.
        mode: "paper": pass 3 with f' and the output error frozen; "exact": the true gradient of the input loss.
        strength: instead of alpha and reduction: backpropagation + strength * third pass of reduction="sample".
        input_at: the module whose output counts as the input; by default the floating-point tensors of x are, or, where
            there are none, the output of the first embedding that runs.
        batch_size: the effective batch, where x is only a part of it: the parts' gradients then add up to the whole's.
        separate: also give both terms, unweighted, as `backprop_grads` and `third_grads`.
    """
    options = Options(alpha, reduction, mode, strength, input_at, batch_size, separate)
    return run(model, loss_fn, x, y, options)


def run(
    model: nn.Module, loss_fn, x: Any, y: Any, options: Options, *, third: bool = True, warn: bool = True
) -> Result:
    """`three_pass` with its options in one object; third=False leaves the third term out, warn=False is for measurements."""
    try:
        return _passes(model, loss_fn, x, y, options, third, warn, paths=False)
    except UnsupportedError:
        return _passes(model, loss_fn, x, y, options, third, warn, paths=True)  # fails again, and says in which modules


def _passes(model, loss_fn, x, y, options: Options, third: bool, warn: bool, paths: bool) -> Result:
    check_model(model)
    samples = check_x(x, options)
    batch = options.batch_size or samples
    with trainable_surroundings(), unchanged_on_error(model):
        # Pass 1: forward. The tape keeps every operation that the input runs through.
        tape = Record(next(model.parameters()).device.type)
        output, loss = forward(model, loss_fn, x, y, options, tape, paths)

        # Pass 2: backward, down to the input. Of the effective batch's mean loss, this part has samples / batch.
        gain = error_gain(tape.half, batch)
        dx, d = backward(tape, loss, gain * samples / batch, everything=options.exact)

        # Pass 3: forward again, from t_0 = c dl_i/dx_i. A weight's gradient is taken as soon as its tangent is there.
        t_0, unscale = start(dx, options.scale(batch), gain, tape.half)
        if not third or not (options.third or options.separate):
            t_0 = None
        elif warn and not options.exact:
            _warn_of_norms(model, tape)
        gradients = Gradients(options, options.separate or bool(tape.half), (1 / gain, unscale))
        forward_again(tape, dx, t_0, d, gradients)
        if tape.problems:
            raise UnsupportedError(tape.problems)
        grads, backprop_grads, third_grads = gradients.finish(model)

    squares = sum(g.to(accumulate_dtype(g.dtype)).div(gain).square().sum() for g in dx)
    return Result(
        output=tree_map(lambda z: z.detach() if isinstance(z, Tensor) else z, output),
        loss=loss.detach(),
        input_loss=0.5 * squares * (batch**2 / samples),
        input_grad=_like_x(x, [g / gain if gain != 1 else g for g in dx], tape.inside),
        grads=grads,
        backprop_grads=backprop_grads,
        third_grads=third_grads,
    )


def forward(model, loss_fn, x, y, options: Options, tape: Record, paths: bool) -> tuple[Any, Tensor]:
    """Pass 1: the model and the loss, once, as the user wrote them."""
    x, y = tree_map(_usable, (x, y))
    with contextlib.ExitStack() as stack:
        if paths:
            stack.enter_context(_paths(model, tape))
        if options.input_at is None and any(map(_is_float, tree_leaves(x))):
            x = tree_map(lambda z: tape.add_input(z) if _is_float(z) else z, x)
        else:
            tape.inside = True
            stack.enter_context(_inputs_inside(model, tape, options.input_at))
        stack.enter_context(functions_seen())
        stack.enter_context(tape)
        output = model(*x) if isinstance(x, tuple) else model(**x) if isinstance(x, Mapping) else model(x)
        loss = loss_fn(output, y)
    if not tape.inputs:
        where = "no embedding" if options.input_at is None else f"input_at={options.input_at!r}: that module did not"
        raise ValueError(f"{where} run, so there is no input to go back to")
    check_loss(loss)
    if not tape.is_active(loss):
        if tape.problems:
            raise UnsupportedError(tape.problems)
        raise ValueError(
            "the loss does not depend on the input: is it computed under no_grad, or from detached tensors?"
        )
    return output, loss


def backward(tape: Record, loss: Tensor, seed: float, everything: bool) -> tuple[list[Tensor], Errors]:
    """Pass 2: dl/dx, and the error d of every operation that has weights (of every operation, for exact mode)."""
    ops = [op for op in tape.operations if op.weights or everything]
    leaves = [leaf for _, leaf, _ in tape.inputs]
    edges = [edge for op in ops for edge in op.edges]
    with tape.rerunning():
        errors = list(torch.autograd.grad(loss, [*leaves, *edges], torch.full_like(loss, seed), allow_unused=True))
    dx = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, errors, strict=False)]
    rest = iter(errors[len(leaves) :])
    d = {op: [op.error_at_output(next(rest)) for _ in op.edges] for op in ops}
    return dx, d


def forward_again(tape: Record, dx: list[Tensor], t_0: list[Tensor] | None, d: Errors, gradients: Gradients) -> None:
    """Pass 3: the tangent, operation by operation, and the weights' gradients. Without t_0: pass 2's gradients alone."""
    for (source, _, _), g in zip(tape.inputs, dx, strict=True):
        if source.requires_grad:  # weights before input_at
            gradients.add(source, g, None)
    signals = tape.signals()
    for (_, _, z), t in zip(tape.inputs, t_0 or (), strict=False):
        signals.put(z, t)
    whole = gradients.options.exact and t_0 is not None
    visits = []
    for op, pushes, last in tape.program(to_the_end=whole):
        tangents = None
        with tape.explaining(op):
            visit = Visit(op, d.pop(op, [None] * len(op.outputs)), [signals.get(z) for _, z in op.active])
            if whole:
                visits.append(visit)
            else:
                visit.collect(gradients)
            if pushes and t_0 is not None:
                tangents = visit.push()
        for z in last:
            signals.put(z, None)
        if pushes and t_0 is not None:
            for u, t in zip(op.outputs, tangents or [u.zeros() for u in op.outputs], strict=True):
                signals.put(u, t)
    if whole:
        exact.pull(tape, visits, gradients)


@contextlib.contextmanager
def trainable_surroundings() -> Iterator[None]:
    """Gradients can be computed here, whatever the caller switched off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextlib.contextmanager
def unchanged_on_error(model: nn.Module, always: bool = False) -> Iterator[None]:
    """Puts buffers and random state back if something goes wrong; `always`: in any case."""
    device = next(model.parameters()).device.type
    rng = random_state(device)
    buffers = [
        (m._buffers, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None
    ]
    try:
        yield
    except BaseException:
        always = True
        raise
    finally:
        if always:
            set_random_state(rng, device)
            with torch.no_grad():
                for where, name, buffer, contents in buffers:
                    where[name] = buffer
                    buffer.copy_(contents)


@contextlib.contextmanager
def _inputs_inside(model: nn.Module, tape: Record, input_at: str | None) -> Iterator[None]:
    """The output of the module named input_at, or of the first embedding that runs, becomes the input."""
    modules = dict(model.named_modules())
    if input_at is not None and input_at not in modules:
        names = ", ".join(list(filter(None, modules))[:20])
        raise ValueError(f"input_at={input_at!r} names no module of the model; it has: {names}")
    chosen = [modules[input_at]] if input_at is not None else [
        m for m in modules.values() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))
    ]  # fmt: skip
    if not chosen:
        raise TypeError("no tensor of x is floating point, and the model has no embedding: convert x to floating point, "
                        "or name the module whose output counts as the input, as in input_at=\"embeddings\"")  # fmt: skip
    first: list[nn.Module] = []

    def hook(module, args, output):
        first.append(module)
        if module is not first[0]:
            return output
        with torch._C.DisableTorchFunction():
            return tree_map(lambda z: tape.add_input(z) if _is_float(z) and not tape.is_active(z) else z, output)

    handles = [module.register_forward_hook(hook) for module in chosen]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_float(z: Any) -> bool:
    return isinstance(z, Tensor) and z.is_floating_point()


@contextlib.contextmanager
def _paths(model: nn.Module, tape: Record) -> Iterator[None]:
    """Keeps tape.path at the module that is running."""
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
            continue
        handles.append(
            module.register_forward_pre_hook(lambda m, args, name=name: tape.path.append(name), prepend=True)
        )
        handles.append(module.register_forward_hook(lambda m, args, out: _leave(tape), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leave(tape: Record) -> None:
    tape.path.pop()


def _usable(z: Any) -> Any:
    """A tensor made under inference_mode cannot take part in a backward pass; a copy of it can."""
    return z.clone() if isinstance(z, Tensor) and z.is_inference() else z


def _like_x(x: Any, dx: list[Tensor], inside: bool) -> Any:
    """dl/dx in the shape of x, None for what is no floating-point tensor; of an input inside the model, as it comes."""
    if inside:
        return dx[0] if len(dx) == 1 else tuple(dx)
    rest = iter(dx)
    return tree_map(lambda z: next(rest) if _is_float(z) else None, x)


def _warn_of_norms(model: nn.Module, tape: Record) -> None:
    norms = sorted({op.name for op in tape.operations if _is_curved_norm(op)})
    if norms and model not in _warned:
        _warned.add(model)
        warnings.warn(
            f'mode="paper" leaves out the curvature of {", ".join(norms)} and of the loss, so on this model the third pass may '
            'point away from the gradient of the input loss; mode="exact" is that gradient, and '
            "threepass.alignment(model, loss_fn, x, y) measures how far the two agree",
            NormalizationWarning,
            stacklevel=5,
        )


def _is_curved_norm(op: Operation) -> bool:
    fixed = op.name in ("batch_norm", "instance_norm") and op.values[5] is False  # the running statistics
    return op.name in _NORMS and not fixed
