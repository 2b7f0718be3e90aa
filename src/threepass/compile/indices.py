"""Indices in x and y that are out of range (class labels, tokens, edges of a graph), found before a program runs.

PyTorch's operations raise an `IndexError`. The loops that Inductor makes for a CPU check their indices too, but in
threads, where an exception ends the process. So every index that is computed from integer tensors alone is checked
before the program runs, and has not written to anything. Indices that are computed from activations, as by argmax, are
in range.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..rules.table import name_of

_aten = torch.ops.aten
_LOSSES = (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)
_ALONG_A_DIMENSION = (
    _aten.gather, _aten.index_add, _aten.index_copy, _aten.index_fill, _aten.index_select, _aten.scatter,
    _aten.scatter_add, _aten.scatter_reduce,
)  # fmt: skip
_BY_DIMENSION = (_aten.index, _aten.index_put)


class Range(NamedTuple):
    """What an index may be: below size, and not negative unless it wraps.

    size: a number, or in a program with dynamic shapes the place of an input and a dimension of it. ignored: a value
    that is allowed in any case.
    """

    operation: str
    size: Any
    wraps: bool = False
    ignored: int | None = None


class IndexRanges:
    """The indices that a program reads, as a function of its inputs, and their ranges."""

    def __init__(self, graph: Graph, state: int):
        """state: how many of the first placeholders are not given anew at each call."""
        places = graph.find_nodes(op="placeholder")
        known = _whole_numbers(graph)
        given = _computed_from(places[state:], graph)
        found: dict[tuple[Node, Range], None] = {}
        for index, operation, size, *rest in (read for node in graph.nodes for read in _reads(node)):
            limit = Range(operation, size if isinstance(size, int) else _place_of(size, places), *rest)
            if index in known and index in given and limit.size is not None:
                found[index, limit] = None
        self._ranges = [limit for _, limit in found]
        self._indices = _only(graph, [index for index, _ in found])

    def check(self, values: Sequence[Tensor]) -> None:
        """Raises an `IndexError` if one is out of range; values: the inputs of the graph."""
        if not self._ranges:
            return
        with torch.no_grad():
            for index, limit in zip(self._indices(*values), self._ranges, strict=True):
                if index.numel():
                    self._check_one(index, limit, values)

    def _check_one(self, index: Tensor, limit: Range, values: Sequence[Tensor]) -> None:
        size = limit.size if isinstance(limit.size, int) else values[limit.size[0]].shape[limit.size[1]]
        least = -size if limit.wraps else 0
        low, high = index.aminmax()
        if low >= least and high < size:
            return
        bad = index[(index < least) | (index >= size)]
        bad = bad if limit.ignored is None else bad[bad != limit.ignored]
        if bad.numel():
            raise IndexError(
                f"index {int(bad[0])} is out of range for {limit.operation}: valid indices are {least} to {size - 1}. "
                "A class label, a token or another index in x or y is too large or too small"
            )


def _reads(node: Node) -> Iterator[tuple[Any, ...]]:
    """The indices that a node reads, each with the fields of its range."""
    packet = getattr(node.target, "overloadpacket", None)
    args: Any = node.args
    if node.target is _aten.embedding.default:
        yield args[1], "embedding", _shape(args[0])[0]
    elif node.target is _aten.embedding_dense_backward.default:
        yield args[1], "embedding", args[2]
    elif node.target in _LOSSES:
        shape = _shape(args[0])
        yield args[1], "nll_loss", shape[1] if len(shape) > 1 else shape[0], False, args[4]
    elif packet in _ALONG_A_DIMENSION and _shape(args[0]):
        yield args[2], _name(packet), _shape(args[0])[args[1]]
    elif packet in _BY_DIMENSION:
        for k, index in enumerate(args[1]):
            if index is not None:
                yield index, "indexing", _shape(args[0])[k], True


def _name(packet: Any) -> str:
    return name_of(packet).removeprefix("aten.")


def _shape(node: Node) -> Sequence[Any]:
    return node.meta["val"].shape


def _whole_numbers(graph: Graph) -> set[Node]:
    """The nodes that are computed from tensors of integers and booleans alone."""
    found: set[Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dtype in _WHOLE and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def _computed_from(places: Sequence[Node], graph: Graph) -> set[Node]:
    found = set(places)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _place_of(size: Any, places: Sequence[Node]) -> tuple[int, int] | None:
    """An input, and the dimension of it that has this symbolic size."""
    for i, place in enumerate(places):
        for k, other in enumerate(_shape(place)):
            if isinstance(other, torch.SymInt) and other.node.expr == size.node.expr:
                return i, k
    return None


def _only(graph: Graph, nodes: Sequence[Node]) -> GraphModule:
    """A graph with the same inputs that computes these nodes."""
    part = Graph()
    copies: dict[Node, Node] = {}
    wanted, todo = set(nodes), list(nodes)
    while todo:
        others = [z for z in todo.pop().all_input_nodes if z not in wanted]
        wanted.update(others)
        todo += others
    for node in graph.nodes:
        if node.op == "placeholder" or node in wanted:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] for node in nodes))
    return GraphModule({}, part)
