"""Second derivatives of smooth activations, for exact mode's curvature."""

import math

import torch
from torch import Tensor


def silu_second(a: Tensor) -> Tensor:
    p = torch.sigmoid(a)
    return p * (1 - p) * (2 + a * (1 - 2 * p))


def gelu_second(a: Tensor) -> Tensor:
    return torch.exp(-0.5 * a * a) / math.sqrt(2 * math.pi) * (2 - a * a)


def gelu_tanh_second(a: Tensor) -> Tensor:
    """With h' = (1 - h²) g, g = k (1 + 3 c a²): f'' = h' + a h'' / 2"""
    k, c = math.sqrt(2 / math.pi), 0.044715
    h = torch.tanh(k * (a + c * a * a * a))
    g = k * (1 + 3 * c * a * a)
    return (1 - h * h) * (g + a * (3 * k * c * a - h * g * g))
