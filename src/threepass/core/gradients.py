"""The weights' gradients: pass 2's and pass 3's, mixed in one product or kept apart, and on to the parameters."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from ..numerics.packed import together
from ..numerics.precision import accumulate_dtype, kept_op, mix_op, round_op
from ..rules.table import Map
from ..tape.operation import Operation

Scale = float | Tensor
Terms = dict[int, tuple[Tensor, Tensor]]  # id of a weight -> the weight, its gradient
Named = dict[str, Tensor]


@dataclass
class Gradients:
    """Collects r.grads = back * (pass 2's) + third * (pass 3's) over operations and tied weights.

    A weight takes one product d (x) mix, or, with `apart`, a product for each pass, because the terms were asked for,
    because the mix would lose t to rounding, or because a second product costs less than the memory of the mix.
    `joined`: exact mode's way back carries both terms (`exact.py`), and pass 2's own gradients are left to it.
    `unscale`: what pass 2's and pass 3's terms are to be multiplied by, where they were computed at a scale of their
    own (low precision).
    """

    back: Scale
    third: Scale
    apart: bool
    relative: bool = False  # the mix is a + (third / back) t, and its products are multiplied by back
    compiled: bool = False  # in a step that is compiled: in the parameters' own formats, rounded at random
    joined: bool = False
    unscale: tuple[Scale, Scale] = (1.0, 1.0)
    seed: Tensor | None = None  # of random rounding, in a step that is compiled
    mixed: Terms = field(default_factory=dict)
    passes: tuple[Terms, Terms] = field(default_factory=lambda: ({}, {}))

    @cached_property
    def _ratio(self) -> Scale:
        return (self.third * self.unscale[1]) / (self.back * self.unscale[0])

    @cached_property
    def _kept_ratio(self) -> Tensor:
        assert isinstance(self._ratio, Tensor)
        return kept_op(self._ratio)

    def add_mapped(self, op: Operation, m: Map, d: Tensor, s: Tensor | None) -> None:
        """A fast rule's products: of the error d with the signal and with its tangent s."""
        if self.joined:
            for i, weight in op.weights if s is not None else ():
                if op.values[i] in m.grad:
                    self.add(weight, None, m.grad[op.values[i]](d, s))
            return
        mix = None if self.apart or s is None else self._mix(m.signal, s)
        for i, weight in op.weights:
            value = op.values[i]
            if value in m.add:
                self.add(weight, m.add[value](d), None)
            elif mix is not None:
                _accumulate(self.mixed, weight, m.grad[value](d, mix))
            else:
                self.add(weight, m.grad[value](d, m.signal), None if s is None else m.grad[value](d, s))

    def add_mixed(self, op: Operation, m: Map, d: Tensor | None, mix: Tensor | None) -> None:
        """A fast rule's product, of the error d with the mix that pass 3 carried."""
        assert d is not None
        assert mix is not None
        for i, weight in op.weights:
            value = op.values[i]
            if value in m.add:
                self.add(weight, m.add[value](d), None)
            else:
                _accumulate(self.mixed, weight, m.grad[value](d, mix))

    def add_tapped(self, op: Operation, m: Map, d: Tensor, s: Tensor | None, found: list[Tensor | None]) -> None:
        """Behind a tap: the gradients that pass 2 found, and pass 3's from d, the error of a."""
        for i, weight in op.weights:
            value = op.values[i]
            back = next(g for (given, _), g in zip(op.leaves, found, strict=True) if given is value)
            self.add(weight, back, m.third[value](d, s) if value in m.third and s is not None else None)

    def add_pulled(self, op: Operation, m: Map, r: Tensor) -> None:
        """Exact mode's own products, of R{d} with the signal."""
        for i, weight in op.weights:
            value = op.values[i]
            _accumulate(self.passes[1], weight, m.add[value](r) if value in m.add else m.grad[value](r, m.signal))

    def add(self, weight: Tensor, back: Tensor | None, third: Tensor | None) -> None:
        if self.joined:
            _accumulate(self.mixed, weight, third)
            return
        _accumulate(self.passes[0], weight, back)
        _accumulate(self.passes[1], weight, third)

    def mix(self, a: Tensor, t: Tensor) -> Tensor:
        """back * a + third * t, or in a `relative` step that over back."""
        if self.relative:
            return a + self._ratio * t
        if isinstance(self.back, Tensor) or isinstance(self.third, Tensor):
            return self.back * a + self.third * t
        if self.back + self.third == 1:
            return torch.lerp(t, a, self.back)
        return torch.add(a * self.back if self.back != 1 else a, t, alpha=self.third)

    def _mix(self, a: Tensor | None, t: Tensor) -> Tensor:
        assert a is not None  # a tangent of the signal comes with the signal
        return mix_op(a, t, self._kept_ratio, self.seed) if self.relative else self.mix(a, t)

    def _scales(self) -> tuple[Scale, Scale, Scale]:
        """What `mixed` and the passes' own terms are multiplied by."""
        back, third = self.back * self.unscale[0], self.third * self.unscale[1]
        return back if self.relative else 1.0, back, third

    def left_out(self, model: nn.Module) -> int:
        """How many leaves took part that are no parameters of the model."""
        own = {id(p) for p in model.parameters()}
        terms = {**self.mixed, **self.passes[0], **self.passes[1]}
        return sum(weight.is_leaf and key not in own for key, (weight, _) in terms.items())

    def finish(self, model: nn.Module) -> tuple[Named, Named | None, Named | None]:
        """r.grads, and the two passes' own gradients where they were kept apart, by parameter name."""
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        terms = [_by_name(parameters, each, dense=self.apart) for each in (self.mixed, *self.passes)]
        grads = self._sums(parameters, terms, self._scales(), own_format=self.compiled)
        if not self.apart:
            return grads, None, None
        back, third = (
            {n: g[n] if n in g else torch.zeros_like(grads[n], dtype=accumulate_dtype(grads[n].dtype)) for n in grads}
            for g in (self._sums(parameters, [z], [s]) for z, s in zip(terms[1:], self.unscale, strict=True))
        )
        return grads, back, third

    def _sums(
        self,
        parameters: dict[str, nn.Parameter],
        terms: Sequence[Named],
        scales: Sequence[Scale],
        own_format: bool = False,
    ) -> Named:
        """The terms' sums, each times its scale, of all parameters that have any: those with the same kinds of terms,
        and of the same format, together."""
        groups: dict[tuple[tuple[int, ...], torch.dtype], list[str]] = {}
        for name, p in parameters.items():
            if kinds := tuple(i for i, each in enumerate(terms) if name in each):
                groups.setdefault((kinds, p.dtype if own_format else accumulate_dtype(p.dtype)), []).append(name)
        sums: Named = {}
        for (kinds, dtype), names in groups.items():
            total = partial(_total, [scales[i] for i in kinds], dtype, self.seed)
            columns = [[terms[i][name] for name in names] for i in kinds]
            alone = not self.compiled or (len(kinds) == 1 and _is_one(scales[kinds[0]]))
            sums |= zip(names, (map if alone else together)(total, *columns), strict=True)
        return {name: sums[name] for name in parameters if name in sums}


