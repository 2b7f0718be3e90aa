"""Which tensors are active, weights or constants, and what in-place writes change about that.

An in-place write has three consequences. Operations recorded earlier that read the old contents, and need them in a
later pass, get a copy. Tensors that alias the same storage share their signals from then on. And a weight that was
computed from parameters, and becomes an activation by the write, leaves its autograd history to a copy.
"""

from typing import Any

from torch import Tensor, nn

from ..errors import Place
from ..rules.generic import leaf_tensors_of
from ..rules.table import name_of, rule_for
from .intercept import FunctionInterceptor
from .signals import ActivationMeta, Storage, storage_of
from .storage_index import StorageIndex

_UNSEEN = (
    "code that torch function modes cannot intercept: TorchScript, vmap or another torch.func transform, or a C++ "
    "extension"
)


class ActivityTracker(FunctionInterceptor):
    """What a tape knows about tensors, and the list of places in the model that are not supported."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[Place] = []
        self.path: list[str] = []  # the names of the modules being run, for messages
        self._token = object()
        self._computed: dict[int, Tensor] = {}  # weights that are computed from parameters
        self._aliased: set[Storage] = set()  # storages that were written to while several tensors aliased them
        self._storages = StorageIndex()

    def is_active(self, z: Tensor) -> bool:
        return z.requires_grad and not z.is_leaf and id(z) not in self._computed

    def problem(self, operation: str, reason: str, advice: str) -> None:
        self.problems.append(Place(self.path[-1] if self.path else "", operation, reason, advice))

    def meta_of(self, z: Tensor) -> ActivationMeta:
        """The metadata under which the signals of an active tensor are stored."""
        return self._lookup(z) or self._register(z)

    def check_recorded(self, name: str, z: Tensor) -> None:
        """Adds a problem if z was computed by an operation that the tape did not intercept."""
        if self._lookup(z) is None and storage_of(z) not in self._aliased:
            self.problem(
                name,
                f"its result{_node_of(z)} was computed by {_UNSEEN}",
                "write it in plain PyTorch",
            )

    def _lookup(self, z: Tensor) -> ActivationMeta | None:
        """The metadata of z, if z was not changed since this tape registered it."""
        meta, history = getattr(z, "_threepass", (None, None))
        if meta is None or meta.token is not self._token:
            return None
        return meta if history is z.grad_fn or meta.storage in self._aliased else None

    def _register(self, z: Tensor) -> ActivationMeta:
        """Makes z active: attaches metadata to it, or its new history to the metadata that it has."""
        meta, _ = getattr(z, "_threepass", (None, None))
        if meta is None or meta.token is not self._token or meta.shape != z.shape or meta.stride != z.stride():
            meta = ActivationMeta.of(z, self._token)
            self._storages.add_tensor(z)
        setattr(z, "_threepass", (meta, z.grad_fn))  # noqa: B010
        if self._computed:
            self._computed.pop(id(z), None)
        return meta

    def _lookup_or_report(self, func, z: Tensor) -> ActivationMeta | None:
        if storage_of(z) in self._aliased:  # it became active when something was written to its storage
            return self._register(z)
        self.problem(
            name_of(func),
            f"one of its arguments{_node_of(z)} was computed in an earlier call, or by {_UNSEEN}",
            "run that part as plain PyTorch, or wrap it as an autograd.Function or a custom op; detach tensors "
            "kept from earlier calls",
        )
        return None

    def _mark_computed(self, results: list[Tensor]) -> None:
        """After a call on weights and constants alone: results that require grad are weights."""
        for z in [w for u in results for w in (u, u._base) if w is not None]:
            if z.requires_grad and not z.is_leaf and self._lookup(z) is None:
                self._computed[id(z)] = z

    def _mark_hidden_weights(self, active: list[Tensor]) -> bool:
        """Marks what was computed from parameters alone by calls that the tape did not see; whether there is any.

        In the graph of what an earlier step computed, the input of that step is a leaf too.
        """
        unknown = [z for z in active if self._lookup(z) is None and storage_of(z) not in self._aliased]
        weights = [z for z in unknown if _is_computed_from_parameters(z)]
        self._mark_computed(weights)
        return bool(weights)

    def _copy_for_readers(self, z: Tensor) -> None:
        """Before z's storage is written to: replaces it by a copy in the operations that read it earlier."""
        for reader, i in self._storages.take_readers(z):
            reader.keep_contents(i)

    def _prepare_write(self, func, z: Tensor, recorded: list[Any], weights: list[tuple[int, Tensor]]) -> Tensor:
        """Before func writes to z: copies the old contents where they are needed, and returns what to write to."""
        self._copy_for_readers(z)
        storage = storage_of(z)
        if z._is_view() or any(alias is not z for alias in self._storages.tensors(storage)):
            self._aliased.add(storage)
        if id(z) in self._computed:  # a computed weight becomes an activation: a copy keeps its history
            history = z.clone()
            self._computed[id(history)] = history
            weights[:] = [(i, history if w is z else w) for i, w in weights]
            z.detach_()
            del self._computed[id(z)]
        if rule_for(func) is None:
            recorded[0] = z.detach().clone()
        return z


def _is_computed_from_parameters(z: Tensor) -> bool:
    leaves = [*leaf_tensors_of(z)]
    return bool(leaves) and all(isinstance(leaf, nn.Parameter) for leaf in leaves)


def _node_of(z: Tensor) -> str:
    return f" (grad_fn {z.grad_fn.name()})" if z.grad_fn is not None else ""
