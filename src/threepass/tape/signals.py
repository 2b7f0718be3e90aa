"""Signals: what runs along the activations, t in pass 3 and R{d} in exact mode."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Storage = tuple[int, int]  # its address and size in bytes


def storage_of(z: Tensor) -> Storage:
    storage = z.untyped_storage()
    return storage._cdata, storage.nbytes()


@dataclass(frozen=True, slots=True, eq=False)
class Spot:
    """Where an active tensor's signal lives. The tape keeps spots, not tensors, so that activations can be freed."""

    token: object  # of the tape that the tensor is active on
    storage: Storage
    shape: torch.Size
    stride: tuple[int, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device

    def window(self, buffer: Tensor) -> Tensor:
        """The part of a storage-shaped buffer that this tensor looks at."""
        buffer = buffer if buffer.dtype == self.dtype else buffer.view(self.dtype)
        return buffer.as_strided(self.shape, self.stride, self.offset)

    def narrow(self, buffer: Tensor) -> Tensor:
        """The same, with one element along expanded dimensions, so that it can be written to."""
        shape = [1 if stride == 0 else size for size, stride in zip(self.shape, self.stride, strict=True)]
        buffer = buffer if buffer.dtype == self.dtype else buffer.view(self.dtype)
        return buffer.as_strided(shape, self.stride, self.offset)

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is its storage, in order."""
        count, expected = 1, []
        for size in reversed(self.shape):
            expected.append(count)
            count *= size
        return (
            self.offset == 0
            and self.stride == tuple(reversed(expected))
            and count * self.dtype.itemsize == self.storage[1]
        )

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def buffer(self) -> Tensor:
        return torch.zeros(self.storage[1] // self.dtype.itemsize, dtype=self.dtype, device=self.device)


class Signals:
    """One signal for every active tensor: the tangent t in pass 3, R{d} in exact mode.

    Where operations write to storage that several tensors look at, their signals share storage in the same way.
    """

    def __init__(self, shared: set[Storage]):
        self._shared = shared
        self._own: dict[Spot, Tensor] = {}
        self._buffers: dict[Storage, Tensor] = {}

    def get(self, z: Spot) -> Tensor | None:
        if z.storage not in self._shared:
            return self._own.get(z)
        return z.window(self._buffers[z.storage]).clone() if z.storage in self._buffers else None

    def put(self, z: Spot, signal: Tensor | None) -> None:
        if z.storage in self._shared:
            narrow = z.narrow(self._buffer(z))
            narrow.copy_(torch.zeros_like(narrow) if signal is None else signal.expand(z.shape)[_first(z)])
        elif signal is None:
            self._own.pop(z, None)
        else:
            self._own[z] = signal

    def add(self, z: Spot, signal: Tensor) -> None:
        if z.storage in self._shared:
            narrow = z.narrow(self._buffer(z))
            narrow.add_(signal.sum_to_size(narrow.shape))
        else:
            self._own[z] = self._own[z] + signal if z in self._own else signal

    def take(self, z: Spot) -> Tensor | None:
        """The signal of z, which has none from here on."""
        signal = self.get(z)
        if signal is not None:
            self.put(z, None)
        return signal

    def _buffer(self, z: Spot) -> Tensor:
        if z.storage not in self._buffers:
            self._buffers[z.storage] = z.buffer()
        return self._buffers[z.storage]


def _first(z: Spot) -> tuple[slice, ...]:
    """Of an expanded tensor, each element once."""
    return tuple(slice(0, 1) if stride == 0 else slice(None) for stride in z.stride)
