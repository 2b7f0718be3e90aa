"""How the gradients of pass 2 and pass 3 are combined: chosen once, after pass 1, and followed by the later passes.

A weight's gradient is back * (d (x) a) + third * (d (x) t). Computed as it stands, that is two products. Both are
linear in the signal, so one product with the mix back * a + third * t gives the same; and in some nets the mix itself
can be propagated, or a backward pass that exact mode runs anyway can carry both terms. `Terms` lists the cases.

One case is chosen later: `samplewise.py` needs the derivative of the loss at the output, which is known after pass 2.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..numerics.precision import error_gain
from ..tape.record import Record
from ..tracing import is_for_compiler
from .options import Options

Scale = float | Tensor


class Operand(Enum):
    """What the error d is multiplied by to give a weight's gradient, or a term of it."""

    A = "a, the activation: the gradient of backpropagation"
    T = "t, its tangent: the gradient of the third pass"
    MIX = "back * a + third * t: both"

    __hash__ = object.__hash__  # that of Enum is written in Python, and operands are keys at every weight


class Case(NamedTuple):
    """A row of the table in `Terms`.

    carried: what pass 3 propagates; None: there is no pass 3.
    products: what d is multiplied by at every weight: pairs of a factor and of the sum that the product with it is
        added to. The three sums, one for each operand, are multiplied by different scales at the end.
    error_freed_first: d is multiplied and freed before the tangent is propagated through the operation, else after.
    needs_signs_only: passes 2 and 3 need of the activations a only the signs of rectified ones; a can be freed.
    backprop_in_last_pass: exact mode's backward pass takes the products of backpropagation too. Pass 3 takes none, and
        starts from third * t_0.
    """

    carried: Operand | None
    products: tuple[tuple[Operand, Operand], ...]
    error_freed_first: bool = False
    needs_signs_only: bool = False
    backprop_in_last_pass: bool = False


class Terms(Enum):
    """How the terms of a weight's gradient are combined.

    BACKPROP_ONLY   no third pass: its weight is zero, or this step skips it.
    SEPARATE        a product for each term: both were asked for, a half-precision dtype would round t away in the mix,
                    or, in a compiled step, a second product costs less than keeping a in memory until pass 3.
    MIXED_PRODUCT   pass 3 carries t; the mix is formed at every weight.
    MIXED_SIGNAL    pass 3 carries the mix m: in a piecewise linear net it obeys one recursion, m -> W m + back * b and
                    then the same gates, so that a is not needed.
    JOINT_BACKWARD  exact mode: pass 3 takes d (x) third * t, and the backward pass that follows carries
                    back * d + third * R{d} and takes its product with a (`exact.py`).
    """

    BACKPROP_ONLY = Case(None, ((Operand.A, Operand.A),))
    SEPARATE = Case(Operand.T, ((Operand.A, Operand.A), (Operand.T, Operand.T)))
    MIXED_PRODUCT = Case(Operand.T, ((Operand.MIX, Operand.MIX),))
    MIXED_SIGNAL = Case(Operand.MIX, ((Operand.MIX, Operand.MIX),), needs_signs_only=True)
    JOINT_BACKWARD = Case(Operand.T, ((Operand.T, Operand.MIX),), error_freed_first=True, backprop_in_last_pass=True)


class MixForm(Enum):
    """How the weights of the two terms enter the mix.

    WEIGHTED    back * a + third * t.
    RELATIVE    a + (third / back) * t, in compiled steps: a is representable as it is, so that in half precision only
                what t adds is rounded. The errors are multiplied by back in pass 2, or, in half precision, which would
                round them, the gradients at the end.
    PER_SAMPLE  t + e_i a, with a number for each sample (`samplewise.py`).
    """

    WEIGHTED = "weighted"
    RELATIVE = "relative"
    PER_SAMPLE = "per sample"


