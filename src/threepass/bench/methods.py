"""The methods: the gradients that an optimizer would get from one training step.

All are functions of (model, x, y, v) and return a gradient for every trainable parameter, in order. z = model(x) are
the class scores, l the cross-entropy. None changes a weight or `.grad`; buffers move as in the method's forwards.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._torch_compat import foreach_norm
from ..core.engine import three_pass

ALPHA, RHO, H, JACOBIAN = 0.1, 0.05, 0.01, 0.01
Method = Callable[[nn.Module, Tensor, Tensor, Tensor], Sequence[Tensor]]


def weights(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def plain(model: nn.Module, x: Tensor, y: Tensor, v: Tensor) -> Sequence[Tensor]:
    """dl/dw: forward and backward."""
    return torch.autograd.grad(F.cross_entropy(model(x), y), list(weights(model).values()))


def paper(model: nn.Module, x: Tensor, y: Tensor, v: Tensor) -> Sequence[Tensor]:
    """Three passes, as in the paper."""
    return _three(model, x, y, "paper")


def exact(model: nn.Module, x: Tensor, y: Tensor, v: Tensor) -> Sequence[Tensor]:
    """Three passes with the true gradient of the input loss."""
    return _three(model, x, y, "exact")


def alpha_1(model: nn.Module, x: Tensor, y: Tensor, v: Tensor) -> Sequence[Tensor]:
    """The same program with alpha = 1, which is plain training: what the recording itself costs."""
    return _three(model, x, y, "alpha1")


def sam(model: nn.Module, x: Tensor, y: Tensor, v: Tensor) -> Sequence[Tensor]:
    """The gradient at w + rho g / |g|: forward and backward twice (Foret et al. 2020)."""
    g = plain(model, x, y, v)
    up = RHO / torch.stack(foreach_norm(list(g))).norm()
    moved = {
        name: (p + up * e).detach().requires_grad_() for (name, p), e in zip(weights(model).items(), g, strict=True)
    }
    return torch.autograd.grad(F.cross_entropy(functional_call(model, moved, (x,)), y), list(moved.values()))


def finite(model: nn.Module, x: Tensor, y: Tensor, v: Tensor) -> Sequence[Tensor]:
    """Penalty 1/2 ((l(x + h n) - l(x)) / h)^2 with n = dl/dx / |dl/dx| held fixed (Finlay and Oberman 2019)."""
    x = x.detach().requires_grad_()
    losses = F.cross_entropy(model(x), y, reduction="none")
    (dx,) = torch.autograd.grad(losses.sum(), x, retain_graph=True)
    near = x.detach() + H * F.normalize(dx.flatten(1), dim=1).view_as(x)
    slope = (F.cross_entropy(model(near), y, reduction="none") - losses) / H
    penalised = (ALPHA * losses + (1 - ALPHA) / 2 * slope.square()).mean()
    return torch.autograd.grad(penalised, list(weights(model).values()))


def jacobian(model: nn.Module, x: Tensor, y: Tensor, v: Tensor) -> Sequence[Tensor]:
    """Penalty 1/2 |d(v.z)/dx|^2 with a random unit v for each sample (Hoffman, Roberts and Yaida 2019)."""
    x = x.detach().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        z = model(x)
        (dx,) = torch.autograd.grad((v * z).sum(), x, create_graph=True)
        penalty = JACOBIAN / 2 * z.shape[-1] * dx.square().sum() / len(x)
        return torch.autograd.grad(F.cross_entropy(z, y) + penalty, list(weights(model).values()))


def double(model: nn.Module, x: Tensor, y: Tensor, v: Tensor) -> Sequence[Tensor]:
    """alpha l + (1 - alpha)/2 |dl/dx|^2 by autograd through dl/dx: the same numbers as `exact`.

    Of tokens, the input is the output of the first embedding, as it is for three passes.
    """
    with sdpa_kernel(SDPBackend.MATH), _input(model, x) as (x, inputs):
        loss = F.cross_entropy(model(x), y)
        (dx,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return torch.autograd.grad(ALPHA * loss + (1 - ALPHA) / 2 * dx.square().sum(), list(weights(model).values()))


@contextlib.contextmanager
def _input(model: nn.Module, x: Tensor) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """What the model is to be called with, and a list of the input that gradients are taken at, filled by that call."""
    if x.is_floating_point():
        x = x.detach().requires_grad_()
        yield x, [x]
        return
    inputs: list[Tensor] = []
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    handle = embedding.register_forward_hook(lambda module, args, output: inputs.append(output))
    try:
        yield x, inputs
    finally:
        handle.remove()


def _three(model: nn.Module, x: Tensor, y: Tensor, method: str) -> Sequence[Tensor]:
    grads = three_pass(model, F.cross_entropy, x, y, **OPTIONS[method]).grads
    return [grads[name] for name in weights(model)]


METHODS: Mapping[str, Method] = {
    "plain": plain,
    "paper": paper,
    "exact": exact,
    "alpha1": alpha_1,
    "sam": sam,
    "finite": finite,
    "jacobian": jacobian,
    "double": double,
}
NAMES = {
    "plain": "plain training",
    "paper": "three passes, paper",
    "exact": "three passes, exact",
    "alpha1": "three passes, alpha = 1",
    "sam": "SAM",
    "finite": "finite-difference penalty",
    "jacobian": "Jacobian regulariser",
    "double": "double backward",
}
OPTIONS: dict[str, dict[str, Any]] = {  # of ThreePass, for the methods that it is
    "paper": {"alpha": ALPHA},
    "exact": {"alpha": ALPHA, "mode": "exact"},
    "alpha1": {"alpha": 1.0},
}
