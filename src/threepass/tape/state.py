"""State that a step sets or restores: autograd's switches, buffers and random state.

In a trace the random state is a node, and so is setting it: generators cannot be read or set there. In the graph a draw
is identified by its number, that of the draws before it, and setting the state counts on from where the state was
taken. So draws of the same number are the same random numbers (`compile/randomness.py`).
"""

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import has_side_effect

from .._torch_compat import DisableTorchFunction, get_proxy_mode, is_dynamo_imported, is_traced, no_dispatch_modes


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of `model.named_modules()` with their names as prefixes ("layer.0."), several times as fast."""
    modules: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()
    todo = [("", model)]
    while todo:
        prefix, module = todo.pop()
        if module not in seen:
            seen.add(module)
            modules.append((prefix, module))
            if module._modules:
                children = [(f"{prefix}{name}.", m) for name, m in module._modules.items() if m is not None]
                todo.extend(reversed(children))
    return modules


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """`dict(model.named_parameters())`, which every step asks for."""
    if type(model).named_parameters is not nn.Module.named_parameters:
        return dict(model.named_parameters())
    named: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for prefix, module in named_modules(model):
        for name, p in module._parameters.items():
            if p is not None and id(p) not in seen:
                seen.add(id(p))
                named[prefix + name] = p
    return named


@contextlib.contextmanager
def autograd_enabled() -> Iterator[None]:
    """Enables autograd, whatever the caller disabled, and runs `torch.compile`d parts eagerly."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if is_dynamo_imported():
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disables Python's cyclic garbage collector, which the many objects of a tape would trigger several times a step.

    Reference counting frees these objects when the step ends, so that they do not add to the collector's counts.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def unchanged_on_error(model: nn.Module, always: bool = False) -> Iterator[None]:
    """Restores buffers and random state if an exception is raised; `always`: in any case."""
    device = next(itertools.chain(model.parameters(), model.buffers())).device.type
    with no_dispatch_modes():  # not traced, and with real contents in a trace on fake tensors
        rng, buffers = random_state(device), _Buffers(model)
    try:
        yield
    except BaseException:
        always = True
        raise
    finally:
        if always:
            with torch.no_grad(), no_dispatch_modes():
                set_random_state(rng, device)
                buffers.restore()


class _Buffers:
    """The buffers of a model and their contents; those of one dtype and device are copied together, in one launch."""

    def __init__(self, model: nn.Module):
        tables = [m._buffers for _, m in named_modules(model) if m._buffers]
        self.buffers = [(table, name, b) for table in tables for name, b in table.items() if b is not None]
        groups: dict[Any, list[Tensor]] = {}
        for _, _, b in self.buffers:
            groups.setdefault((b.dtype, b.device) if b.layout == torch.strided else id(b), []).append(b)
        self.copies = [
            (group, group[0].clone() if isinstance(key, int) else torch.cat([b.reshape(-1) for b in group]))
            for key, group in groups.items()
        ]

    def restore(self) -> None:
        for table, name, buffer in self.buffers:
            table[name] = buffer
        for group, copy in self.copies:
            strided = copy.layout == torch.strided
            parts = copy.split([b.numel() for b in group]) if strided else [copy]
            for buffer, part in zip(group, parts, strict=True):
                contents = part.view(buffer.shape) if strided else part
                if not strided or not torch.equal(buffer, contents):
                    buffer.copy_(contents)


@torch.library.custom_op("threepass::random_state", mutates_args=())
def random_state_op() -> Tensor:
    """Stands for the random state at its place in a trace."""
    return torch.zeros(())


@torch.library.custom_op("threepass::set_random_state", mutates_args=())
def set_random_state_op(state: Tensor) -> Tensor:
    """In a trace, sets the random state to one that `random_state_op` stands for."""
    return state.clone()


random_state_op.register_fake(lambda: torch.zeros(()))
set_random_state_op.register_fake(torch.empty_like)
has_side_effect(torch.ops.threepass.random_state.default)
has_side_effect(torch.ops.threepass.set_random_state.default)


def _traced(op: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Calls an operation that no mode but the tracer is to see: selective checkpoints record the others."""
    tracer = get_proxy_mode()
    assert tracer is not None
    with DisableTorchFunction(), no_dispatch_modes(), tracer:
        return op(*args)


def random_state(device: str) -> list[Tensor]:
    """What `set_random_state` takes: the states of the generators, or in a trace a node."""
    if is_traced():
        return [_traced(random_state_op)]
    states = [torch.get_rng_state()]
    return states if device == "cpu" else [*states, torch.get_device_module(device).get_rng_state()]


def set_random_state(states: list[Tensor], device: str) -> None:
    if is_traced():
        _traced(set_random_state_op, *states)
        return
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1])


@contextlib.contextmanager
def drawing_from(states: list[Tensor], device: str) -> Iterator[None]:
    """Random numbers are drawn from an earlier random state; afterwards, from the present one."""
    now = random_state(device)
    set_random_state(states, device)
    try:
        yield
    finally:
        set_random_state(now, device)
