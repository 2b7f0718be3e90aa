"""Sums: each computed once, and next to other sums of the same tensor.

Pass 3 needs statistics that pass 1 computed; once Inductor has decomposed both into sums, the duplicates are removed.
And Inductor schedules a sum where it is used, for a gradient at the very end, too far from other sums of the same
tensor to be fused with them: each is moved to directly after its operands.

The error of a residual block's output has many users: it is materialised once.
"""

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from ...kernels.batch_norm import can_gate, rectified
from ...tape.replay import is_random_node
from .graph import insert_call, is_elementwise, replace_call

_aten = torch.ops.aten

_SUMS = {_aten.var_mean.correction, _aten.var.correction, _aten.sum.dim_IntList, _aten.sum.default, _aten.mean.dim,
         _aten.amax.default, _aten.mm.default, _aten.bmm.default, _aten.convolution.default}  # fmt: skip


def share_sums(graph: Graph) -> None:
    """Takes equal reductions and products once. The graph must be functional: no operation in it writes to a tensor."""
    first: dict[Any, Node] = {}
    same: dict[Node, Node] = {}

    def known(value: Any) -> Any:
        return same.get(value, value) if isinstance(value, Node) else repr(value)  # 0.0, -0.0 and False are not equal

    for node in list(graph.nodes):
        if node.op != "call_function" or node.is_impure() or is_random_node(node):
            continue
        key = (node.target, map_aggregate((node.args, node.kwargs), known))
        same[node] = twin = first.setdefault(_hashable(key), node)
        is_output = any(user.op == "output" for user in node.users)  # two gradients are to be two tensors
        if twin is not node and node.target in _SUMS and not is_output:
            node.replace_all_uses_with(twin)
            graph.erase_node(node)


def take_sums_early(graph: Graph) -> None:
    """Moves each sum over images, and nodes that only it uses, to directly after the last of its operands."""
    for node in list(graph.nodes):
        if node.target is not _aten.sum.dim_IntList or node.args[0].meta["val"].dim() != 4:
            continue
        chain, todo = {node}, list(node.all_input_nodes)
        while todo:
            n = todo.pop()
            if n not in chain and is_elementwise(n) and all(user in chain for user in n.users):
                chain.add(n)
                todo += n.all_input_nodes
        operands = {n for z in chain for n in z.all_input_nodes if n.op != "placeholder"} - chain
        place = {n: i for i, n in enumerate(graph.nodes)}
        if operands:
            last = max(operands, key=lambda n: place[n])
            for z in sorted(chain, key=lambda n: place[n]):
                last.append(z)
                last = z


def add_early(graph: Graph) -> None:
    """Moves elementwise operations that are the only readers of their operands to directly after the last of these.

    Inductor computes a product and the sum that it is added to in one call, where the sum is. At the end of the graph,
    where gradients are added up, that would keep the activations and errors of all recomputed blocks in memory.
    """
    for node in list(graph.nodes):
        operands = node.all_input_nodes
        if is_elementwise(node) and operands and all(z.op != "placeholder" and len(z.users) == 1 for z in operands):
            max(operands).append(node)


def _hashable(key: Any) -> Any:
    if isinstance(key, (tuple, list)):
        return tuple(map(_hashable, key))
    return tuple((k, _hashable(v)) for k, v in key.items()) if isinstance(key, dict) else key


def keep_gated_sums(graph: Graph) -> None:
    """Materialises the errors of residual blocks' outputs that have several users, or a norm that uses them twice."""
    for node in graph.nodes:
        if node.target is not _aten.threshold_backward.default or node.args[2] != 0:
            continue
        if len(node.users) == 1 and "batch_norm_backward" not in str(next(iter(node.users)).target):
            continue
        total: Any = node.args[0]
        is_sum = total.target is _aten.add.Tensor and not total.kwargs and len(total.users) == 1
        made = is_sum and all(isinstance(n, Node) and not is_elementwise(n) for n in total.args)
        u: Any = node.args[1]
        z, numbers = u.args if u.target is rectified else (u, None)
        if made and can_gate(*(n.meta["val"] for n in (*total.args, z)), numbers=numbers is not None):
            replace_call(node, torch.ops.threepass.gated_sum.default, (*total.args, z, numbers))


def keep_sums_of_errors(graph: Graph) -> None:
    """Materializes the sum of an error to which exact mode later adds another sum.

    Otherwise the compiler would keep the error, and compute its sum only then. Runs after `fuse`, whose kernels compute
    the sum together with the product.
    """
    for node in list(graph.nodes):
        is_sum = node.target is _aten.sum.dim_IntList and node.args[0].meta["val"].dim() == 4 and len(node.args) == 2
        if is_sum and _is_added(node):
            with graph.inserting_after(node):
                kept = insert_call(graph, torch.ops.threepass.materialized.default, (node,))
            node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)


def _is_added(node: Node) -> bool:
    """Whether a value, times its weight and in another dtype, is added to something."""
    while len(node.users) == 1 and is_elementwise(node := next(iter(node.users))):
        if node.target is _aten.add.Tensor:
            return True
    return False
