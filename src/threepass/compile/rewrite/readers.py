"""What is next to a node of a captured step's graph: the dtypes that its readers take, and the sums of its value."""

from typing import Any

import torch
from torch.fx import Graph, Node

from ..._torch_compat import to_copy, unsafe_view
from .graph import insert_call, is_pointwise, value_of

_aten = torch.ops.aten
_copy = to_copy.default


def source(z: Any) -> Any:
    """The bfloat16 tensor that z is a float32 copy of, otherwise z itself: our kernels read bfloat16 and convert it."""
    wide = isinstance(z, Node) and z.target is _copy and z.kwargs == {"dtype": torch.float32}
    return z.args[0] if wide and value_of(z.args[0]).dtype == torch.bfloat16 else z


def may_be_wide(reader: Any) -> bool:
    """Whether a node takes float32 as well as a half dtype: a pack, a float32 copy, a view that only such read."""
    if getattr(reader.target, "is_view", False):
        return bool(reader.users) and all(map(may_be_wide, reader.users))
    wide = reader.target is _copy and reader.kwargs == {"dtype": torch.float32}
    return wide or reader.target is torch.ops.threepass.pack.default


def widen(graph: Graph, node: Any, wide: Any) -> None:
    """Puts a float32 value in a node's place; those that need the node's dtype get a copy."""
    readers = list(node.users)
    same = value_of(node).dtype == value_of(wide).dtype
    narrow = set() if same else {n for n in readers if not may_be_wide(n)}
    copy = wide
    if narrow:
        with graph.inserting_after(wide):
            copy = insert_call(graph, _copy, (wide,), {"dtype": value_of(node).dtype})
    for reader in readers:
        reader.replace_input_with(node, copy if reader in narrow else wide)


def column_sums(z: Any) -> list[Any]:
    """The sums of z, (..., C), over all its rows, as (C)."""
    rows, columns = list(range(value_of(z).dim() - 1)), value_of(z).shape[-1]
    if not rows:  # no dimensions are all, to a sum
        return []
    found = [n for n in z.users if n.target is _aten.sum.dim_IntList and list(n.args[1:]) == [rows] and not n.kwargs]
    for view in [n for n in z.users if n.target is _aten.view.default and value_of(n).shape[-1:] == (columns,)]:
        found += column_sums(view)
    return found


def is_fused_into_its_reader(z: Any) -> bool:
    """Whether the compiler would fuse the computation of z into its only reader."""
    while len(z.users) == 1 and (getattr(z.target, "is_view", False) or z.target is unsafe_view.default):
        z = z.args[0]
    return len(z.users) == 1 and is_pointwise(z)
