"""Exact mode: the true gradient of the input loss, by one more backward pass.

With R{.} the derivative along t_0 (Pearlmutter's R-operator), pass 3 computes R{a} = t, and the gradient of l_x is

    d (x) R{a} + R{d} (x) a.

R{d} is propagated backward along the tape like an error. It is zero at the loss, and every operation that is nonlinear
in a (the loss itself, smooth activations, norms) adds a term of its own:

    R{d_a} = J_aᵀ R{d_u} + d/da < d_u , J_a op(a; p) t >.

Both terms at once (`Terms.JOINT_BACKWARD`): pass 3 starts from third * t_0, and the backward pass from back * dl/dl in
place of zero. It then carries back * d + third * R{d}, and d (x) t + R{d} (x) a is the gradient with both weights, with
no mix to form and no product for backpropagation alone.

A convolution takes six units: forward, error, tangent, R{d}, and two products for its weight.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ..tape.operation import Operation
from ..tape.record import Record
from ..tape.signals import ActivationMeta
from .gradients import Gradients


class Propagated(Protocol):
    """What pass 3 keeps of an operation for this backward pass (`propagation.py`)."""

    @property
    def op(self) -> Operation: ...
    @property
    def curves(self) -> bool:
        """Whether it adds to R{d} of its arguments where that of its outputs is zero."""

    def pull(self, r: list[Tensor | None], gradients: Gradients, wanted: bool) -> list[Tensor | None]:
        """R{d} of the active arguments from r, that of the outputs, if it is wanted; adds products to the gradients."""


def backward_again(
    tape: Record, steps: list[Propagated], start: Sequence[tuple[ActivationMeta, Tensor]], gradients: Gradients
) -> list[Tensor | None]:
    """Propagates R{d} backward and adds its products to the gradients; returns R{d} of the inputs.

    steps: what pass 3 returned for each operation; they are consumed.

    start: the tensors where R{d} starts, with what is added to it there; it is zero everywhere else downstream.
    """
    signals = tape.signals()
    for z, value in start:
        signals.add(z, value)
    while steps:
        step = steps.pop()
        try:
            r = [signals.take(u) for u in step.op.outputs]
            if not step.curves and all(s is None for s in r):
                continue
            wanted = any(tape.needs_error(z) for _, z in step.op.active)
            for (_, z), s in zip(step.op.active, step.pull(r, gradients, wanted), strict=True):
                if s is not None:
                    signals.add(z, s)
        except Exception as error:
            tape.record_error(step.op, error)
    for source, _, z in tape.inputs:
        if source.requires_grad:
            gradients.add(source, None, signals.get(z))
    return [signals.get(z) for _, _, z in tape.inputs]
