"""A traced step as a functional program: no operation in it writes to a tensor that another one reads.

`make_fx` records what ran, writes included: a batch norm moves its running statistics, a hook changes an error in
place, an activation is written over its input. `functional` traces the graph once more, on fake tensors and through
PyTorch's functionalisation, so that every node is a value. What the step writes to outside itself (buffers) is written
by `copy_` nodes at the very end of the graph. So the rewrites of a captured step may move, merge and recompute nodes
without a look at memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import FakeTensor, batch_norm_legit, make_fx, to_copy
from .grouped import declare_grouped_products
from .rewrite.graph import value_of
from .rewrite.strides import reshape_instead_of_view

_aten = torch.ops.aten


def functional(graph: GraphModule, inputs: Sequence[Tensor]) -> GraphModule:
    """The graph with its writes to tensors replaced by new values, and one `copy_` for each input that it changes.

    inputs: fake tensors, of one mode, if the graph has dynamic shapes.
    """
    declare_statistics(graph.graph)
    widen_group_norms(graph.graph)
    declare_grouped_products(graph.graph)
    reshape_instead_of_view(graph.graph)  # fake tensors may have other strides than the traced ones had
    graph.graph.eliminate_dead_code()
    graph.recompile()
    values = torch.func.functionalize(lambda *inputs: graph(*inputs), remove="mutations")
    dynamic = any(isinstance(z, FakeTensor) for z in inputs)
    traced = make_fx(values, tracing_mode="symbolic" if dynamic else "fake")(*inputs)
    traced.graph.eliminate_dead_code()
    return traced


def declare_statistics(graph: Graph) -> None:
    """Batch norms in training mode by the operation whose schema says that it writes to the running statistics.

    The schemas of `native_batch_norm` and cuDNN's do not declare these writes, so dead-code elimination would drop an
    unused one.
    """
    for node in list(graph.nodes):
        if node.target in (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default) and node.args[5]:
            x, weight, bias, mean, var, training, momentum, eps = node.args[:8]
            if mean is None:
                node.target = batch_norm_legit.no_stats
                node.args = (x, weight, bias, training, momentum, eps)
            else:
                node.target = batch_norm_legit.default
        elif node.target is _aten.cudnn_batch_norm_backward.default:
            x, d, weight, mean, var, save_mean, save_rstd, eps, _ = node.args
            node.target = _aten.native_batch_norm_backward.default
            node.args = (d, x, weight, mean, var, save_mean, save_rstd, True, eps, [True, True, True])


def widen_group_norms(graph: Graph) -> None:
    """Group norms of a narrow dtype with float32 weights, as CPUs compute them under autocast, in float32.

    Fake tensors have other dtypes than the results of these operations, so the graph would not fit its values.
    """
    for node in list(graph.nodes):
        forward = node.target is _aten.native_group_norm.default
        if not (forward or node.target is _aten.native_group_norm_backward.default):
            continue
        x, weight = (node.args[0], node.args[1]) if forward else (node.args[1], node.args[4])
        narrow = value_of(x).dtype
        if weight is None or value_of(weight).dtype == narrow:
            continue
        with graph.inserting_before(node):
            signals = [_cast(graph, z, value_of(weight).dtype) for z in node.args[: 1 if forward else 2]]
        node.args = (*signals, *node.args[len(signals) :])
        for result in [user for user in node.users if user.args[1] == 0]:
            with graph.inserting_after(result):
                cast = _cast(graph, result, narrow)
            result.replace_all_uses_with(cast, lambda user, cast=cast: user is not cast)


def _cast(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    return graph.call_function(to_copy.default, (node,), {"dtype": dtype})
