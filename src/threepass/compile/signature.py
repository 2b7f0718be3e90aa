"""The signature of a step: everything that its captured program depends on besides the contents of tensors.

    signature = Signature(model, loss_fn)
    signature.state()            equal to an earlier one: the earlier program is right for this call
    input_signature(x, y)        the same for what a call is given

`ThreePass(compile=True)` and `fit(compile=True)` share it. A call costs some 20 microseconds on plain-20
(`benchmarks/signature.py`): the full description is made only when a quick look finds that something has changed.
"""

import contextlib
import random
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch_compat import TreeSpec, tree_flatten
from ..errors import CaptureError
from .dependencies import PLAIN, Attribute, Dependencies, TensorItem, change_in_words, in_words, plain_item

RECENT = 4  # states that are looked at before the full description is made: training and evaluation take turns
_, _PAIR = tree_flatten((torch.empty(0), torch.empty(0)))


class UnsettledError(CaptureError):
    """The step itself changes what its program depends on, as a cache does that is filled by the first call."""


class State:
    """A description of the model, the loss and PyTorch's switches, to be compared with others."""

    __slots__ = ("_hash", "items")

    def __init__(self, items: dict[str, Hashable]):
        self.items, self._hash = items, hash(frozenset(items.items()))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, State) and self._hash == other._hash and self.items == other.items)

    def __hash__(self) -> int:
        return self._hash

    def changes(self, other: "State") -> Iterator[tuple[str, Any, Any]]:
        """(path, value here, value there) of what differs."""
        return _changes(self.items, other.items)

    def difference(self, other: "State") -> str:
        """The first thing that differs, in words."""
        path, ours, theirs = next(self.changes(other), ("nothing", None, None))
        return f"{path} ({change_in_words(ours, theirs)})"


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for path in {**before, **after}:
        ours, theirs = before.get(path), after.get(path)
        if ours != theirs:
            yield path, ours, theirs


class Overwritten(NamedTuple):
    """A tensor that a step keeps in an attribute, and what was there before."""

    path: str
    attribute: Attribute
    old: Any
    new: TensorItem

    def is_like_before(self) -> bool:
        """Whether Python code that looks at the attribute, but not at the tensor's contents, does the same again."""
        if not isinstance(self.old, TensorItem):
            return False
        return (self.old.shape, self.old.dtype, self.old.device) == (self.new.shape, self.new.dtype, self.new.device)


class Signature:
    """Watches a model and its loss."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor]):
        self._roots: dict[str, Any] = {"model": model, "loss_fn": loss_fn}
        self._recent: list[tuple[Dependencies, State]] = []
        self._ignored: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
        self._caches: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()  # of them, constants
        self._overwritten: list[Overwritten] = []  # by the step in the last trace

    def watch(self, roots: dict[str, Any]) -> None:
        """Makes functions and modules of the user's a part of the state, in place of those of the same names."""
        if any(self._roots.get(name, roots) is not value for name, value in roots.items()):
            self._roots |= roots
            self._recent.clear()

    def state(self) -> State:
        """The state of the model, the loss and PyTorch's switches: the same object while nothing changes."""
        for i, (dependencies, state) in enumerate(self._recent):
            if dependencies.is_unchanged():
                if i:
                    self._recent.insert(0, self._recent.pop(i))
                return state
        dependencies, state = self._described()
        self._recent = [(dependencies, state), *self._recent[: RECENT - 1]]
        return state

    def _described(self) -> tuple[Dependencies, State]:
        try:
            dependencies = Dependencies(self._roots, self._ignored)
        except Exception as error:
            raise CaptureError(
                f"the model or the loss contains an object whose attributes cannot be read, {type(error).__name__}: "
                f"{error}"
            ) from error
        return dependencies, State({"flags": dependencies.flags, **dependencies.items})

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Around a step while it is traced: refuses one that changes what its own program depends on.

        A module may keep a tensor in an attribute, if the step does not read what was there before (see `settle`).
        """
        dependencies = Dependencies(self._roots, {})
        drawn = _random_numbers()
        self._overwritten.clear()
        yield
        if _random_numbers() != drawn:
            raise CaptureError(
                "the step draws numbers from Python's random module or numpy.random, which a captured program would "
                "not draw again. Use torch's generators, as in torch.rand(()), and torch.where instead of a branch"
            )
        after = Dependencies(self._roots, {}).items  # whose shapes may have symbols
        for path, old, new in _changes(dependencies.items, after):
            is_tensor = isinstance(new, TensorItem) and (isinstance(old, TensorItem) or _none(old))
            if not (is_tensor and path in dependencies.attributes):
                raise _unsettled(path, old, new)
            self._overwritten.append(Overwritten(path, dependencies.attributes[path], old, new))

    @property
    def overwritten(self) -> list[Attribute]:
        """Where the step that was traced last keeps tensors."""
        return [each.attribute for each in self._overwritten]

    def settle(self, state: Sequence[Tensor], are_constant: Sequence[bool] = ()) -> None:
        """After a capture whose program reads the tensors `state`: what it overwrites and does not read counts no more.

        Raises if the next call could find another shape there, or read it. are_constant: whether the tensors that the
        step keeps, in their order, depend on nothing but sizes, as a mask does: the program then computes the same.
        """
        read = {z.data_ptr() for z in state if z.numel()}
        overwritten = [*zip(self._overwritten, are_constant or [False] * len(self._overwritten), strict=True)]
        for each, is_constant in overwritten:
            module, name = each.attribute
            if isinstance(each.old, TensorItem) and each.old.pointer in read:
                raise self._reads(each.path, each.old.pointer)
            if not (name in self._ignored.get(module, ()) or is_constant or each.is_like_before()):
                raise _unsettled(each.path, each.old, each.new)
        for module, names in self._ignored.items():
            for name in names - self._caches.get(module, set()):
                value = vars(module).get(name)
                if isinstance(value, Tensor) and value.data_ptr() in read:
                    raise self._reads(f"{type(module).__name__}.{name}", value.data_ptr())
        for each, is_constant in overwritten:
            module, name = each.attribute
            self._ignored.setdefault(module, set()).add(name)
            caches = self._caches.setdefault(module, set())
            (caches.add if is_constant else caches.discard)(name)
            self._recent.clear()

    def _reads(self, path: str, pointer: int | None) -> CaptureError:
        """The error for a step that reads a tensor which it, or another call of it, replaces."""
        roots = [root for root in self._roots.values() if isinstance(root, nn.Module)]
        registered = {z.data_ptr() for root in roots for z in (*root.parameters(), *root.buffers())}
        kind = UnsettledError if pointer in registered else CaptureError  # at first it is a view of a parameter
        return kind(
            f"the step reads {path} and assigns another tensor to it, but a captured program would continue to read "
            "the old one. Register it as a buffer and write to it in place, as copy_() does"
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Puts attributes of the model and the loss back: tracing a step runs its Python code."""
        dependencies, drawn = Dependencies(self._roots, {}), _random_numbers()
        try:
            yield
        finally:
            dependencies.restore()
            _set_random_numbers(drawn)


