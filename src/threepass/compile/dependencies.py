"""What a captured step depends on besides the contents of tensors, found by walking the model and the loss.

A `Dependencies` object describes the same things twice:

    items           {path: hashable value}: compares two states of a model, and names what changed between them
    is_unchanged()  compares the same objects with what they were, in a few comparisons at C speed: has nothing changed?

What is walked: modules with all of their attributes, parameters, buffers and hooks; functions with their code, their
closures, default arguments and the globals that their code names; partials and bound methods; lists, dicts, sets and
tuples; of classes and other objects the attributes that some code among all this names. Tensors, modules, functions and
hooks are compared by identity, numbers, strings, containers, arrays and code by value.
"""

import dis
import functools
import random
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, KeysView, Mapping
from enum import Enum
from itertools import chain
from operator import attrgetter, getitem, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import (  # by name: an attribute of torch is looked up slowly, as that module has a __getattr__
    Tensor,
    get_autocast_dtype,
    get_default_dtype,
    is_autocast_cache_enabled,
    is_autocast_enabled,
    is_inference_mode_enabled,
    nn,
)

from .._torch_compat import (
    DICTS_HAVE_VERSIONS,
    GLOBAL_HOOKS,
    MODULE_HOOK_FLAGS,
    MODULE_HOOKS,
    MODULE_MEMBERS,
    MODULE_OTHERS,
    TensorGuards,
    dict_version,
    kernel_switches,
    number_of_function_modes,
)

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, Enum, range,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_LARGEST = 10_000  # elements of a container; a larger one (a data set) is compared by identity and length alone
_DEEPEST = {False: 2, True: 8}  # objects within objects: all of their attributes, and those that code names

_METADATA = frozenset(
    ("in_channels", "out_channels", "in_features", "out_features")
)  # that PyTorch's layers only print
_REPLACED = (MODULE_MEMBERS[-1], *MODULE_HOOKS)  # dicts of modules, hooks and submodules, that people put others for
_WALKED = frozenset((*MODULE_HOOKS, *MODULE_MEMBERS, *MODULE_HOOK_FLAGS, *MODULE_OTHERS))

_SHARED = getattr(random.random, "__self__", None)  # the generator of the random module
_contents, _fields = attrgetter("cell_contents"), attrgetter("__dict__")
_parts = attrgetter("__code__", "__defaults__", "__kwdefaults__")  # of a function


class Identity:
    """Equal for the same object only, and to nothing once that is gone.

    The object is not kept alive if it allows that: descriptions of earlier models and losses would keep their tensors.
    """

    __slots__ = ("_id", "_object")

    def __init__(self, object: Any):
        self._id = id(object)
        try:
            self._object: Callable[[], Any] = weakref.ref(object)
        except TypeError:
            self._object = lambda: object

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Identity):
            return self is other
        return (mine := self._object()) is not None and mine is other._object()

    def __hash__(self) -> int:
        return self._id


class TensorItem(NamedTuple):
    tensor: Identity
    pointer: int | None
    shape: torch.Size
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    inference: bool


class Attribute(NamedTuple):
    """A plain attribute of a module that holds, or held, a tensor."""

    module: nn.Module
    name: str


class Scope(NamedTuple):
    """How far an object is walked.

    named: only the attributes that code names count, where it is neither a module nor a function. depth: of objects
    within objects.
    """

    named: bool = False
    depth: int = 0

    def inside(self) -> "Scope":
        """Of the attributes of an object."""
        return Scope(self.named, self.depth + 1)


WHOLE, NAMED = Scope(), Scope(named=True)


