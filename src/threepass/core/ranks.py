"""Several ranks: over how many the gradients are averaged, and how they get through DistributedDataParallel.

Each of R ranks computes the mean loss l_r of its own n samples, and the ranks' gradients are averaged, by
DistributedDataParallel, by `fully_shard` (`sharded.py`) or by hand. So training minimises l, the mean of the l_r, in
which a sample has the weight w = 1 / (R n): if all ranks have equally many samples, w = 1 / B, where B counts the
samples of all ranks. The third pass is that of l, and a rank computes its part of it from l_r alone:

    in the passes of l                                      on rank r
    errors w d_i                                            those of l_r; averaging the gradients divides them by R
    t_0 = dl/dx_i, with reduction="batch"                   dl_r/dx_i divided by R
    t_0 = dl_i/dx_i, with reduction="sample" or strength    dl_r/dx_i times n

No rank needs to know how many samples the others have. Nothing is communicated but gradients and, in models with
`nn.SyncBatchNorm`, its sums (`rules/sync_batch_norm.py`): l_r then depends on the samples of other ranks too, and the
table holds all the same.

With batch_size=B every sample has the weight 1 / B, however the batch is divided among ranks and micro-batches: a rank
then computes the gradient of R / B times the sum of its samples' losses.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..tape.inputs import call_model
from .deepspeed import check_engine, count_engine_ranks, hooks_moved, is_engine
from .precomputed_loss import PrecomputedLoss
from .sharded import count_shards, is_fully_sharded, loss_through_shards, sharded_modules

Passes = Callable[[nn.Module, Any], PrecomputedLoss]  # of a module and x


def count_ranks(model: nn.Module, process_group: Any = None) -> int:
    """The ranks whose gradients are averaged: those of DistributedDataParallel, `fully_shard` or a DeepSpeed engine.

    Without any of them those of process_group; default: all ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    sizes = {m.process_group.size() for m in model.modules() if isinstance(m, DistributedDataParallel)}
    sizes |= count_shards(model) | count_engine_ranks(model)
    if len(sizes) > 1:
        raise NotImplementedError(
            f"gradients of the model's parts are averaged over different numbers of ranks, {sorted(sizes)}, by "
            "DistributedDataParallel or fully_shard: wrap the whole model once, and shard all parts over the same mesh"
        )
    size = sizes.pop() if sizes else dist.get_world_size(process_group)
    if size < 1:
        raise ValueError("this process is not a member of process_group: pass a group that contains this rank")
    return size


def check_parallel(model: nn.Module) -> None:
    """Raises for models that this process does not compute alone, or whose parameters are sharded."""
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise NotImplementedError(
            "nn.DataParallel over several devices is not supported: it runs the model in threads, whose operations "
            "cannot be recorded. Use torch.nn.parallel.DistributedDataParallel"
        )
    if not (dist.is_available() and dist.is_initialized()):
        return
    check_engine(model)
    fsdp, tensor = sys.modules.get("torch.distributed.fsdp"), sys.modules.get("torch.distributed.tensor")
    sharded = [name for name, p in model.named_parameters() if tensor is not None and isinstance(p, tensor.DTensor)]
    if sharded:
        what = f"{len(sharded)} parameter(s) of the model are DTensors ({sharded[0]!r}, for example)"
        raise NotImplementedError(f"{what}: {_what_to_do_with_shards(model)}")
    for module in model.modules():
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise NotImplementedError("three passes do not support FullyShardedDataParallel; use fully_shard (FSDP2)")
        if isinstance(module, DistributedDataParallel):
            _check_recorded(module)


def _what_to_do_with_shards(model: nn.Module) -> str:
    if is_fully_sharded(model):
        return "models sharded by fully_shard are supported by ThreePass and its .loss, not by three_pass"
    if sharded_modules(model):
        return "fully_shard was called on parts of the model only; call it on the whole model too, after its parts"
    return (
        "three passes do not support tensor parallelism; use DistributedDataParallel or fully_shard on a mesh for data "
        "parallelism alone"
    )


def _check_recorded(ddp: DistributedDataParallel) -> None:
    """Checks a DistributedDataParallel whose forward will be recorded, because it is not the outermost module."""
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(ddp, option):
            raise NotImplementedError(
                f"DistributedDataParallel({option}=True) is supported only if it wraps the whole model passed to "
                "ThreePass. With three_pass, or around a submodule, leave the option out or pass its .module"
            )


def is_wrapper(model: nn.Module) -> bool:
    """Whether the model is in `model.module`, and its wrapper averages gradients over ranks."""
    return isinstance(model, DistributedDataParallel) or is_engine(model)


def reduces_gradients(model: nn.Module) -> bool:
    """Whether the model itself averages gradients over ranks, in the backward pass of a loss."""
    return is_wrapper(model) or is_fully_sharded(model)


def loss_through(model: nn.Module, x: Any, passes: Passes) -> Tensor:
    """Runs `passes(module, x)` of a model that `reduces_gradients`; the loss, whose backward pass reduces them."""
    if is_wrapper(model):
        return _loss_through_wrapper(model, x, passes)
    return loss_through_shards(model, x, passes)


def _loss_through_wrapper(wrapper: nn.Module, x: Any, passes: Passes) -> Tensor:
    """Runs `passes(module, x)` in place of the wrapped module's forward, and returns the loss with their gradients.

    DistributedDataParallel finds out in its forward which parameters are used, and averages gradients when a backward
    pass has accumulated them. The three passes contain a backward pass of their own, which it must not mistake for that
    one. So all three run inside its forward, after it has broadcast the buffers, and the output that it gets is the
    loss, whose backward pass yields the gradients. Everything that it does in a training step (`no_sync`, `join`,
    find_unused_parameters, static_graph, communication hooks) then works as in plain training. Likewise an engine of
    DeepSpeed (`deepspeed.py`).
    """
    _check_wrapper(wrapper)
    module: Any = wrapper.module

    def forward(*args: Any, **kwargs: Any) -> Tensor:  # on the module's device: DistributedDataParallel moves x there
        given = args if isinstance(x, tuple) else kwargs if isinstance(x, Mapping) else args[0]
        return passes(module, given).loss()

    stand_in = _StandIn(module, forward)
    moved = hooks_moved(wrapper, module, stand_in) if is_engine(wrapper) else contextlib.nullcontext()
    with torch.inference_mode(False), torch.enable_grad(), moved:
        _set_module(wrapper, stand_in)
        try:
            return call_model(wrapper, x)
        finally:
            _set_module(wrapper, module)


def _set_module(wrapper: nn.Module, module: nn.Module) -> None:
    wrapper._modules["module"] = module
    if "module" in vars(wrapper):  # in an engine of DeepSpeed it is a plain attribute as well
        vars(wrapper)["module"] = module


def _check_wrapper(wrapper: nn.Module) -> None:
    if is_engine(wrapper):
        check_engine(wrapper)
    elif wrapper.mixed_precision is not None:
        raise NotImplementedError(
            "DistributedDataParallel(mixed_precision=...) replaces parameters during the forward, which three passes "
            "do not support: use torch.autocast"
        )
    if wrapper._forward_hooks or wrapper._backward_hooks or wrapper._backward_pre_hooks:
        raise NotImplementedError(
            f"the {type(wrapper).__name__} module has forward or backward hooks of its own, which three passes do not "
            "run: register them on model.module"
        )


class _StandIn(nn.Module):
    """The parameters, buffers and children of a module, under their names, with another forward and no hooks."""

    def __init__(self, module: nn.Module, forward: Callable[..., Tensor]):
        super().__init__()
        self.forward = forward
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