def _random_numbers() -> tuple[Any, Any]:
    """The states of Python's generator and of NumPy's, if that is imported."""
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    return random.getstate(), None if state is None else (state[0], state[1].tobytes(), *state[2:])


def _set_random_numbers(states: tuple[Any, Any]) -> None:
    """Sets what `_random_numbers` returned."""
    random.setstate(states[0])
    if states[1] is not None:
        kind, key, *rest = states[1]
        numpy = sys.modules["numpy"]
        numpy.random.set_state((kind, numpy.frombuffer(key, dtype=numpy.uint32), *rest))


def _none(item: Any) -> bool:
    return item is None or item == (type(None), None)


def _unsettled(path: str, old: Any, new: Any) -> UnsettledError:
    return UnsettledError(
        f"the step changes {path} while it runs (from {in_words(old)} to {in_words(new)}), but a captured program does "
        "not run the Python code that does this. Keep numbers that change in a buffer and write to it in place, or "
        "change them outside of the model and the loss"
    )


def flattened(x: Any, y: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of x and y, tensors without gaps in memory, and their structure.

    Raises a `CaptureError` for a leaf that cannot be an input of a program.
    """
    if type(x) is Tensor and type(y) is Tensor:
        return [_dense(x), _dense(y)], _PAIR
    x, y = (dict(z) if isinstance(z, Mapping) else z for z in (x, y))
    flat, spec = tree_flatten((x, y))
    for z in flat:
        if not isinstance(z, (Tensor, *PLAIN)):
            raise CaptureError(
                f"x or y contains a {type(z).__name__}; only tensors and plain numbers or strings can be captured"
            )
    return [_dense(z) if isinstance(z, Tensor) else z for z in flat], spec


def input_signature(flat: list[Any]) -> tuple[Hashable, ...]:
    """What a program depends on of the leaves of x and y."""
    return tuple([
        (type(z), z.shape, z.stride(), z.dtype, z.device, z.is_inference()) if isinstance(z, Tensor) else plain_item(z)
        for z in flat
    ])  # fmt: skip


def _dense(z: Tensor) -> Tensor:
    """A contiguous copy of a view with gaps, as a CUDA graph's input has none."""
    if z.requires_grad and (not z.is_leaf or isinstance(z, nn.Parameter)):
        raise CaptureError(
            "x or y contains a tensor that requires grad (a parameter, or computed from one), and a captured program "
            "propagates no gradient into its inputs. Compute it inside the model, or pass z.detach()"
        )
    if z.layout != torch.strided:
        raise CaptureError(f"x or y contains a tensor of layout {z.layout}; only dense tensors can be captured")
    if z.is_contiguous() or (z.dim() == 4 and z.is_contiguous(memory_format=torch.channels_last)):
        return z
    return z.contiguous()
