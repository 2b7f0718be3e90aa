"""An operation in pass 3, with all that the passes have brought to it: d from behind, t from before."""

from torch import Tensor

from .gradients import Gradients
from .rules import generic
from .tape import Operation

Signal = list[Tensor | None]


class Visit:
    """u = op(a; p) with d, the errors of u, and t, the tangents of a: by its fast rule, or by the generic one."""

    def __init__(self, op: Operation, d: Signal, t: Signal):
        self.op, self.d, self.t = op, d, t
        self.map = op.map()
        self.s = self.map.tangent(t[0]) if self.map and self.map.signal is not None and t[0] is not None else None

    def push(self) -> Signal:
        """The tangents of u."""
        if self.map is None:
            return generic.push(self.op, self.t)
        if self.s is not None:
            return [self.map.push(self.s)]
        by_position = dict(zip((i for i, _ in self.op.active), self.t, strict=True))
        return [self.map.push(*(by_position.get(i) for i in range(self.op.arity)))]

    def collect(self, gradients: Gradients, r: Signal | None = None) -> None:
        """The gradients of p: d (x) mix, and for exact mode R{d} (x) a."""
        if not self.op.weights or all(e is None for e in self.d):
            return
        if self.map is not None and self.d[0] is not None:
            gradients.add_mapped(self.op, self.map, self.d[0], self.s, None if r is None else r[0])
            return
        t = self.t if any(s is not None for s in self.t) else None
        back, third, _ = generic.derive(self.op, self.d, t, r)
        for (_, weight), b, g in zip(self.op.weights, back, third, strict=True):
            gradients.add(weight, b, g)

    def pull(self, r: Signal, gradients: Gradients, wanted: bool) -> Signal:
        """Exact mode: R{d} of a from R{d} of u, and the gradients of p on the way."""
        if self.map is not None and self.map.pull is not None:
            self.collect(gradients, r)
            return [self.map.pull(r[0]) if wanted and r[0] is not None else None]
        back, third, pulled = generic.derive(self.op, self.d, self.t, r, curvature=True)
        for (_, weight), b, g in zip(self.op.weights, back, third, strict=True):
            gradients.add(weight, b, g)
        return pulled
