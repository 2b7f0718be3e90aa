"""An operation in pass 3, with all that the passes have brought to it: d from behind, t from before."""

from torch import Tensor

from ..rules import generic
from ..rules.linearity import is_flat
from ..rules.table import Map, Signal
from ..tape.operation import Operation
from .gradients import Gradients, Scale


class Visit:
    """u = op(a; p) with d, the errors of u, and t, the tangents of a: by its fast rule, or by the generic one.

    Of a tapped operation d is the error of a, and pass 2 has found the weights' gradients, which come behind it.
    """

    def __init__(self, op: Operation, d: Signal, t: Signal):
        self.op, self.d, self.found, self.t = op, d[: len(op.outputs)], d[len(op.outputs) :], t
        self.map = op.map()
        self.s = self.map.tangent(t[0]) if self.map and self.map.signal is not None and t[0] is not None else None

    def carry(self, back: Scale) -> Signal:
        """The mix of u, where t is the mix of a."""
        if self.map is None or self.map.mix is None:
            return generic.push(self.op, self.t)
        assert self.t[0] is not None
        return [self.map.mix(self.t[0], back)]

    def push(self) -> Signal:
        """The tangents of u."""
        if self.map is None:
            return generic.push(self.op, self.t)
        if self.s is not None:
            return [self.map.push(self.s)]
        return [self.map.push(*self._by_position())]

    def _by_position(self) -> Signal:
        """The tangents of the arguments that a fast rule knows, None for those that are not active."""
        given = dict(zip((i for i, _ in self.op.active), self.t, strict=True))
        return [given.get(i) for i in range(self.op.arity)]

    @property
    def flat(self) -> bool:
        """Whether u is known to be (piecewise) linear in a: then R{d} needs neither d nor t here."""
        if self.map is not None:
            return self.map.pull is not None and self.map.curve is None
        return not self.op.weights and is_flat(self.op.func)

    def collect(self, gradients: Gradients, mixed: bool = False) -> None:
        """The gradients of p that passes 2 and 3 give: d (x) mix; `mixed`: t is the mix already."""
        if not self.op.weights or all(e is None for e in self.d):
            return
        if mixed:
            assert self.map is not None
            gradients.add_mixed(self.op, self.map, self.d[0], self.s)
            return
        if self.map is not None and self.d[0] is not None:
            if self.op.leaves:
                gradients.add_tapped(self.op, self.map, self.d[0], self.s, self.found)
            else:
                gradients.add_mapped(self.op, self.map, self.d[0], self.s)
            return
        t = self.t if any(s is not None for s in self.t) else None
        back, third, _ = generic.derive(self.op, self.d, t, back=not gradients.joined)
        for (_, weight), b, g in zip(self.op.weights, back, third, strict=True):
            gradients.add(weight, b, g)

    def forget_error(self) -> None:
        self.d, self.found = [None] * len(self.d), []

    def forget_tangent(self) -> None:
        self.t, self.s = [None] * len(self.t), None

    def pull(self, r: Signal, gradients: Gradients, wanted: bool) -> Signal:
        """Exact mode: R{d} of a from R{d} of u; of p the gradients R{d} (x) a, or all where the operation is curved."""
        if self.map is not None and self.map.pull is not None:
            return [self._pull(self.map, r[0], gradients, wanted)]
        if self.map is not None and self.map.bend is not None:
            bent = self.map.bend(r, self.d, self._by_position()) if wanted else [None] * self.op.arity
            return [bent[i] for i, _ in self.op.active]
        back, third, pulled = generic.derive(self.op, self.d, self.t, r, curvature=True, back=not gradients.joined)
        for (_, weight), b, g in zip(self.op.weights, back, third, strict=True):
            gradients.add(weight, b, g)
        return pulled

    def _pull(self, m: Map, r: Tensor | None, gradients: Gradients, wanted: bool) -> Tensor | None:
        if not self.flat:
            self.collect(gradients)
        if r is not None:
            gradients.add_pulled(self.op, m, r)
        if not wanted:
            return None
        pulled = None if r is None or m.pull is None else m.pull(r)
        if m.curve is not None and self.d[0] is not None and self.t[0] is not None:
            curved = m.curve(self.d[0], self.t[0], *self.found)
            pulled = curved if pulled is None else pulled + curved
        return None if pulled is None else pulled.to(self.op.active[0][1].dtype)
