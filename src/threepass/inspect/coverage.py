"""Which parameter is served by which rule."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_compat import tree_leaves
from ..core.engine import Task, backward, forward, forward_again
from ..core.gradients import Gradients
from ..core.options import Options, check_model, check_x
from ..core.plan import make_plan
from ..errors import Place, UnsupportedError
from ..rules.generic import leaf_tensors_of
from ..tape.operation import Operation
from ..tape.record import Record
from ..tape.state import autograd_enabled, unchanged_on_error


@dataclass(frozen=True)
class Row:
    """One parameter in one operation; rule is "fast", "generic", "unsupported" or "none"."""

    parameter: str
    operation: str
    rule: str
    why: str


@dataclass(frozen=True)
class Coverage:
    """Which operation uses each parameter, and what is not supported.

    Attributes:
        rows: one for every use of a parameter, with `parameter`, `operation`, `rule` ("fast", "generic", "unsupported"
            or "none") and `why`.
        unsupported: the operations that have no third pass, with `module`, `operation`, `reason` and `advice`.
    """

    rows: tuple[Row, ...]
    unsupported: tuple[Place, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        cells = [
            ("parameter", "operation", "rule", "why"),
            *((r.parameter, r.operation, r.rule, r.why) for r in self.rows),
        ]
        widths = [max(len(row[i]) for row in cells) for i in range(3)]
        lines = [
            "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in cells
        ]
        return "\n".join([*lines, *(f"unsupported: {place}" for place in self.unsupported)])


def coverage(model: nn.Module, x: Any, input_at: str | None = None) -> Coverage:
    """Runs the model on x and lists, for every parameter, the operations that use it and their rules.

    Changes nothing: buffers and random state are restored.
    """
    options = Options(input_at=input_at, separate=True)
    check_model(model)
    samples = check_x(x, options)
    with autograd_enabled(), unchanged_on_error(model, always=True):
        tape = Record(next(model.parameters()).device.type, module_paths=True)
        try:
            _, loss = forward(Task(model, _some_loss, x, None), tape, options)
        except UnsupportedError:
            return Coverage(_rows(model, tape, list(tape.operations)), tuple(dict.fromkeys(tape.problems)))
        operations = list(tape.operations)
        tape.prune()
        plan = make_plan(tape, options, samples)
        dx, errors = backward(tape, plan, loss)
        with torch.no_grad():
            forward_again(tape, dx, dx, errors, Gradients(plan, 1.0))
        return Coverage(_rows(model, tape, operations), tuple(dict.fromkeys(tape.problems)))


def _some_loss(output: Any, y: None) -> Tensor:
    floats = [z for z in tree_leaves(output) if isinstance(z, Tensor) and z.is_floating_point()]
    return torch.stack([z.square().mean() for z in floats]).sum()


def _rows(model: nn.Module, tape: Record, operations: list[Operation]) -> tuple[Row, ...]:
    uses: dict[Tensor, list[Row]] = {p: [] for p in model.parameters()}
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    failed = {(place.module, place.operation): place.reason for place in tape.problems}
    for op in operations:
        reason = failed.get((op.module, op.name))
        is_fast = op.linearize() is not None
        for _, weight in op.weights:
            for p in _parameters_of(weight):
                if p in uses:
                    rule = "unsupported" if reason else "fast" if is_fast else "generic"
                    why = reason or (
                        f"rule {op.rule.make.__name__}"
                        if is_fast and op.rule
                        else "double backward of this one operation"
                    )
                    if p is not weight:
                        why += ", then the chain rule"
                    uses[p].append(Row(names[p], op.name, rule, why))
    for source, _, _ in tape.inputs:
        for p in _parameters_of(source) if source.requires_grad else ():
            if p in uses:
                why = "gets backpropagation's gradient, and in exact mode that of the input loss too"
                uses[p].append(Row(names[p], "(upstream of the input)", "generic", why))
    for p, rows in uses.items():
        if not rows:
            why = "no operation that leads to the output uses it" if p.requires_grad else "frozen"
            rows.append(Row(names[p], "-", "none", why))
    return tuple(dict.fromkeys(row for rows in uses.values() for row in rows))


def _parameters_of(weight: Tensor) -> list[Tensor]:
    """The leaves that a weight is computed from."""
    return [weight] if weight.is_leaf else list(leaf_tensors_of(weight))
