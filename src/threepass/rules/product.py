"""Sums of products, linear in each factor: matrix products and einsum.

    u[out] = sum a[left] b[right]        over the letters that `out` does not have, as in "nci,ij->ncj"

The tangent of u is the same sum with the tangent of a factor in its place, and the error of a factor is the sum of the
products of the error of u with the other factor.
"""

import string
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.backends import opt_einsum

from .table import Linearization, Signal, rule

Term = tuple[str, Tensor]  # the letters of a tensor's dimensions, and the tensor


def einsum_in_pairs(equation: Any, *operands: Any) -> Tensor:
    """torch.einsum by calls with one or two operands, a letter for each dimension and no letter twice in an operand."""
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    parsed = None
    if isinstance(equation, str) and all(isinstance(z, Tensor) for z in given):
        parsed = _letters(equation, tuple(z.dim() for z in given))
    if parsed is None:  # in sublists, or wrong
        return torch.einsum(equation, *operands)
    letters, out = parsed
    terms = [_with_diagonals(*term) for term in zip(letters, given, strict=True)]
    for pair in _order(f"{','.join(letters)}->{out}", given):
        left, right = (terms[i] for i in pair)
        terms = [term for i, term in enumerate(terms) if i not in pair]
        needed = set(out).union(*(k for k, _ in terms))
        kept = "".join(k for k in dict.fromkeys(left[0] + right[0]) if k in needed)
        terms.append((kept, _contract([left, right], kept)))
    return _contract(terms, out)


