"""Engines of DeepSpeed: the three passes as a loss, for `engine.backward(loss)` and `engine.step()`.

An engine's forward runs the model under the autocast of the engine's configuration, and registers hooks on the output,
which tell the engine's gradient reducer that a backward pass begins. Pass 2 must not trigger them. Therefore all three
passes run inside the engine's forward, whose output is then the loss: the backward pass of this loss gives the
parameters their gradients and triggers the reducer. The engine's hooks on the model (timers, casts of the inputs) run
around the passes, and are neither recorded nor captured.

ZeRO stages 0, 1 and 2 keep whole parameters. Stage 3 gathers the parameters of a layer in the layer's own forward and
backward and frees them again, so that they are missing in pass 3.
"""

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import nn


def is_engine(model: nn.Module) -> bool:
    """Whether `deepspeed.initialize` returned it."""
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine)


def count_engine_ranks(model: nn.Module) -> set[int]:
    """Over how many ranks DeepSpeed averages gradients."""
    engines: list[Any] = [m for m in model.modules() if is_engine(m)]
    return {engine.dp_world_size for engine in engines}


def check_engine(model: nn.Module) -> None:
    """Raises for parameters that DeepSpeed partitions (ZeRO stage 3), and for pipelines."""
    if any(hasattr(p, "ds_id") for p in model.parameters()):
        raise NotImplementedError(
            "the parameters of the model are partitioned by ZeRO stage 3 of DeepSpeed, which frees each layer's "
            "parameters after its forward, but later passes need them: use stage 2, or fully_shard (FSDP2) of PyTorch"
        )
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None and isinstance(model, deepspeed.PipelineEngine):
        raise NotImplementedError(
            "the model is a pipeline of DeepSpeed, which runs its stages and their backward passes itself: use an "
            "engine without pipeline parallelism"
        )


@contextlib.contextmanager
def hooks_moved(engine: nn.Module, module: nn.Module, stand_in: nn.Module) -> Iterator[None]:
    """The hooks that an engine has registered on its module are on the stand-in instead."""
    handles = [getattr(engine, f"module_forward_{when}_hook", None) for when in ("pre", "post")]
    ids = [handle.id for handle in handles if handle is not None]
    before = module._forward_pre_hooks, module._forward_hooks
    stand_in._forward_pre_hooks, stand_in._forward_hooks = (
        OrderedDict((i, hook) for i, hook in hooks.items() if i in ids) for hooks in before
    )
    stand_in._forward_pre_hooks_with_kwargs = module._forward_pre_hooks_with_kwargs
    module._forward_pre_hooks, module._forward_hooks = (
        OrderedDict((i, hook) for i, hook in hooks.items() if i not in ids) for hooks in before
    )
    try:
        yield
    finally:
        module._forward_pre_hooks, module._forward_hooks = before
