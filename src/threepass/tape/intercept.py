"""Interception of calls: all patches of PyTorch while a step runs or is traced, and what a call needs before it runs.

A `TorchFunctionMode` does not see calls of `autograd.Function.apply`, nor those inside torch functions that are written
in Python: `functions_seen` and `python_body` show it these.
"""

import contextlib
import functools
import re
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from .._torch_compat import (
    DisableTorchFunction,
    function_modes,
    function_modes_enabled,
    set_trace_switches,
    trace_switches,
    tree_map,
)
from ..rules.table import name_of
from .arguments import flatten, tensors_in, unflatten
from .replay import MULTI_HEAD

DROPOUT = {torch.dropout: torch.mul, torch.dropout_: Tensor.mul_,
           torch.feature_dropout: torch.mul, torch.feature_dropout_: Tensor.mul_}  # fmt: skip


class SeesFunctions(TorchFunctionMode):
    """A mode that is shown calls of `autograd.Function.apply`, which is no torch function, while `functions_seen`."""


_lock = threading.Lock()
_users = 0
_original: Any = None
_traces = 0
_switches: tuple[bool, bool, Any] = (False, True, None)


@contextlib.contextmanager
def functions_seen() -> Iterator[None]:
    """Puts a wrapper around `autograd.Function.apply` that asks whether this thread has a mode to show the call to."""
    global _users, _original
    with _lock:
        _users += 1
        if _users == 1:
            _original = Function.__dict__["apply"]
            setattr(Function, "apply", classmethod(_shown_apply))  # noqa: B010
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                setattr(Function, "apply", _original)  # noqa: B010


def _shown_apply(cls, *args, **kwargs):
    func = types.MethodType(_original.__func__, cls)
    modes = [m for m in function_modes() if isinstance(m, SeesFunctions)] if function_modes_enabled() else []
    if not modes:
        return func(*args, **kwargs)
    if cls is CheckpointFunction:  # its backward works in loss.backward() only: run what it wraps
        return args[0](*args[2:])
    if cls.__module__ == CheckpointFunction.__module__:  # other checkpoints' own bookkeeping
        return func(*args, **kwargs)
    with DisableTorchFunction():
        return modes[-1].__torch_function__(func, (), args, kwargs)


def apart(out: Any) -> Any:
    """Copies of outputs with histories of their own, so that one's error has no part in another's.

    An LSTM cell computes its state h from its state c, so h's error reaches c's own edge. An alias would not do: a
    write to it would drop it from the graph.
    """
    if isinstance(out, Tensor) or len({z.grad_fn for z in tensors_in(out)} - {None}) < 2:
        return out
    return tree_map(lambda z: z.clone() if isinstance(z, Tensor) and z.requires_grad else z, out)


def drawn_once(func, values, spec):
    """Dropout as a multiplication by its mask, drawn as dropout draws it, so that pass 3 has the same mask."""
    args, kwargs = unflatten(values, spec)
    a, p, train = (*args, *kwargs.values())[:3]
    if not train or p == 0:
        return func, values, spec
    draw = torch.dropout if func in (torch.dropout, torch.dropout_) else torch.feature_dropout
    mask = draw(torch.ones_like(a, requires_grad=False), p, True)
    return DROPOUT[func], *flatten((a, mask), {})


@functools.cache
def writes_to(func) -> bool:
    """Whether torch's names say that a function writes to its first argument."""
    name = name_of(func).rpartition(".")[2]
    return bool(re.fullmatch(r"\w*[^_]_|__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|matmul)__", name))


@functools.cache
def python_body(func) -> Callable[..., Any] | None:
    """A torch function written in Python, with its question whether somebody overrides it answered no."""
    if not isinstance(func, types.FunctionType) or not func.__module__.startswith("torch") or func is MULTI_HEAD:
        return None
    asks = [name for name in func.__globals__ if name.startswith("has_torch_function")]
    globals_ = func.__globals__ | {name: lambda *_: False for name in asks}
    body = types.FunctionType(func.__code__, globals_, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


@contextlib.contextmanager
def told_it_is_compiled() -> Iterator[None]:
    """`torch.compiler.is_compiling()` returns True, and contents of tensors are not validated.

    Libraries ask it before they look into a mask. torch asks it too, where it makes no difference to a step's results:
    modules do not call hooks for exceptions, transformer layers do not look for padding in a mask. As under
    `torch.compile`, distributions do not validate their arguments, and `torch._check_tensor_all` does nothing.
    `torch.compiler.is_dynamo_compiling()` and `torch.compiler.is_exporting()` stay False. Other threads see this too.
    """
    global _traces, _switches
    with _lock:
        _traces += 1
        if _traces == 1:
            _switches = trace_switches()
            set_trace_switches(True, False, lambda error_type, cond, message=None: None)
    try:
        yield
    finally:
        with _lock:
            _traces -= 1
            if _traces == 0:
                set_trace_switches(*_switches)
