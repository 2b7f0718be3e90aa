"""Running a recorded operation again under the conditions of pass 1: autocast, random state, kernels."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._torch_compat import arguments_of, set_mkldnn_enabled
from .inner_dropout import ATTENTION, RECURRENT
from .state import drawing_from
from .traits import Traits

# By cuDNN and oneDNN; PyTorch's own kernels can be differentiated twice.
_ONCE_DIFFERENTIABLE = (*RECURRENT, torch.grid_sampler)
SILENT_WRITES = {torch.batch_norm: (3, 4), torch.instance_norm: (3, 4)}  # running statistics: no version changes


def is_random(func: Callable[..., Any], traits: Traits, values: list[Any]) -> bool:
    """Whether a call may draw random numbers."""
    if func is ATTENTION:
        return any(isinstance(v, float) and v > 0 for v in values)
    return traits.is_random


def is_random_node(node: Any) -> bool:
    """Whether a node of a graph draws random numbers.

    Attention does so only with a dropout of more than zero, rrelu only in training mode.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments = arguments_of(node.target)
    given = {argument.name: argument.default_value for argument in arguments}
    given |= dict(zip(given, node.args, strict=False)) | node.kwargs
    conditions = [value for name, value in given.items() if "dropout" in name or name == "training"]
    return not conditions or any(conditions)


def has_conditions(func: Callable[..., Any], autocast: tuple[str, bool, torch.dtype], rng: list[Tensor] | None) -> bool:
    """Whether `as_recorded` has anything to do."""
    device, enabled, _ = autocast
    is_special = func is ATTENTION or func in _ONCE_DIFFERENTIABLE
    return is_special or rng is not None or enabled or torch.is_autocast_enabled(device)


@contextlib.contextmanager
def as_recorded(
    func: Callable[..., Any], autocast: tuple[str, bool, torch.dtype], rng: list[Tensor] | None
) -> Iterator[None]:
    """Sets autocast and the random state as in pass 1, and selects kernels that can be differentiated twice."""
    device, enabled, dtype = autocast
    with contextlib.ExitStack() as stack:
        if enabled or torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
        if rng is not None:
            stack.enter_context(drawing_from(rng, device))
        if func is ATTENTION:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if func in _ONCE_DIFFERENTIABLE:
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            stack.callback(set_mkldnn_enabled, set_mkldnn_enabled(False))
        yield
