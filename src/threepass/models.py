"""The paper's nets, their counterparts with norms and shortcuts, ResNet-18, a small ViT, and nets by name."""

import importlib
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU, "gelu": nn.GELU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh,
}  # fmt: skip
Activation = str | Callable[[], nn.Module]


def mlp(*sizes: int, activation: Activation = "relu") -> nn.Sequential:
    """A perceptron over flattened input: `mlp(784, 512, 10)` is the paper's for MNIST.

    activation: "relu", "gelu", "sigmoid", "tanh", or a module class; there is none after the last layer.

    Examples:
        >>> mlp(784, 512, 10)[-1]
        Linear(in_features=512, out_features=10, bias=True)
    """
    if len(sizes) < 2:
        raise ValueError(f"mlp needs an input and an output size, got {sizes}")
    make = _activation(activation)
    layers: list[nn.Module] = [nn.Flatten()]
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), make()]
    return nn.Sequential(*layers[:-1])


def plain(
    depth: int = 20,
    classes: int = 10,
    width: int = 16,
    channels: int = 3,
    bias: bool = True,
    activation: Activation = "relu",
) -> nn.Sequential:
    """The paper's plain net of depth 6n + 2 for 32 x 32 images: He's CIFAR ResNet without shortcuts and norms.

    Kaiming initialisation, biases zero. Images may have another size: the last layer takes the mean over pixels.
    bias=False leaves out the biases of the convolutions; the paper does not say whether its nets have them.

    Examples:
        >>> sum(p.numel() for p in plain(20).parameters()), sum(p.numel() for p in plain(32).parameters())
        (269034, 463018)
    """
    make = _activation(activation)
    layers: list[nn.Module] = []
    for n_in, n_out, stride in _stages("plain net", depth, width, channels):
        layer = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=bias)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if bias:
            nn.init.constant_(cast(Tensor, layer.bias), 0)
        layers += [layer, make()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))


def resnet(
    depth: int = 20, classes: int = 10, width: int = 16, channels: int = 3, activation: Activation = "relu"
) -> nn.Sequential:
    """He's CIFAR ResNet of depth 6n + 2: the layers of `plain(depth)` with BatchNorm, and a shortcut around every two.

    Shortcuts have no parameters (He's option A): where a stage begins, they skip every second pixel and pad the new
    channels with zeros. Kaiming initialisation, convolutions without bias.

    Examples:
        >>> [round(sum(p.numel() for p in resnet(depth).parameters()) / 1e6, 2) for depth in (20, 32, 56)]
        [0.27, 0.46, 0.85]
    """
    make = _activation(activation)
    (first, *rest) = _stages("ResNet", depth, width, channels)
    blocks = [_Block(n_in, n_out, stride, make) for n_in, n_out, stride in rest[::2]]
    return nn.Sequential(
        *_conv_norm(*first), make(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes)
    )


def resnet18(classes: int = 10, width: int = 64, channels: int = 3, activation: Activation = "relu") -> nn.Sequential:
    """ResNet-18 with the first layer that is usual for small images: 3 x 3, stride 1, no pooling.

    Four stages of two blocks; a shortcut that changes shape is a 1 x 1 convolution with BatchNorm (He's option B).

    Examples:
        >>> sum(p.numel() for p in resnet18().parameters())
        11173962
    """
    make = _activation(activation)
    layers: list[nn.Module] = [*_conv_norm(channels, width, 1), make()]
    n_in = width
    for stage in range(4):
        n_out = width * 2**stage
        layers += [_Projected(n_in, n_out, 2 if stage else 1, make), _Projected(n_out, n_out, 1, make)]
        n_in = n_out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, classes))


