"""Mixes of pass 2's and pass 3's signals: one that several weights use is computed once."""

from typing import Any

import torch
from torch.fx import Graph, Node

from ...numerics.precision import mix_of, round_of


def share_mixes(graph: Graph) -> None:
    """Computes a mix that several weights use (those of a residual block's two branches) once."""
    first: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.target is torch.ops.threepass.mix.default:
            twin = first.setdefault(node.args[:3], node)  # whatever their seeds
            if twin is not node:
                node.replace_all_uses_with(twin)
                graph.erase_node(node)


_OPENED = {torch.ops.threepass.mix.default: mix_of, torch.ops.threepass.round.default: round_of}


def open_mixes(graph: Graph) -> None:
    """Replaces mixes and stochastic roundings by their PyTorch operations, which the compiler fuses."""
    for node in graph.nodes:
        node.target = _OPENED.get(node.target, node.target)
