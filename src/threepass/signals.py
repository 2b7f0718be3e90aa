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
        return buffer.as_strided(self.shape, self.stride, self.offset)

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
            self._window(z).copy_(torch.zeros((), dtype=z.dtype) if signal is None else signal)
        elif signal is None:
            self._own.pop(z, None)
        else:
            self._own[z] = signal

    def add(self, z: Spot, signal: Tensor) -> None:
        if z.storage in self._shared:
            self._window(z).add_(signal)
        else:
            self._own[z] = self._own[z] + signal if z in self._own else signal

    def take(self, z: Spot) -> Tensor | None:
        """The signal of z, which has none from here on."""
        signal = self.get(z)
        if signal is not None:
            self.put(z, None)
        return signal

    def _window(self, z: Spot) -> Tensor:
        if z.storage not in self._buffers:
            self._buffers[z.storage] = z.buffer()
        return z.window(self._buffers[z.storage])
