"""Sums, products, powers, exponentials and lengths: what radial bases, filters and positional encodings are made of."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .activation import smooth
from .table import Linearization, Signal, rule, times, to_dtype_of


@rule(torch.add, Tensor.add, arity=2, reads="shapes")
def add(
    u: Tensor, a: Tensor | float, other: Tensor | float, *, alpha: float = 1, active: Sequence[int] = (0,)
) -> Linearization | None:
    """u = a + alpha b: t -> t_a + alpha t_b, R{d_a} = R{d}, R{d_b} = alpha R{d}; broadcast dimensions are summed."""
    return None if u.is_complex() else _weighted_sum(u, (a, other), (1, alpha), active)


@rule(torch.sub, Tensor.sub, arity=2, reads="shapes")
def sub(
    u: Tensor, a: Tensor | float, other: Tensor | float, *, alpha: float = 1, active: Sequence[int] = (0,)
) -> Linearization | None:
    """u = a - alpha b"""
    return None if u.is_complex() else _weighted_sum(u, (a, other), (1, -alpha), active)


@rule(torch.rsub, arity=2, reads="shapes")
def rsub(
    u: Tensor, a: Tensor, other: Tensor | float, *, alpha: float = 1, active: Sequence[int] = (0,)
) -> Linearization | None:
    """u = b - alpha a, as 1 - a is"""
    return None if u.is_complex() else _weighted_sum(u, (a, other), (-alpha, 1), active)


def _weighted_sum(
    u: Tensor, terms: Sequence[Tensor | float], factors: Sequence[float], active: Sequence[int]
) -> Linearization:
    """u = the sum of factor * term."""

    def push(t_a: Tensor | None, t_b: Tensor | None = None) -> Tensor:
        if t_a is not None and t_b is not None:
            return torch.add(times(factors[0], t_a), t_b, alpha=factors[1]).to(u.dtype)
        t, factor = (t_a, factors[0]) if t_b is None else (t_b, factors[1])
        assert t is not None  # one of the arguments has a tangent
        return times(factor, t).to(u.dtype).expand(u.shape)

    def pulled(i: int, r: Tensor) -> Tensor:
        z = terms[i]
        assert isinstance(z, Tensor)
        return times(factors[i], to_dtype_of(z, r.sum_to_size(z.shape)))

    if len(active) == 2:
        return Linearization(
            push=push, bend=lambda r, d, t: [None if r[0] is None else pulled(i, r[0]) for i in active]
        )
    rest = 1 - active[0]
    weight = terms[rest]
    add: dict[Tensor, Callable[[Tensor], Tensor]] = (
        {weight: partial(pulled, rest)} if isinstance(weight, Tensor) else {}
    )
    return Linearization(push=push, pull=partial(pulled, active[0]), add=add)


@rule(torch.mul, Tensor.mul, torch.multiply, Tensor.multiply, arity=2, bilinear=True, reads="shapes")
def mul(u: Tensor, a: Tensor | float, other: Tensor | float, *, active: Sequence[int] = (0,)) -> Linearization | None:
    """u = a b: t -> t_a b + a t_b, R{d_a} = R{d} b + d t_b, and likewise for b; broadcast dimensions are summed."""
    if u.is_complex():
        return None
    if len(active) == 1:
        z, w = (a, other) if active[0] == 0 else (other, a)
        assert isinstance(z, Tensor)
        return _scaled(u, z, w)
    assert isinstance(a, Tensor)
    assert isinstance(other, Tensor)
    if a.is_meta or other.is_meta:
        return None
    b = other

    def push(t_a: Tensor | None, t_b: Tensor | None = None) -> Tensor:
        t = _sum([(t_a, b), (t_b, a)], u)
        assert t is not None  # one of the arguments has a tangent
        return t

    def pull(r: Signal, d: Signal, t: Signal) -> Signal:
        return [_sum([(r[0], b), (d[0], t[1])], a), _sum([(r[0], a), (d[0], t[0])], b)]

    return Linearization(push=push, bend=pull)


def _scaled(u: Tensor, a: Tensor, w: Tensor | float) -> Linearization:
    """u = w a with a constant or a weight w."""
    return Linearization(
        signal=a,
        push=lambda s: (s * w).to(u.dtype),
        pull=lambda r: (r * w).sum_to_size(a.shape),
        grad={w: lambda d, s: (d * s).sum_to_size(w.shape).to(w)} if isinstance(w, Tensor) else {},
    )


def _sum(products: Sequence[tuple[Tensor | None, Tensor | None]], like: Tensor) -> Tensor | None:
    """The sum of the products whose factors are both there, in the shape and dtype of `like`."""
    total: Tensor | None = None
    for x, y in products:
        if x is not None and y is not None:
            total = x * y if total is None else _add_product(total, x, y)
    return None if total is None else total.sum_to_size(like.shape).to(like.dtype)


def _add_product(total: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """total + x y, in place where total has the shape and the dtype of the result."""
    fits = total.dtype == x.dtype == y.dtype and total.shape in (x.shape, y.shape) and total.dim() >= x.dim()
    return total.addcmul_(x, y) if fits and total.dim() >= y.dim() else torch.addcmul(total, x, y)


@rule(
    torch.div, Tensor.div, torch.divide, Tensor.divide, torch.true_divide, Tensor.true_divide, arity=2, reads="shapes"
)  # fmt: skip
def div(u: Tensor, a: Tensor | float, other: Tensor | float, *, active: Sequence[int] = (0,)) -> Linearization | None:
    """u = a / b: t -> (t_a - u t_b) / b, R{d_a} = R{d / b}, R{d_b} = -R{d u / b}; broadcast dimensions are summed."""
    if u.is_complex() or not isinstance(a, Tensor) or not u.is_floating_point():
        return None
    if not isinstance(other, Tensor) or 1 not in active:
        b = other
        return Linearization(push=lambda t, _=None: (t / b).to(u.dtype), pull=lambda r: (r / b).sum_to_size(a.shape))
    return None if a.is_meta or other.is_meta else _quotient(a, other, active)


def _quotient(a: Tensor, b: Tensor, active: Sequence[int]) -> Linearization:
    inverse = b.reciprocal()
    ratio = a * inverse

    def push(t_a: Tensor | None, t_b: Tensor | None = None) -> Tensor:
        if t_b is None:
            assert t_a is not None  # one of the arguments has a tangent
            return t_a * inverse
        return (-ratio * t_b if t_a is None else torch.addcmul(t_a, ratio, t_b, value=-1)) * inverse

    def pull(r: Signal, d: Signal, t: Signal) -> Signal:
        error, of_inverse = r[0], None if t[1] is None else t[1] * -inverse * inverse
        of_ratio = None if d[0] is None or (t[0] is None and t[1] is None) else push(t[0], t[1])
        to_a = _sum([(error, inverse), (d[0], of_inverse)], a) if 0 in active else None
        # R{d_b} = R{-d u / b} = -(R{d} u + d R{u}) / b - d u R{1/b}
        products = [(error, -ratio * inverse)]
        if of_ratio is not None:
            curved = -of_ratio * inverse
            products.append((d[0], curved if of_inverse is None else curved - ratio * of_inverse))
        return [to_a, _sum(products, b)]

    return Linearization(push=push, bend=pull)


@rule(torch.exp, torch.exp_, Tensor.exp, Tensor.exp_, reads="u")
def exp(u: Tensor, a: Tensor) -> Linearization:
    return smooth(lambda s: s * u.conj(), u, lambda u: u)


@rule(torch.sin, Tensor.sin)
def sin(u: Tensor, a: Tensor) -> Linearization:
    return smooth(lambda s: s * a.cos().conj(), a, lambda a: -a.sin())


@rule(torch.cos, Tensor.cos)
def cos(u: Tensor, a: Tensor) -> Linearization:
    return smooth(lambda s: -s * a.sin().conj(), a, lambda a: -a.cos())


@rule(torch.sqrt, torch.sqrt_, Tensor.sqrt, Tensor.sqrt_, reads="u")
def sqrt(u: Tensor, a: Tensor) -> Linearization:
    """f' = 1 / (2 u), f'' = -1 / (4 u³)"""
    return smooth(lambda s: s / (2 * u.conj()), u, lambda u: -0.25 / u**3)


