"""TorchScript operation by operation, so that modes see the calls inside compiled code.

`run` interprets the graph of a TorchScript function or method. An operation on tensors becomes a call of the torch
function of its name, with the arguments of its schema in their order; everything else (numbers, lists, branches, loops)
is Python. A graph is translated once. One with a node that has no translation runs as it was compiled.
"""

import contextlib
import math
import operator
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import SCRIPT_DTYPES, ScriptArgument, native_function, script_operation

Values = dict[str, Any]  # of a graph's variables, by name
Step = Callable[[Values], None]

_MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
_KINDS = {"ScalarType": SCRIPT_DTYPES, "MemoryFormat": _MEMORY_FORMATS}  # which a graph has as numbers


class UntranslatableError(Exception):
    """A node of a graph has no translation."""


class Program:
    """The graph of a TorchScript function or method as steps in Python."""

    def __init__(self, scripted: Any):
        graph = scripted.inlined_graph
        self._names = [z.debugName() for z in graph.inputs()]
        self._arguments = scripted.schema.arguments
        self._run = _block(graph)

    def arguments(self, given: Sequence[Any], named: dict[str, Any]) -> list[Any] | None:
        """A value for each input of the graph; None if these are not the function's arguments."""
        rest, named = self._arguments[len(given) :], dict(named)
        if len(given) > len(self._arguments) or any(a.name not in named and not a.has_default_value() for a in rest):
            return None
        values = [*given, *(named.pop(a.name, a.default_value) for a in rest)]
        return None if named else [_as_scripted(v, str(a.type)) for v, a in zip(values, self._arguments, strict=True)]

    def __call__(self, arguments: list[Any]) -> Any:
        return self._run(dict(zip(self._names, arguments, strict=True)))[0]


_programs: weakref.WeakKeyDictionary[Any, Program | None] = weakref.WeakKeyDictionary()


