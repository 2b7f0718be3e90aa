"""Signals of activations: the tangent t (or the mix) in pass 3, R{d} in the backward pass of exact mode."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import no_dispatch_modes

Storage = tuple[int, int | str]  # its address and size in bytes, as a string where the size is symbolic


def storage_of(z: Tensor) -> Storage:
    storage = z.untyped_storage()
    return _key(storage._cdata, storage.nbytes())


def _key(address: int, size: Any) -> Storage:
    return address, size if isinstance(size, int) else str(size)


def _traced_bytes(z: Tensor, size: Any) -> Any:
    """The symbolic size of a storage as a trace knows it: from the shape of the tensor that the storage was made for.

    The storage's own is unknown to the trace, which fails on it once the symbol has become a number.
    """
    owner = z if z._base is None else z._base
    known = math.prod(owner.shape) * owner.dtype.itemsize
    with no_dispatch_modes():
        return known if known == size else size


@dataclass(slots=True, eq=False)
class ActivationMeta:
    """The metadata of an active tensor, by which the tape refers to it, so that the tensor itself can be freed."""

    token: object  # of the tape that the tensor is active on
    storage: Storage
    nbytes: int  # of the storage
    shape: torch.Size
    stride: tuple[int, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, z: Tensor, token: object) -> "ActivationMeta":
        storage = z.untyped_storage()
        size = storage.nbytes()
        key = _key(storage._cdata, size)
        if not isinstance(size, int):
            size = _traced_bytes(z, size)
        return cls(token, key, size, z.shape, z.stride(), z.storage_offset(), z.dtype, z.device)

    def view_in(self, buffer: Tensor) -> Tensor:
        """The part of a buffer at this tensor's offset, shape and strides; the buffer is as large as the storage."""
        buffer = buffer if buffer.dtype == self.dtype else buffer.view(self.dtype)
        return buffer.as_strided(self.shape, self.stride, self.offset)

    def writable_view_in(self, buffer: Tensor) -> Tensor:
        """The same, with size 1 along expanded dimensions, so that it can be written to."""
        shape = [1 if stride == 0 else size for size, stride in zip(self.shape, self.stride, strict=True)]
        buffer = buffer if buffer.dtype == self.dtype else buffer.view(self.dtype)
        return buffer.as_strided(shape, self.stride, self.offset)

    @property
    def covers_storage(self) -> bool:
        """Whether the tensor is contiguous and as large as its storage."""
        count, expected = 1, []
        for size in reversed(self.shape):
            expected.append(count)
            count *= size
        return (
            self.offset == 0 and self.stride == tuple(reversed(expected)) and count * self.dtype.itemsize == self.nbytes
        )

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def buffer(self) -> Tensor:
        return torch.zeros(self.nbytes // self.dtype.itemsize, dtype=self.dtype, device=self.device)


class Signals:
    """The signal of every active tensor.

    Where operations write to a storage that several tensors alias, their signals alias a buffer in the same way.
    """

    def __init__(self, aliased: set[Storage]):
        self._aliased = aliased
        self._own: dict[ActivationMeta, Tensor] = {}
        self._buffers: dict[Storage, Tensor] = {}

    def get(self, z: ActivationMeta) -> Tensor | None:
        if not self._aliased or z.storage not in self._aliased:
            return self._own.get(z)
        return z.view_in(self._buffers[z.storage]).clone() if z.storage in self._buffers else None

    def put(self, z: ActivationMeta, signal: Tensor | None) -> None:
        if self._aliased and z.storage in self._aliased:
            view = z.writable_view_in(self._buffer(z))
            view.copy_(torch.zeros_like(view) if signal is None else signal.expand(z.shape)[_without_repeats(z)])
        elif signal is None:
            self._own.pop(z, None)
        else:
            self._own[z] = signal

    def add(self, z: ActivationMeta, signal: Tensor) -> None:
        """Adds to the signal of z, in the dtype of z, as autograd accumulates gradients."""
        signal = signal.to(z.dtype)  # under autocast, what reads z may compute in another dtype
        if z.storage in self._aliased:
            view = z.writable_view_in(self._buffer(z))
            view.add_(signal.sum_to_size(view.shape))
        else:
            self._own[z] = self._own[z] + signal if z in self._own else signal

    def take(self, z: ActivationMeta) -> Tensor | None:
        """Removes and returns the signal of z."""
        signal = self.get(z)
        if signal is not None:
            self.put(z, None)
        return signal

    def _buffer(self, z: ActivationMeta) -> Tensor:
        if z.storage not in self._buffers:
            self._buffers[z.storage] = z.buffer()
        return self._buffers[z.storage]


def _without_repeats(z: ActivationMeta) -> tuple[slice, ...]:
    """The index of an expanded tensor that takes each element once."""
    return tuple(slice(0, 1) if stride == 0 else slice(None) for stride in z.stride)
