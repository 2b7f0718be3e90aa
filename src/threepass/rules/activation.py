"""Activations: u = f(a) with f' frozen at pass 1's values. Rectifiers are linear wherever they have a derivative."""

import torch
from torch import Tensor

from .table import Map, rule


@rule(torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, reads="u", flat=True)
def relu(u: Tensor, a: Tensor) -> Map:
    def masked(s: Tensor) -> Tensor:
        return torch.ops.aten.threshold_backward(s, u, 0)

    return Map(push=masked, pull=masked, mix=lambda m, back: masked(m))
