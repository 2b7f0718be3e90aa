"""The input of pass 1: the call of a model with x, and module hooks.

The hooks are for an input that is the output of a module, and for the name of the module that is running.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_compat import DisableTorchFunction, tree_map
from .record import Record


def call_model(model: nn.Module, x: Any) -> Any:
    """`model(*x)` for a tuple, `model(**x)` for a dict, else `model(x)`."""
    if isinstance(x, tuple):
        return model(*x)
    return model(**x) if isinstance(x, Mapping) else model(x)


def is_float(z: Any) -> bool:
    """Whether z is a floating-point tensor."""
    return isinstance(z, Tensor) and z.is_floating_point()


@contextlib.contextmanager
def module_output_as_input(model: nn.Module, tape: Record, input_at: str | None) -> Iterator[None]:
    """Makes the output of the module named input_at, or of the first embedding that runs, the input of the net."""
    modules = dict(model.named_modules())
    if input_at is not None and input_at not in modules:
        names = ", ".join(list(filter(None, modules))[:20])
        raise ValueError(f"input_at={input_at!r} names no module of the model; it has: {names}")
    embeddings = [m for m in modules.values() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    chosen = embeddings if input_at is None else [modules[input_at]]
    if not chosen:
        raise TypeError(
            "no tensor of x is floating point, and the model has no embedding: convert x to floating point, or name "
            'the module whose output counts as the input, as in input_at="embeddings"'
        )
    first: list[nn.Module] = []

    def hook(module, args, output):
        first.append(module)
        if module is not first[0]:
            return output
        with DisableTorchFunction():
            return tree_map(lambda z: tape.add_input(z) if is_float(z) and not tape.is_active(z) else z, output)

    handles = [module.register_forward_hook(hook) for module in chosen]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def tracking_module_paths(model: nn.Module, tape: Record) -> Iterator[None]:
    """Updates tape.path to the module that is running."""
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
            continue
        handles.append(
            module.register_forward_pre_hook(lambda m, args, name=name: tape.path.append(name), prepend=True)
        )
        handles.append(module.register_forward_hook(lambda m, args, out: _leave(tape), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leave(tape: Record) -> None:
    tape.path.pop()
