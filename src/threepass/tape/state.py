"""State that a step sets or restores: autograd's switches, buffers and random state."""

import contextlib
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .._torch_compat import is_dynamo_imported, no_dispatch_modes


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
def unchanged_on_error(model: nn.Module, always: bool = False) -> Iterator[None]:
    """Restores buffers and random state if an exception is raised; `always`: in any case."""
    device = next(itertools.chain(model.parameters(), model.buffers())).device.type
    rng = random_state(device)
    with no_dispatch_modes():  # not recorded by a tracer, and contents even where that computes without any
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
            with torch.no_grad(), no_dispatch_modes():
                for module_buffers, name, buffer, contents in buffers:
                    module_buffers[name] = buffer
                    if not torch.equal(buffer, contents):
                        buffer.copy_(contents)


def random_state(device: str) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states if device == "cpu" else [*states, torch.get_device_module(device).get_rng_state()]


def set_random_state(states: list[Tensor], device: str) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1])
