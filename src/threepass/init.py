"""Initialisation: the two classics, and the two that the paper's section on it leads to.

With n the fan in, n' the fan out and g = 2 for ReLU, 1 for symmetric activations, Var[W] of a layer is

    xavier      2 / (n + n')       gain 1, whatever the nonlinearity
    kaiming     g / n              fan in
    geometric   g / sqrt(n n')
    xavier-relu 2 g / (n + n')     } other readings of the paper's rows: Xavier with the
    kaiming-out g / n'             } nonlinearity's gain, Kaiming by fan out
    balanced    a root V of the paper's (init1) or (init2), which keep Var[Delta v^i + nabla v^i] the same for every i:

                a V - 1 = a V (b V - 1) P    with a = n' / g, b = n / g, P = product of a b V^2 over the earlier layers

The latter is a quadratic, a b P V^2 - a (1 + P) V + 1 = 0. Its roots are positive where they are real, that is where
n' / n >= 4 P / (1 + P)^2: always in a layer that does not narrow. Of two roots the one nearer to the geometric value is
taken (for layers of one width it is that value); where there is none, the layer gets the geometric value and a note.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ._torch_compat import ConvNd

SCHEMES = ("xavier", "kaiming", "geometric", "balanced")
READINGS = ("xavier-relu", "kaiming-out")
GAINS = {"relu": 2.0, "linear": 1.0, "tanh": 1.0, "sigmoid": 1.0}  # sigmoid as if its slope at 0 were 1
LAYERS = (nn.Linear, ConvNd)  # convolutions and transposed ones, in 1 to 3 dimensions
NO_ROOT = "no real root: geometric"

Fans = tuple[int, int]  # n, n'


class Choice(NamedTuple):
    """Var[W] of a layer, the scheme that it comes from, and a note where that is not the one asked for."""

    variance: float
    scheme: str
    note: str = ""


@dataclass(frozen=True)
class Layer:
    """What `init_` did to one layer."""

    name: str
    n_in: int
    n_out: int
    variance: float
    scheme: str
    note: str = ""


@dataclass(frozen=True)
class Initialisation:
    """What `init_` did, layer by layer."""

    layers: tuple[Layer, ...]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __str__(self) -> str:
        width = max([len("layer"), *(len(layer.name) for layer in self.layers)])
        lines = [
            f"{r.name:<{width}}  {r.n_in:>6}  {r.n_out:>6}  {r.variance:9.3g}  {r.scheme:<9}  {r.note}".rstrip()
            for r in self.layers
        ]
        return "\n".join([f"{'layer':<{width}}    n_in   n_out     Var[W]  scheme", *lines])


@torch.no_grad()
def init_(
    model: nn.Module, scheme: str, nonlinearity: str = "relu", generator: torch.Generator | None = None
) -> Initialisation:
    """Draws the weights of every linear and convolution layer from a normal distribution, and sets its biases to zero.

    "balanced" takes the layers as one chain, in the order of `model.modules()`. Other modules with
    weights (norms, embeddings, the input projection of `nn.MultiheadAttention`) keep their values. Layers with
    requires_grad=False are initialised too.

    Args:
        model: any module.
        scheme: "xavier": Var[W] = 2 / (n + n'), with fan in n and fan out n'; "kaiming": g / n, with g = 2 for ReLU,
            else 1; "geometric": g / sqrt(n n'); "balanced": the paper's equations, solved layer by layer.
        nonlinearity: "relu", or, for the symmetric case, "linear", "tanh" or "sigmoid".
        generator: where the random numbers come from; by default PyTorch's own.

    Examples:
        >>> print(init_(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)), "balanced"))
        layer    n_in   n_out     Var[W]  scheme
        0           8      32     0.0335  balanced
        2          32       2       0.25  geometric  no real root: geometric
    """
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, LAYERS)]
    for name, layer in layers:
        if is_lazy(layer.weight):
            raise ValueError(f"layer {name!r} has no size yet: run the model once on a batch, then initialise it")
        if "weight" not in layer._parameters:
            raise ValueError(
                f"layer {name!r} has a parametrized weight: initialise it before registering the parametrization"
            )
    sizes = [fans(layer) for _, layer in layers]
    choices = variance(scheme, sizes, nonlinearity)
    for (_, layer), choice in zip(layers, choices, strict=True):
        layer.weight.normal_(0, math.sqrt(choice.variance), generator=generator)
        if layer.bias is not None:
            layer.bias.zero_()
    rows = zip(layers, sizes, choices, strict=True)
    return Initialisation(tuple(Layer(name, n, m, *choice) for (name, _), (n, m), choice in rows))


def fans(layer: nn.Module) -> Fans:
    """(n, n') of a layer: how many inputs an output reads, and how many outputs read an input, strides left aside.

    >>> fans(nn.Linear(5, 7)), fans(nn.Conv2d(4, 8, 3, groups=2)), fans(nn.ConvTranspose1d(4, 8, 3))
    ((5, 7), (18, 36), (12, 24))
    """
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if not isinstance(layer, ConvNd):
        raise TypeError(f"only linear and convolution layers have a fan-in and a fan-out, got {type(layer).__name__}")
    window = math.prod(layer.kernel_size)
    return layer.in_channels // layer.groups * window, layer.out_channels // layer.groups * window


def variance(scheme: str, fans: Sequence[Fans], nonlinearity: str = "relu") -> list[Choice]:
    """Var[W] of every layer of a chain, from its (n, n').

    >>> [round(c.variance, 4) for c in variance("geometric", [(784, 512), (512, 10)])]
    [0.0032, 0.028]
    """
    g = gain(nonlinearity)
    if scheme not in SCHEMES + READINGS:
        raise ValueError(f"scheme must be one of {', '.join(SCHEMES + READINGS)}, got {scheme!r}")
    if scheme.startswith("xavier"):
        return [Choice((g if scheme == "xavier-relu" else 1) * 2 / (n + m), scheme) for n, m in fans]
    if scheme == "kaiming-out":
        return [Choice(g / m, scheme) for _, m in fans]
    if scheme == "kaiming":
        return [Choice(g / n, scheme) for n, _ in fans]
    if scheme == "geometric":
        return [Choice(g / math.sqrt(n * m), scheme) for n, m in fans]
    choices, product = [], 1.0
    for n, m in fans:
        a, b = m / g, n / g
        geometric = 1 / math.sqrt(a * b)
        root = _root(a, b, product, geometric)
        choices.append(Choice(geometric, "geometric", NO_ROOT) if root is None else Choice(root, scheme))
        product *= a * b * choices[-1].variance ** 2
    return choices


def gain(nonlinearity: str) -> float:
    """g: 2 where half of the units are off, else 1."""
    if nonlinearity not in GAINS:
        raise ValueError(f"nonlinearity must be one of {', '.join(GAINS)}, got {nonlinearity!r}")
    return GAINS[nonlinearity]


def _root(a: float, b: float, product: float, near: float) -> float | None:
    """The root of a b P V^2 - a (1 + P) V + 1 = 0 nearest to a value; None where there is no real one."""
    half = a * (1 + product) / 2
    quarter = half**2 - a * b * product
    if quarter < -1e-12 * half**2:  # a layer of one width has a double root, up to rounding
        return None
    larger = half + math.sqrt(max(quarter, 0.0))
    return min(1 / larger, larger / (a * b * product), key=lambda root: abs(root - near))
