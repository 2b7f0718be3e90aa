"""Activations: u = f(a) with f' and f'' frozen at pass 1's values: t -> f' t, R{d} -> f' R{d} + f'' d t.

Rectifiers are linear wherever they have a derivative. The others are computed in float32 at least.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import _torch_compat
from ..kernels.activation import KINDS, curve
from ..numerics.precision import accumulate_dtype, as_dtype
from .table import Linearization, rule

_aten = torch.ops.aten


@rule(torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, reads="u")
def relu(u: Tensor, a: Tensor) -> Linearization:
    def masked(s: Tensor) -> Tensor:
        return _aten.threshold_backward.default(s, u, 0)

    return Linearization(push=masked, pull=masked, mix=lambda m, back: masked(m))


@rule(_torch_compat.leaky_relu, _torch_compat.leaky_relu_, reads="u")
def leaky_relu(u: Tensor, a: Tensor, negative_slope: float = 0.01) -> Linearization:
    """The sign of u is that of a: pass 1 runs negative slopes as another function."""

    def sloped(s: Tensor) -> Tensor:
        return _aten.leaky_relu_backward(s, u.to(s.dtype), negative_slope, True)  # u may be its sign alone

    return Linearization(push=sloped, pull=sloped, mix=lambda m, back: sloped(m))


@rule(torch.tanh, torch.tanh_, Tensor.tanh, Tensor.tanh_, reads="u")
def tanh(u: Tensor, a: Tensor) -> Linearization:
    """f' = 1 - u², f'' = -2 u f'"""
    return smooth(lambda s: _aten.tanh_backward(s, u), u, lambda u: -2 * u * (1 - u * u))


@rule(torch.sigmoid, torch.sigmoid_, Tensor.sigmoid, Tensor.sigmoid_, reads="u")
def sigmoid(u: Tensor, a: Tensor) -> Linearization:
    """f' = u (1 - u), f'' = f' (1 - 2 u)"""
    return smooth(lambda s: _aten.sigmoid_backward(s, u), u, lambda u: u * (1 - u) * (1 - 2 * u))


@rule(_torch_compat.silu)
def silu(u: Tensor, a: Tensor) -> Linearization:
    """f = a σ, f'' = σ (1 - σ) (2 + a (1 - 2 σ))"""
    return _of_kind("silu", a.detach())


@rule(F.gelu)
def gelu(u: Tensor, a: Tensor, approximate: str = "none") -> Linearization:
    """f = a Φ(a), f'' = φ(a) (2 - a²); "tanh": f = a (1 + h) / 2 with h = tanh(k (a + c a³))"""
    return _of_kind("gelu" if approximate == "none" else "gelu-tanh", a.detach())


@rule(F.softplus)
def softplus(u: Tensor, a: Tensor, beta: float = 1, threshold: float = 20) -> Linearization:
    """f' = σ(β a), f'' = β f' (1 - f'); above the threshold f' is 1"""

    @functools.cache
    def slope() -> Tensor:
        wide = a.detach().to(accumulate_dtype(a.dtype))
        return _aten.softplus_backward(wide.new_ones(()).expand_as(wide), wide, beta, threshold)

    return Linearization(
        push=lambda t: _aten.softplus_backward(t.to(a.dtype), a, beta, threshold),
        pull=lambda r: (slope() * r).to(a.dtype),
        curve=lambda d, t: _aten.sigmoid_backward((d if beta == 1 else beta * d) * t.to(slope().dtype), slope()),
    )


@rule(torch.softmax, Tensor.softmax, reads="u")
def softmax(u: Tensor, a: Tensor, dim: int, dtype: torch.dtype | None = None) -> Linearization:
    """J z = u (z - <u, z>), symmetric; d/da <d, J t> = J (d t - d <u, t> - t <u, d>)"""
    exact = accumulate_dtype(u.dtype)

    def jacobian(z: Tensor) -> Tensor:
        return _torch_compat.softmax_backward(as_dtype(z, u.dtype), u, dim, u.dtype)

    def curve(d: Tensor, t: Tensor) -> Tensor:
        wide, d, t = u.to(exact), d.to(exact), t.to(exact)
        of_t, of_d = ((wide * z).sum(dim, keepdim=True) for z in (t, d))
        return as_dtype(_torch_compat.softmax_backward(d * (t - of_t) - t * of_d, wide, dim, exact), a.dtype)

    return Linearization(push=jacobian, pull=lambda r: as_dtype(jacobian(r), a.dtype), curve=curve)


def _of_kind(kind: str, a: Tensor) -> Linearization:
    """An activation that has a kernel: with the term of f'' as one operation, which a captured step finds."""
    f = KINDS[kind]
    return curving(lambda s: f.backward(s, a, **f.options), a, lambda d, t: curve(d, t, a, kind))


def smooth(first: Callable[[Tensor], Tensor], z: Tensor, second: Callable[[Tensor], Tensor]) -> Linearization:
    """first: r -> conj(f') r, as in pass 2; second: z -> f'', of a or of u."""

    def curve(d: Tensor, t: Tensor) -> Tensor:
        dtype = accumulate_dtype(z.dtype)
        return (second(z.to(dtype)) * t.to(dtype)).conj() * d.to(dtype)

    return curving(first, z, curve)


def curving(first: Callable[[Tensor], Tensor], z: Tensor, curve: Callable[[Tensor, Tensor], Tensor]) -> Linearization:
    """As `smooth`, with the whole term of f'': (d, t) -> f'' d t."""

    def pull(r: Tensor) -> Tensor:
        return first(as_dtype(r, z.dtype))

    def push(t: Tensor) -> Tensor:
        return pull(t.conj()).conj() if z.is_complex() else pull(t)  # a real tensor is its own conjugate

    return Linearization(push=push, pull=pull, curve=curve)