def vit(
    image: int = 32,
    patch: int = 4,
    width: int = 192,
    depth: int = 6,
    heads: int = 3,
    classes: int = 10,
    channels: int = 3,
) -> nn.Module:
    """A small vision transformer: norms before attention and MLP, learned positions, the mean over patches classified.

    `vit(depth=12)` has the shape of ViT-Tiny, with 4 x 4 patches.

    Examples:
        >>> sum(p.numel() for p in vit().parameters())
        2693194
    """
    if image % patch or width % heads:
        raise ValueError(
            f"patch must divide image and heads must divide width, got image={image}, patch={patch}, "
            f"width={width}, heads={heads}"
        )
    return _ViT(nn.Conv2d(channels, width, patch, patch), image // patch, depth, heads, classes)


def by_name(name: str, **options: Any) -> nn.Module:
    """A net by its name: "mlp", "plain20", "resnet20" (any 6n + 2), "resnet18", "vit", or a function of yours.

    A function of yours is "module:function".

    Options go to the function; `sizes` are the mlp's, by default the paper's.

    Examples:
        >>> by_name("mlp", sizes=(4, 3), activation="tanh")[-1]
        Linear(in_features=4, out_features=3, bias=True)
    """
    if ":" in name:
        return _of_the_users(name, options)
    stem, depth = cast(re.Match[str], re.fullmatch(r"(.*?)-?(\d*)", name, re.S)).groups()
    if stem == "mlp" and not depth:
        return mlp(*options.pop("sizes", (784, 512, 10)), **options)
    if stem == "vit" and not depth:
        return vit(**options)
    if (stem, depth) == ("resnet", "18"):
        return resnet18(**options)
    if stem in ("plain", "resnet"):
        return (plain if stem == "plain" else resnet)(**options | ({"depth": int(depth)} if depth else {}))
    raise ValueError(
        f"unknown model {name!r}: choose from mlp, vit, plain20, resnet20 (or another depth 6n + 2), resnet18, "
        "or module:function"
    )


def _of_the_users(name: str, options: dict[str, Any]) -> nn.Module:
    path, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(path)
    except Exception as error:
        raise ValueError(f"model {name!r}: importing {path!r} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"model {name!r}: module {path!r} has no function {attribute!r}")
    model = function(**options)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model {name!r}: the function must return a torch.nn.Module, got {type(model).__name__}")
    return model


def _activation(activation: Activation) -> Callable[[], nn.Module]:
    if not isinstance(activation, str):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)} or a class, got {activation!r}")
    return ACTIVATIONS[activation]


def _stages(what: str, depth: int, width: int, channels: int) -> list[tuple[int, int, int]]:
    """(channels in, channels out, stride) of the 6n + 1 convolutions."""
    if depth < 8 or depth % 6 != 2:
        raise ValueError(f"a {what} has 6n + 2 layers, such as 20 or 32, got {depth}")
    outs = [width] + [width * 2**stage for stage in range(3) for _ in range((depth - 2) // 3)]
    return [
        (n_in, n_out, 2 if i > 0 and n_out > n_in else 1) for i, (n_in, n_out) in enumerate(pairwise([channels, *outs]))
    ]


def _conv_norm(n_in: int, n_out: int, stride: int, size: int = 3) -> list[nn.Module]:
    conv = nn.Conv2d(n_in, n_out, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return [conv, nn.BatchNorm2d(n_out)]


class _Block(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int, activation: Callable[[], nn.Module]):
        super().__init__()
        self.stride, self.new = stride, n_out - n_in
        self.body = nn.Sequential(*_conv_norm(n_in, n_out, stride), activation(), *_conv_norm(n_out, n_out, 1))
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.new:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, self.new // 2, self.new - self.new // 2))
        return self.activation(self.body(x) + shortcut)


class _Projected(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int, activation: Callable[[], nn.Module]):
        super().__init__()
        self.body = nn.Sequential(*_conv_norm(n_in, n_out, stride), activation(), *_conv_norm(n_out, n_out, 1))
        self.activation = activation()
        self.shortcut = nn.Sequential(*_conv_norm(n_in, n_out, stride, 1) if n_in != n_out else ())

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.body(x) + self.shortcut(x))


class _ViT(nn.Module):
    """patches: turns an image into side x side tokens."""

    def __init__(self, patches: nn.Conv2d, side: int, depth: int, heads: int, classes: int):
        super().__init__()
        width = patches.out_channels
        self.patches = patches
        self.positions = nn.Parameter(0.02 * torch.randn(side**2, width))
        self.blocks = nn.Sequential(*(_Attention(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)
