"""Gates of ReLUs (where the output is zero): pass 3 reads them from pass 2's errors.

Passes 2 and 3 both multiply by the gate of a ReLU, so its output u would have to be kept until pass 3. But pass 2's
error is kept anyway, for the gradient of the weight upstream. So pass 2 marks a closed gate by minus zero in the error,
and pass 3 reads the mark: u is freed in pass 2, and a net of ReLUs needs no more memory than in plain training.
"""

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .graph import replace_call

_aten = torch.ops.aten


def mark_gates(graph: Graph) -> None:
    """Reads pass 3's gates from pass 2's errors, wherever pass 3 needs nothing else of the ReLU's output."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    gates: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        is_gate = node.target is _aten.threshold_backward.default and node.args[2] == 0
        if is_gate and node.args[1].target is _aten.relu.default:
            gates.setdefault(node.args[1], []).append(node)
    for u, (first, *later) in gates.items():
        others = [order[user] for user in u.users if user not in gates[u]]
        if later and max(others, default=0) < order[later[0]]:
            replace_call(first, marked, (first.args[0], u))
            for gate in later:
                replace_call(gate, gated, (gate.args[0], first))


def marked(g: Tensor, u: Tensor) -> Tensor:
    """g where the ReLU's output u is positive, with +0 for every zero of g; minus zero, the mark, where u is 0.

    Minus zero is computed, because Triton reads a literal -0.0 as 0.0; by a product, because Triton negates by
    subtracting from 0.0; and not by its bits, because the compiler looks through views of bits, and would keep u and g
    in place of the mark.
    """
    return torch.where(u > 0, torch.where(g == 0, 0.0, g), u.abs() * -2.0)


def gated(s: Tensor, mark: Tensor) -> Tensor:
    """s where `mark` is not minus zero (as an integer: the smallest one), else 0."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[mark.dtype.itemsize]
    return torch.where(mark.view(bits) == torch.iinfo(bits).min, 0.0, s)