class Snapshot:
    """Objects, and their contents when `remember` was called."""

    def __init__(self) -> None:
        self.sized: list[Any] = []  # what has as many entries as before
        self.fields: dict[tuple[str, ...], list[Any]] = defaultdict(list)  # names -> the dicts that have them
        self.owners: list[Any] = []  # dicts, and the names in them of what is compared by identity
        self.owned: list[str] = []
        self.cells: list[Any] = []
        self.containers: list[Any] = []
        self.mixed: list[Any] = []  # those of more than plain values
        self.members: list[dict[Any, Any]] = []  # parameters, buffers, submodules and hooks, each with its owner above

    def remember(self, *others: tuple[Callable[[Any], Any], list[Any]]) -> None:
        """Records what `is_unchanged` compares with; others: functions, and objects of which they return a part."""
        groups = ((itemgetter(*names), fields) for names, fields in self.fields.items() if names)
        parts: list[tuple[Callable[[Any], Any], list[Any]]] = [(len, self.sized), *groups, *others]
        self._parts = [(part_of, objects, [*map(part_of, objects)]) for part_of, objects in parts if objects]
        self.copies = [*map(_copied, self.containers)]
        self._contents = [*self.copies, *map(dict, self.members)]
        self._live = [*self.containers, *self.members]
        self._elements = [*map(_elements_of, chain(self.mixed, self.members))]
        self._identities = [*self._identified()]

    def is_unchanged(self) -> bool:
        """Whether the contents are the same. Lists do not compare elements that are the same object."""
        for part_of, objects, before in self._parts:
            if [*map(part_of, objects)] != before:
                return False
        return all(map(is_, self._identified(), self._identities)) and self._live == self._contents

    def _identified(self) -> Iterator[Any]:
        owned, elements = map(getitem, self.owners, self.owned), chain.from_iterable(self._elements)
        return chain(owned, map(_contents, self.cells), elements)


