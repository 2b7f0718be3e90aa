"""Losses on the gradient of a net: dL/dw for L = loss_fn(output, g, y), where g = d value / dx.

    pass 1   forward           a -> u, and value = value_fn(output)
    pass 2   backward          d = dvalue/du, down to g = dvalue/dx
    loss     loss_fn           e = dL/doutput and t_0 = dL/dg, by autograd through loss_fn alone
    pass 3   forward again     t = R{a}, the derivative of a along t_0
    pass 4   backward again    R{d}, which starts as e at the output and as zero at the value

L depends on the weights through the output and through g. With e and t_0 held fixed,

    dL/dw = d/dw < e , output > + d/dw < t_0 , dvalue/dx > = d (x) t + R{d} (x) a.

The first term is an ordinary backward pass from e, the second is exact mode's (`exact.py`). Both are linear in what
pass 4 starts from, so that one pass 4 serves them together. Some piecewise linear nets need no pass 4
(`samplewise.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._python_compat import signature_of
from .._torch_compat import tree_leaves, tree_map
from ..errors import UnsupportedError
from ..numerics.precision import power_of_two, seed_op
from ..rules.generic import leaf_tensors_of
from ..tape.intercept import eager_code
from ..tape.record import Record
from ..tape.signals import ActivationMeta
from ..tape.state import autograd_enabled, unchanged_on_error
from .engine import Task, backward, forward, forward_again, like_x
from .exact import Propagated, backward_again
from .gradients import Gradients
from .options import check_input_options, check_loss, check_model, check_tensors
from .penalty import check_finite
from .plan import joint_plan
from .propagation import Propagation, check_hooks, raise_problems
from .samplewise import is_samplewise, samplewise_plan
from .warn import warn_of_other_leaves
from .wrt import Wrt, as_wrt, without_other_leaves


@dataclass(frozen=True, repr=False)
class GradientResult:
    """The result of one step on a loss of the input gradient.

    Attributes:
        output: what the model returned, detached.
        value: value_fn(output), detached.
        input_grad: g = d value / dx, structured like x, with None for everything but floating-point tensors; with `wrt`
            a tensor, or a dict where it names several entries.
        loss: loss_fn(output, g, y), detached.
        grads: the gradient of the loss for every parameter that it depends on, by name.
        through_output: with separate=True, the part of grads that comes through the output; else None.
        through_input_grad: with separate=True, the part of grads that comes through g; else None.
    """

    GRADIENTS: ClassVar = ("grads", "through_output", "through_input_grad")

    output: Any
    value: Tensor
    input_grad: Any
    loss: Tensor
    grads: dict[str, Tensor]
    through_output: dict[str, Tensor] | None
    through_input_grad: dict[str, Tensor] | None

    def __repr__(self) -> str:
        """In one line; tensors are attributes."""
        terms = "" if self.through_output is None else ", through_output, through_input_grad"
        return (
            f"GradientResult(loss={self.loss.item():.4g}, value={self.value.item():.4g}, "
            f"grads of {len(self.grads)} parameters; also output, input_grad{terms})"
        )


@dataclass(frozen=True)
class GradientOptions:
    """The options of `gradient_step`."""

    value_fn: Callable[[Any], Tensor] | None = None
    wrt: Wrt = None
    input_at: str | None = None
    separate: bool = False

    def __post_init__(self) -> None:
        if self.value_fn is not None and not callable(self.value_fn):
            raise TypeError(f"value_fn must be a function of the model's output, got {type(self.value_fn).__name__}")
        object.__setattr__(self, "wrt", as_wrt(self.wrt))
        check_input_options(self.wrt, self.input_at)


def gradient_step(
    model: nn.Module,
    loss_fn: Callable[[Any, Any, Any], Tensor],
    x: Any,
    y: Any = None,
    value_fn: Callable[[Any], Tensor] | None = None,
    wrt: Wrt = None,
    input_at: str | None = None,
    separate: bool = False,
) -> GradientResult:
    """One step on a loss of the model's output and of its gradient at the input: forces, R1, Eikonal and the like.

    The gradients are those of loss_fn(output, g, y) with g = d value_fn(output) / dx, as
    `torch.autograd.grad(..., create_graph=True)` and a second backward pass would give them. Does not change any
    `.grad`; buffers and random state advance as in one training forward.

    Args:
        model: any module; `model(x)`, `model(*x)` for a tuple or `model(**x)` for a dict gives the output.
        loss_fn: `loss_fn(output, g, y)`, any differentiable scalar of the output and of g.
        x: what the model takes. Samples need not lie along dimension 0.
        y: what the loss takes.
        value_fn: `value_fn(output)`, the scalar that is differentiated; default: `output.sum()`.
        wrt: the entry of a dict x (its name), or of a tuple x (its index), that g is taken for, or several of them in a
            tuple; default: all floating-point tensors of x. g is then a tensor, or a dict.
        input_at: the module whose output counts as the input, instead of x.
        separate: also give the two parts of the gradients, `through_output` and `through_input_grad`.

    Examples:
        >>> energy = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> positions, forces = torch.randn(5, 3), torch.randn(5, 3)
        >>> r = gradient_step(energy, lambda output, g, y: (-g - y).square().mean(), positions, forces)
        >>> r.input_grad.shape
        torch.Size([5, 3])
    """
    check_loss_fn(loss_fn)
    return run(Task(model, loss_fn, x, y), GradientOptions(value_fn, wrt, input_at, separate))


def check_loss_fn(loss_fn: Any) -> None:
    """Raises a `TypeError` if it cannot be called with three arguments, where that can be told beforehand."""
    try:
        signature = signature_of(loss_fn)
    except (TypeError, ValueError):  # not a function, or one that is not written in Python
        return
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        raise TypeError(f"loss_fn must take (output, g, y), where g = d value / dx: {error}") from None


def run(task: Task, options: GradientOptions, *, warn: bool = True, seed: Tensor | None = None) -> GradientResult:
    """`gradient_step` with its arguments in two objects.

    seed: in a compiled step, an int32 scalar that random rounding is made from; the gradients then are in the
    parameters' own dtypes.
    """
    seed = None if seed is None else seed_op(seed)
    if isinstance(task.x, Mapping):
        task = task._replace(x=dict(task.x))
    try:
        return _passes(task, options, warn, seed, module_paths=False)
    except UnsupportedError:  # fails again, and says in which modules
        return _passes(task, options, warn, seed, module_paths=True)


def _passes(task: Task, options: GradientOptions, warn: bool, seed, module_paths: bool) -> GradientResult:
    model = task.model
    parameters = check_model(model)
    check_tensors(task.x, options.wrt)
    x = without_other_leaves(task.x, options.wrt, parameters)
    with autograd_enabled(), unchanged_on_error(model), eager_code(model):
        # Pass 1: forward, to the value.
        tape = Record(next(iter(parameters.values())).device.type, module_paths)
        value_fn = options.value_fn or _summed
        of_value = task._replace(loss_fn=lambda out, _: value_fn(out), x=x)
        output, value = forward(of_value, tape, options, _check_value)
        samplewise = options.value_fn is None and not options.separate and is_samplewise(tape, output)
        tape.prune(_active(tape, value, output))
        plan = joint_plan(tape, compiled=seed is not None)

        # Pass 2: backward, to g.
        g, errors = backward(tape, plan, value)
        check_hooks(tape, "remove the hook")

        # The loss, and what passes 3 and 4 start from.
        loss = differentiate(task, output, g, partial(like_x, x, options, tape), tape)
        size = loss.scale_down(tape) if tape.half else 1.0

        # Pass 3: forward again, from t_0. Pass 4: backward again, from e.
        if samplewise and loss.e:  # a loss of g alone keeps the joint plan, whose pass 4 has nothing to propagate
            plan = samplewise_plan(plan, loss.e[0][1])
        gradients = [Gradients(plan, 1.0, seed) for _ in range(2 if options.separate else 1)]
        first, last = gradients[0], gradients[-1]
        with torch.no_grad():
            steps = forward_again(tape, g, loss.t_0, errors, first)
            if options.separate:
                _backward_from_zero(tape, steps, first)
            start = loss.starts(tape, last)
            if plan.exact:
                backward_again(tape, steps, start, last)
        raise_problems(tape)
        if warn:
            others = [z.count_other_leaves(parameters, tape.sources()) for z in gradients]
            warn_of_other_leaves(model, max(loss.other_leaves, *others))
        terms = [_times(size, each.finish(parameters)[0]) for each in gradients]

    return GradientResult(
        output=tree_map(lambda z: z.detach() if isinstance(z, Tensor) else z, output),
        value=value.detach(),
        input_grad=like_x(x, options, tape, g),
        loss=loss.value.detach(),
        grads=_sum(*terms) if options.separate else terms[0],
        through_output=_sum(terms[1], _times(0.0, terms[0])) if options.separate else None,
        through_input_grad=_sum(terms[0], _times(0.0, terms[1])) if options.separate else None,
    )


def _active(tape: Record, *results: Any) -> list[ActivationMeta]:
    """What loss_fn may depend on through the model."""
    return [tape.meta_of(z) for z in tree_leaves(results) if isinstance(z, Tensor) and tape.is_active(z)]


def _backward_from_zero(tape: Record, steps: list[Propagated], gradients: Gradients) -> None:
    """Pass 4 without the term through the output; the steps stay for another pass 4."""
    backward_again(tape, list(steps), [], gradients)
    for step in steps:
        assert isinstance(step, Propagation)  # this tape records no blocks
        step.free_signals()


@dataclass
class DifferentiatedLoss:
    """A loss with its derivatives, as autograd finds them through loss_fn alone."""

    value: Tensor
    t_0: list[Tensor]  # at g
    e: list[tuple[Tensor, Tensor]]  # pairs of a tensor of the model's output and the derivative at it
    direct: list[tuple[Tensor, Tensor]]  # likewise at parameters that loss_fn reads itself
    other_leaves: int  # other tensors that require grad

    def scale_down(self, tape: Record) -> Tensor:
        """Divides the derivatives by a power of two near the largest one, for half precision; returns it."""
        derivatives = [*self.t_0, *(e for _, e in (*self.e, *self.direct))]
        largest, max_over_ranks = torch.stack([z.abs().max().float() for z in derivatives]).max(), tape.max_over_ranks()
        size = power_of_two(largest if max_over_ranks is None else max_over_ranks(largest))
        self.t_0 = [(t.float() / size).to(t.dtype) for t in self.t_0]
        self.e, self.direct = ([(z, (e.float() / size).to(e.dtype)) for z, e in each] for each in (self.e, self.direct))
        return size

    def starts(self, tape: Record, gradients: Gradients) -> list[tuple[ActivationMeta, Tensor]]:
        """Where R{d} starts, and as what. Outputs that do not depend on the input are weights and get a gradient."""
        for z, e in (*self.direct, *((z, e) for z, e in self.e if not tape.is_active(z))):
            gradients.add(z, None, e)
        return [(tape.meta_of(z), e) for z, e in self.e if tape.is_active(z)]


def differentiate(
    task: Task, output: Any, g: Sequence[Tensor], structure: Callable[[list[Tensor]], Any], tape: Record
) -> DifferentiatedLoss:
    """loss_fn(output, g, y) with its derivatives at the output, at g, and at parameters that it reads itself."""
    outputs: list[tuple[Tensor, Tensor]] = []

    def leaf_of(z: Any) -> Any:
        if not isinstance(z, Tensor) or not z.requires_grad:
            return z
        outputs.append((z, z.detach().requires_grad_()))
        return outputs[-1][1]

    given, at = tree_map(leaf_of, output), [z.detach().requires_grad_() for z in g]
    own = [*(leaf for _, leaf in outputs), *at]
    with _SecondOrderOnly(own):
        loss = task.loss_fn(given, structure(at), task.y)
    check_loss(loss, "any scalar of the output and of g")
    leaves = [] if loss.grad_fn is None else list(leaf_tensors_of(loss))
    if not any(leaf is z for leaf in leaves for z in own):
        raise ValueError(
            "the loss depends neither on the output nor on g: is it computed under no_grad, or from detached tensors?"
        )
    if any(leaf is z for leaf in leaves for _, z, _ in tape.inputs):
        raise TypeError(
            f"the model returned a {type(output).__name__}, whose tensors cannot be found: return a tensor, or a "
            "tuple, list or dict of tensors, or register the class with torch.utils._pytree"
        )
    named = {id(p) for p in task.model.parameters()}
    parameters = [leaf for leaf in leaves if id(leaf) in named]
    grads = torch.autograd.grad(loss, [*own, *parameters], allow_unused=True)
    e, direct = grads[: len(outputs)], grads[len(own) :]
    t_0 = [torch.zeros_like(z) if t is None else t for t, z in zip(grads[len(outputs) : len(own)], at, strict=True)]
    check_finite("loss_fn(output, g, y)", "g", t_0, at)
    return DifferentiatedLoss(
        loss,
        t_0,
        [(z, s) for (z, _), s in zip(outputs, e, strict=True) if s is not None],
        list(zip(parameters, direct, strict=True)),
        sum(all(leaf is not z for z in (*own, *parameters)) for leaf in leaves),
    )


class _SecondOrderOnly(TorchFunctionMode):
    """Refuses a loss_fn that differentiates g, or the output, once more with respect to something outside of it."""

    def __init__(self, own: list[Tensor]):
        super().__init__()
        self.own = own

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
            outputs, inputs = (*args, *kwargs.values())[0], args[1] if len(args) > 1 else kwargs.get("inputs")
            if any(map(self._depends, _tensors(outputs))) and not all(map(self._depends, _tensors(inputs))):
                raise NotImplementedError(
                    "loss_fn differentiates g or the output again (a Laplacian, say), which needs third derivatives of "
                    "the model; gradient_step supports second derivatives only. Compute that term separately with "
                    "torch.autograd.grad(create_graph=True) or torch.func, and add its gradients to p.grad"
                )
        return func(*args, **kwargs)

    def _depends(self, z: Tensor) -> bool:
        return any(leaf is own for leaf in (z, *leaf_tensors_of(z)) for own in self.own)


def _tensors(given: Any) -> list[Tensor]:
    return [given] if isinstance(given, Tensor) else [z for z in given or () if isinstance(z, Tensor)]


def _summed(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the model returns a {type(output).__name__}, not a tensor: pass value_fn, which computes the scalar to "
            "differentiate, as in value_fn=lambda output: output['energy'].sum()"
        )
    return output.sum()


def _check_value(value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        actual = f"a tensor of {value.dtype}, shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
        raise ValueError(
            f"value_fn must return a floating-point scalar (g is its gradient), got {actual}: sum over the samples, as "
            "in value_fn=lambda output: output.sum()"
        )


def _times(scale: float | Tensor, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    return grads if isinstance(scale, float) and scale == 1 else {name: g * scale for name, g in grads.items()}


def _sum(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**first, **{name: first[name] + g if name in first else g for name, g in second.items()}}
