"""What is around the passes: switches of autograd, state to put back, hooks on modules, and a warning."""

import contextlib
import itertools
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ._torch_compat import DisableTorchFunction, is_dynamo_imported, no_dispatch_modes, tree_map
from .errors import NormalizationWarning, warn_caller
from .operation import Operation
from .replay import random_state, set_random_state
from .tape import Record

_NORMS = ("batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm")
_warned: "weakref.WeakKeyDictionary[nn.Module, set[type[Warning]]]" = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def trainable_surroundings() -> Iterator[None]:
    """Gradients can be computed here, whatever the caller switched off; compiled parts run as they were written."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if is_dynamo_imported():
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextlib.contextmanager
def unchanged_on_error(model: nn.Module, always: bool = False) -> Iterator[None]:
    """Puts buffers and random state back if something goes wrong; `always`: in any case."""
    device = next(itertools.chain(model.parameters(), model.buffers())).device.type
    rng = random_state(device)
    buffers = [
        (m._buffers, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None
    ]
    try:
        yield
    except BaseException:
        always = True
        raise
    finally:
        if always:
            set_random_state(rng, device)
            with torch.no_grad(), no_dispatch_modes():  # a tracer is not to see this
                for where, name, buffer, contents in buffers:
                    where[name] = buffer
                    if not torch.equal(buffer, contents):
                        buffer.copy_(contents)


@contextlib.contextmanager
def inputs_inside(model: nn.Module, tape: Record, input_at: str | None) -> Iterator[None]:
    """The output of the module named input_at, or of the first embedding that runs, becomes the input."""
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
            return tree_map(lambda z: tape.add_input(z) if _is_float(z) and not tape.is_active(z) else z, output)

    handles = [module.register_forward_hook(hook) for module in chosen]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def paths_kept(model: nn.Module, tape: Record) -> Iterator[None]:
    """Keeps tape.path at the module that is running."""
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


def _is_float(z: object) -> bool:
    return isinstance(z, Tensor) and z.is_floating_point()


def warn_of_norms(model: nn.Module, operations: list[Operation]) -> None:
    norms = sorted({op.name for op in operations if _is_curved_norm(op)})
    if norms:
        warn_once(
            model,
            f'mode="paper" leaves out the curvature of {", ".join(norms)} and of the loss, so on this model the third '
            'pass may point away from the gradient of the input loss; mode="exact" is that gradient, and '
            "threepass.alignment(model, loss_fn, x, y) measures how far the two agree",
            NormalizationWarning,
        )


def warn_once(model: nn.Module, text: str, category: type[Warning]) -> None:
    """A warning for a model's first call of its kind, at the user's line."""
    seen = _warned.setdefault(model, set())
    if category not in seen:
        seen.add(category)
        warn_caller(text, category)


def _is_curved_norm(op: Operation) -> bool:
    fixed = op.name in ("batch_norm", "instance_norm") and op.values[5] is False  # the running statistics
    return op.name in _NORMS and not fixed
