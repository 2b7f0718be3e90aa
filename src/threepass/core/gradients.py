"""The weights' gradients: products of errors with activations and tangents, summed and passed on to parameters."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from .._torch_compat import foreach_add, foreach_mul, is_traced
from ..numerics.packed import together
from ..numerics.precision import accumulate_dtype, as_dtype, materialized_op, mix_op, round_op
from ..rules.table import Linearization
from ..tape.operation import Operation
from .plan import MixForm, Operand, Plan, Scale, Terms

ByWeight = dict[int, tuple[Tensor, Tensor]]  # id of a weight -> the weight, its gradient
ByName = dict[str, Tensor]
Parameters = dict[str, nn.Parameter]  # of a model, by name


@dataclass
class Gradients:
    """Collects r.grads = back * backprop + third * third pass over operations and tied weights.

    Attributes:
        plan: which products are taken.
        third_scale: what the third pass's gradients are multiplied by to undo the scales of t and d.
        seed: of stochastic rounding, in a compiled step.
        products: for each operand, the sums of its products with errors. Products that have both weights already are
            in the sums of the mix.
    """

    plan: Plan
    third_scale: Scale
    seed: Tensor | None = None
    products: dict[Operand, ByWeight] = field(default_factory=lambda: {Operand.MIX: {}, Operand.A: {}, Operand.T: {}})

    def add_products(self, op: Operation, lin: Linearization, d: Tensor, s: Tensor | None) -> None:
        """A fast rule's products with d; s: what pass 3 carries of the signal that the weights multiply."""
        factors: list[tuple[Tensor, Operand]] | None = None
        for i, weight in op.weights:
            value = op.values[i]
            add = lin.add.get(value)
            if add is None:
                factors = self._factors(lin, s) if factors is None else factors
                for z, term in factors:
                    _accumulate(self.products[term], weight, lin.grad[value](d, z))
            elif not self.plan.case.backprop_in_last_pass:
                _accumulate(self.products[Operand.A], weight, add(self._weighted(d)))

    def add_tapped(
        self, op: Operation, lin: Linearization, d: Tensor, s: Tensor | None, backprop: list[Tensor | None]
    ) -> None:
        """A rule with a tap: d is the error of a, and pass 2 has already computed backpropagation's gradients."""
        for i, weight in op.weights:
            value = op.values[i]
            given = next(g for (leaf_of, _), g in zip(op.leaves, backprop, strict=True) if leaf_of is value)
            self.add(weight, given, lin.third[value](d, s) if value in lin.third and s is not None else None)

    def add_pulled(self, op: Operation, lin: Linearization, r: Tensor) -> None:
        """Exact mode's products of R{d} with the signal."""
        for i, weight in op.weights:
            value = op.values[i]
            product = lin.add[value](r) if value in lin.add else lin.grad[value](r, lin.signal)
            _accumulate(self.products[Operand.T], weight, product)

    def add(self, weight: Tensor, backprop: Tensor | None, third: Tensor | None) -> None:
        """Adds to the two terms; with a joint backward pass, backpropagation's own term is part of the third."""
        if self.plan.case.backprop_in_last_pass:
            _accumulate(self.products[Operand.MIX], weight, third)
            return
        _accumulate(self.products[Operand.A], weight, backprop)
        _accumulate(self.products[Operand.T], weight, third)

    def mix(self, a: Tensor, t: Tensor) -> Tensor:
        """The mix of a and t, in the plan's form."""
        back, third = self.plan.back, self.plan.third
        if self.plan.mix_form is MixForm.PER_SAMPLE:
            return torch.addcmul(t, a, self._per_sample(a))
        if self.plan.mix_form is MixForm.RELATIVE:
            return a + self._ratio * t
        if isinstance(back, Tensor) or isinstance(third, Tensor):
            return back * a + third * t
        if back + third == 1:
            return torch.lerp(t, a, back)
        return torch.add(a * back if back != 1 else a, t, alpha=third)

    def _weighted(self, d: Tensor) -> Tensor:
        """d times the weights of backpropagation's term for each sample."""
        return d * self._per_sample(d) if self.plan.mix_form is MixForm.PER_SAMPLE else d

    def _per_sample(self, like: Tensor) -> Tensor:
        assert self.plan.sample_weights is not None
        return self.plan.sample_weights.reshape(-1, *[1] * (like.dim() - 1))

    def _factors(self, lin: Linearization, s: Tensor | None) -> list[tuple[Tensor, Operand]]:
        """What d is multiplied by, and the sums that the products are added to; without a tangent, a alone."""
        case = self.plan.case
        products = case.products
        if s is None:
            products = () if case.backprop_in_last_pass else Terms.BACKPROP_ONLY.value.products
        factors = []
        for factor, term in products:
            if factor is case.carried:
                z = s
            else:
                z = lin.signal if factor is Operand.A else self._mix_at_weight(lin.signal, s)
            assert z is not None
            factors.append((z, term))
        return factors

    def _mix_at_weight(self, a: Tensor | None, t: Tensor | None) -> Tensor:
        assert a is not None  # a tangent of the signal comes with the signal
        assert t is not None
        if self.plan.mix_form is MixForm.RELATIVE:
            return mix_op(a, t, self._materialized_ratio, self.seed)
        return self.mix(a, t)

    @cached_property
    def _ratio(self) -> Scale:
        """third / back, in the scales that d and t are computed at."""
        return (self.plan.third * self.third_scale) / (self.plan.back * self._error_scale)

    @cached_property
    def _materialized_ratio(self) -> Tensor:
        assert isinstance(self._ratio, Tensor)
        return materialized_op(self._ratio)

    @property
    def _error_scale(self) -> float:
        """What backpropagation's gradients are multiplied by to undo the scale of d."""
        return 1 / self.plan.error_unit

    def _scales(self) -> dict[Operand, Scale]:
        """What the products with each operand are multiplied by."""
        back = self.plan.back * self._error_scale
        third = 1.0 if self.plan.case.backprop_in_last_pass else self.plan.third
        return {
            Operand.MIX: back if self.plan.mix_form is MixForm.RELATIVE else 1.0,
            Operand.A: back,
            Operand.T: third * self.third_scale,
        }

    def count_other_leaves(self, parameters: Parameters, inputs: Iterable[Tensor]) -> int:
        """How many tensors that require grad were used but are neither parameters of the model nor its inputs."""
        own = {id(z) for z in (*parameters.values(), *inputs)}
        weights = {key: weight for term in self.products.values() for key, (weight, _) in term.items()}
        return sum(weight.is_leaf for key, weight in weights.items() if key not in own)

    def finish(self, parameters: Parameters) -> tuple[ByName, ByName | None, ByName | None]:
        """r.grads, and if they were asked for the two terms, unweighted, by parameter name."""
        parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        dense = self.plan.has_dense_terms
        terms = {operand: _by_name(parameters, term, dense) for operand, term in self.products.items()}
        grads = self._sum(parameters, terms, self._scales(), own_dtype=self.plan.compiled)
        if not self.plan.separate:
            return grads, None, None
        unscale = {Operand.A: self._error_scale, Operand.T: self.third_scale}
        backprop, third = (
            {n: g[n] if n in g else torch.zeros_like(grads[n], dtype=accumulate_dtype(grads[n].dtype)) for n in grads}
            for g in (self._sum(parameters, {z: terms[z]}, unscale) for z in unscale)
        )
        return grads, backprop, third

    def _sum(
        self,
        parameters: Parameters,
        terms: dict[Operand, ByName],
        scales: Mapping[Operand, Scale],
        own_dtype: bool = False,
    ) -> ByName:
        """The sum of every parameter's terms, each times its scale.

        Parameters of the same dtype that have the same terms are summed together.
        """
        groups: dict[tuple[tuple[Operand, ...], torch.dtype], list[str]] = {}
        for name, p in parameters.items():
            if present := tuple(operand for operand, term in terms.items() if name in term):
                groups.setdefault((present, p.dtype if own_dtype else accumulate_dtype(p.dtype)), []).append(name)
        sums: ByName = {}
        for (present, dtype), names in groups.items():
            weights = [scales[operand] for operand in present]
            columns = [[terms[operand][name] for name in names] for operand in present]
            total = partial(_total, weights, dtype, self.seed)
            if len(present) == 1 and _is_one(weights[0]):
                totals: Iterable[Tensor] = map(total, *columns)
            elif self.plan.compiled:
                totals = together(total, *columns)
            elif not is_traced() and all(g.layout == torch.strided for column in columns for g in column):
                totals = _totals(weights, dtype, *columns)
            else:
                totals = map(total, *columns)
            sums |= zip(names, totals, strict=True)
        return {name: sums[name] for name in parameters if name in sums}


