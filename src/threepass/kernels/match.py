"""Finding what a rule wrote in a captured step's graph.

A pattern is (operation, *arguments); a name stands for any argument, the same one wherever it occurs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

_copy = torch.ops.aten._to_copy.default


def match(pattern: Any, value: Any, found: dict[str, Any], inner: dict[Any, Any]) -> bool:
    """Whether value is what the pattern says. found: what a name stands for; inner: the pattern of each node."""
    if isinstance(pattern, str):
        return found.setdefault(pattern, value) == value
    if not isinstance(pattern, (tuple, list)):
        return pattern == value
    if isinstance(pattern, tuple):
        if not isinstance(value, Node) or value.target is not pattern[0]:
            return False
        inner[value] = pattern
        pattern, value = pattern[1:], value.args
    same = isinstance(value, (tuple, list)) and len(pattern) == len(value)
    return same and all(match(p, v, found, inner) for p, v in zip(pattern, value, strict=True))


def source(z: Any) -> Any:
    """What a float32 copy was made from: our kernels make it themselves."""
    wide = isinstance(z, Node) and z.target is _copy and z.kwargs == {"dtype": torch.float32}
    return z.args[0] if wide and value_of(z.args[0]).dtype == torch.bfloat16 else z


def may_be_wide(reader: Any) -> bool:
    """Whether a node takes float32 as well as a half format: a pack, a float32 copy, a view that only such read."""
    if getattr(reader.target, "is_view", False):
        return bool(reader.users) and all(map(may_be_wide, reader.users))
    wide = reader.target is _copy and reader.kwargs == {"dtype": torch.float32}
    return wide or reader.target is torch.ops.threepass.pack.default


def value_of(node: Any) -> Tensor:
    return node.meta["val"]
