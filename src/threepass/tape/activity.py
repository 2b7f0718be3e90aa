"""Which tensors are active, weights or constants, where the active ones' signals live, and what is written in place.

A write makes three kinds of work: whoever read the old contents and needs them later gets a copy; tensors that look at
the same storage share their signals from then on; and a weight with a history that becomes an activation leaves its
history to a copy.
"""

import weakref
from collections import defaultdict
from typing import Any

from torch import Tensor

from ..errors import Place
from ..rules.table import name_of, rule_for
from .intercept import SeesFunctions
from .operation import Operation
from .signals import Spot, Storage, storage_of


class Activations(SeesFunctions):
    """The tape's knowledge of tensors; and the places that it cannot go through."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[Place] = []
        self.path: list[str] = []  # the modules being run, for messages
        self._token = object()
        self._derived: dict[int, Tensor] = {}  # weights that are computed from parameters
        self._shared: set[Storage] = set()  # storage that is written to while several tensors look at it
        self._readers: dict[Storage, list[tuple[Operation, int]]] = defaultdict(list)
        self._lookers: dict[Storage, list[weakref.ref[Tensor]]] = defaultdict(list)

    def is_active(self, z: Tensor) -> bool:
        return z.requires_grad and not z.is_leaf and id(z) not in self._derived

    def problem(self, operation: str, reason: str, advice: str) -> None:
        self.problems.append(Place(self.path[-1] if self.path else "", operation, reason, advice))

    def _derive(self, results: list[Tensor]) -> None:
        """Results of a call on weights and constants alone: what needs a gradient is a weight."""
        for z in [w for u in results for w in (u, u._base) if w is not None]:
            if z.requires_grad and not z.is_leaf and self._spot(z) is None:
                self._derived[id(z)] = z

    def _spot(self, z: Tensor) -> Spot | None:
        """Where z's signal lives, if z is as this tape last saw it."""
        spot, history = getattr(z, "_threepass", (None, None))
        if spot is None or spot.token is not self._token:
            return None
        return spot if history is z.grad_fn or spot.storage in self._shared else None

    def place(self, z: Tensor) -> Spot:
        """Where an active tensor's signal lives."""
        return self._spot(z) or self._settle(z)

    def _settle(self, z: Tensor) -> Spot:
        """Gives z a spot, or notes that the one it has goes on."""
        storage = storage_of(z)
        spot = getattr(z, "_threepass", (None, None))[0]
        if spot is None or spot.token is not self._token or spot.shape != z.shape or spot.stride != z.stride():
            spot = Spot(self._token, storage, z.shape, z.stride(), z.storage_offset(), z.dtype, z.device)
            self._lookers[storage].append(weakref.ref(z))
        setattr(z, "_threepass", (spot, z.grad_fn))  # noqa: B010
        self._derived.pop(id(z), None)
        return spot

    def _known(self, func, z: Tensor) -> Spot | None:
        if storage_of(z) in self._shared:  # it became active when something was written to its storage
            return self._settle(z)
        maker = z.grad_fn.name() if z.grad_fn is not None else "a hidden operation"
        self.problem(
            name_of(func),
            f"its argument comes from {maker}, run where torch functions are unseen (TorchScript, vmap, an extension) "
            "or in an earlier call",
            "run that part as plain PyTorch, wrap it as an autograd.Function or a custom op, or detach what is old",
        )
        return None

    def check_known(self, name: str, z: Tensor) -> None:
        """A problem, if z was made by something that the tape did not see."""
        if self._spot(z) is None and storage_of(z) not in self._shared:
            maker = z.grad_fn.name() if z.grad_fn is not None else "a hidden operation"
            self.problem(
                name,
                f"comes from {maker}, run where torch functions are unseen (TorchScript, vmap, an extension)",
                "write it in plain PyTorch",
            )

    def _keep_for_readers(self, z: Tensor) -> None:
        """Before z's storage is written to: those who read it before get a copy of what they read."""
        for reader, i in self._readers.pop(storage_of(z), ()):
            reader.values[i] = reader.values[i].detach().clone()

    def _before_write(self, func, z: Tensor, kept: list[Any], weights: list[tuple[int, Tensor]]) -> Tensor:
        """Before func writes to z: keeps the old contents for those who need them, and returns what to write to."""
        self._keep_for_readers(z)
        storage = storage_of(z)
        lookers = [looker() for looker in self._lookers[storage]]
        if z._is_view() or any(looker is not None and looker is not z for looker in lookers):
            self._shared.add(storage)
        if id(z) in self._derived:  # a weight with a history becomes an activation: the history goes on from a copy
            history = z.clone()
            self._derived[id(history)] = history
            weights[:] = [(i, history if w is z else w) for i, w in weights]
            z.detach_()
            del self._derived[id(z)]
        if rule_for(func) is None:
            kept[0] = z.detach().clone()
        return z
