"""Interception of calls: the patches of torch's functions while a step runs or is traced.

A `TorchFunctionMode` does not intercept `autograd.Function.apply`, nor calls inside TorchScript functions and inside
torch functions that are written in Python: `intercepting_functions` and `python_body` change that. Functions of
`torch.nn.functional` do not call the mode at all, because dispatching to it takes longer than many of them: their
`has_torch_function` checks are patched to return False, and the mode intercepts the calls inside them.
`nn.SyncBatchNorm` calls an `autograd.Function` that can be differentiated once, and on GPUs only, so its forward is
replaced. The patches of DDP, DeepSpeed and FSDP objects are in `core/ranks.py`, `core/deepspeed.py` and
`_torch_compat.py`.
"""

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction, noop_context_fn

from .._torch_compat import (
    DisableTorchFunction,
    checkpoint_generator,
    function_modes,
    function_modes_enabled,
    index_select,
    innermost_function_mode,
    is_traced,
    leaky_relu,
    python_function_of,
    set_checkpoint_generator,
    set_compiling,
    set_trace_switches,
    trace_switches,
    tree_map,
)
from ..rules import sync_batch_norm
from ..rules.affine import has_uneven_rows, linear_by_rows
from ..rules.product import einsum_in_pairs
from . import script
from .arguments import flatten, tensors_in, unflatten
from .state import drawing_from, random_state

_REQUIRES_GRAD: Any = Tensor.requires_grad
DROPOUT = {torch.dropout: torch.mul, torch.dropout_: Tensor.mul_,
           torch.feature_dropout: torch.mul, torch.feature_dropout_: Tensor.mul_}  # fmt: skip


