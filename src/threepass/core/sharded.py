"""Models sharded by `fully_shard` (FSDP2): the three passes of such a model as a loss whose backward reduces gradients.

Parameters are DTensors between steps. All of them are gathered before pass 1 and stay gathered in passes 2 and 3, which
read the weights again. So a step needs memory for the parameters and gradients of the whole model, in the dtype of the
mixed-precision policy; optimizer states stay sharded.

FSDP's forward hooks run in pass 1: they move and cast inputs and outputs. Its backward hooks do not run in the passes.
They are attached to the loss that the step returns, so that `loss.backward()` reduces, scatters and reshards as for any
loss. Accumulation by `set_requires_gradient_sync`, the policy's `reduce_dtype` and frozen parameters work as in FSDP.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_compat import fsdp_groups, fsdp_initialize, fsdp_register_backward, fsdp_state, without_fsdp_backward
from .precomputed_loss import PrecomputedLoss


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was called on the model itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on."""
    return [m for m in model.modules() if is_fully_sharded(m)]


def count_shards(model: nn.Module) -> set[int]:
    """Over how many ranks FSDP averages gradients; the ranks that hold copies (a 2D mesh) count too."""
    return {group.mesh_info.mesh.size() for m in sharded_modules(model) for group in fsdp_groups(fsdp_state(m))}


def loss_through_shards(model: nn.Module, x: Any, passes: Callable[[nn.Module, Any], PrecomputedLoss]) -> Tensor:
    """Runs `passes(model, x)` on gathered parameters, and returns the loss with their gradients."""
    root = fsdp_state(model)
    fsdp_initialize(root)
    with torch.inference_mode(False), torch.enable_grad():
        with _gathered(model):
            loss = passes(model, x).loss()
        return fsdp_register_backward(root, loss)


@contextlib.contextmanager
def _gathered(model: nn.Module) -> Iterator[None]:
    """All parameters are gathered, and stay so; on an error they are sharded again."""
    modules = sharded_modules(model)
    pending = [m.unshard(async_op=True) for m in modules]
    for handle in pending:
        handle.wait()
    try:
        with contextlib.ExitStack() as stack:
            for m in modules:
                stack.enter_context(without_fsdp_backward(fsdp_state(m)))
            yield
    except BaseException:
        for m in modules:
            m.reshard()
        raise
