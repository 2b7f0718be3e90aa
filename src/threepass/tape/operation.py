"""One call of the tape, as pass 3 needs it: run again as a pure function, or passed through by its fast rule."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..rules.linearity import is_flat, is_homogeneous
from ..rules.table import Map, Rule, name_of
from .arguments import Shape, tensors_in, unflatten
from .replay import SILENT_WRITES, as_recorded
from .signals import Spot


@dataclass(slots=True, eq=False)
class Operation:
    """One call `u = op(a; p)`: its flat arguments, and which of them are active (a) or weights (p)."""

    func: Callable[..., Any]
    values: list[Any]  # the arguments; one that a later call writes to is replaced by a copy of what it was
    spec: Shape
    active: list[tuple[int, Spot]]
    weights: list[tuple[int, Tensor]]
    module: str
    autocast: tuple[str, bool, torch.dtype]
    rng: list[Tensor] | None
    rule: Rule | None
    written: list[int] = field(default_factory=list)
    picks: list[int] = field(default_factory=list)  # which of the call's results are the outputs u
    outputs: list[Spot] = field(default_factory=list)
    output: Tensor | None = None  # u, for a fast rule; its contents, if the rule reads them
    edges: list[GradientEdge] = field(default_factory=list)  # where pass 2 finds the error d of each output, or of a
    leaves: list[tuple[Tensor | None, Tensor]] = field(default_factory=list)  # behind a tap: weights and their leaves
    bent: dict[int, Tensor] = field(default_factory=dict)  # errors that hooks of the user's changed
    base: Spot | None = None  # of whom the output is a part, where the call writes through a view
    pushes: bool = True  # whether a weight downstream, or in exact mode the loss, needs the tangents of the outputs
    last_reads: list[Spot] = field(default_factory=list)  # the active tensors that no operation downstream reads

    @property
    def name(self) -> str:
        return name_of(self.func)

    @property
    def arity(self) -> int:
        return 0 if self.rule is None else self.rule.arity

    @property
    def needs_error(self) -> bool:
        """Whether exact mode needs d of the output: for weights, and for the curvature."""
        flat = is_flat(self.func) if self.rule is None else self.rule.flat
        return bool(self.weights) or not flat

    @property
    def carries_mix(self) -> bool:
        """Whether pass 3 can carry the mix of a and t through this call instead of t."""
        if self.rule is None or self.output is None:
            return not self.weights and is_homogeneous(self.func, self.values, [i for i, _ in self.active])
        made = self.map()
        return made is not None and made.mix is not None

    @property
    def has_cheap_products(self) -> bool:
        made = None if self.rule is None or self.output is None else self.map()
        return made is not None and made.cheap()

    def keep_gates(self) -> None:
        """Before pass 2, where pass 3 will carry the mix: lets go of a, and of a rectifier's u all but its sign."""
        if self.output is None or self.rule is None:
            return
        if self.rule.reads == "u":
            self.output = self.output.le(0).logical_not_()
        else:
            i, _ = self.active[0]
            self.values[i] = torch.empty_like(self.values[i], device="meta")

    def call(self, values: list[Any]) -> list[Tensor]:
        """The operation as a pure function of its flat arguments: what it writes to, it gets a copy of."""
        values = list(values)
        for i in (*self.written, *SILENT_WRITES.get(self.func, ())):
            values[i] = values[i].clone() if isinstance(values[i], Tensor) else values[i]
        args, kwargs = unflatten(values, self.spec)
        with as_recorded(self.func, self.autocast, self.rng):
            out = self.func(*args, **kwargs)
        results = results_of(out, values, self.written)
        return [results[i] for i in self.picks]

    def map(self) -> Map | None:
        """The fast rule's map for this call; None where the generic rule serves."""
        if self.rule is None or self.output is None:
            return None
        values = list(self.values)
        for i, _ in self.active:
            values[i] = values[i].detach()
        args, kwargs = unflatten(values, self.spec)
        made = self.rule.make(self.output, *args, **kwargs)
        knows = made is not None and all(values[i] in made.grad or values[i] in made.add for i, _ in self.weights)
        return made if knows else None

    def error_at_output(self, d: Tensor | None) -> Tensor | None:
        """The output's part of the error that pass 2 found at its edge."""
        if self.base is None or d is None:
            return d
        if self.base.is_whole and self.outputs[0].is_whole and self.base.dtype == self.outputs[0].dtype:
            return d.reshape(self.outputs[0].shape)
        buffer = self.base.buffer()
        self.base.window(buffer).copy_(d)
        return self.outputs[0].window(buffer)


def results_of(out: Any, values: list[Any], written: list[int]) -> list[Tensor]:
    """The tensors that a call leaves behind: what it returns, then what it wrote to."""
    return [*tensors_in(out), *(values[i] for i in written)]