class FunctionInterceptor(TorchFunctionMode):
    """A mode that, inside `intercepting_functions`, gets `autograd.Function.apply` and calls inside TorchScript.

    Of functions of `torch.nn.functional` it gets the calls inside.
    """

    device = "cpu"

    def checkpointing(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> contextlib.AbstractContextManager[Callable[..., Any]]:
        """Around a function that `torch.utils.checkpoint.checkpoint` runs; gives the one for the backward pass."""
        return contextlib.nullcontext(function)


_lock = threading.Lock()
_users = 0
_original: Any = None
_checkpoint_options = [
    p.name for p in inspect.signature(checkpoint_generator).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
]
_run_script = torch.jit.ScriptFunction.__call__
_run_script_method = torch.ScriptMethod.__call__
_run_sync_batch_norm = nn.SyncBatchNorm.forward
_checks = {name: getattr(F, name) for name in vars(F) if name.startswith("has_torch_function")}
_traces = 0
_eager_modules: frozenset[str] = frozenset()
_switches: tuple[bool, bool, Any] = (False, True, None)


@contextlib.contextmanager
def intercepting_functions() -> Iterator[None]:
    """Patches `autograd.Function.apply` to call the innermost `FunctionInterceptor` of the thread, if there is one.

    With one, a TorchScript function runs as the Python function that it was compiled from, other TorchScript by
    `script.py`, and `nn.SyncBatchNorm` by `rules/sync_batch_norm.py`.
    """
    global _users, _original
    with _lock:
        _users += 1
        if _users == 1:
            _original = Function.__dict__["apply"]
            setattr(Function, "apply", classmethod(_intercepted_apply))  # noqa: B010
            setattr(torch.jit.ScriptFunction, "__call__", _intercepted_script)  # noqa: B010
            setattr(torch.ScriptMethod, "__call__", _intercepted_script_method)  # noqa: B010
            setattr(nn.SyncBatchNorm, "forward", _intercepted_sync_batch_norm)  # noqa: B010
            set_checkpoint_generator(_intercepted_checkpoint)
            for name, check in _checks.items():
                setattr(F, name, functools.partial(_is_overridden, check))
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                setattr(Function, "apply", _original)  # noqa: B010
                setattr(torch.jit.ScriptFunction, "__call__", _run_script)  # noqa: B010
                setattr(torch.ScriptMethod, "__call__", _run_script_method)  # noqa: B010
                setattr(nn.SyncBatchNorm, "forward", _run_sync_batch_norm)  # noqa: B010
                set_checkpoint_generator(checkpoint_generator)
                for name, check in _checks.items():
                    setattr(F, name, check)


def _intercepted_apply(cls, *args, **kwargs):
    func = types.MethodType(_original.__func__, cls)
    modes = _interceptors()
    if not modes:
        return func(*args, **kwargs)
    if cls is CheckpointFunction:  # its backward works in loss.backward() only: call the function that it wraps
        return args[0](*args[2:])
    if cls.__module__ == CheckpointFunction.__module__:  # other checkpoints' own bookkeeping
        return func(*args, **kwargs)
    with DisableTorchFunction():
        return modes[-1].__torch_function__(func, (), args, kwargs)


def _intercepted_checkpoint(*arguments, **kwargs):
    options = dict(zip(_checkpoint_options, arguments, strict=False))
    args, modes = arguments[len(options) :], _interceptors()
    if not (modes or is_traced()):
        yield from checkpoint_generator(*arguments, **kwargs)
        return
    function = _drawing_alike(options["fn"], modes[-1].device if modes else "cpu")  # a trace has one state for all
    is_whole = options["context_fn"] is noop_context_fn  # not a checkpoint that keeps some of the activations
    whole = modes[-1].checkpointing(function, args, kwargs) if modes and is_whole else contextlib.nullcontext(function)
    with whole as recomputed:
        yield from checkpoint_generator(recomputed, *arguments[1:], **kwargs)


def _drawing_alike(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The function with the random numbers that it draws if it is called now, whenever it is called.

    PyTorch restores the generators too, but not in a trace, and not with `preserve_rng_state=False`.
    """
    state = random_state(device)

    def alike(*args: Any, **kwargs: Any) -> Any:
        with drawing_from(state, device):
            return function(*args, **kwargs)

    return alike


def _is_overridden(check: Callable[..., bool], *args: Any) -> bool:
    """Whether a function of `torch.nn.functional` has to dispatch to a mode or a subclass, other than ours."""
    return check(*args) and not isinstance(innermost_function_mode(), FunctionInterceptor)


def _intercepted_script(scripted, *args, **kwargs):
    if not _interceptors():
        return _run_script(scripted, *args, **kwargs)
    function = python_function_of(scripted)
    return function(*args, **kwargs) if function is not None else script.run(scripted, _run_script, *args, **kwargs)


def _intercepted_script_method(method, *args, **kwargs):
    if not _interceptors():
        return _run_script_method(method, *args, **kwargs)
    return script.run(method, _run_script_method, *args, **kwargs)


def _intercepted_sync_batch_norm(module, a):
    is_ours = _interceptors() and sync_batch_norm.is_synchronized(module)
    return sync_batch_norm.forward(module, a) if is_ours else _run_sync_batch_norm(module, a)


def _interceptors() -> list[FunctionInterceptor]:
    return [m for m in function_modes() if isinstance(m, FunctionInterceptor)] if function_modes_enabled() else []


def with_separate_histories(out: Any) -> Any:
    """The outputs of a call, cloned if they have different autograd nodes, so that each edge has its own error alone.

    An LSTM cell computes its state h from its state c, so the gradient at c's own edge includes the error of h. A view
    would not do: an in-place write to it would replace its node.
    """
    if isinstance(out, Tensor) or len({z.grad_fn for z in tensors_in(out)} - {None}) < 2:
        return out
    return tree_map(lambda z: z.clone() if isinstance(z, Tensor) and z.requires_grad else z, out)


def dropout_as_product(func, values, spec):
    """Dropout as the product with its mask, drawn by dropout itself, so that pass 3 has the same mask."""
    args, kwargs = unflatten(values, spec)
    a, p, train = (*args, *kwargs.values())[:3]
    if not train or p == 0:
        return None
    draw = torch.dropout if func in (torch.dropout, torch.dropout_) else torch.feature_dropout
    mask = draw(torch.ones_like(a, requires_grad=False), p, True)
    return DROPOUT[func], *flatten((a, mask), {})


def rows_as_index_select(func, values, spec):
    """a[index] with a vector of integers as `index_select`, several times as fast on a CPU, backward too."""
    args, _ = unflatten(values, spec)
    a, index = args[0], args[-1]
    is_vector = isinstance(index, Tensor) and index.dim() == 1 and index.dtype in (torch.int64, torch.int32)
    if not is_vector or a.dim() == 0 or not a.is_contiguous() or is_traced():
        return None  # of other layouts a[index] keeps the order of strides, and index_select does not
    rows = torch.where(index < 0, index + a.shape[0], index).to(a.device)  # a[index] takes indices of the CPU too
    return index_select, *flatten((a, 0, rows), {})


def negative_slope_as_weight(func, values, spec):
    """A leaky ReLU with a negative slope, whose result does not have the sign of its argument, as a constant PReLU."""
    (a, *given), kwargs = unflatten(values, spec)
    slope = (*given, *kwargs.values(), 0.01)[0]
    return None if slope >= 0 else (torch.prelu, *flatten((a, a.new_full((1,), slope)), {}))


def transposed_as_rows(func, values, spec):
    """A linear layer of a transposed batch as one matrix product."""
    count, names, _ = spec
    fits = count >= 2 and has_uneven_rows(*values[:2]) and set(names) <= {"bias"}
    return (linear_by_rows, values, spec) if fits else None


def flag_is_set_already(func, values, spec):
    """`z.requires_grad = True` of an activation, which the setter refuses: the input itself, a leaf, would take it."""
    z, value = values
    return (_REQUIRES_GRAD.__get__, *flatten((z,), {})) if value is True else None


# the call to make in place of another: its function, its flat arguments and their shape; None: the call itself
REPLACED: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: transposed_as_rows,
    **dict.fromkeys(DROPOUT, dropout_as_product),
    leaky_relu: negative_slope_as_weight,
    Tensor.__getitem__: rows_as_index_select,
    _REQUIRES_GRAD.__set__: flag_is_set_already,
}


def python_body(func) -> Callable[..., Any] | None:
    """A copy of a pure-Python torch function whose `has_torch_function` checks return False.

    A mode then intercepts the calls inside it. None for other functions. `torch.einsum` has a body of our own.
    """
    if func is torch.einsum:
        return einsum_in_pairs
    if not isinstance(func, types.FunctionType) or not func.__module__.startswith("torch"):
        return None
    return _without_checks(func)


@functools.cache
def _without_checks(func: types.FunctionType) -> Callable[..., Any]:
    checks = [name for name in func.__globals__ if name.startswith("has_torch_function")]
    globals_ = func.__globals__ | {name: lambda *_: False for name in checks}
    body = types.FunctionType(func.__code__, globals_, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


@contextlib.contextmanager
def reporting_compilation() -> Iterator[None]:
    """`torch.compiler.is_compiling()` returns True, and contents of tensors are not validated.

    Libraries check it before they read a mask's values. torch checks it where the results of a step do not depend on
    it: modules do not call `always_call` hooks on exceptions, transformer layers do not look for padding in a mask. As
    under `torch.compile`, distributions do not validate their arguments, and `torch._check_tensor_all` does nothing.
    `torch.compiler.is_dynamo_compiling()` and `torch.compiler.is_exporting()` stay False. Other threads are affected.
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


@contextlib.contextmanager
def running_eager_code_in(modules: frozenset[str]) -> Iterator[None]:
    """In a trace: names modules in which `torch.compiler.is_compiling()` is to return False (`eager_code`)."""
    global _eager_modules
    _eager_modules, before = modules, _eager_modules
    try:
        yield
    finally:
        _eager_modules = before


@contextlib.contextmanager
def eager_code(model: nn.Module) -> Iterator[None]:
    """Makes the modules that a trace names run their eager code: libraries may have other code for compilers."""
    handles: list[Any] = []
    answers: list[bool] = []

    def enter(module: nn.Module, args: Any) -> None:
        answers.append(set_compiling(False))

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        set_compiling(answers.pop())

    for name, module in model.named_modules() if _eager_modules else ():
        if name in _eager_modules:
            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for answer in answers[:1]:
            set_compiling(answer)
        for handle in handles:
            handle.remove()
