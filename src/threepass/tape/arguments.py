"""The arguments of a call as a flat list, without pytree overhead where they are flat already (nearly always)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._torch_compat import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

_NUMBERS = frozenset((int, float, bool))
_LEAVES = _NUMBERS | {Tensor, Parameter, type(None), str, torch.dtype, torch.device}

Shape = tuple[int, tuple[str, ...], TreeSpec | None]


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Shape]:
    """The arguments as a list; containers are flattened if any of them holds tensors."""
    values: list[Any] = [*args, *kwargs.values()]
    for v in values:
        if type(v) in _LEAVES or (type(v) is tuple and _NUMBERS.issuperset(map(type, v))):
            continue
        if isinstance(v, (tuple, list, dict)):
            break  # it may hold tensors, or be changed by the caller
    else:
        return values, (len(args), tuple(kwargs), None)
    values = [_copy_lists(v) for v in values]
    if not any(map(_holds_tensors, values)):
        return values, (len(args), tuple(kwargs), None)
    flat, spec = tree_flatten(values)
    return flat, (len(args), tuple(kwargs), spec)


def unflatten(values: list[Any], shape: Shape) -> tuple[list[Any], dict[str, Any]]:
    count, names, spec = shape
    if spec is not None:
        values = tree_unflatten(values, spec)
    return values[:count], dict(zip(names, values[count:], strict=True)) if names else {}


def tensors_in(out: Any) -> list[Tensor]:
    """The tensors that a call returned."""
    if isinstance(out, Tensor):
        return [out]
    return [z for z in tree_leaves(out) if isinstance(z, Tensor)] if _holds_tensors(out) else []


def _copy_lists(value: Any) -> Any:
    """The value with its lists copied, because the caller may change them later."""
    if isinstance(value, list):
        return [_copy_lists(v) for v in value]
    if type(value) is tuple and any(isinstance(v, (list, tuple)) for v in value):
        return tuple(_copy_lists(v) for v in value)
    return value


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return _holds_tensors(tuple(value.values()))
    return isinstance(value, (tuple, list)) and any(isinstance(v, Tensor) or _holds_tensors(v) for v in value)
