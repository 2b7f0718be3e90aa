"""Products, powers, exponentials and lengths: what radial bases, filters and positional encodings are made of."""

import torch
from torch import Tensor

from .activation import smooth
from .table import Linearization, Signal, rule


@rule(torch.mul, Tensor.mul, torch.multiply, Tensor.multiply, arity=2)
def mul(u: Tensor, a: Tensor, b: Tensor | float) -> Linearization | None:
    """u = a b: t -> t_a b + a t_b, R{d_a} = R{d} b + d t_b, and likewise for b; broadcast dimensions are summed."""
    if u.is_complex():
        return None
    if not isinstance(b, Tensor):
        return Linearization(push=lambda t, _=None: t * b, pull=lambda r: r * b)

    def push(t_a: Tensor | None, t_b: Tensor | None) -> Tensor:
        t = _sum([(t_a, b), (t_b, a)], u)
        assert t is not None  # one of the arguments is active
        return t

    def pull(r: Signal, d: Signal, t: Signal) -> Signal:
        return [_sum([(r[0], b), (d[0], t[1])], a), _sum([(r[0], a), (d[0], t[0])], b)]

    return Linearization(push=push, bend=pull)


def _sum(products: list[tuple[Tensor | None, Tensor | None]], like: Tensor) -> Tensor | None:
    """The sum of the products whose factors are both there, in the shape and format of `like`."""
    total: Tensor | None = None
    for x, y in products:
        if x is not None and y is not None:
            total = x * y if total is None else torch.addcmul(total, x, y)
    return None if total is None else total.sum_to_size(like.shape).to(like.dtype)


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


@rule(torch.square, Tensor.square)
def square(u: Tensor, a: Tensor) -> Linearization | None:
    return power(u, a, 2)


@rule(torch.pow, Tensor.pow, Tensor.__pow__)
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


@rule(torch.linalg.vector_norm)
def vector_norm(
    u: Tensor, a: Tensor, ord: float = 2, dim=None, keepdim: bool = False, *, dtype=None
) -> Linearization | None:
    """u = |a|, n = a / u: t -> <n, t>, R{d_a} = R{d} n + d (t - n <n, t>) / u; zero where a is."""
    if ord != 2 or dtype is not None or a.is_complex() or a.dim() == 0:
        return None
    dims = list(range(a.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
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