@rule(torch.rsqrt, Tensor.rsqrt)
def rsqrt(u: Tensor, a: Tensor) -> Linearization | None:
    return power(u, a, -0.5)


@rule(torch.reciprocal, Tensor.reciprocal)
def reciprocal(u: Tensor, a: Tensor) -> Linearization | None:
    return power(u, a, -1)


@rule(torch.log, Tensor.log)
def log(u: Tensor, a: Tensor) -> Linearization:
    return smooth(lambda s: s / a.conj(), a, lambda a: -1 / (a * a))


@rule(torch.abs, Tensor.abs)
def absolute(u: Tensor, a: Tensor) -> Linearization | None:
    return None if a.is_complex() else Linearization(push=lambda t: t * a.sgn(), pull=lambda r: r * a.sgn())


@rule(torch.square, Tensor.square)
def square(u: Tensor, a: Tensor) -> Linearization | None:
    return power(u, a, 2)


@rule(torch.pow, Tensor.pow)
def power(u: Tensor, a: Tensor, exponent: Tensor | float) -> Linearization | None:
    """f' = n aⁿ⁻¹, f'' = n (n - 1) aⁿ⁻² for a number n"""
    if isinstance(exponent, Tensor) or u.is_complex():
        return None
    n = exponent
    return smooth(lambda s: s * _monomial(n, n - 1, a), a, lambda a: _monomial(n * (n - 1), n - 2, a))


