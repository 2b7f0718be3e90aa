"""One recorded call, as the later passes need it: a pure function that can run again, or linearized by its rule."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .._torch_compat import is_traced, no_dispatch_modes
from ..rules.linearity import is_affine, is_piecewise_linear
from ..rules.table import Linearization, Rule, name_of
from .arguments import Shape, tensors_in, unflatten
from .replay import SILENT_WRITES, as_recorded, has_conditions
from .signals import ActivationMeta


@dataclass(slots=True, eq=False)
class Operation:
    """One call `u = op(a; p)`: its flat arguments, and which of them are active (a) or weights (p)."""

    func: Callable[..., Any]
    values: list[Any]  # the arguments; one that a later call writes to is replaced by a copy made before the write
    spec: Shape
    active: list[tuple[int, ActivationMeta]]
    weights: list[tuple[int, Tensor]]
    module: str
    autocast: tuple[str, bool, torch.dtype]
    rng: list[Tensor] | None
    rule: Rule | None
    written: Sequence[int] = ()
    output_indices: list[int] = field(default_factory=list)  # which of the call's results are the outputs u
    outputs: list[ActivationMeta] = field(default_factory=list)
    output: Any = None  # u, for a fast rule, or a list of several; on "meta" if the rule does not read its contents
    error_edges: Sequence[GradientEdge] = ()  # of the outputs, or of a: pass 2's errors d
    leaves: Sequence[tuple[Tensor | None, Tensor]] = ()  # of a tap: weights and their leaves
    saved: Sequence[Tensor] = ()  # of a tap: what its rule may need
    linearization: Linearization | None = None  # once it is known, where it is known before pass 3
    hooked_errors: dict[int, Tensor] = field(default_factory=dict)  # errors as changed by the user's tensor hooks
    base: ActivationMeta | None = None  # the base of the output, where it is a view whose error is that of its base
    pushes: bool = True  # whether a weight downstream, or in exact mode the loss, needs the tangents of the outputs
    last_reads: Sequence[ActivationMeta] = ()  # the arguments that are not read downstream

    @property
    def name(self) -> str:
        return name_of(self.func)

    @property
    def arity(self) -> int:
        return 0 if self.rule is None else self.rule.arity

    @property
    def needs_error(self) -> bool:
        """Whether exact mode needs the errors of the outputs: for weights, and for second derivatives."""
        if self.weights:
            return True
        if self.rule is None:
            return not is_affine(self.func)
        return not (self.rule.flat or (self.rule.bilinear and len(self.active) == 1))

    @property
    def carries_mix(self) -> bool:
        """Whether pass 3 can carry the mix of a and t through this call instead of t."""
        if not self.weights and is_piecewise_linear(self.func, self.values, [i for i, _ in self.active]):
            return True
        linearization = self.linearize()
        return linearization is not None and linearization.mix is not None

    @property
    def has_cheap_products(self) -> bool:
        linearization = None if self.rule is None or self.output is None else self.linearize()
        return linearization is not None and linearization.cheap()

    def free_unread(self) -> None:
        """After the call: frees the activations among the arguments, if the rule reads their shapes alone."""
        if self.rule is None or self.rule.reads != "shapes" or is_traced():  # a graph frees what it does not read
            return
        values, given = self.values, list(self.values)
        for i, _ in self.active:
            if type(given[i]) is Tensor and given[i].dim() > 0:
                given[i] = without_contents(given[i])
        self.values = given
        lin = self.linearize()
        if lin is not None and all(given[i] in lin.add for i, _ in self.weights):  # other products have a as a factor
            self.linearization = lin
        else:
            self.values = values

    def keep_contents(self, i: int) -> None:
        """Before a later call writes to an argument: keeps a copy of its contents."""
        self.values[i] = self.values[i].detach().clone()
        self.linearization = None

    def free_activation(self) -> None:
        """Before pass 2, where pass 3 will carry the mix: frees a, or, of a ReLU's u, all but its sign."""
        if self.output is None or self.rule is None:
            return
        if self.name in ("relu", "relu_"):
            self.output = self.output.ne(0)  # NaN is not
        elif self.rule.reads == "u":
            self.output = self.output.le(0).logical_not_()
        else:
            i, _ = self.active[0]
            self.values[i] = without_contents(self.values[i])

    def call(self, values: list[Any]) -> list[Tensor]:
        """The operation as a pure function of its flat arguments: it gets copies of those that it writes to."""
        values = list(values)
        for i in (*self.written, *SILENT_WRITES.get(self.func, ())):
            values[i] = values[i].clone() if isinstance(values[i], Tensor) else values[i]
        args, kwargs = unflatten(values, self.spec)
        if has_conditions(self.func, self.autocast, self.rng):
            with as_recorded(self.func, self.autocast, self.rng):
                out = self.func(*args, **kwargs)
        else:
            out = self.func(*args, **kwargs)
        results = results_of(out, values, self.written)
        return [results[i] for i in self.output_indices]

    def linearize(self) -> Linearization | None:
        """The call linearized by its fast rule; None where the generic rule is used."""
        if self.linearization is not None:
            return self.linearization
        if self.rule is None or self.output is None:
            return None
        values = self.values
        if torch.is_grad_enabled():  # the passes themselves run without
            values = [v.detach() if isinstance(v, Tensor) and v.requires_grad else v for v in values]
        args, kwargs = unflatten(values, self.spec)
        if self.rule.takes_active:
            kwargs["active"] = [i for i, _ in self.active]
        if self.rule.takes_saved:
            kwargs["saved"] = self.saved
        lin = self.rule.make(self.output, *args, **kwargs)
        if lin is None:
            return None
        for i, _ in self.weights:
            if values[i] not in lin.grad and values[i] not in lin.add:
                return None
        return lin

    def error_at_output(self, d: Tensor | None) -> Tensor | None:
        """The error of the output, from the gradient of its edge, which may be that of its base."""
        if self.base is None or d is None:
            return d
        if self.base.covers_storage and self.outputs[0].covers_storage and self.base.dtype == self.outputs[0].dtype:
            return d.reshape(self.outputs[0].shape)
        buffer = self.base.buffer()
        self.base.view_in(buffer).copy_(d)
        return self.outputs[0].view_in(buffer)


def without_contents(z: Tensor) -> Tensor:
    """A meta tensor with the shape, strides and dtype of z."""
    if type(z) is not Tensor or is_traced():  # a trace has to see where a tensor comes from
        return torch.empty_like(z, device="meta")
    return _meta(z.shape, z.stride(), z.dtype)


@functools.lru_cache(maxsize=4096)
def _meta(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Made once for each key, which is all that such a tensor has. Rules only read it."""
    with no_dispatch_modes():
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def results_of(out: Any, values: list[Any], written: Sequence[int]) -> list[Tensor]:
    """The results of a call: the tensors that it returned, then those that it wrote to."""
    return [*tensors_in(out), *(values[i] for i in written)]
