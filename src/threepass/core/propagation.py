"""One operation in pass 3: its error d and its tangent t, propagated through its Jacobian and multiplied."""

from typing import NamedTuple

from torch import Tensor

from ..rules import generic
from ..rules.linearity import is_affine
from ..rules.table import Linearization
from ..tape.operation import Operation
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


class Propagation:
    """u = op(a; p) with the errors d of u and the tangents t of a: by its fast rule, or by the generic one."""

    __slots__ = ("d", "linearization", "op", "s", "t", "weight_grads")

    def __init__(self, op: Operation, errors: Errors | None, t: Tensors):
        self.op, self.t = op, t
        self.d, self.weight_grads = errors or Errors([None] * len(op.outputs), [])
        self.linearization = lin = op.linearize()
        self.s = None if lin is None or lin.signal is None or t[0] is None else lin.tangent(t[0])  # of the signal

    @property
    def is_linear(self) -> bool:
        """Whether u is known to be (piecewise) linear in a: then R{d} needs neither d nor t here."""
        if self.linearization is not None:
            has_flat_rule = self.op.rule is not None and self.op.rule.flat
            return has_flat_rule or (self.linearization.pull is not None and self.linearization.curve is None)
        return not self.op.weights and is_affine(self.op.func)

    def forward(self, gradients: Gradients) -> Tensors | None:
        """Pass 3 at this operation: adds the weights' gradients, and returns the tangents of u if they are needed.

        d and t are freed as soon as they can be: in exact mode, a nonlinear operation keeps them for the backward pass.
        """
        plan = gradients.plan
        case = plan.case
        is_last_use = not plan.exact or self.is_linear
        if is_last_use and case.error_freed_first:
            self._use_error(gradients)
        out = self.push(plan) if case.carried is not None and self.op.pushes else None
        if is_last_use:
            if not case.error_freed_first:
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
        if self.linearization is not None and self.linearization.pull is not None:
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
        self.t, self.s = [None] * len(self.t), None

    def _use_error(self, gradients: Gradients) -> None:
        if self.op.weights:
            self.add_gradients(gradients)
        self.d, self.weight_grads = [None] * len(self.d), []

    def _pull(self, lin: Linearization, r: Tensor | None, gradients: Gradients, wanted: bool) -> Tensor | None:
        if not self.is_linear:
            self.add_gradients(gradients)
        if r is not None:
            gradients.add_pulled(self.op, lin, r)
        if not wanted:
            return None
        pulled = None if r is None or lin.pull is None else lin.pull(r)
        if lin.curve is not None and self.d[0] is not None and self.t[0] is not None:
            curved = lin.curve(self.d[0], self.t[0], *self.weight_grads)
            pulled = curved if pulled is None else pulled + curved
        return pulled

    def _add_generic(self, gradients: Gradients, backprop: Tensors, third: Tensors) -> None:
        for (_, weight), b, g in zip(self.op.weights, backprop, third, strict=True):
            gradients.add(weight, b, g)

    def _by_position(self) -> Tensors:
        """The tangents of the arguments that a fast rule knows, None for those that are not active."""
        given = dict(zip((i for i, _ in self.op.active), self.t, strict=True))
        return [given.get(i) for i in range(self.op.arity)]