@cache
def _letters(equation: str, dims: tuple[int, ...]) -> tuple[tuple[str, ...], str] | None:
    """The letters of each operand and of the result, with letters for the ellipses; None where they do not fit."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(dims):
        return None
    named = Counter(k for k in inputs if k.isalpha())
    hidden = [dim - len(term.replace("...", "")) for term, dim in zip(terms, dims, strict=True)]
    most = max((n for n, term in zip(hidden, terms, strict=True) if "..." in term), default=0)
    ellipsis = "".join(islice((k for k in string.ascii_letters if k not in named), most))
    if not arrow:
        out = "..." + "".join(sorted(k for k, n in named.items() if n == 1))
    letters = [term.replace("...", ellipsis[most - n :]) for term, n in zip(terms, hidden, strict=True)]
    fits = all(len(term) == dim and (not term or term.isalpha()) for term, dim in zip(letters, dims, strict=True))
    return (tuple(letters), out.replace("...", ellipsis)) if fits else None


def _with_diagonals(letters: str, z: Tensor) -> Term:
    """A term without letters that stand there twice."""
    for k in [k for k, n in Counter(letters).items() for _ in range(n - 1)]:
        i, j = letters.index(k), letters.rindex(k)
        z, letters = z.diagonal(dim1=i, dim2=j), letters[:i] + letters[i + 1 : j] + letters[j + 1 :] + k
    return letters, z


def _order(equation: str, operands: Sequence[Tensor]) -> Sequence[tuple[int, ...]]:
    """The pairs that torch.einsum contracts before the last one, by their places; each result goes to the end."""
    count = len(operands)
    if count <= 2:
        return []
    if opt_einsum.enabled and opt_einsum.is_available():
        path, _ = opt_einsum.get_opt_einsum().contract_path(equation, *operands, optimize=opt_einsum.strategy)
        return path[:-1]
    return [(0, 1), *((k - 1, 0) for k in range(count - 1, 2, -1))]


def _contract(terms: Sequence[Term], out: str) -> Tensor:
    return torch.einsum(f"{','.join(k for k, _ in terms)}->{out}", *(z for _, z in terms))


@rule(torch.einsum, arity=3, bilinear=True, reads="shapes")
def einsum(u: Tensor, equation: str, *operands: Tensor, active: Sequence[int] = (1,)) -> Linearization | None:
    """Of one or two operands, as `einsum_in_pairs` gives them."""
    left, _, out = equation.partition("->")
    letters = left.split(",")
    if (
        u.is_complex()
        or len(letters) != len(operands)
        or any(len(k) != z.dim() for k, z in zip(letters, operands, strict=False))
    ):
        return None
    return _product(u, out, list(zip(letters, operands, strict=True)), [i - 1 for i in active], before=1)


@rule(
    torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm, torch.mv, Tensor.mv,
    arity=2, bilinear=True, reads="shapes",
)  # fmt: skip
def matmul(u: Tensor, a: Tensor, b: Tensor, *, active: Sequence[int] = (0,)) -> Linearization | None:
    """u = a b, with a: (..., i, j) or (j), b: (..., j, k) or (j)."""
    if u.is_complex():
        return None
    batch = string.ascii_uppercase[: max(a.dim(), b.dim()) - 2]
    left = "j" if a.dim() == 1 else batch[len(batch) - a.dim() + 2 :] + "ij"
    right = "j" if b.dim() == 1 else batch[len(batch) - b.dim() + 2 :] + "jk"
    out = batch + ("i" if a.dim() > 1 else "") + ("k" if b.dim() > 1 else "")
    return _product(u, out, [(left, a), (right, b)], active)


@rule(torch.outer, Tensor.outer, torch.ger, Tensor.ger, arity=2, bilinear=True, reads="shapes")
def outer(u: Tensor, a: Tensor, b: Tensor, *, active: Sequence[int] = (0,)) -> Linearization | None:
    return None if u.is_complex() else _product(u, "ij", [("i", a), ("j", b)], active)


def _product(u: Tensor, out: str, terms: list[Term], active: Sequence[int], before: int = 0) -> Linearization | None:
    """The sum of the products of one or two terms, of which `active` depend on the input.

    before: how many arguments the call has before the terms.
    """
    factors = [(letters, z.to(u.dtype)) for letters, z in terms]
    if len(active) == 2:
        return None if any(z.is_meta for _, z in terms) else _of_two_activations(out, factors, before)
    (letters, a), rest = factors[active[0]], [factor for i, factor in enumerate(factors) if i != active[0]]
    weights = [term for i, term in enumerate(terms) if i != active[0]]
    return Linearization(
        signal=a,
        tangent=lambda t: t.to(u.dtype),
        push=lambda s: _contract([(letters, s), *rest], out),
        mix=lambda m, back: _contract([(letters, m.to(u.dtype)), *rest], out),
        pull=lambda r: _error(letters, a, [(out, r), *rest]),
        grad={w: partial(_weight_grad, k, w, out, letters) for k, w in weights},
    )


def _weight_grad(letters: str, weight: Tensor, out: str, of_signal: str, d: Tensor, s: Tensor) -> Tensor:
    return _error(letters, weight, [(out, d), (of_signal, s)])


def _of_two_activations(out: str, factors: list[Term], before: int) -> Linearization:
    (left, a), (right, b) = factors

    def push(*tangents: Tensor | None) -> Tensor:
        t_a, t_b = tangents[before : before + 2]
        terms = [] if t_a is None else [_contract([(left, t_a.to(a.dtype)), (right, b)], out)]
        if t_b is not None:
            terms.append(_contract([(left, a), (right, t_b.to(b.dtype))], out))
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def bend(r: Signal, d: Signal, t: Signal) -> Signal:
        """R{d_a} = R{d} b + d t_b, and likewise for b."""
        t_a, t_b = t[before : before + 2]
        to_a = _sum_of_errors(left, a, out, right, [(r[0], b), (d[0], t_b)])
        to_b = _sum_of_errors(right, b, out, left, [(r[0], a), (d[0], t_a)])
        return [*[None] * before, to_a, to_b]

    return Linearization(push=push, bend=bend)


def _sum_of_errors(
    letters: str, like: Tensor, out: str, other: str, products: Sequence[tuple[Tensor | None, Tensor | None]]
) -> Tensor | None:
    """The sum of the products whose factors are both there, with an error of u and a signal of the other operand."""
    terms = [
        _error(letters, like, [(out, e), (other, z.to(like.dtype))])
        for e, z in products
        if e is not None and z is not None
    ]
    return sum(terms[1:], terms[0]) if terms else None


def _error(letters: str, like: Tensor, factors: Sequence[Term]) -> Tensor:
    """The error of an operand with these letters, from the factors that it was multiplied by, and the error of u."""
    known = {k for of_factor, _ in factors for k in of_factor}
    kept = "".join(k for k, n in zip(letters, like.shape, strict=True) if k in known and n != 1)  # 1: it was broadcast
    z = _contract(factors, kept)
    sizes = iter(z.shape)
    return z.reshape([next(sizes) if k in kept else 1 for k in letters]).expand(like.shape)
