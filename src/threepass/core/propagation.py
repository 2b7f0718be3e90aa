"""Passes 2 and 3 along a tape: operation by operation, and through checkpointed blocks, with tapes of their own."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..rules import generic
from ..rules.linearity import is_affine
from ..rules.table import Linearization
from ..tape.arguments import unflatten
from ..tape.checkpointed import Block, recompute_from
from ..tape.intercept import intercepting_functions
from ..tape.operation import Operation
from ..tape.record import Record
from ..tape.replay import as_recorded
from ..tape.signals import ActivationMeta, Signals
from ..tracing import is_for_compiler
from .exact import Propagated, backward_again
from .gradients import Gradients
from .plan import Operand, Plan

Tensors = list[Tensor | None]


class Errors(NamedTuple):
    """What pass 2 computed for an operation.

    d: the errors of its outputs u; where the rule has a tap, of its input a.
    weight_grads: where the rule has a tap, the gradients of the weights, in the order of `op.leaves`.
    """

    d: Tensors
    weight_grads: Tensors


def errors_from(tape: Record, plan: Plan, u: Tensor, d: Tensor) -> tuple[list[Tensor], dict[Operation, Errors]]:
    """The errors of the inputs and of operations, from the error d of the output u."""
    ops = [op for op in reversed(tape.operations) if _keeps_error(op, plan)]
    leaves = [leaf for _, leaf, _ in tape.inputs]
    wanted: list[Any] = [*leaves, *(z for op in ops for z in (*op.error_edges, *(leaf for _, leaf in op.leaves)))]
    with tape.recomputing():
        grads = iter(torch.autograd.grad(u, wanted, d, allow_unused=True))
    dx = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads, strict=False)]
    errors = {}
    for op in ops:
        of_outputs = [op.error_at_output(next(grads)) for _ in op.error_edges]
        errors[op] = Errors(of_outputs, [next(grads) for _ in op.leaves])
        for i, changed in op.hooked_errors.items() if not op.leaves else ():
            of_outputs[i] = changed
    return dx, errors


def _keeps_error(op: Operation, plan: Plan) -> bool:
    """Whether a later pass reads the error from pass 2."""
    if plan.exact and isinstance(op, Block) and op.gets_error:
        return False
    return bool(op.weights) or (plan.exact and op.needs_error)


def propagate(
    tape: Record, signals: Signals, errors: dict[Operation, Errors], gradients: Gradients, keep: bool = False
) -> list[Propagated]:
    """Pass 3: propagates the signals along the tape, which it consumes, and adds the weights' gradients.

    keep: return what exact mode's backward pass needs, by operation.
    """
    plan = gradients.plan
    steps: list[Propagated] = []
    between = BetweenBlocks({}, {})
    for op in tape.consume():
        out = None
        try:
            t = [signals.get(z) for _, z in op.active]
            d = errors.pop(op, None)
            step: Propagation | BlockPropagation
            step = BlockPropagation(op, d, t, between) if isinstance(op, Block) else Propagation(op, d, t)
            out = step.forward(gradients)
            if keep:
                steps.append(step)
        except Exception as error:
            tape.record_error(op, error)
        for z in op.last_reads:
            signals.put(z, None)
            if between.outputs:
                between.outputs.pop(z, None)
        if op.pushes and plan.case.carried is not None:
            for u, s in zip(op.outputs, out or [u.zeros() for u in op.outputs], strict=True):
                signals.put(u, s)
    return steps


class Propagation:
    """u = op(a; p) with the errors d of u and the tangents t of a: by its fast rule, or by the generic one."""

    __slots__ = ("curved", "d", "linearization", "op", "s", "t", "weight_grads")

    def __init__(self, op: Operation, errors: Errors | None, t: Tensors):
        self.op, self.t = op, t
        self.d, self.weight_grads = errors or Errors([None] * len(op.outputs), [])
        self.curved: Tensor | None = None  # the term of the second derivative, where pass 3 has computed it
        self.linearization = lin = op.linearize()
        self.s = None if lin is None or lin.signal is None or t[0] is None else lin.tangent(t[0])  # of the signal

    @property
    def is_affine(self) -> bool:
        """Whether u is known to be affine in a: then R{d} needs neither d nor t here."""
        if self.linearization is not None:
            has_flat_rule = self.op.rule is not None and self.op.rule.flat
            return has_flat_rule or (self.linearization.pull is not None and self.linearization.curve is None)
        return not self.op.weights and is_affine(self.op.func)

    @property
    def curves(self) -> bool:
        """Whether there is a term of the second derivative, or what it is computed from."""
        return self.curved is not None or any(e is not None for e in self.d)

    def forward(self, gradients: Gradients) -> Tensors | None:
        """Pass 3 at this operation: adds the weights' gradients, and returns the tangents of u if they are needed.

        d and t are freed as soon as they can be. Of a nonlinear operation, exact mode keeps the term of the second
        derivative in their place, which is half as much, where a rule gives that term alone.
        """
        plan = gradients.plan
        case = plan.case
        is_nonlinear = plan.exact and not self.is_affine
        if not is_nonlinear and case.error_freed_first:
            self._use_error(gradients)
        out = self.push(plan) if case.carried is not None and self.op.pushes else None
        if is_nonlinear:
            if not self._curves_alone or is_for_compiler():  # kernels of compiled steps add the term to that of `pull`
                return out
            self.curved = self._curvature()
        self._use_error(gradients)
        self.t, self.s = [None] * len(self.t), None
        return out

    def push(self, plan: Plan) -> Tensors:
        """The tangents of u; where pass 3 carries the mix, t is the mix of a, and this returns the mix of u."""
        if self.linearization is None:
            return generic.push(self.op, self.t)
        if plan.case.carried is Operand.MIX and self.linearization.mix is not None:
            assert self.t[0] is not None
            return [self.linearization.mix(self.t[0], plan.back)]
        if self.s is not None:
            return [self.linearization.push(self.s)]
        out = self.linearization.push(*(self.t if self.op.arity == 1 else self._by_position()))
        return [out] if isinstance(out, Tensor) else list(out)

    def add_gradients(self, gradients: Gradients) -> None:
        """Adds the gradients of p that passes 2 and 3 give."""
        if self.linearization is not None and self.d[0] is not None:
            if self.op.leaves:
                gradients.add_tapped(self.op, self.linearization, self.d[0], self.s, self.weight_grads)
            else:
                gradients.add_products(self.op, self.linearization, self.d[0], self.s)
            return
        if not self.op.weights or all(e is None for e in self.d):
            return
        t = self.t if any(s is not None for s in self.t) else None
        back = not gradients.plan.case.backprop_in_last_pass
        self._add_generic(gradients, *generic.derive(self.op, self.d, t, back=back)[:2])

    def pull(self, r: Tensors, gradients: Gradients, wanted: bool) -> Tensors:
        """Exact mode: R{d} of a from r, the R{d} of u; adds R{d} (x) a, and pass 3's products if they are not yet."""
        if self._curves_alone:
            assert self.linearization is not None
            return [self._pull(self.linearization, r[0], gradients, wanted)]
        if self.linearization is not None and self.linearization.bend is not None:
            pulled = self.linearization.bend(r, self.d, self._by_position()) if wanted else [None] * self.op.arity
            return [pulled[i] for i, _ in self.op.active]
        back = not gradients.plan.case.backprop_in_last_pass
        *terms, pulled = generic.derive(self.op, self.d, self.t, r, curvature=True, back=back)
        self._add_generic(gradients, *terms)
        return pulled

    def free_signals(self) -> None:
        """Frees d and t: from here on the operation is its Jacobian, and `pull` adds no curvature."""
        self.d, self.weight_grads = [None] * len(self.d), []
        self.t, self.s, self.curved = [None] * len(self.t), None, None

    @property
    def _curves_alone(self) -> bool:
        """Whether the rule computes the term of the second derivative apart from the Jacobian's."""
        return self.linearization is not None and self.linearization.pull is not None

    def _curvature(self) -> Tensor | None:
        """The term of the second derivative in R{d} of a."""
        (d, *_), (t, *_) = self.d, self.t
        if self.linearization is None or self.linearization.curve is None or d is None or t is None:
            return None
        return self.linearization.curve(d, t, *self.weight_grads)

    def _use_error(self, gradients: Gradients) -> None:
        if self.op.weights:
            self.add_gradients(gradients)
        self.d, self.weight_grads = [None] * len(self.d), []

    def _pull(self, lin: Linearization, r: Tensor | None, gradients: Gradients, wanted: bool) -> Tensor | None:
        if not self.is_affine:
            self.add_gradients(gradients)
        if r is not None:
            gradients.add_pulled(self.op, lin, r)
        if not wanted:
            return None
        pulled = None if r is None or lin.pull is None else lin.pull(r)
        curved = self._curvature() if self.curved is None else self.curved
        if pulled is None or curved is None:
            return curved if pulled is None else pulled
        return pulled + curved

    def _add_generic(self, gradients: Gradients, backprop: Tensors, third: Tensors) -> None:
        for (_, weight), b, g in zip(self.op.weights, backprop, third, strict=True):
            gradients.add(weight, b, g)

    def _by_position(self) -> Tensors:
        """The tangents of the arguments that a fast rule knows, None for those that are not active."""
        given = dict(zip((i for i, _ in self.op.active), self.t, strict=True))
        return [given.get(i) for i in range(self.op.arity)]


