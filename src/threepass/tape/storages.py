"""Who uses a storage: asked only where something is written in place, so that other steps need not look."""

import weakref
from collections import defaultdict
from collections.abc import Iterator

from torch import Tensor

from .operation import Operation
from .signals import Storage, storage_of


class StorageIndex:
    """The operations that read a storage, and the active tensors that alias it.

    What is added is looked at when the next question is asked.
    """

    def __init__(self) -> None:
        self._readers: dict[Storage, list[tuple[Operation, int]]] = defaultdict(list)
        self._tensors: dict[Storage, list[weakref.ref[Tensor]]] = defaultdict(list)
        self._new_operations: list[Operation] = []
        self._new_tensors: list[weakref.ref[Tensor]] = []

    def add_operation(self, op: Operation) -> None:
        self._new_operations.append(op)

    def add_tensor(self, z: Tensor) -> None:
        self._new_tensors.append(weakref.ref(z))

    def take_readers(self, storage: Storage) -> list[tuple[Operation, int]]:
        """Removes and returns the operations that read the storage, and the positions of the arguments."""
        for op in self._new_operations:
            active = {i for i, _ in op.active}
            for i, v in enumerate(op.values):  # positions and masks may be written to later, as signals may
                if isinstance(v, Tensor) and i not in op.written and (i in active or not v.is_floating_point()):
                    self._readers[storage_of(v)].append((op, i))
        self._new_operations.clear()
        return self._readers.pop(storage, [])

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
        for storage, readers in list(self._readers.items()):
            self._readers[storage] = [(op, i) for op, i in readers if id(op) not in gone]

    def clear_operations(self) -> None:
        self._readers.clear()
        self._new_operations.clear()
