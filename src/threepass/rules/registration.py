"""What a rule can be registered for, and how it is called.

Pass 1 records calls of functions and methods of torch that are written in C++, of `autograd.Function`s and of custom
ops. Of a Python function it records the operations that the function calls, so that a rule for the function itself
would not be used.
"""

import ast
import contextlib
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_compat import OpOverloadPacket, arguments_of
from .names import IN_C, is_user_defined, key_of, name_of

_METADATA = (Tensor.dim, Tensor.is_floating_point, Tensor.numel, Tensor.size)
_WRAPPERS = (nn.Module, functools.partial, torch.jit.ScriptFunction)
_MOST = 6  # operations that a message lists
_PACKAGE = __name__.partition(".")[0]


def check_operations(functions: Sequence[Any]) -> None:
    """Raises an error that says what to register instead, if pass 1 does not record each of them as one operation."""
    if not functions:
        raise TypeError("threepass.rule() needs the operation that the rule is for: @threepass.rule(operation)")
    for key in map(key_of, functions):
        is_other_class = isinstance(key, type) and not issubclass(key, torch.autograd.Function)
        if not callable(key) or is_other_class or isinstance(key, _WRAPPERS):
            raise TypeError(
                f"threepass.rule(operation) got {key!r}, which is not an operation: it takes functions and methods of "
                "torch, autograd.Function classes and custom ops"
            )
        if isinstance(key, (types.FunctionType, types.MethodType)) and not _is_recorded(key):
            raise ValueError(_advice(key))


def check_options(arity: Any, reads: Any) -> None:
    if reads not in ("a", "u", "shapes"):
        raise ValueError(
            'reads must be "a" (the contents of the arguments), "u" (those of the output) or "shapes" (no contents), '
            f"got {reads!r}"
        )
    if not isinstance(arity, int) or arity < 1:
        raise ValueError(
            f"arity must be a positive integer (how many arguments may depend on the input), got {arity!r}"
        )


def check_parameters(make: Callable[..., Any], func: Any) -> None:
    """Raises an error if a rule cannot be called with the output u and the operation's arguments."""
    signature, known = inspect.signature(make), _parameters(key_of(func))
    required, names = known or (1, ["a"])
    bind = signature.bind if known else signature.bind_partial
    keywords = dict.fromkeys(signature.parameters.keys() & {"active", "saved"})
    for count in range(required, len(names) + 1):
        with contextlib.suppress(TypeError):
            bind(*[None] * (1 + count), **keywords)
            return
    given = ", ".join(["u", *names] if known else ["u", "a", "..."])
    raise TypeError(
        f"the rule {name_of(make)}{signature} cannot be called with the output and the arguments of "
        f"{name_of(func)}: ({given})"
    )


def _parameters(key: Any) -> tuple[int, list[str]] | None:
    """How many positional parameters are required, and the names of all of them; None where this is not known."""
    if not is_user_defined(key):
        return None
    if isinstance(key, OpOverloadPacket):
        first, *others = key.overloads()
        arguments = [a for a in arguments_of(getattr(key, first)) if not a.kwarg_only]
        return None if others else (sum(not a.has_default_value() for a in arguments), [a.name for a in arguments])
    parameters = list(inspect.signature(key.forward).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    parameters = parameters[key.setup_context is torch.autograd.Function.setup_context :]  # without ctx
    return sum(p.default is p.empty for p in parameters), [p.name for p in parameters]


def _is_recorded(func: Any) -> bool:
    """Whether a call of a Python function reaches pass 1, and is recorded as it is.

    Functions that call `handle_torch_function` reach it; for those of torch, pass 1 runs their body. `torch.einsum` has
    a body of calls of itself, and `super()` calls the method in C++ that a Python method of `Tensor` stands for.
    Functions of this package are run in place of others.
    """
    names = func.__code__.co_names
    if _is_of_torch(func):
        return func is torch.einsum or "super" in names
    return (func.__module__ or "").startswith(_PACKAGE) or any("torch_function" in name for name in names)


def _is_of_torch(func: Any) -> bool:
    return (func.__module__ or "").startswith("torch")


def _advice(func: Any) -> str:
    called = _operations_called_by(func)
    listed = f" (in its source: {', '.join(called)})" if 0 < len(called) <= _MOST else ""
    instead = "" if _is_of_torch(func) else ", or make the function one operation: an autograd.Function or a custom op"
    return (
        f"threepass.rule(operation) got {func.__module__}.{func.__qualname__}, which is a Python function: pass 1 "
        "records the operations that it calls, so that a rule for the function itself would not be used. Register the "
        f"rule for those operations{listed}{instead}. docs/add-a-rule.md shows how to list what is recorded"
    )


def _operations_called_by(func: Any) -> list[str]:
    """The functions of torch in C++ that the source of a Python function names, as one would type them."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(func)))
    except (OSError, SyntaxError, TypeError):
        return []
    hints = {name: Tensor for name, hint in func.__annotations__.items() if hint is Tensor}
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sorted({name for call in calls if (name := _resolved(call, func.__globals__ | hints))})


def _resolved(call: str, names: dict[str, Any]) -> str | None:
    """The full name of a function in C++ that dispatches to torch function modes; None for others."""
    root, *attributes = call.split(".")
    value = names.get(root)
    path = "torch.Tensor" if value is Tensor else getattr(value, "__name__", "")
    for name in attributes:
        value, path = getattr(value, name, None), f"{path}.{name}"
    is_operation = isinstance(value, IN_C) and value not in (*_METADATA, *torch.overrides.get_ignored_functions())
    return path if is_operation and path.startswith("torch.") else None