def _monomial(factor: float, n: float, a: Tensor) -> Tensor:
    """factor aⁿ; zero where the factor is, whatever a is."""
    if factor == 0:
        return torch.zeros_like(a)
    return factor * (torch.ones_like(a) if n == 0 else a if n == 1 else a**n)


@rule(torch.linalg.norm)
def norm(u: Tensor, a: Tensor, ord=None, dim=None, keepdim: bool = False, *, dtype=None) -> Linearization | None:
    """Of vectors; norms of matrices are left to the generic rule."""
    if ord not in (None, 2) or (ord == 2 and not isinstance(dim, int) and a.dim() != 1):
        return None
    return vector_norm(u, a, 2, dim, keepdim, dtype=dtype)


@rule(torch.linalg.vector_norm)
def vector_norm(
    u: Tensor, a: Tensor, ord: float = 2, dim=None, keepdim: bool = False, *, dtype=None
) -> Linearization | None:
    """u = |a|, n = a / u: t -> <n, t>, R{d_a} = R{d} n + d (t - n <n, t>) / u; zero where a is."""
    if ord != 2 or dtype is not None or a.is_complex() or a.dim() == 0:
        return None
    dims = [dim] if isinstance(dim, int) else list(dim or range(a.dim()))
    shape = [1 if i in {k % a.dim() for k in dims} else size for i, size in enumerate(a.shape)]
    length = torch.linalg.vector_norm(a, dim=dims, keepdim=True)
    inverse = torch.where(length == 0, 0, length.reciprocal())
    n = a * inverse

    def along(t: Tensor) -> Tensor:
        return (n * t).sum(dims, keepdim=True)

    return Linearization(
        push=lambda t: along(t).reshape(u.shape),
        pull=lambda r: r.reshape(shape) * n,
        curve=lambda d, t: (d.reshape(shape) * inverse) * (t - n * along(t)),
    )


@rule(torch.std, Tensor.std)
def std(
    u: Tensor, a: Tensor, dim=None, unbiased: bool = True, keepdim: bool = False, *, correction: int | None = None
) -> Linearization | None:
    """u = |a - mean| / sqrt(n - correction), with the mean and the n numbers along `dim`."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    dims = list(range(a.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    count = math.prod(a.shape[k] for k in dims) - (int(unbiased) if correction is None else correction)

    def centred(z: Tensor) -> Tensor:
        return z - z.mean(dims, keepdim=True)

    length = vector_norm(u, centred(a), 2, dims, keepdim) if a.numel() and count > 0 else None
    if length is None or length.pull is None or length.curve is None:
        return None
    push, pull, curve, scale = length.push, length.pull, length.curve, count**-0.5
    return Linearization(
        push=lambda t: scale * push(centred(t)),
        pull=lambda r: scale * pull(r),  # has mean 0 already
        curve=lambda d, t: scale * curve(d, centred(t)),
    )
