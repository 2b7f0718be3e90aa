"""What the tape needs to know about a function before it calls it."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..rules.table import IN_C, is_user_defined, name_of
from .inner_dropout import RECURRENT
from .intercept import python_body

_RANDOM = {
    "_sample_dirichlet", "_standard_gamma", "alpha_dropout", "bernoulli", "binomial", "cauchy", "exponential",
    "feature_alpha_dropout", "geometric", "log_normal", "multinomial", "normal", "poisson", "rrelu",
    "rrelu_with_noise", "uniform",
}  # fmt: skip
_WRITE = re.compile(r"\w*[^_]_|__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|matmul)__")
_METADATA = frozenset(
    [getattr(Tensor, name) for name in ("__len__", "dim", "is_contiguous", "numel", "size", "storage_offset", "stride")]
    + [Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex, torch.numel]
    + [getattr(Tensor, name).__get__ for name in ("device", "dtype", "is_cuda", "is_leaf", "is_sparse", "layout")]
    + [getattr(Tensor, name).__get__ for name in ("ndim", "requires_grad", "shape")]
)


class Traits(NamedTuple):
    """What is known about a function from its name and type alone.

    is_metadata  it returns the shape or other metadata of a tensor, and neither computes nor writes anything
    body         for a torch function that is written in Python, the copy to run in its place (`python_body`)
    writes       by torch's naming conventions it writes to its first argument in place
    is_random    it may draw random numbers, whatever its arguments are; any user-defined operation may
    is_user_defined     it is user-defined: an `autograd.Function` or a custom op
    """

    is_metadata: bool
    body: Callable[..., Any] | None
    writes: bool
    is_random: bool
    is_user_defined: bool


_known: dict[Any, Traits] = {}


def traits_of(func: Any) -> Traits:
    """The traits of a function, remembered for functions and methods of torch.

    The key is the function object, and traits depend on nothing but its name and its type, which these objects cannot
    change: they are written in C++, or they are functions of torch's own modules. Whether it has a rule is not among
    them, because rules can be registered at any time. Functions of users are looked at in every call.
    """
    traits = _known.get(func)
    if traits is None:
        traits = _traits(func)
        if isinstance(func, IN_C) or traits.body is not None:
            _known[func] = traits
    return traits


def _traits(func: Any) -> Traits:
    name, users = name_of(func), is_user_defined(func)
    return Traits(
        is_metadata=func in _METADATA,
        body=python_body(func),
        writes=_WRITE.fullmatch(name.rpartition(".")[2]) is not None,
        is_random=users or func in RECURRENT or name.removesuffix("_") in _RANDOM,
        is_user_defined=users,
    )
