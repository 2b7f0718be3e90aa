"""What an operation is registered under, and what messages and tables call it."""

import types
from typing import Any

import torch

from .._torch_compat import OpOverload, OpOverloadPacket, overload_of

IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)


def key_of(func: Any) -> Any:
    """The key that an operation is registered under: the class of `Function.apply`, the packet of an overload."""
    if isinstance(func, OpOverload):
        return func.overloadpacket
    if isinstance(func, torch.library.CustomOpDef):
        return overload_of(func).overloadpacket
    owner = getattr(func, "__self__", None)
    return owner if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) else func


_names: dict[Any, str] = {}  # of functions and methods that are written in C++: their names are fixed


def name_of(func: Any) -> str:
    """The operation's name, for messages."""
    name = _names.get(func)
    if name is None:
        name = _find_name(func)
        if isinstance(func, IN_C):
            _names[func] = name
    return name


def _find_name(func: Any) -> str:
    key = key_of(func)
    if isinstance(key, OpOverloadPacket):
        return str(key)
    name = getattr(key, "__name__", str(key))
    owner = getattr(key, "__self__", None)
    return f"Tensor.{owner.__name__}" if name == "__get__" and owner is not None else name


def is_user_defined(func: Any) -> bool:
    """Whether an operation is user-defined: an `autograd.Function` or a custom op."""
    key = key_of(func)
    return isinstance(key, type) or (isinstance(key, OpOverloadPacket) and not str(key).startswith("aten."))
