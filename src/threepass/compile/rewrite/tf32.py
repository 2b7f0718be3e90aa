"""TF32: signals are rounded where they are computed, instead of by every product that reads them.

Our convolution kernels round the operands of their products to nearest (`kernels/product_triton.py`), which takes a
fifth of their time. A signal is the operand of two or three products, and rounding it once, in the registers of the
kernel that computes it, costs nothing. All products of a signal then have the operands that they had before.

    computed by a convolution kernel     that kernel rounds its result
    computed by elementwise operations   one more of them, which the compiler fuses with the others
    weights                              one rounded copy for all passes
    anything else                        the product's own kernel rounds, as before
"""

from typing import Any

import torch
from torch.fx import Graph, Node

from ...kernels import runs_on
from ...kernels.batch_norm import rectified
from ...kernels.conv import THIN
from ...numerics.precision import tf32_convolutions
from ...numerics.rounding import round_to_tf32
from .gates import gated, marked
from .graph import insert_call, is_elementwise, value_of

_ours = torch.ops.threepass
_FORWARD, _INPUT, _WEIGHT = _ours.conv3x3.default, _ours.conv3x3_input.default, _ours.conv3x3_weight.default
# The operands of a product are its first two arguments; which of them are signals, not weights:
_SIGNALS = {_FORWARD: (0,), _INPUT: (0,), _WEIGHT: (0, 1)}
_FREE = (_FORWARD, _INPUT, _ours.mix.default, marked, gated, rectified)


def round_signals(graph: Graph) -> None:
    """Rounds the operands of our float32 convolutions where they are computed, if TF32 is allowed."""
    if not tf32_convolutions():
        return
    products = [node for node in graph.nodes if node.target in _SIGNALS and _takes_rounded_operands(node)]
    copies: dict[Node, Node] = {}
    for node in products:
        with graph.inserting_before(node):  # the products are in execution order: the first reader's copy serves all
            operands = tuple(_rounded(graph, z, copies) for z in node.args[:2])
        node.args = operands + node.args[2:]
        node.kwargs = {**node.kwargs, "rounded": True}


def _takes_rounded_operands(node: Any) -> bool:
    """Whether every signal that a product reads can be rounded for free; those of an image's few channels are not."""
    signals = [node.args[place] for place in _SIGNALS[node.target]]
    values = [value_of(z) for z in signals]
    fit = all(z.dtype == torch.float32 and z.shape[1] > THIN and runs_on(z.device) for z in values)
    return fit and all(map(_is_rounded_for_free, signals))


def _is_rounded_for_free(signal: Node) -> bool:
    return signal.target in _FREE or is_elementwise(signal)


def _rounded(graph: Graph, operand: Node, copies: dict[Node, Node]) -> Node:
    """The operand as TF32 numbers: the node itself, if its kernel can round its result, else a rounded copy."""
    if operand.target in (_FORWARD, _INPUT):
        operand.kwargs = {**operand.kwargs, "round_result": True}
        return operand
    if operand not in copies:
        copies[operand] = insert_call(graph, round_to_tf32, (operand,))
    return copies[operand]
