"""Rewrites of a traced graph that make it independent of the strides that the traced tensors had.

A trace records what ran: `reshape` is recorded as `view` where the strides of the real tensors allowed it. The compiler
derives strides from its own decompositions, and they can differ: the input gradient of a layer norm is contiguous in
the eager kernel, and has the strides of the incoming gradient in the decomposition.
"""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..._torch_compat import OpOverload, arguments_of, unsafe_index_put, unsafe_view
from .graph import insert_call

_aten = torch.ops.aten

_VIEWS = {_aten.view.default, unsafe_view.default}
_SCATTERS = {
    _aten.index_add.default, _aten.index_copy.default, _aten.index_fill.int_Scalar, _aten.index_fill.int_Tensor,
    _aten.index_put.default, _aten.index_reduce.default, unsafe_index_put.default, _aten.put.default,
    _aten.scatter.src, _aten.scatter.value, _aten.scatter.reduce, _aten.scatter.value_reduce, _aten.scatter_add.default,
    _aten.scatter_reduce.two, _aten.masked_scatter.default, _aten.slice_scatter.default, _aten.select_scatter.default,
    _aten.diagonal_scatter.default, _aten.as_strided_scatter.default,
}  # fmt: skip
_OVERLAPPING = {_aten.expand.default, _aten.as_strided.default, _aten.unfold.default}


def reshape_instead_of_view(graph: Graph) -> None:
    """Replaces `view` by `reshape`, which copies where the compiler's strides do not allow a view.

    A view stays one if something in the graph writes to its storage: a copy would miss that.
    """
    storage: dict[Node, Node] = {}  # the node that made it
    written: set[Node] = set()
    for node in graph.nodes:
        aliased = dict(_aliased(node))
        storage[node] = storage[next(iter(aliased))] if aliased else node
        written.update(storage[source] for source, is_write in aliased.items() if is_write)
    for node in graph.nodes:
        if node.target in _VIEWS and storage[node] not in written:
            node.target = _aten.reshape.default


def dense_before_scatter(graph: Graph) -> None:
    """Copies an expanded tensor that a functional scatter (`index_add`, `index_put`, ...) starts from.

    Inductor computes the scatter in place if nothing else reads that tensor, although elements of an expanded tensor
    share memory (pytorch/pytorch#183986). Forward AD makes such tensors: the tangent of a constant is an expanded zero.
    """
    for node in list(graph.nodes):
        source = node.args[0] if node.target in _SCATTERS else None
        if source is None or not _may_overlap(source):
            continue
        with graph.inserting_before(node):
            dense = graph.call_function(_aten.clone.default, (source,), {"memory_format": torch.contiguous_format})
        if "val" in source.meta:
            dense.meta["val"] = source.meta["val"].clone(memory_format=torch.contiguous_format)
        node.replace_input_with(source, dense)


def copy_returned_inputs(graph: Graph) -> None:
    """Results that are inputs of the graph, or views of them, become copies, one for each place among the results.

    A gradient can be one: that of a loss whose backward returns a tensor which it has saved. As `p.grad` it would be
    added to and set to zero, and with it a parameter, or a tensor in y.
    """
    output = graph.output_node()

    def own(node: Node) -> Node:
        if _origin(node).op != "placeholder":
            return node
        with graph.inserting_before(output):
            return insert_call(graph, _aten.clone.default, (node,))

    output.args = map_arg(output.args, own)


def _origin(node: Node) -> Node:
    """The node whose result a view is of."""
    while source := next((source for source, is_write in _aliased(node) if not is_write), None):
        node = source
    return node


def _may_overlap(node: Node | None) -> bool:
    """Whether two elements of a node's result may have one place in memory."""
    while node is not None and node.target not in _OVERLAPPING:
        node = next((source for source, is_write in _aliased(node) if not is_write), None)
    return node is not None


def _aliased(node: Node) -> Iterator[tuple[Node, bool]]:
    """The arguments whose storage a node's result shares or that it writes to, and whether it writes."""
    if node.target is operator.getitem:
        yield node.all_input_nodes[0], False
    if not isinstance(node.target, OpOverload):
        return
    for i, argument in enumerate(arguments_of(node.target)):
        if argument.alias_info is None:
            continue
        value: Any = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        for source in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(source, Node):
                yield source, argument.alias_info.is_write