def _total(scales: Sequence[Scale], dtype: torch.dtype, seed: Tensor | None, *terms: Tensor) -> Tensor:
    total: Tensor | None = None
    for scale, g in zip(scales, terms, strict=True):
        if not _is_one(scale):
            g = g.to(accumulate_dtype(g.dtype)) * scale
        total = g.to(accumulate_dtype(dtype)) if total is None else total + g
    assert total is not None
    return total if total.dtype == dtype else round_op(total, dtype, seed)


def _is_one(scale: Scale) -> bool:
    return isinstance(scale, float) and scale == 1


def _accumulate(terms: Terms, weight: Tensor, g: Tensor | None) -> None:
    if g is None:
        return
    if id(weight) in terms:
        exact = accumulate_dtype(weight.dtype)
        g = terms[id(weight)][1].to(exact) + g.to(exact)
    terms[id(weight)] = (weight, g)


def _by_name(parameters: dict[str, nn.Parameter], terms: Terms, dense: bool) -> Named:
    """The gradients of the parameters; those of computed weights run on to them by the chain rule."""
    names = {id(p): name for name, p in parameters.items()}
    grads = {names[key]: g for key, (_, g) in terms.items() if key in names}
    computed = [(weight, g.to(weight.dtype)) for weight, g in terms.values() if not weight.is_leaf]
    if computed:
        weights, errors = zip(*computed, strict=True)
        wanted = list(parameters.values())
        with _hooks_off(wanted):
            chained = torch.autograd.grad(weights, wanted, errors, retain_graph=True, allow_unused=True)
        for name, g in zip(parameters, chained, strict=True):
            if g is not None:
                g = g.to(accumulate_dtype(g.dtype))
                grads[name] = grads[name] + g if name in grads else g
    return {name: g.to_dense() if dense and g.is_sparse else g for name, g in grads.items()}


@contextlib.contextmanager
def _hooks_off(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Parameters' hooks are for what goes into `p.grad`, not for the chain rule on the way there."""
    hooked = [(p._backward_hooks, dict(p._backward_hooks)) for p in parameters if p._backward_hooks]
    for hooks, _ in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in hooked:
            hooks.update(kept)