def _total(scales: Sequence[Scale], dtype: torch.dtype, seed: Tensor | None, *terms: Tensor) -> Tensor:
    total: Tensor | None = None
    for scale, g in zip(scales, terms, strict=True):
        if not _is_one(scale):
            g = g.to(accumulate_dtype(g.dtype)) * scale
        total = as_dtype(g, accumulate_dtype(dtype)) if total is None else total + g
    assert total is not None
    return total if total.dtype == dtype else round_op(total, dtype, seed)


def _totals(scales: Sequence[Scale], dtype: torch.dtype, *columns: Sequence[Tensor]) -> Sequence[Tensor]:
    """`_total` of many dense terms, in few launches; the dtype is one that sums are accumulated in."""
    totals: Sequence[Tensor] = []
    for scale, column in zip(scales, columns, strict=True):
        if not _is_one(scale):
            column = foreach_mul([as_dtype(g, accumulate_dtype(g.dtype)) for g in column], scale)
        column = [as_dtype(g, dtype) for g in column]
        totals = foreach_add(list(totals), column) if totals else column
    return totals


def _is_one(scale: Scale) -> bool:
    return isinstance(scale, float) and scale == 1


def _accumulate(terms: ByWeight, weight: Tensor, g: Tensor | None) -> None:
    if g is None:
        return
    if id(weight) in terms:
        exact = accumulate_dtype(weight.dtype)
        g = terms[id(weight)][1].to(exact) + g.to(exact)
    terms[id(weight)] = (weight, g)


def _by_name(parameters: Parameters, terms: ByWeight, dense: bool) -> ByName:
    """The gradients of the parameters; gradients of computed weights are passed on to them by the chain rule."""
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
    """Disables the parameters' hooks, which are for gradients that are added to `p.grad`, not for the chain rule."""
    hooked = [(p._backward_hooks, dict(p._backward_hooks)) for p in parameters if p._backward_hooks]
    for hooks, _ in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, saved in hooked:
            hooks.update(saved)