def run(scripted: Any, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call of a TorchScript function or method; compiled: the call as TorchScript makes it."""
    program = translated(scripted)
    owner = [scripted.owner] if isinstance(scripted, torch.ScriptMethod) else []
    arguments = None if program is None else program.arguments([*owner, *args], kwargs)
    if program is None or arguments is None:
        return compiled(scripted, *args, **kwargs)
    return program(arguments)


def translated(scripted: Any) -> Program | None:
    """Its program; None if its graph has no translation."""
    if scripted not in _programs:
        try:
            _programs[scripted] = Program(scripted)
        except UntranslatableError:
            _programs[scripted] = None
    return _programs[scripted]


def _as_scripted(value: Any, kind: str) -> Any:
    """A Python argument as TorchScript sees it: lists are copied, and dtypes are numbers."""
    if isinstance(value, torch.dtype):
        return SCRIPT_DTYPES.index(value)
    if "List[" in kind and isinstance(value, (list, tuple)):
        return list(value)
    if "Device" in kind and isinstance(value, str):
        return torch.device(value)
    return float(value) if "float" in kind and type(value) is int else value


def _block(block: Any) -> Callable[[Values], list[Any]]:
    steps = [_step(node) for node in block.nodes()]
    outputs = [z.debugName() for z in block.outputs()]

    def run_block(values: Values) -> list[Any]:
        for step in steps:
            step(values)
        return [values[name] for name in outputs]

    return run_block


def _step(node: Any) -> Step:
    ins, outs = ([z.debugName() for z in each] for each in (node.inputs(), node.outputs()))
    kind = node.kind()
    if kind in _CONTROL:
        return _CONTROL[kind](node, ins, outs)
    if kind == "prim::PythonOp" and set(node.cconv()) <= {"d"}:  # it takes the node's inputs and nothing else
        function = node.pyobj()
    else:
        function = _LOCAL[kind] if kind in _LOCAL else _operation(node)

    def step(values: Values) -> None:
        result = function(*[values[name] for name in ins])
        if len(outs) == 1:
            values[outs[0]] = result
        elif outs:
            values.update(zip(outs, result, strict=True))

    return step


def _constant(node: Any, ins: list[str], outs: list[str]) -> Step:
    (name,) = outs
    if str(node.output().type()) == "Function":  # it was inlined
        return lambda values: None
    value = node.output().toIValue()
    return lambda values: values.__setitem__(name, value)


def _attribute(node: Any, ins: list[str], outs: list[str]) -> Step:
    (owner,), (name,), attribute = ins, outs, node.s("name")
    return lambda values: values.__setitem__(name, _in_c(values[owner]).getattr(attribute))


def _set_attribute(node: Any, ins: list[str], outs: list[str]) -> Step:
    (owner, value), attribute = ins, node.s("name")
    return lambda values: _in_c(values[owner]).setattr(attribute, values[value])


def _in_c(module: Any) -> Any:
    return vars(module).get("_c", module) if isinstance(module, torch.jit.ScriptModule) else module


def _branch(node: Any, ins: list[str], outs: list[str]) -> Step:
    (condition,), (then, otherwise) = ins, map(_block, node.blocks())
    return lambda values: values.update(zip(outs, (then if values[condition] else otherwise)(values), strict=True))


def _loop(node: Any, ins: list[str], outs: list[str]) -> Step:
    (block,) = node.blocks()
    count, goes_on, *carried = ins
    index, *inner = (z.debugName() for z in block.inputs())
    body = _block(block)

    def step(values: Values) -> None:
        i, more, state = 0, values[goes_on], [values[name] for name in carried]
        while more and i < values[count]:
            values[index] = i
            values.update(zip(inner, state, strict=True))
            more, *state = body(values)
            i += 1
        values.update(zip(outs, state, strict=True))

    return step


_CONTROL: dict[str, Callable[[Any, list[str], list[str]], Step]] = {
    "prim::Constant": _constant, "prim::GetAttr": _attribute, "prim::SetAttr": _set_attribute, "prim::If": _branch,
    "prim::Loop": _loop,
}  # fmt: skip


def _dict(*items: Any) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _list(*items: Any) -> list[Any]:
    return [*items]


def _tuple(*items: Any) -> tuple[Any, ...]:
    return items


def _same(value: Any, *_: Any) -> Any:
    return value


def _raise(message: str, *_: Any) -> None:
    raise torch.jit.Error(message)


def _warn(message: str, *_: Any) -> None:
    warnings.warn(message, stacklevel=2)


_LOCAL: dict[str, Callable[..., Any]] = {
    "prim::ListConstruct": _list, "prim::TupleConstruct": _tuple, "prim::DictConstruct": _dict,
    "prim::TupleUnpack": _same, "prim::ListUnpack": _same, "prim::TupleIndex": operator.getitem,
    "prim::unchecked_cast": _same, "prim::Uninitialized": lambda: None, "prim::RaiseException": _raise,
    "prim::dtype": lambda z: SCRIPT_DTYPES.index(z.dtype), "prim::device": lambda z: z.device,
    "prim::is_cuda": lambda z: z.is_cuda, "prim::requires_grad": lambda z: z.requires_grad,
    "prim::NumToTensor": _same, "prim::min": min, "prim::max": max, "prim::abs": abs, "prim::Print": print,
    "aten::_set_item": operator.setitem, "aten::_unwrap_optional": _same, "aten::warn": _warn,
}  # fmt: skip


def _length(z: Any) -> int:
    return z.shape[0] if isinstance(z, Tensor) else len(z)


# On numbers, lists, dicts and strings: where the first argument is no tensor.
_PYTHON: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "neg", "pow", "eq", "ne", "lt", "le",
                                                  "gt", "ge", "__and__", "__or__", "__xor__", "__getitem__",
                                                  "__contains__")},
    "div": operator.truediv, "floor_divide": operator.floordiv, "remainder": operator.mod, "__not__": operator.not_,
    "append": list.append, "extend": list.extend, "insert": list.insert, "clear": lambda z: z.clear(),
    "pop": lambda z, *key: z.pop(*key), "reverse": list.reverse, "copy": lambda z: z.copy(), "list": list,
    "keys": lambda z: [*z.keys()], "values": lambda z: [*z.values()], "items": lambda z: [*z.items()],
    "get": lambda z, *key: z.get(*key), "format": str.format, "slice": lambda z, *ends: z[slice(*ends)],
    "index": list.index, "add_": operator.iadd, "mul_": operator.imul, "floor": math.floor, "ceil": math.ceil,
    "sqrt": math.sqrt, "log": math.log, "exp": math.exp, "sin": math.sin, "cos": math.cos, "abs": abs,
}  # fmt: skip
# On tensors too.
_EITHER: dict[str, Callable[..., Any]] = {
    "__is__": operator.is_, "__isnot__": operator.is_not, "len": _length, "Int": int, "Float": float, "Bool": bool,
    "IntImplicit": int, "FloatImplicit": float, "item": lambda z: z.item(), "dim": lambda z: z.dim(),
    "numel": lambda z: z.numel(), "size": lambda z, *dim: z.shape[dim[0]] if dim else [*z.shape],
    "is_floating_point": lambda z: z.is_floating_point(), "is_complex": lambda z: z.is_complex(),
    "ScalarImplicit": lambda z: z.item(), "tensor": lambda value, **options: torch.tensor(value, **options),
    "grad": lambda outputs, inputs, seeds, *given: torch.autograd.grad(outputs, inputs, seeds, *given),
}  # fmt: skip


def _slice(z: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    part = slice(start, end, step)
    return z if part == slice(0, _END, 1) else z[(slice(None),) * (dim % z.dim()) + (part,)]


_END = 2**63 - 1  # of a slice that goes on to the end


def _index(indices: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return tuple(slice(None) if i is None else i for i in indices)


def _to(z: Tensor, *given: Any, **options: Any) -> Tensor:
    return z.to(*(_as_torch(v, "ScalarType") for v in given), **options)


_TENSORS: dict[str, Callable[..., Any]] = {  # other calls than those of the torch function with that name
    "slice": _slice, "einsum": lambda equation, factors, *_: torch.einsum(equation, *factors),
    "index": lambda z, indices: z[_index(indices)], "numpy_T": lambda z: z.T,
    "index_put_": lambda z, indices, value, *rest: z.index_put_(tuple(indices), value, *rest),
    "index_put": lambda z, indices, value, *rest: z.index_put(tuple(indices), value, *rest),
    "to": _to,
}  # fmt: skip


def _operation(node: Any) -> Callable[..., Any]:
    """An operation with a schema; its arguments come by position, those too that torch takes by keyword alone."""
    try:
        name, arguments, native = script_operation(node)
    except RuntimeError as error:  # no schema, or no operation of ATen
        raise UntranslatableError(str(error)) from error
    if name in _EITHER:
        return _call(_EITHER[name], arguments)
    on_tensors = _call(_TENSORS.get(name) or native_function(name) or native, arguments, native)
    if name not in _PYTHON:
        return on_tensors
    python = _PYTHON[name]
    return lambda *values: on_tensors(*values) if isinstance(values[0], Tensor) else python(*values)


def _call(
    function: Callable[..., Any], arguments: Sequence[ScriptArgument], native: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """The call without trailing defaults; native: the operation itself, for arguments that torch's function refuses."""
    places = [i for i, a in enumerate(arguments) if not a.by_name]

    def call(*values: Any) -> Any:
        given = [_as_torch(v, a.kind) for v, a in zip(values, arguments, strict=True)]
        chosen = [not a.is_default(v) for v, a in zip(values, arguments, strict=True)]
        named = {a.name: v for a, v, is_given in zip(arguments, given, chosen, strict=True) if a.by_name and is_given}
        count = max((i + 1 for i in places if chosen[i]), default=0)
        try:
            return function(*given[:count], **named)
        except TypeError:
            if native is None or native is function:
                raise
        return native(*given[:count], **named)

    return call


def _as_torch(value: Any, kind: str) -> Any:
    """A number that stands for a dtype or a memory format as that."""
    if type(value) is int and kind in _KINDS:
        with contextlib.suppress(IndexError):
            return _KINDS[kind][value]
    return value