class BetweenBlocks(NamedTuple):
    """What the checkpointed blocks of a tape give to one another, because it is not kept since passes 1 and 2.

    outputs: recomputed in pass 3; errors: in the backward pass of exact mode, of the blocks that get them so.
    """

    outputs: dict[ActivationMeta, Tensor]
    errors: dict[ActivationMeta, Tensor]


class BlockPropagation:
    """Pass 3 and, in exact mode, the backward pass after it, through a checkpointed block (`tape/checkpointed.py`)."""

    __slots__ = ("between", "d", "op", "t")

    def __init__(self, op: Block, errors: Errors | None, t: list[Tensor | None], between: BetweenBlocks):
        self.op, self.t, self.between = op, t, between
        self.d: list[Tensor | None] = [None] if errors is None else errors.d

    @property
    def curves(self) -> bool:
        return self.d[0] is not None or self.op.outputs[0] in self.between.errors

    def forward(self, gradients: Gradients) -> list[Tensor | None]:
        """The tangent of the output; in paper mode also adds the weights' gradients, by the errors inside the block."""
        (d,) = self.d
        if d is None and not self.op.gets_error:  # the loss does not depend on it
            return [None]
        inner, u = self._recorded()
        output = inner.meta_of(u)
        errors = {}
        if not gradients.plan.exact:
            assert d is not None  # blocks get their errors from others in exact mode alone
            errors = errors_from(inner, gradients.plan, u, recompute_from(d))[1]
        if self.op.is_read_by_block:
            self.between.outputs[self.op.outputs[0]] = u.detach()
        del u
        signals = self._signals(inner)
        propagate(inner, signals, errors, gradients)
        raise_problems(inner)
        if not gradients.plan.exact:
            self.d, self.t = [None], []
        return [signals.get(output)]

    def pull(self, r: list[Tensor | None], gradients: Gradients, wanted: bool) -> list[Tensor | None]:
        """Exact mode: R{d} of the arguments from that of the output; adds all products inside the block."""
        d = self.between.errors.pop(self.op.outputs[0], self.d[0])
        if d is None:
            return [None] * len(self.op.active)
        inner, u = self._recorded()
        inner.needs_input_errors = wanted
        start = [] if r[0] is None else [(inner.meta_of(u), r[0])]
        dx, errors = errors_from(inner, gradients.plan, u, recompute_from(d))
        self._pass_errors(dx)
        check_hooks(inner, 'use mode="paper", or remove the hook')
        del u
        steps = propagate(inner, self._signals(inner), errors, gradients, keep=True)
        pulled = backward_again(inner, steps, start, gradients)
        raise_problems(inner)
        return pulled

    def _pass_errors(self, dx: list[Tensor]) -> None:
        """Gives the errors of the block's arguments to the blocks that computed these, and kept no error."""
        errors = self.between.errors
        for (_, z), e in zip(self.op.active, dx, strict=True):
            if z in self.op.passes_error:
                errors[z] = errors[z] + e if z in errors else e

    def _recorded(self) -> tuple[Record, Tensor]:
        """The block's operations on a tape of their own, and its output."""
        block, inner = self.op, Record(self.op.autocast[0])
        values = block.arguments(self.between.outputs)
        with torch.enable_grad():
            for i, _ in block.active:
                values[i] = inner.add_input(recompute_from(values[i]))
            args, kwargs = unflatten(values, block.spec)
            with as_recorded(block.func, block.autocast, block.rng), intercepting_functions(), inner:
                result = block.func(*args, **kwargs)
            u = block.output_in(result, inner.operations, inner.meta_of)
            inner.prune([inner.meta_of(u)] if block.pushes else [])
        return inner, u

    def _signals(self, inner: Record) -> Signals:
        signals = inner.signals()
        for (_, _, z), s in zip(inner.inputs, self.t, strict=True):
            signals.put(z, s)
        return signals


def check_hooks(tape: Record, advice: str) -> None:
    if any(op.hooked_errors for op in tape.operations):
        tape.problem("register_hook", "a hook on a tensor changes its gradient", advice)


def raise_problems(tape: Record) -> None:
    if tape.problems:
        raise UnsupportedError(tape.problems)