@dataclass(frozen=True)
class Plan:
    """The choices and scales that passes 2 and 3 follow.

    Attributes:
        terms: how the terms of a weight's gradient are combined.
        mix_form: how the weights enter the mix.
        exact: pass 3 is followed by the backward pass of exact mode.
        compiled: the step is being traced; gradients are given in the parameters' own dtypes.
        separate: both terms are results of the step.
        half: the half-precision dtypes that operations ran in.
        frees_activations: activations are freed before pass 2; in a step that is compiled, the compiler decides.
        back: the factor that backpropagation's gradients are multiplied by; 1 if the errors of pass 2 already include
            this weight.
        third: the factor that the third pass's gradients are multiplied by.
        error_unit: the power of two that keeps float16 errors from underflowing; 1 without float16.
        error_scale: the factor that every error is multiplied by: error_unit, times backpropagation's weight if the
            errors include it.
        loss_error: the error of the loss, from which pass 2 starts.
        tangent_scale: t_0 is this times dl/dx.
        sample_weights: the e_i of MixForm.PER_SAMPLE, for the samples along dimension 0.
    """

    terms: Terms
    mix_form: MixForm
    exact: bool
    compiled: bool
    separate: bool
    half: set[torch.dtype]
    frees_activations: bool
    back: Scale
    third: Scale
    error_unit: float
    error_scale: Scale
    loss_error: Scale
    tangent_scale: float
    sample_weights: Tensor | None = None

    @cached_property
    def case(self) -> Case:
        return self.terms.value

    @property
    def has_dense_terms(self) -> bool:
        """Whether terms are added as dense tensors: they are results, or are added in float32."""
        return self.separate or (bool(self.half) and self.mix_form is MixForm.WEIGHTED)


def make_plan(
    tape: Record,
    options: Options,
    samples: int,
    runs_third_pass: bool = True,
    weights: tuple[Tensor, Tensor] | None = None,
) -> Plan:
    """Chooses the plan from the options and the pruned tape.

    samples: the number of samples in x; weights: (back, third) as tensors, in a compiled step.
    """
    terms, form = _combination(tape, options, runs_third_pass, compiled=weights is not None)
    batch = options.part(samples)
    back, third = weights or (options.back, options.third)
    scale: Scale
    scale = unit = error_gain(tape.half, batch)
    if unit != 1 and (max_over_ranks := tape.max_over_ranks()) is not None:
        scale = unit = float(max_over_ranks(torch.tensor(unit, device=tape.device)))
    if form is MixForm.RELATIVE and not tape.half:
        scale, back = scale * back, 1.0
    return Plan(
        terms=terms,
        mix_form=form,
        exact=options.exact and runs_third_pass,
        compiled=weights is not None,
        separate=options.separate,
        half=tape.half,
        frees_activations=terms.value.needs_signs_only and not is_for_compiler(),
        back=back,
        third=third,
        error_unit=unit,
        error_scale=scale,
        loss_error=scale * (samples / batch),  # of the effective batch's mean loss, x has samples / batch
        tangent_scale=options.scale(batch),
    )


def joint_plan(tape: Record, compiled: bool) -> Plan:
    """The plan of a loss on the input gradient: a joint backward pass, in which both terms have the weight 1."""
    return Plan(
        terms=Terms.JOINT_BACKWARD,
        mix_form=MixForm.WEIGHTED,
        exact=True,
        compiled=compiled,
        separate=False,
        half=tape.half,
        frees_activations=False,
        back=1.0,
        third=1.0,
        error_unit=1.0,
        error_scale=1.0,
        loss_error=1.0,
        tangent_scale=1.0,
    )


def _combination(tape: Record, options: Options, runs_third_pass: bool, compiled: bool) -> tuple[Terms, MixForm]:
    """How the terms are combined, and in which form a mix is computed where there is one."""
    relative = compiled and options.back != 0 and not options.separate
    form = MixForm.RELATIVE if relative else MixForm.WEIGHTED
    if not runs_third_pass:
        return Terms.BACKPROP_ONLY, form
    if options.separate:
        return Terms.SEPARATE, MixForm.WEIGHTED
    if tape.half:  # these dtypes would round R{d} away beside d, and t away in a weighted mix
        is_mixed = relative and is_for_compiler() and (options.exact or not tape.has_cheap_products())
        return (Terms.MIXED_PRODUCT, form) if is_mixed else (Terms.SEPARATE, MixForm.WEIGHTED)
    if options.exact:
        return Terms.JOINT_BACKWARD, MixForm.WEIGHTED
    return (Terms.MIXED_SIGNAL if tape.carries_mix() else Terms.MIXED_PRODUCT), form