class Dependencies:
    """The model and the loss as they are now; `ignored` names attributes of modules that do not count."""

    def __init__(self, roots: Mapping[str, Any], ignored: Mapping[nn.Module, set[str]]):
        self._ignored = ignored
        self._named: frozenset[str] = frozenset()  # the names in all code that was walked
        while True:  # a name that is found late may be that of an attribute that was left out
            self._walk(roots)
            named = frozenset().union(self._matched, *map(names_in, self._codes))
            if named <= self._named:
                break
            self._named |= named
        self._remember()

    def _walk(self, roots: Mapping[str, Any]) -> None:
        self.items: dict[str, Hashable] = {}
        self.attributes: dict[str, Attribute] = {}
        self._paths: dict[int, str] = {}  # of what was walked already
        self._alive: list[Any] = []  # and that itself, so that its address stays its own
        self._codes: list[types.CodeType] = []
        self._restorable: list[tuple[dict[str, Any], dict[str, Any], set[str] | None]] = []
        self._classes: dict[type, dict[str, Any]] = {}  # what was walked of each class
        self._slots: dict[tuple[str, ...], list[Any]] = defaultdict(list)
        self._objects: list[Any] = []  # whose class may be replaced
        self._holders: list[Any] = []  # whose `__dict__` may be replaced, and that dict
        self._held: list[dict[str, Any]] = []
        self._empty: list[Any] = []
        self._undefined: list[tuple[KeysView[str], frozenset[str]]] = []  # globals, and names that are not among them
        self._matched: set[str] = set()  # attributes that `case Class(value)` reads
        self._arrays: list[Any] = []
        self._generators: list[Any] = []
        self._torch_generators: list[tuple[torch.Generator, Tensor]] = []  # restored; programs do not draw from them
        self._functions: list[Any] = []
        self._tensors: list[Tensor] = []
        self._always = Snapshot()
        self._versioned = Snapshot()  # of modules' dicts, each of which has a version

        self.flags = flags()
        for root, value in roots.items():
            self._add(root, value)
        hooks = dict(zip(MODULE_HOOKS, GLOBAL_HOOKS, strict=True))
        for kind in MODULE_HOOKS:
            self._hooks(f"torch.nn.modules.module._global{kind}", hooks, kind)

    def _remember(self) -> None:
        """Records what `is_unchanged` compares with."""
        self._generator_states = [*map(_state_of, self._generators)]
        self._cell_values = [*map(_contents, self._always.cells)]
        self._dicts = [*self._versioned.sized, *self._versioned.members]
        self._versions = [*map(dict_version, self._dicts)]
        self._versioned.remember()
        self._always.remember(
            (type, self._objects),
            *((attrgetter(*names), objects) for names, objects in self._slots.items()),
            (tuple, [z for z in self._always.containers if isinstance(z, dict)]),  # the order of their keys
            (_bytes, self._arrays),
            (_state_of, self._generators),
            (_parts, self._functions),
            (Tensor.data_ptr, self._tensors),
        )
        sizes: Any = [list(z.shape) for z in self._tensors]
        strides: Any = [list(z.stride()) for z in self._tensors]
        self._guards = TensorGuards(*self._tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def is_unchanged(self) -> bool:
        """Whether nothing has changed. May say no where the full description is the same; never the other way round.

        A dict whose version is the same has the same entries; where one is another, values are compared.
        """
        try:
            versions = [*map(dict_version, self._dicts)]
            if flags() != self.flags or any(self._empty) or not self._always.is_unchanged():
                return False
            if not all(map(is_, map(_fields, self._holders), self._held)):
                return False
            if not all(names.isdisjoint(defined) for defined, names in self._undefined):
                return False
            if versions != self._versions:
                if not self._versioned.is_unchanged():
                    return False
                self._versions = versions
            return self._guards.check(*self._tensors)
        except Exception:  # an attribute is gone, or values cannot be compared
            return False

    def restore(self) -> None:
        """Puts attributes, closures' variables and the contents of containers back, where they are others now."""
        for fields, before, names in self._restorable:
            for name in [] if names is None else [n for n in fields if n not in names]:
                del fields[name]
            for name, value in before.items():
                if fields.get(name, fields) is not value:
                    fields[name] = value
        for cls, before in self._classes.items():
            for name, value in before.items():
                if vars(cls).get(name, cls) is not value:
                    setattr(cls, name, value)
        for generator, state in zip(self._generators, self._generator_states, strict=True):
            if isinstance(generator, random.Random):
                generator.setstate(state)
            else:
                generator.bit_generator.state = state
        for drawn, contents in self._torch_generators:
            drawn.set_state(contents)
        for cell, value in zip(self._always.cells, self._cell_values, strict=True):
            cell.cell_contents = value
        for container, contents in zip(self._always.containers, self._always.copies, strict=True):
            container.clear()
            (container.update if isinstance(container, (dict, set)) else container.extend)(contents)

    def _add(self, path: str, value: Any, scope: Scope = WHOLE) -> None:
        """Describes a value under its path."""
        if isinstance(value, PLAIN):
            self.items[path] = plain_item(value)
        elif isinstance(value, Tensor):
            self._tensor(path, value)
        elif isinstance(value, tuple) and all(type(v) is int for v in value):
            self.items[path] = (tuple, tuple(iter(value)))  # a class derived from tuple may refuse to tell its length
        elif id(value) in self._paths:
            self.items[path] = ("as", self._paths[id(value)])
        else:
            if not isinstance(value, types.MethodType):  # a new object at every access
                self._paths[id(value)] = path
            self._alive.append(value)
            self._composite(path, value, scope)

    def _composite(self, path: str, value: Any, scope: Scope) -> None:
        match value:
            case nn.Module():
                self._module(path, value)
            case types.FunctionType():
                self._function(path, value)
            case types.MethodType():
                self._method(path, value, scope.depth)
            case functools.partial():
                self.items[path] = functools.partial
                self._add(f"{path}.func", value.func, scope)
                self._add(f"{path}.args", value.args, scope)
                self._add(f"{path}.keywords", value.keywords, scope)
            case slice():
                self._add(path, (slice, value.start, value.stop, value.step), scope)
            case tuple() | frozenset():
                self._elements(path, value, scope)
            case list() | dict() | set() | deque():
                self._container(path, value, scope)
            case staticmethod() | classmethod():
                self._add(path, value.__func__)
            case property():
                self._add(path, value.fget)
            case types.MappingProxyType():
                self.items[path] = (types.MappingProxyType, len(value))
                self._attributes(path, value, [*value], scope, whole=True)
            case types.ModuleType():
                self._python_module(path, value)
            case type():
                self.items[path] = Identity(value)
                is_function, is_module = issubclass(value, torch.autograd.Function), issubclass(value, nn.Module)
                self._class(value, whole=is_function, made=not is_module)
            case types.BuiltinFunctionType():
                self.items[path] = Identity(value)
                if value.__self__ is not _SHARED:  # `Signature.capturing` looks at that one
                    self._add(f"{path}.__self__", value.__self__, Scope(True, scope.depth))
            case torch.Generator():
                self.items[path] = Identity(value)
                self._torch_generators.append((value, value.get_state()))
            case _ if isinstance(value, random.Random) or _is_numpy_generator(value):
                self._generators.append(value)
                self.items[path] = (type(value), f"state {hash(repr(_state_of(value))):x}")
            case _ if _is_array(value):
                self._arrays.append(value)
                self.items[path] = (type(value), str(getattr(value, "dtype", "")), _bytes(value))
            case _:
                self._object(path, value, scope)

    def _tensor(self, path: str, z: Tensor) -> None:
        try:
            pointer, stride = z.data_ptr(), z.stride()
        except RuntimeError:  # sparse, or without a storage
            pointer, stride = None, None
        self.items[path] = TensorItem(
            Identity(z), pointer, z.shape, stride, z.dtype, z.device, z.requires_grad, z.is_inference()
        )
        if id(z) not in self._paths and pointer is not None:
            self._tensors.append(z)
        self._paths[id(z)] = path

    def _module(self, path: str, module: nn.Module) -> None:
        self.items[path] = (Identity(module), Identity(type(module)))
        self._objects.append(module)
        if isinstance(module, torch.jit.ScriptModule):  # takes no hooks and no new attributes
            self._slots[("training",)].append(module)
            self.items[f"{path}.training"] = module.training
            for name, z in chain(module.named_parameters(), module.named_buffers()):
                self._add(f"{path}.{name}", z)
            return
        named = self._class(type(module), whole=True)
        fields = self._dict_of(module)
        left_out = _WALKED | self._ignored.get(module, set())
        if type(module).__module__.startswith("torch.nn."):
            left_out |= _METADATA
        self._attributes(path, fields, [n for n in fields if n not in left_out], Scope(named), module, whole=True)
        for kind in MODULE_MEMBERS:
            self._entries(fields, kind, module)
            self.items[f"{path}.{kind}"] = tuple(fields[kind])  # their order
            for name, member in fields[kind].items():
                self._add(f"{path}.{name}", member)
        for kind in MODULE_HOOKS:
            self._hooks(f"{path}.{kind.strip('_')}", fields, kind)
        flagged = [fields[kind].keys() for kind in MODULE_HOOK_FLAGS if fields[kind]]
        if flagged:
            self.items[f"{path}.hooks"] = tuple(map(tuple, flagged))

    def _hooks(self, path: str, fields: dict[str, Any], kind: str) -> None:
        self._entries(fields, kind)
        for i, hook in enumerate(fields[kind].values()):
            self._add(f"{path}[{i}]", hook)
            self.items[f"{path}[{i}] itself"] = Identity(hook)

    def _snapshot_for(self, module: nn.Module | None) -> Snapshot:
        """Where a module's dicts belong: one that a step writes to would have another version at every call."""
        versioned = DICTS_HAVE_VERSIONS and module is not None and not self._ignored.get(module)
        return self._versioned if versioned else self._always

    def _dict_of(self, holder: Any) -> dict[str, Any]:
        """The `__dict__` of a module or another object, which is watched: people also assign another one."""
        self._holders.append(holder)
        self._held.append(holder.__dict__)
        return self._held[-1]

    def _entries(self, fields: dict[str, Any], kind: str, module: nn.Module | None = None) -> None:
        """A dict of a module, whose values are compared by identity; people also put another dict in its place."""
        if fields[kind]:
            # other dicts change order in one version
            snapshot = self._snapshot_for(module if type(fields[kind]) is dict else None)
            snapshot.members.append(fields[kind])
            snapshot.owners.append(fields)
            snapshot.owned.append(kind)
        else:
            self._empty.append(fields[kind])

    def _attributes(
        self,
        path: str,
        fields: Any,
        chosen: list[str],
        scope: Scope,
        module: nn.Module | None = None,
        whole: bool = False,
    ) -> None:
        """Watches the entries `chosen` of a `__dict__` or a similar mapping; whole: adding an entry is a change too."""
        compared, snapshot = [], self._snapshot_for(module)
        if whole:
            snapshot.sized.append(fields)
        if isinstance(fields, dict):
            self._restorable.append((fields, {name: fields[name] for name in chosen}, set(fields) if whole else None))
        for name in chosen:
            value = fields[name]
            if isinstance(value, Tensor):
                snapshot.owners.append(fields)
                snapshot.owned.append(name)
            else:
                compared.append(name)
            if module is not None:
                self.attributes[f"{path}.{name}"] = Attribute(module, name)
            self._add(f"{path}.{name}", value, scope)
        if module is not None:  # dicts with entries are compared one by one
            compared += [kind for kind in _REPLACED if not fields[kind]]
        snapshot.fields[tuple(compared)].append(fields)

    def _class(self, cls: type, whole: bool = False, made: bool = False) -> bool:
        """Walks a class of the user's, and those that it is derived from; False for a class of a library.

        whole: with all of its own attributes and methods; else with those that code names, and special methods. made:
        with those that make an object, as a step may do if its code names the class.
        """
        bases = [base for base in cls.__mro__ if not is_library(base.__module__)]
        for base in bases:
            own = [n for n, v in vars(base).items() if _is_own(n, v)]
            walked = self._classes.setdefault(base, {})
            chosen = [n for n in own if n not in walked and (whole or n in self._named or n in _SPECIAL)]
            chosen += [n for n in _MAKING if made and n not in walked and isinstance(vars(base).get(n), _CODE)]
            self._matched.update(n for n in vars(base).get("__match_args__", ()) if isinstance(n, str))
            walked |= {n: vars(base)[n] for n in chosen}
            self._always.sized.append(vars(base))
            others = [c for c in self._classes if c.__qualname__ == base.__qualname__]
            number = f" ({others.index(base) + 1})" if others[0] is not base else ""
            self._attributes(f"class {base.__qualname__}{number}", vars(base), chosen, NAMED)
        if bases and not is_library(type(cls).__module__):
            self._class(type(cls))
        return bool(bases)

    def _function(self, path: str, f: types.FunctionType) -> None:
        self.items[path] = Identity(f)
        if is_library(f.__module__ or ""):
            return
        self._functions.append(f)
        self._codes.append(f.__code__)
        self.items[f"{path} code"] = f.__code__
        self._add(f"{path} defaults", f.__defaults__, NAMED)
        self._add(f"{path} defaults by name", f.__kwdefaults__, NAMED)
        if f.__dict__:
            self._add(f"{path} attributes", f.__dict__, NAMED)
        else:
            self._empty.append(f.__dict__)
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # assigned later
                continue
            self._always.cells.append(cell)
            if name == "__class__":  # of a method that calls super(); it makes no object
                self.items[f"{path}: {name}"] = Identity(value)
                self._class(value)
            else:
                self._add(f"{path}: {name}", value, NAMED)
        self._globals(f)

    def _globals(self, f: types.FunctionType) -> None:
        read = sorted(globals_in(f.__code__))
        self._attributes(f"{f.__module__}", f.__globals__, [n for n in read if n in f.__globals__], NAMED)
        if undefined := frozenset(read).difference(f.__globals__):  # built-ins, and what may be defined later
            self._undefined.append((f.__globals__.keys(), undefined))
        for name in sorted(names_in(f.__code__).difference(f.__globals__)):  # imported inside the function
            if isinstance(module := sys.modules.get(name), types.ModuleType) and not is_library(name):
                self._add(f"module {name}", module, NAMED)

    def _python_module(self, path: str, module: types.ModuleType) -> None:
        self.items[path] = Identity(module)
        if not is_library(module.__name__):
            chosen = [n for n in sorted(self._named) if n in vars(module)]
            self._attributes(module.__name__, vars(module), chosen, NAMED)

    def _method(self, path: str, method: types.MethodType, depth: int) -> None:
        self.items[path] = types.MethodType
        self._add(f"{path}.__func__", method.__func__)
        self._add(f"{path}.__self__", method.__self__, Scope(hasattr(method.__func__, "__code__"), depth))

    def _elements(self, path: str, values: Iterable[Any], scope: Scope) -> None:
        ordered = sorted(values, key=repr) if isinstance(values, (set, frozenset)) else [*iter(values)]
        self.items[path] = (type(values), len(ordered))
        for i, value in enumerate(ordered):
            self._add(f"{path}[{i}]", value, scope)

    def _container(self, path: str, container: Any, scope: Scope) -> None:
        if type(container) not in (list, dict, set, deque):
            self._fields_of(path, container, scope)
        if len(container) > _LARGEST:
            self._always.sized.append(container)
            self.items[path] = (Identity(container), len(container))
            return
        self._always.containers.append(container)
        values = [*container.values()] if isinstance(container, dict) else [*container]
        if not all(isinstance(v, PLAIN) for v in values):
            self._always.mixed.append(container)
        if isinstance(container, dict):
            self._elements(f"{path} keys", container.keys(), scope)
        self._elements(path, container.values() if isinstance(container, dict) else container, scope)

    def _object(self, path: str, value: Any, scope: Scope) -> None:
        """Some object: its attributes, or with `scope.named` those that code names, and its class."""
        self.items[path] = (Identity(value), Identity(type(value)))
        self._objects.append(value)
        if scope.depth >= _DEEPEST[scope.named]:
            return
        if not scope.named and callable(value):
            self._class(type(value), whole=True)
        self._fields_of(path, value, scope)
        if not is_library(type(value).__module__):
            fields = chain.from_iterable(vars(base).items() for base in type(value).__mro__)
            slots = [n for n, v in fields if isinstance(v, types.MemberDescriptorType) and hasattr(value, n)]
            if slots:
                self._slots[tuple(slots)].append(value)
            for name in slots:
                self._add(f"{path}.{name}", getattr(value, name), scope.inside())

    def _fields_of(self, path: str, value: Any, scope: Scope) -> None:
        self._class(type(value))
        if not isinstance(getattr(value, "__dict__", None), dict):
            return
        fields = self._dict_of(value)
        whole = not scope.named or isinstance(value, Collection)  # whose special methods may be a library's
        chosen = [n for n in fields if whole or n in self._named or n == "__wrapped__"]  # by functools.lru_cache
        self._always.sized.append(fields)
        self._attributes(path, fields, chosen, scope.inside(), whole=whole)


_CODE = (types.FunctionType, staticmethod, classmethod, property)


def flags() -> tuple[Hashable, ...]:
    """The switches of PyTorch that change what a step computes, or by which kernels."""
    return (
        is_autocast_enabled("cuda"),
        is_autocast_enabled("cpu"),
        get_autocast_dtype("cuda"),
        get_autocast_dtype("cpu"),
        is_autocast_cache_enabled(),
        get_default_dtype(),
        is_inference_mode_enabled(),
        kernel_switches(),
        number_of_function_modes() and str(torch.get_default_device()),
    )


@functools.cache
def is_library(module: Any) -> bool:
    """Whether this module is PyTorch's, Python's, ours, or otherwise installed: its code does not change."""
    if not isinstance(module, str):  # of a class that is not written in Python
        return True
    root = module.partition(".")[0]
    if root in ("torch", "threepass") or root in sys.stdlib_module_names:
        return root != "__main__"
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


@functools.lru_cache(4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """The globals and attributes that a function's code names, also as strings, functions inside it included."""
    inner = (names_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(_words_in(code.co_consts), *inner)


def _words_in(const: Any) -> Iterator[str]:
    """The identifiers among the strings of a constant: `("gain", "bias")`, or the keywords of a pattern of a class."""
    if isinstance(const, str) and const.isidentifier():
        yield const
    elif isinstance(const, (tuple, frozenset)):
        yield from chain.from_iterable(map(_words_in, const))


@functools.lru_cache(4096)
def globals_in(code: types.CodeType) -> frozenset[str]:
    """The globals that a function's code reads, functions inside it included.

    Attributes do not count: scripts name their own variables as models name attributes (`loss`, `x`, `out`).
    """
    if not _BY_STRING.isdisjoint(names_in(code)):
        return names_in(code)
    own = (i.argval for i in dis.get_instructions(code) if i.opname.endswith(_READS_GLOBAL))
    inner = (globals_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(own).union(*inner)


_READS_GLOBAL = ("_GLOBAL", "_GLOBALS", "_NAME")  # the last two in bodies of classes
_BY_STRING = frozenset(("eval", "exec", "globals", "vars", "__dict__", "__globals__"))


def _is_own(name: str, value: Any) -> bool:
    """Whether an attribute of a class is one that the user gave it, and not for making or printing objects."""
    if name.startswith("__"):
        return name == "__match_args__" or (isinstance(value, _CODE) and name in _SPECIAL)
    return not isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType))


# fmt: off
_SPECIAL = frozenset(f"__{name}__" for name in (  # what runs or is read without being named
    "call", "getattr", "getattribute", "setattr", "delattr", "getitem", "setitem", "delitem", "missing", "get", "set",
    "delete", "contains", "iter", "next", "reversed", "len", "length_hint", "bool", "float", "int", "index", "complex",
    "round", "trunc", "floor", "ceil", "hash", "enter", "exit", "class_getitem", "instancecheck", "subclasscheck",
    "match_args", "torch_function", "eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert",
    *(f"{kind}{name}" for kind in ("", "r", "i") for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul", "and", "or", "xor", "lshift",
        "rshift",
    )),
))
_MAKING = ("__new__", "__init__", "__post_init__")
# fmt: on


def plain_item(value: Any) -> Hashable:
    """A number or string, to be compared by type and value; 0.0 is not -0.0."""
    return type(value), value.hex() if isinstance(value, float) else value


def _is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy's or Python's, and not a large one."""
    try:
        return 0 < memoryview(value).nbytes <= 8 * _LARGEST
    except (TypeError, ValueError):
        return False


def _is_numpy_generator(value: Any) -> bool:
    return type(value).__name__ == "Generator" and type(value).__module__.startswith("numpy.")


def _state_of(generator: Any) -> Any:
    """The state of a random number generator of Python's or NumPy's."""
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def _bytes(array: Any) -> bytes:
    return memoryview(array).tobytes()


def _copied(container: Any) -> Any:
    kind = next(kind for kind in (dict, list, set, deque) if isinstance(container, kind))
    return kind(container)


def _elements_of(container: Any) -> Iterable[Any]:
    """What is iterated over to see the elements as they are then; a class derived from dict may make a list of them."""
    if isinstance(container, OrderedDict):
        return OrderedDict.values(container)  # those of dict.values come in another order
    return dict.values(container) if isinstance(container, dict) else container


def in_words(item: Any) -> str:
    """An item of `Dependencies.items`, for messages."""
    match item:
        case TensorItem():
            return f"a tensor of shape {tuple(item.shape)}"
        case (type() as kind, str() as value) if kind is float:
            return repr(float.fromhex(value))
        case (type(), value):
            return repr(value)
        case Identity() | (Identity(), *_):
            return "another object"
        case types.CodeType():
            return "other code"
        case None:
            return "nothing"
        case _:
            return "something else"


def change_in_words(before: Any, after: Any) -> str:
    """Two items of one path that differ, for messages."""
    ours, theirs = in_words(before), in_words(after)
    if isinstance(before, TensorItem) and isinstance(after, TensorItem) and ours == theirs:
        for name in ("dtype", "device", "stride", "requires_grad"):
            if (old := getattr(before, name)) != (new := getattr(after, name)):
                return f"{name} {old}, then {new}"
        return f"{ours}, then {'the same in other memory' if before.tensor == after.tensor else 'another one'}"
    return f"{'an object' if ours == theirs else ours}, then {theirs}"
