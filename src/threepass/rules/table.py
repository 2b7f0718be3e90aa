"""The table of fast rules.

A rule says how signals pass one operation `u = op(a; p)`, once pass 1 has fixed its arguments. It is a function of the
output and of the call's own arguments that returns a `Map`, or None where it does not apply to this call:

    @rule(torch.nn.functional.linear)
    def linear(u, a, weight, bias=None):
        return Map(signal=a, push=lambda s: s @ weight.mT, ...)

An operation without a rule goes through the generic one (`generic.py`), which is right for every operation that PyTorch
can differentiate twice. A rule exists because a benchmark showed that it pays.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import OpOverload, OpOverloadPacket, overload_of

Signal = list[Tensor | None]


def _never() -> bool:
    return False


def _same(t: Tensor) -> Tensor:
    return t


@dataclass(frozen=True, slots=True, eq=False)
class Map:
    """An operation at pass 1's values: a signal map, then a map that is linear in the signal and in the weights.

    Attributes:
        push: s -> the tangent of u.
        signal: what the weights multiply: a itself, or the normalised a of a norm.
        tangent: t -> the tangent s of the signal.
        pull: R{d} of u -> what it adds to R{d} of a.
        curve: (d, t) -> what the curvature adds to R{d} of a; a `pull` without it means that there is none.
        bend: for an operation without weights, (r, d, t) -> R{d} of the arguments, curvature included. r and d are R{d}
            and d of the outputs; t and the result go by position, as for push, with None where there is no signal.
        grad: for each weight, (d, s) -> its gradient, linear in both.
        add: for each additive weight, d -> its gradient; pass 3 adds nothing to it.
        third: with a tap, where d is the error of a: for each weight but additive ones, (d, s) -> pass 3's gradient.
        mix: (m, back) -> the mix of u from m, the mix back * a + third * t of a. Given only where u = J a + b, with J
            the same for a and t, so that pass 3 can carry m alone: m -> J m + back * b.
        cheap: () -> whether a compiled step has kernels of ours for `grad`, so that a second product costs little.
    """

    push: Callable[..., Tensor]
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
    """A call as pass 1 ran it where pass 2 is to find the error of a and the weights' gradients.

    output  u
    input   the alias of a that the operation, and it alone, has read: its error is the error of a
    leaves  pairs of a weight, as the call gives it, and the leaf that stood for it
    """

    output: Tensor
    input: Tensor
    leaves: list[tuple[Tensor | None, Tensor]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A registered rule; `reads` says whose contents it needs, the arguments' ("a") or the output's ("u")."""

    make: Callable[..., Map | None]
    arity: int
    reads: str
    flat: bool
    tap: Callable[..., Tap | None] | None
    names: frozenset[str]  # of its arguments; a call by other keywords is not for it


Make = Callable[..., Map | None]

_RULES: dict[Any, Rule] = {}


def rule(
    *functions: Any,
    arity: int = 1,
    reads: str = "a",
    flat: bool = False,
    tap: Callable[..., Tap | None] | None = None,
) -> Callable[[Make], Make]:
    """Registers a rule for torch functions, custom ops (`torch.ops.lib.name`) or `autograd.Function` classes.

    Args:
        functions: what the rule is for.
        arity: how many of the first arguments may depend on the input; the generic rule takes calls where others do.
        reads: "a": the rule reads its arguments, and of u only shape and dtype; "u": it reads u, and of the first
            argument only shape and dtype (the mask of a ReLU can be read from either). A rule with "u" must accept
            every call.
        flat: every map of this rule has a `pull` and no `curve`, or a `bend` that reads neither d nor t, so that exact
            mode need not keep the output's error.
        tap: runs the call in pass 1 in place of the function, or returns None. The error d of the map is then that of
            a, and pass 2 computes the weights' gradients; `curve` gets them after d and t. The rule must accept every
            call that its tap has run.
    """

    def register(make: Make) -> Make:
        names = frozenset(inspect.signature(make).parameters)
        for function in functions:
            _RULES[key_of(function)] = Rule(make, arity, reads, flat, tap, names)
        return make

    return register


def rule_for(func: Callable[..., Any]) -> Rule | None:
    return _RULES.get(key_of(func))


def key_of(func: Any) -> Any:
    """What an operation is registered under: the Function class behind its `apply`, the packet of an overload."""
    if isinstance(func, OpOverload):
        return func.overloadpacket
    if isinstance(func, torch.library.CustomOpDef):
        return overload_of(func).overloadpacket
    owner = getattr(func, "__self__", None)
    return owner if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) else func


def name_of(func: Any) -> str:
    """The operation's name as a user would say it."""
    key = key_of(func)
    if isinstance(key, OpOverloadPacket):
        return str(key)
    name = getattr(key, "__name__", str(key))
    owner = getattr(key, "__self__", None)
    return f"Tensor.{owner.__name__}" if name == "__get__" and owner is not None else name


def is_users(func: Any) -> bool:
    """Whether an operation is somebody's own: an `autograd.Function` or a custom op."""
    key = key_of(func)
    return isinstance(key, type) or (isinstance(key, OpOverloadPacket) and not str(key).startswith("aten."))
