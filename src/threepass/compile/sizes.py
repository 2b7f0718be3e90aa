"""Calls that differ in nothing but the sizes of their inputs: which sizes differ, and the dynamic programs for them."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .dependencies import plain_item
from .dynamic import Dimensions

P = TypeVar("P")
MAX_DYNAMIC = 4  # programs with dynamic shapes for one family, before each size has a program of its own


@dataclass(frozen=True)
class Sizes(Generic[P]):
    """The sizes of a call's tensors, and what a dynamic program needs of the call.

    layout: all that an input signature has besides sizes. make: captures a program, dynamic in these dimensions.
    serves: whether a dynamic program is right for this call. label: the call in words, with "*" for these dimensions.
    """

    layout: Hashable
    shapes: tuple[torch.Size, ...]
    make: Callable[[Dimensions], P]
    serves: Callable[[P], bool]
    label: Callable[[Dimensions], str]


@dataclass
class Family(Generic[P]):
    """The calls of one state, kind and layout.

    put_off: calls without a program since the last one was captured. is_static: each size has a program of its own.
    """

    shapes: tuple[torch.Size, ...]  # of the first call
    varying: set[tuple[int, int]] = field(default_factory=set)
    dynamic: list[Any] = field(default_factory=list)  # entries of `Programs`
    put_off: int = 0
    captures: int = 0
    is_static: bool = False

    def add(self, shapes: tuple[torch.Size, ...]) -> None:
        """Notes which sizes differ from those of the first call."""
        for i, (first, shape) in enumerate(zip(self.shapes, shapes, strict=True)):
            self.varying.update((i, k) for k, size in enumerate(shape) if size != first[k])

    def symbols_for(self, shapes: tuple[torch.Size, ...]) -> Dimensions:
        """The varying dimensions that can be symbols in a trace with these sizes: 0 and 1 cannot."""
        return frozenset((i, k) for i, k in self.varying if shapes[i][k] > 1)


def layout_of(flat: list[Any]) -> tuple[Hashable, ...]:
    """An input signature without sizes: tensors are contiguous or channels_last."""
    return tuple(_layout(z) if isinstance(z, Tensor) else plain_item(z) for z in flat)


def _layout(z: Tensor) -> tuple[Hashable, ...]:
    return type(z), z.dim(), z.is_contiguous(), z.dtype, z.device, z.is_inference()


def inputs_in_words(flat: list[Any], dynamic: Dimensions = frozenset()) -> str:
    """The leaves of x and y; the sizes of dynamic dimensions are "*"."""
    places = iter(range(len(flat)))
    return ", ".join(_in_words(z, next(places), dynamic) if isinstance(z, Tensor) else repr(z) for z in flat)


def _in_words(z: Tensor, i: int, dynamic: Dimensions) -> str:
    sizes = ["*" if (i, k) in dynamic else str(size) for k, size in enumerate(z.shape)]
    return f"{str(z.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"
