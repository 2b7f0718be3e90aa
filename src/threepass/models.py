"""The paper's nets."""

from itertools import pairwise
from typing import cast

from torch import Tensor, nn


def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """A perceptron over flattened input: `mlp(784, 512, 10)` is the paper's for MNIST.

    >>> mlp(784, 512, 10)[-1]
    Linear(in_features=512, out_features=10, bias=True)
    """
    if len(sizes) < 2:
        raise ValueError(f"mlp needs an input and an output size, got {sizes}")
    layers: list[nn.Module] = [nn.Flatten()]
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), activation()]
    return nn.Sequential(*layers[:-1])


def plain(depth: int = 20, classes: int = 10, width: int = 16) -> nn.Sequential:
    """The paper's plain net of depth 6n + 2 for 3 x 32 x 32 images: He's CIFAR ResNet without shortcuts and norms.

    Kaiming initialisation, biases zero.

    >>> sum(p.numel() for p in plain(20).parameters()), sum(p.numel() for p in plain(32).parameters())
    (269034, 463018)
    """
    if depth < 8 or depth % 6 != 2:
        raise ValueError(f"a plain net has 6n + 2 layers, such as 20 or 32, got {depth}")
    layers: list[nn.Module] = []
    channels = 3

    def conv(out: int, stride: int) -> None:
        nonlocal channels
        layer = nn.Conv2d(channels, out, 3, stride, 1)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.constant_(cast(Tensor, layer.bias), 0)
        layers.extend([layer, nn.ReLU()])
        channels = out

    conv(width, 1)
    for stage in range(3):
        for i in range((depth - 2) // 3):
            conv(width * 2**stage, 2 if stage > 0 and i == 0 else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
