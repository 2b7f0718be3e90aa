"""The table of fast rules.

A rule linearizes one operation `u = op(a; p)` at the values of pass 1. It is a function of the output and of the call's
own arguments that returns a `Linearization`, or None where it does not apply to this call:

    @rule(torch.nn.functional.linear)
    def linear(u, a, weight, bias=None):
        return Linearization(signal=a, push=lambda s: s @ weight.mT, ...)

Operations without a rule use the generic one (`generic.py`), which is right for every operation that PyTorch can
differentiate twice. A rule exists because a benchmark showed that it is faster.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .linearity import is_affine
from .names import IN_C, is_user_defined, key_of, name_of
from .registration import check_operations, check_options, check_parameters

__all__ = [
    "IN_C",
    "Linearization",
    "Rule",
    "Signal",
    "Tap",
    "has_symbolic_shape",
    "is_user_defined",
    "key_of",
    "name_of",
    "registered",
    "rule",
    "rule_for",
    "times",
    "to_dtype_of",
]

Signal = list[Tensor | None]


def _never() -> bool:
    return False


def _same(t: Tensor) -> Tensor:
    return t


@dataclass(slots=True, eq=False)
class Linearization:
    """The derivatives of an operation u = op(a; p) at the values of pass 1.

    The operation is seen as two functions: a -> signal, then signal -> u, which is linear in the signal and in the
    weights, apart from additive weights.

    Attributes:
        push: s -> the tangent of u (the Jacobian-vector product), from the tangent s of the signal; of an operation
            with several results, all their tangents.
        signal: what the weights multiply: a itself, or the normalised a of a norm.
        tangent: t -> the tangent s of the signal, from the tangent t of a.
        pull: R{d} of u -> its contribution to R{d} of a (the vector-Jacobian product).
        curve: (d, t) -> the contribution of the second derivative to R{d} of a; a `pull` without it means that the
            second derivative is zero.
        bend: for an operation without weights, (r, d, t) -> R{d} of the arguments, second derivatives included. r and d
            are R{d} and d of the outputs; t and the result are by position, as for push, with None where an argument
            does not depend on the input.
        grad: for each weight, (d, s) -> its gradient, linear in both.
        add: for each additive weight, d -> its gradient; pass 3 adds nothing to it.
        third: with a tap, where d is the error of a: for each weight but additive ones, (d, s) -> pass 3's gradient.
        mix: (m, back) -> the mix of u from m, the mix back * a + third * t of a. Given only where u = J a + b with the
            same J for a and t, so that pass 3 can carry m alone: m -> J m + back * b.
        cheap: () -> whether a compiled step has its own kernels for `grad`, so that a second product costs little.
    """

    push: Callable[..., Any]
    signal: Tensor | None = None
    tangent: Callable[[Tensor], Tensor] = _same
    pull: Callable[[Tensor], Tensor] | None = None
    curve: Callable[..., Tensor] | None = None
    bend: Callable[[Signal, Signal, Signal], Signal] | None = None
    grad: dict[Tensor, Callable[[Tensor, Any], Tensor]] = field(default_factory=dict)
    add: dict[Tensor, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    third: dict[Tensor, Callable[[Tensor, Any], Tensor]] = field(default_factory=dict)
    mix: Callable[[Tensor, float | Tensor], Tensor] | None = None
    cheap: Callable[[], bool] = _never


@dataclass(frozen=True, slots=True, eq=False)
class Tap:
    """A call that pass 1 ran so that pass 2 gives the error of its input and the gradients of its weights.

    output  u
    input   an alias of a that only this operation reads, so that its gradient is this operation's error of a
    leaves  pairs of a weight, as the call got it, and the leaf that was used in its place
    saved   what the rule may need of the call's own results, such as statistics
    """

    output: Tensor
    input: Tensor
    leaves: list[tuple[Tensor | None, Tensor]]
    saved: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """A registered rule, with the arguments of `rule`."""

    make: Callable[..., Linearization | None]
    arity: int
    reads: str
    flat: bool
    tap: Callable[..., Tap | None] | None
    bilinear: bool
    names: frozenset[str]  # of its arguments; calls with other keywords use the generic rule
    several: bool
    takes_active: bool
    takes_saved: bool


Make = Callable[..., Linearization | None]

_RULES: dict[Any, Rule] = {}


def rule(
    *functions: Any,
    arity: int = 1,
    reads: str = "a",
    flat: bool = False,
    tap: Callable[..., Tap | None] | None = None,
    bilinear: bool = False,
    several: bool = False,
) -> Callable[[Make], Make]:
    """Registers a rule for torch functions, custom ops (`torch.ops.lib.name`) or `autograd.Function` classes.

    Args:
        functions: the operations that the rule is for.
        arity: how many of the first arguments may depend on the input; if others do, the generic rule is used.
        reads: what of the arguments that depend on the input is kept until the rule is used. "a": their contents; of u
            the rule reads only shape and dtype. "u": the contents of u, and of the first argument only shape and dtype
            (the mask of a ReLU can be read from either); such a rule must accept every call. "shapes": of u and the
            arguments only shape and dtype. These arguments are then tensors on the device "meta", unless they have no
            dimensions; the rule is asked as soon as the call was made, and may return None for a call of which it
            needs more.
        flat: the operation is affine, or piecewise affine, in all active arguments together: its second derivative is
            zero. The rule returns a `pull` without a `curve`, or a `bend` that uses neither d nor t, and exact mode
            does not keep the output's error. Not needed for torch operations listed in `linearity.py`.
        tap: runs the call in pass 1 in place of the function, or returns None. The error d in the `Linearization` is
            then that of a, and pass 2 computes the weights' gradients; `curve` gets them after d and t. The rule must
            accept every call that its tap has run.
        bilinear: promises that calls in which only one argument depends on the input get a `pull` and no `curve`, so
            that exact mode need not keep the output's error.
        several: the operation returns several tensors, and u is the list of them; the rule is for operations without
            weights, and every result of it has a `bend`.

    A rule with a keyword-only parameter `active` gets the positions of the arguments that depend on the input, and one
    with `saved` what its tap has saved.
    """
    check_options(arity, reads)
    check_operations(functions)

    def register(make: Make) -> Make:
        names = frozenset(inspect.signature(make).parameters)
        given = names & {"active", "saved"}
        takes_active, takes_saved = "active" in given, "saved" in given
        for function in functions:
            check_parameters(make, function)
            is_flat = flat or (is_affine(function) and not is_user_defined(function))
            _RULES[key_of(function)] = Rule(
                make, arity, reads, is_flat, tap, bilinear, names - given, several, takes_active, takes_saved
            )
        return make

    return register


def registered() -> dict[Any, Rule]:
    """The operations that have a fast rule, and their rules."""
    return dict(_RULES)


def rule_for(func: Callable[..., Any]) -> Rule | None:
    return _RULES.get(func) or _RULES.get(key_of(func))


def has_symbolic_shape(z: Tensor) -> bool:
    """Whether a trace with dynamic shapes is at work on this tensor."""
    return any(isinstance(size, torch.SymInt) for size in z.shape)


def to_dtype_of(argument: Tensor, error: Tensor) -> Tensor:
    """An argument's error in its dtype; of a number, on its device too: it may be on the CPU beside CUDA tensors."""
    return error.to(argument) if argument.dim() == 0 else error.to(argument.dtype)


def times(factor: float, z: Tensor) -> Tensor:
    """factor z, without an operation where the factor is 1."""
    return z if factor == 1 else z * factor
