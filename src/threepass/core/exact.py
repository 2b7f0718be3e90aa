"""Exact mode: the true gradient of the input loss, by one more backward pass.

With R{.} the derivative along t_0 (Pearlmutter's R-operator), pass 3 is R{a} = t, and the gradient of l_x is

    d (x) R{a} + R{d} (x) a.

R{d} runs back along the tape as an error does. It starts as zero behind the loss, and every operation that is curved in
a (the loss itself, smooth activations, norms) adds a term of its own:

    R{d_a} = J_aᵀ R{d_u} + d/da < d_u , J_a op(a; p) t >.

Both terms at once: t starts as third * t_0, and R{d} as back * dl/dl in place of zero. Then it is back * d + third *
R{d} everywhere, and d (x) t + R{d} (x) a is the mixed gradient: no mix is made, and no product of pass 2's own. Half
formats would round R{d} away beside d, and take the terms one by one.

A convolution takes six units: forward, error, tangent, R{d}, and two products for its weight.
"""

from collections.abc import Sequence

from torch import Tensor

from ..tape.record import Record
from ..tape.signals import Spot
from .gradients import Gradients
from .visit import Visit


def pull(tape: Record, visits: list[Visit], gradients: Gradients, starts: Sequence[tuple[Spot, Tensor]] = ()) -> None:
    """Runs R{d} back through pass 3's visits, and collects what it adds to the gradients; uses the visits up.

    starts: where R{d} is not zero to begin with, and what it is there.
    """
    signals = tape.signals()
    for z, e in starts:
        signals.add(z, e)
    while visits:
        visit = visits.pop()
        with tape.explaining(visit.op):
            r = [signals.take(u) for u in visit.op.outputs]
            if all(e is None for e in (*visit.d, *r)):
                continue
            wanted = any(tape.wants(z) for _, z in visit.op.active)
            for (_, z), s in zip(visit.op.active, visit.pull(r, gradients, wanted), strict=True):
                if s is not None:
                    signals.add(z, s)
    for source, _, z in tape.inputs:
        if source.requires_grad:
            gradients.add(source, None, signals.get(z))
