"""Blocks under activation checkpointing: `torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)`.

Plain training keeps the inputs of the blocks, and recomputes a block when its backward pass comes to it. So do three
passes. The operations of a block are dropped from the tape when it ends, and one `Block` takes their place:

    pass 1   keeps the block's arguments
    pass 2   recomputes the block, as PyTorch does it, and keeps the error of its output alone
    pass 3   records the block once more on a tape of its own, computes the errors inside it by a backward pass from
             the error of its output, pushes t through it, and drops all of it again

Pass 3 comes to the blocks in their order and recomputes their outputs, so that arguments which are outputs of other
blocks are not kept after pass 2 (`free_chained_arguments`). So the memory is that of the errors between blocks, and of
one block: its activations, errors and tangents. A block takes 7 units of arithmetic (3 forward, 2 backward, tangent,
weights) where checkpointed plain training takes 4.

In exact mode pass 3 pushes t alone, and the backward pass after it records the block again, computes the errors and
tangents inside it, and pulls R{d} through it. Arguments and tangents between blocks are kept until then; errors are not
where a block's output is read by one other block alone, which computes this error once more (`find_passed_errors`). A
block takes 11 units (4 forward, 2 backward, 2 tangents, R{d}, 2 weights).

A block is kept operation by operation where it cannot be recorded again alone: it reads activations that are not among
its arguments, writes in place or to buffers (a batch norm's running statistics), computes weights from parameters, or
has several outputs. So are all operations in models that are sharded by `fully_shard`.

In a trace, the arguments and the error that a block is recomputed from are nodes of their own (`recompute_from`): a
compiler that saw the same operations on the same tensors would compute them once, and keep the results from pass 1 on.
Random numbers that a block draws are the same in every pass: `intercept.py` gives it a function that draws them again.
"""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .._torch_compat import DisableTorchFunction, is_traced, tree_map
from .arguments import tensors_in
from .operation import Operation
from .replay import SILENT_WRITES
from .signals import ActivationMeta, Storage


class BlockError(Exception):
    """A checkpointed function cannot be recorded as one operation: the step starts again, without blocks.

    For example because later operations read more than one tensor that was computed inside it.
    """


@torch.library.custom_op("threepass::recompute_from", mutates_args=())
def recompute_from_op(z: Tensor, place: int = 0) -> Tensor:
    """A copy. Nodes with different places are not taken for the same value."""
    return z.clone()


recompute_from_op.register_fake(lambda z, place=0: torch.empty_like(z))


def recompute_from(z: Tensor) -> Tensor:
    """z, for recomputing a block: in a trace, by a node that keeps a compiler from using the results it has already."""
    return recompute_from_op(z) if is_traced() else z


class Recomputed:
    """A checkpointed function as PyTorch runs it in pass 2; if it is a `Block`, `separate` changes its arguments."""

    def __init__(self, function: Callable[..., Any], separate: Callable[[Any], Any]):
        self.function, self.separate, self.is_block = function, separate, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_block and is_traced():
            with DisableTorchFunction():
                args, kwargs = tree_map(self.separate, (args, kwargs))
        return self.function(*args, **kwargs)


@dataclass(slots=True, eq=False)
class Block(Operation):
    """A checkpointed function as one operation on the tape, whose arguments are `values`.

    inside: its operations, without their tensors; edges: of what they computed, in the autograd graph; chained: the
    positions of arguments that are outputs of other blocks, and are not kept; gets_error: in exact mode's backward
    pass, the error of its output comes from the block that reads it; passes_error: the arguments of which it computes
    the error for another block.
    """

    inside: list[Operation] = field(default_factory=list)
    edges: dict[ActivationMeta, GradientEdge] = field(default_factory=dict)
    chained: list[int] = field(default_factory=list)
    is_read_by_block: bool = False
    gets_error: bool = False
    passes_error: set[ActivationMeta] = field(default_factory=set)

    def resolve_output(self, read: set[ActivationMeta]) -> None:
        """Finds the output: the one result that operations outside the block read."""
        outputs = [(op, u) for op in self.inside for u in op.outputs if u in read]
        if len(outputs) > 1:
            raise BlockError
        for op, u in outputs:
            self.outputs, self.error_edges, self.base = [u], [self.edges[u]], op.base
        self.edges = {}

    def arguments(self, recomputed: dict[ActivationMeta, Tensor]) -> list[Any]:
        """Its arguments, those that are not kept from what pass 3 recomputed."""
        values, metas = list(self.values), dict(self.active)
        for i in self.chained:
            if metas[i] not in recomputed:  # the loss does not depend on the block that computes it
                raise BlockError
            values[i] = recomputed[metas[i]]
        return values

    def output_in(
        self, result: Any, operations: Iterable[Operation], meta_of: Callable[[Tensor], ActivationMeta]
    ) -> Tensor:
        """The output among what the function returned, when its operations were recorded once more."""
        first, again = ([u for op in ops for u in op.outputs] for ops in (self.inside, operations))
        index = first.index(self.outputs[0])
        outputs = [z for z in tensors_in(result) if len(first) == len(again) and meta_of(z) is again[index]]
        if not outputs:
            raise BlockError
        return outputs[0]


def free_chained_arguments(blocks: list[Block], aliased: Container[Storage]) -> None:
    """Frees the arguments of blocks that are outputs of other blocks: in pass 3, these are recomputed in order."""
    producers = {u: block for block in blocks for u in block.outputs if u.storage not in aliased}
    for block in blocks:
        block.chained = [i for i, z in block.active if z in producers]
        for i, z in block.active:
            if z in producers:
                producers[z].is_read_by_block, block.values[i] = True, None


def find_passed_errors(operations: Iterable[Operation], aliased: Container[Storage]) -> None:
    """Finds the blocks whose outputs are read by one block alone, which then gives them the error of their output."""
    readers: dict[ActivationMeta, set[Operation]] = {}
    for op in operations:
        for _, z in op.active:
            readers.setdefault(z, set()).add(op)
    for block in operations:
        if isinstance(block, Block) and (u := block.outputs[0]).storage not in aliased:
            (reader, *others) = readers.get(u, {block})
            if isinstance(reader, Block) and reader is not block and not others:
                block.gets_error = True
                reader.passes_error.add(u)


def can_be_recorded_again(operations: list[Operation], arguments: list[ActivationMeta]) -> bool:
    """Whether operations are a function of the arguments and of parameters alone, without side effects."""
    known = {*arguments, *(u for op in operations for u in op.outputs)}
    return any(op.weights for op in operations) and all(
        not op.written
        and op.func not in SILENT_WRITES
        and all(z in known for _, z in op.active)
        and all(weight.is_leaf for _, weight in op.weights)
        for op in operations
    )


def without_tensors(op: Operation) -> Operation:
    """Frees the activations that an operation of a block refers to."""
    op.values = [None if isinstance(v, Tensor) or tensors_in(v) else v for v in op.values]
    op.output, op.rng, op.linearization = None, None, None
    return op
