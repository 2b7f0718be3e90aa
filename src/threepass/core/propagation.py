"""One operation in pass 3: its error d and its tangent t, propagated through its Jacobian and multiplied."""

from typing import NamedTuple

from torch import Tensor

from ..rules import generic
from ..rules.linearity import is_flat
from ..rules.table import Map
from ..tape.operation import Operation
from .gradients import Gradients
from .plan import Plan, Signal

Tensors = list[Tensor | None]


class Errors(NamedTuple):
    """What pass 2 computed for an operation.

    d: the errors of its outputs u; where the rule has a tap, of its input a.
    weights: where the rule has a tap, the gradients of the weights, by which `op.leaves` are ordered.
    """

    d: Tensors
    weights: Tensors


class Propagation:
    """u = op(a; p) with the errors d of u and the tangents t of a: by its fast rule, or by the generic one."""

    def __init__(self, op: Operation, errors: Errors | None, t: Tensors):
        self.op, self.t = op, t
        self.d, self.weight_errors = errors or Errors([None] * len(op.outputs), [])
        self.map = op.map()
        has_signal = self.map is not None and self.map.signal is not None
        self.s = self.map.tangent(t[0]) if self.map and has_signal and t[0] is not None else None

    @property
    def is_linear(self) -> bool:
        """Whether u is known to be (piecewise) linear in a: then R{d} needs neither d nor t here."""
        if self.map is not None:
            is_flat_rule = self.op.rule is not None and self.op.rule.flat
            return is_flat_rule or (self.map.pull is not None and self.map.curve is None)
        return not self.op.weights and is_flat(self.op.func)

    def forward(self, gradients: Gradients) -> Tensors | None:
        """Pass 3 at this operation: adds the weights' gradients, and returns the tangents of u if they are needed.

        d and t are freed as soon as they can be: in exact mode, a nonlinear operation keeps them for the backward pass.
        """
        plan = gradients.plan
        is_last_use = not plan.exact or self.is_linear
        if is_last_use and plan.case.error_freed_first:
            self._use_error(gradients)
        out = self.push(plan) if plan.case.carried is not None and self.op.pushes else None
        if is_last_use and not plan.case.error_freed_first:
            self._use_error(gradients)
        if is_last_use:
            self.t, self.s = [None] * len(self.t), None
        return out

    def push(self, plan: Plan) -> Tensors:
        """The tangents of u; where pass 3 carries the mix, t is the mix of a, and this returns the mix of u."""
        if self.map is None:
            return generic.push(self.op, self.t)
        if plan.case.carried is Signal.MIX:
            assert self.map.mix is not None
            assert self.t[0] is not None
            return [self.map.mix(self.t[0], plan.back)]
        if self.s is not None:
            return [self.map.push(self.s)]
        return [self.map.push(*self._by_position())]

    def add_gradients(self, gradients: Gradients) -> None:
        """Adds the gradients of p that passes 2 and 3 give."""
        if not self.op.weights or all(e is None for e in self.d):
            return
        if self.map is not None and self.d[0] is not None:
            if self.op.leaves:
                gradients.add_tapped(self.op, self.map, self.d[0], self.s, self.weight_errors)
            else:
                gradients.add_products(self.op, self.map, self.d[0], self.s)
            return
        t = self.t if any(s is not None for s in self.t) else None
        self._add_generic(gradients, *generic.derive(self.op, self.d, t, back=not gradients.plan.is_joint)[:2])

    def pull(self, r: Tensors, gradients: Gradients, wanted: bool) -> Tensors:
        """Exact mode: R{d} of a from r, the R{d} of u; adds R{d} (x) a, and pass 3's products if they are not yet."""
        if self.map is not None and self.map.pull is not None:
            return [self._pull(self.map, r[0], gradients, wanted)]
        if self.map is not None and self.map.bend is not None:
            pulled = self.map.bend(r, self.d, self._by_position()) if wanted else [None] * self.op.arity
            return [pulled[i] for i, _ in self.op.active]
        *terms, pulled = generic.derive(self.op, self.d, self.t, r, curvature=True, back=not gradients.plan.is_joint)
        self._add_generic(gradients, *terms)
        return pulled

    def free_signals(self) -> None:
        """Frees d and t: from here on the operation is its Jacobian, and `pull` adds no curvature."""
        self.d, self.weight_errors = [None] * len(self.d), []
        self.t, self.s = [None] * len(self.t), None

    def _use_error(self, gradients: Gradients) -> None:
        self.add_gradients(gradients)
        self.d, self.weight_errors = [None] * len(self.d), []

    def _pull(self, m: Map, r: Tensor | None, gradients: Gradients, wanted: bool) -> Tensor | None:
        if not self.is_linear:
            self.add_gradients(gradients)
        if r is not None:
            gradients.add_pulled(self.op, m, r)
        if not wanted:
            return None
        pulled = None if r is None or m.pull is None else m.pull(r)
        if m.curve is not None and self.d[0] is not None and self.t[0] is not None:
            curved = m.curve(self.d[0], self.t[0], *self.weight_errors)
            pulled = curved if pulled is None else pulled + curved
        return None if pulled is None else pulled.to(self.op.active[0][1].dtype)

    def _add_generic(self, gradients: Gradients, backprop: Tensors, third: Tensors) -> None:
        for (_, weight), b, g in zip(self.op.weights, backprop, third, strict=True):
            gradients.add(weight, b, g)

    def _by_position(self) -> Tensors:
        """The tangents of the arguments that a fast rule knows, None for those that are not active."""
        given = dict(zip((i for i, _ in self.op.active), self.t, strict=True))
        return [given.get(i) for i in range(self.op.arity)]
