"""Exact mode's errors of queries, keys and values, where one weight computes all three: written side by side.

The backward pass stacks them and copies the stack into the order of that weight's output, (batch, tokens, 3, heads,
width): the kernel writes them so.
"""

import operator
from typing import Any

import torch
from torch.fx import Graph

from .graph import insert_call, value_of

_aten = torch.ops.aten
_ORDER = [1, 3, 0, 2, 4]  # of (3, batch, heads, tokens, width)


def pack_errors(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.target is _aten.stack.default and (bend := _bend_of(node)) is not None:
            (order,) = node.users
            (copy,) = order.users
            with graph.inserting_before(node):
                arguments = bend.args[:-1]
                packed = insert_call(graph, torch.ops.threepass.attention_bend_packed.default, arguments)
                turned = insert_call(graph, _aten.permute.default, (packed, _ORDER))
            copy.replace_all_uses_with(turned)


def _bend_of(stack: Any) -> Any:
    """The call whose three results are stacked, and then copied into that order, and nothing else."""
    errors = [_seen(z) for z in stack.args[0]]
    bend: Any = errors[0].args[0] if errors[0].target is operator.getitem else None
    if (
        bend is None
        or bend.target is not torch.ops.threepass.attention_bend.default
        or list(stack.args[1:]) not in ([], [0])
    ):
        return None
    in_order = [(z.target, *z.args) for z in errors] == [(operator.getitem, bend, i) for i in range(3)]
    alone = len(bend.users) == 3 and all(len(z.users) == 1 for z in (*errors, *stack.args[0], stack))
    if not in_order or not alone:
        return None
    (order,) = stack.users
    copies = list(order.users) if order.target is _aten.permute.default and order.args[1] == _ORDER else []
    return bend if len(copies) == 1 and _is_copy(copies[0]) else None


def _seen(z: Any) -> Any:
    """What a view shows as it is."""
    same = z.target is _aten.view.default and value_of(z).shape == value_of(z.args[0]).shape
    return z.args[0] if same else z


def _is_copy(node: Any) -> bool:
    return node.target is _aten.clone.default and node.kwargs == {"memory_format": torch.contiguous_format}
