"""The weights' gradients: pass 2's and pass 3's, mixed in one product or kept apart, and on to the parameters."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .operation import Operation
from .options import Options
from .precision import accumulate_dtype
from .rules.table import Map

Terms = dict[int, tuple[Tensor, Tensor]]  # id of a weight -> the weight, its gradient


@dataclass
class Gradients:
    """Collects r.grads = back * (pass 2's) + third * (pass 3's) over operations and tied weights.

    Together (full precision): one product d (x) mix a weight. Apart (`split`): a product each, because the terms were
    asked for, or because the mix would lose t to rounding; they are then to be multiplied by `unscale`.
    """

    options: Options
    split: bool
    unscale: tuple[float | Tensor, float | Tensor] = (1.0, 1.0)
    mixed: Terms = field(default_factory=dict)
    back: Terms = field(default_factory=dict)
    third: Terms = field(default_factory=dict)

    def add_mapped(self, op: Operation, m: Map, d: Tensor, s: Tensor | None) -> None:
        """A fast rule's products: of the error d with the signal and with its tangent s."""
        mix = None if self.split or s is None else self._mix(m.signal, s)
        for i, weight in op.weights:
            value = op.values[i]
            if value in m.add:
                self.add(weight, m.add[value](d), None)
            elif mix is not None:
                _accumulate(self.mixed, weight, m.grad[value](d, mix))
            else:
                self.add(weight, m.grad[value](d, m.signal), None if s is None else m.grad[value](d, s))

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
            self.add(weight, None, m.add[value](r) if value in m.add else m.grad[value](r, m.signal))

    def add(self, weight: Tensor, back: Tensor | None, third: Tensor | None) -> None:
        if self.split:
            _accumulate(self.back, weight, back)
            _accumulate(self.third, weight, third)
        else:
            _accumulate(self.mixed, weight, back, self.options.back)
            _accumulate(self.mixed, weight, third, self.options.third)

    def _mix(self, a: Tensor | None, t: Tensor) -> Tensor:
        assert a is not None  # a tangent of the signal comes with the signal
        if self.options.strength is not None:
            return torch.add(a, t, alpha=self.options.third)
        return torch.lerp(t, a, self.options.back)

    def left_out(self, model: nn.Module) -> int:
        """How many leaves took part that are no parameters of the model."""
        own = {id(p) for p in model.parameters()}
        terms = {**self.mixed, **self.back, **self.third}
        return sum(weight.is_leaf and key not in own for key, (weight, _) in terms.items())

    def finish(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor] | None, dict[str, Tensor] | None]:
        """r.grads, r.backprop_grads and r.third_grads, by parameter name."""
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.split:
            return _by_name(parameters, self.mixed), None, None
        back, third = (
            {name: _dense(g) * unscale for name, g in _by_name(parameters, terms).items()}
            for terms, unscale in zip((self.back, self.third), self.unscale, strict=True)
        )
        for name in back.keys() | third.keys():
            zero = torch.zeros_like(parameters[name], dtype=accumulate_dtype(parameters[name].dtype))
            back.setdefault(name, zero)
            third.setdefault(name, zero)
        names = [name for name in parameters if name in back]
        grads = {n: self.options.back * back[n] + self.options.third * third[n] for n in names}
        if not self.options.separate:
            return grads, None, None
        return grads, {n: back[n] for n in names}, {n: third[n] for n in names}


def _dense(g: Tensor) -> Tensor:
    return (g.to_dense() if g.is_sparse else g).to(accumulate_dtype(g.dtype))


def _accumulate(terms: Terms, weight: Tensor, g: Tensor | None, scale: float = 1.0) -> None:
    if g is None:
        return
    g = g.to(accumulate_dtype(weight.dtype))
    if id(weight) in terms:
        g = torch.add(terms[id(weight)][1], g, alpha=scale)
    elif scale != 1:
        g = scale * g
    terms[id(weight)] = (weight, g)


def _by_name(parameters: dict[str, nn.Parameter], terms: Terms) -> dict[str, Tensor]:
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
                grads[name] = grads[name] + g if name in grads else g
    return grads


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
