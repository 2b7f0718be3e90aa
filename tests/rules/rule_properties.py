"""Properties of the linearization that an operation's rule returns, against autograd, in float64.

func is called with args, the activation first; `weights` and `added` are the positions of the weights and of what is
added.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from threepass.rules.table import Linearization, rule_for


def r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def made(func: Callable, args: Sequence[Any]) -> tuple[Tensor, Linearization]:
    u = func(*args)
    keywords = getattr(func, "keywords", {})
    return u, with_pull_and_curve(rule_for(getattr(func, "func", func)).make(u, *args, **keywords))


def with_pull_and_curve(m: Linearization) -> Linearization:
    """The two parts of a `bend` of one argument: R{d} alone, and the error and the tangent alone."""
    if m.pull is not None or m.bend is None:
        return m
    return dataclasses.replace(
        m, pull=lambda r: m.bend([r], [None], [None])[0], curve=lambda d, t: m.bend([None], [d], [t])[0]
    )


def tapped(func: Callable, args: Sequence[Any]) -> bool:
    return func is torch.batch_norm and args[5]


def check_push_is_the_jacobian(func: Callable, args: Sequence[Any]) -> None:
    t = torch.randn_like(args[0])
    with forward_ad.dual_level():
        expected = forward_ad.unpack_dual(func(forward_ad.make_dual(args[0], t), *args[1:])).tangent
    torch.testing.assert_close(made(func, args)[1].push(made(func, args)[1].tangent(t)), expected)


def check_pull_is_its_transpose(func: Callable, args: Sequence[Any]) -> None:
    u, m = made(func, args)
    assert m.pull is not None
    t, d = torch.randn_like(args[0]), torch.randn_like(u)
    torch.testing.assert_close((d * m.push(m.tangent(t))).sum(), (m.pull(d) * t).sum())


def check_curve_is_the_derivative_of_the_jacobian(
    func: Callable, args: Sequence[Any], weights: Sequence[int] = (), added: Sequence[int] = ()
) -> None:
    u, m = made(func, args)
    d, t = torch.randn_like(u), torch.randn_like(args[0])
    leaves = [z.clone().requires_grad_() if i in (0, *weights, *added) else z for i, z in enumerate(args)]
    out = func(*leaves)
    found = torch.autograd.grad(out, [leaves[i] for i in (*weights, *added)], d, retain_graph=True) if weights else ()
    (d_a,) = torch.autograd.grad(out, leaves[0], d, create_graph=True)
    phi = (d_a * t).sum()
    expected = torch.autograd.grad(phi, leaves[0], allow_unused=True)[0] if phi.requires_grad else None
    if m.curve is None:
        assert expected is None or not expected.any()
    elif tapped(func, args):
        torch.testing.assert_close(m.curve(d_a.detach(), t, *found), expected)
    else:
        torch.testing.assert_close(m.curve(d, t), expected)
