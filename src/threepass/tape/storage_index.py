"""Which operations and tensors use a storage. In-place writes alone need to know, so other steps build no index."""

import weakref
from collections import defaultdict
from collections.abc import Iterator

from torch import Tensor

from .operation import Operation
from .signals import Storage, storage_of


class StorageIndex:
    """The operations that read a storage, and the active tensors that alias it.

    Additions are queued, and indexed at the next lookup.
    """

    def __init__(self) -> None:
        self._readers: dict[Storage, list[tuple[Operation, int]]] = defaultdict(list)
        self._tensors: dict[Storage, list[weakref.ref[Tensor]]] = defaultdict(list)
        self._new_operations: list[Operation] = []
        self._new_with_constants: list[Operation] = []  # those of them that read positions or masks, perhaps
        self._new_tensors: list[weakref.ref[Tensor]] = []

    def add_operation(self, op: Operation, has_constants: bool = True) -> None:
        """has_constants: whether there may be arguments that are neither active nor weights, as masks are."""
        self._new_operations.append(op)
        if has_constants:
            self._new_with_constants.append(op)

    def add_tensor(self, z: Tensor) -> None:
        self._new_tensors.append(weakref.ref(z))

    def take_readers(self, z: Tensor) -> list[tuple[Operation, int]]:
        """Removes and returns the operations that read z's storage, and the positions of the arguments."""
        for op in self._new_with_constants:
            active = {i for i, _ in op.active}
            constants = [i for i, v in enumerate(op.values) if isinstance(v, Tensor) and i not in active]
            self._add_readers(op, [i for i in constants if not op.values[i].is_floating_point()])
        self._new_with_constants.clear()
        if z.is_floating_point() or z.is_complex() or z._is_view():  # others, such as counters, alias no activation
            for op in self._new_operations:
                self._add_readers(op, [i for i, _ in op.active])
            self._new_operations.clear()
        return self._readers.pop(storage_of(z), [])

    def _add_readers(self, op: Operation, positions: list[int]) -> None:
        for i in positions:
            if i not in op.written:
                self._readers[storage_of(op.values[i])].append((op, i))

    def tensors(self, storage: Storage) -> Iterator[Tensor]:
        """The tensors that alias the storage, those of them that are still there."""
        for ref in self._new_tensors:
            if (z := ref()) is not None:
                self._tensors[storage_of(z)].append(ref)
        self._new_tensors.clear()
        return (z for ref in self._tensors[storage] if (z := ref()) is not None)

    def forget(self, operations: list[Operation]) -> None:
        """Removes operations."""
        gone = set(map(id, operations))
        self._new_operations = [op for op in self._new_operations if id(op) not in gone]
        self._new_with_constants = [op for op in self._new_with_constants if id(op) not in gone]
        for storage, readers in list(self._readers.items()):
            self._readers[storage] = [(op, i) for op, i in readers if id(op) not in gone]

    def clear_operations(self) -> None:
        self._readers.clear()
        self._new_operations.clear()
        self._new_with_constants.clear()
