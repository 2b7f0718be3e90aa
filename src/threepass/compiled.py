"""`ThreePass(compile=True)`: every kind of call captured once, then replayed.

A call's kind is what the captured program depends on besides the contents of tensors: shapes, dtypes and strides of x
and y and the numbers beside them, the modules, their training flags and hooks, the places of parameters and buffers in
memory, autocast, and whether pass 3 runs. The weights of the two terms are inputs of the program, so that alpha may
move. What Python does besides computing tensors (printing, counting, keeping a tensor in an attribute) happens when a
kind is captured, not at every call, and a plain attribute that changes (a dropout's p) is not noticed: `reset` forgets
all programs.

A kind that cannot be captured runs eagerly, as all do beyond `KINDS`; a warning says so once, with the reason.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from .capture import Captured, capture
from .engine import Result, run
from .errors import CaptureError, warn_uncompiled
from .options import Options, check_model
from .scaler import scaled
from .surroundings import unchanged_on_error

KINDS = 8
_PLAIN = (Tensor, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass
class Step:
    """A captured kind of call, and how its flat outputs make a result."""

    captured: Captured
    parameters: list[nn.Parameter]
    names: list[str]  # of the parameters, in the order of the outputs that are added to `p.grad`
    dicts: int  # how many of r.grads, r.backprop_grads and r.third_grads come behind them
    leaves: list[Any]  # of the rest of the result; a `_Place` is among the outputs behind those
    spec: TreeSpec

    def __call__(self, weights: Tensor, tensors: list[Tensor], scaler: GradScaler | None = None) -> Result:
        """Runs the step; adds to `p.grad`, times the scale of a scaler."""
        static = self.captured.graph is not None
        if static:
            self._keep_sums()
        outputs = self.captured(weights, *tensors)
        count = len(self.parameters)
        self._add(scaled(outputs[:count], scaler))
        starts = range(count, (self.dicts + 1) * count, count)
        named = [dict(zip(self.names, outputs[i : i + count], strict=True)) for i in starts]
        rest = outputs[(self.dicts + 1) * count :]
        fields = [rest[leaf.place] if isinstance(leaf, _Place) else leaf for leaf in self.leaves]
        output, loss, input_loss, input_grad = tree_unflatten(fields, self.spec)
        if static:  # copies of what people keep from call to call; input_grad and grads stay in the graph's memory
            output = tree_map(lambda z: z.clone() if isinstance(z, Tensor) else z, output)
            loss, input_loss = loss.clone(), input_loss.clone()
        return Result(output, loss, input_loss, input_grad, *named, *[None] * (3 - self.dicts))

    def _keep_sums(self) -> None:
        """A `p.grad` that lies in the graph's own memory is a sum so far: the replay must not overwrite it."""
        own = {z.data_ptr() for z in self.captured.outputs[: len(self.parameters)]}
        for p in self.parameters:
            if p.grad is not None and p.grad.data_ptr() in own:
                p.grad = p.grad.clone()

    @torch.no_grad()
    def _add(self, grads: Sequence[Tensor]) -> None:
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self.parameters):
            with torch.enable_grad():
                torch.autograd.backward(self.parameters, [g.clone() for g in grads])
            return
        sums = [(p.grad, g) for p, g in zip(self.parameters, grads, strict=True) if p.grad is not None]
        if sums:
            torch._foreach_add_([s for s, _ in sums], [g for _, g in sums])
        taken: set[int] = set()
        for p, g in zip(self.parameters, grads, strict=True):
            if p.grad is None:
                p.grad = g if g.data_ptr() not in taken else g.clone()
                taken.add(g.data_ptr())


@dataclass(frozen=True)
class _Place:
    place: int


class CompiledSteps:
    """The captured steps of one `ThreePass`."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor]):
        self.model, self.loss_fn = model, loss_fn
        self.steps: dict[Hashable, Step | None] = {}
        self._weights: dict[Hashable, Tensor] = {}
        self._warned = False

    @property
    def compile_seconds(self) -> float:
        return sum(step.captured.compile_seconds for step in self.steps.values() if step is not None)

    @property
    def graph_bytes(self) -> int | None:
        """The memory of all CUDA graphs; None where there are none."""
        each = [step.captured.graph_bytes for step in self.steps.values() if step is not None]
        return sum(b for b in each if b is not None) if any(b is not None for b in each) else None

    def reset(self) -> None:
        """Forgets all programs: the next call of every kind is captured anew."""
        self.steps.clear()

    def __call__(
        self, x: Any, y: Any, options: Options, third: bool, scaler: GradScaler | None = None
    ) -> Result | None:
        """A step, added to `p.grad`; None where this kind of call runs eagerly."""
        x, y = (dict(z) if isinstance(z, Mapping) else z for z in (x, y))
        flat, spec = tree_flatten((x, y))
        if strange := [z for z in flat if not isinstance(z, _PLAIN)]:
            self._warn(f"x or y holds a {type(strange[0]).__name__}, of which it is not known when it changes")
            return None
        flat = [_dense(z) if isinstance(z, Tensor) else z for z in flat]
        kind = self._kind(flat, spec, options, third)
        if kind not in self.steps and len(self.steps) >= KINDS:
            self._warn(
                f"more than {KINDS} kinds of calls came (of shapes, or of numbers in x or y); those after them are not"
            )
            return None
        with torch.inference_mode(False):
            weights = self._weights_of(options)
            if kind not in self.steps:
                self.steps[kind] = self._captured(flat, spec, weights, options, third)
            step = self.steps[kind]
            return None if step is None else step(weights, [z for z in flat if isinstance(z, Tensor)], scaler)

    def _kind(self, flat: list[Any], spec: TreeSpec, options: Options, third: bool) -> Hashable:
        return (
            tuple(_kind_of(z) for z in flat), spec,
            options.mode, options.scale(2), options.input_at, options.batch_size, options.separate, options.ranks,
            options.back > 0, third and (options.third > 0 or options.separate), options.strength is None,
            tuple(_state_of(self.model)),
            tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
        )  # fmt: skip

    def _weights_of(self, options: Options) -> Tensor:
        """(back, third) on the model's device; each pair is sent there once."""
        p = next(self.model.parameters())
        key = (options.back, options.third, p.device, p.dtype)
        if key not in self._weights:
            if len(self._weights) > 4096:  # a schedule that never repeats itself
                self._weights.clear()
            dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
            self._weights[key] = torch.tensor([options.back, options.third], dtype=dtype, device=p.device)
        return self._weights[key]

    def _captured(self, flat: list[Any], spec: TreeSpec, weights: Tensor, options: Options, third: bool) -> Step | None:
        try:
            return _capture(self.model, self.loss_fn, flat, spec, weights, options, third)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._warn(error)
            return None

    def _warn(self, reason: Exception | str) -> None:
        if not self._warned:
            self._warned = True
            warn_uncompiled(reason, stacklevel=6)


@contextlib.contextmanager
def capturable(model: nn.Module) -> Iterator[None]:
    """Around a step in a trace: refuses what the program would get wrong in silence."""
    for module in model.modules():
        if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise CaptureError(f"{type(module).__name__} exchanges gradients between processes in hooks")
    buffers = [id(b) for b in model.buffers()]
    yield
    if [id(b) for b in model.buffers()] != buffers:
        raise CaptureError("the model replaces a buffer by another tensor; write to it in place")


def _capture(model, loss_fn, flat: list[Any], spec: TreeSpec, weights: Tensor, options: Options, third: bool) -> Step:
    names: list[str] = []
    leaves: list[Any] = []
    made: list[Any] = []
    check_model(model)
    named = dict(model.named_parameters())

    def step(weights: Tensor, *tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        x, y = tree_unflatten([next(rest) if isinstance(z, Tensor) else z for z in flat], spec)
        with capturable(model):
            r = run(model, loss_fn, x, y, options, third=third, weights=(weights[0], weights[1]))
        grads = laid_out([named[n] for n in r.grads], list(r.grads.values()))
        dicts = [z for z in (r.grads, r.backprop_grads, r.third_grads) if z is not None]
        found, result_spec = tree_flatten((r.output, r.loss, r.input_loss, r.input_grad))
        others = [leaf for leaf in found if isinstance(leaf, Tensor)]
        places = iter(range(len(others)))
        names[:], made[:] = r.grads, [len(dicts), result_spec]
        leaves[:] = [_Place(next(places)) if isinstance(leaf, Tensor) else leaf for leaf in found]
        return [*grads, *(g[n] for g in dicts for n in names), *others]

    tensors = [z for z in flat if isinstance(z, Tensor)]
    captured = capture(step, [weights, *tensors], restore=lambda: _restored(model, loss_fn))
    return Step(captured, [named[n] for n in names], names, made[0], leaves, made[1])


def laid_out(parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients in their parameters' layouts, as optimizers want them."""
    pairs = zip(parameters, grads, strict=True)
    return [g if g.stride() == p.stride() else torch.empty_like(p).copy_(g) for p, g in pairs]


@contextlib.contextmanager
def _restored(model: nn.Module, loss_fn: Any) -> Iterator[None]:
    """Tracing and warming up run the step: what it writes to in the model and the loss is put back."""
    modules = [model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
    with contextlib.ExitStack() as stack:
        frozen = [(p, p.detach().clone()) for m in modules for p in m.parameters() if not p.requires_grad]
        for module in modules:
            if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
                stack.enter_context(unchanged_on_error(module, always=True))
        yield
    with torch.no_grad():
        for p, contents in frozen:
            p.copy_(contents)


def _dense(z: Tensor) -> Tensor:
    """A part of a larger tensor as one of its own: its place in a CUDA graph has no gaps."""
    nhwc = z.dim() == 4 and z.is_contiguous(memory_format=torch.channels_last)
    return z if z.is_contiguous() or nhwc else z.contiguous()


def _state_of(model: nn.Module) -> Iterator[Any]:
    """Where parameters and buffers lie, what needs a gradient, and what is training: `model.modules()`, but faster."""
    todo: list[nn.Module | None] = [model]
    while todo:
        module = todo.pop()
        if module is None:
            continue
        yield id(module)
        yield module.training
        yield len(module._forward_hooks) + len(module._forward_pre_hooks)
        for p in module._parameters.values():
            if p is not None:
                yield id(p)
                yield p.data_ptr()
                yield p.requires_grad
        for b in module._buffers.values():
            if b is not None:
                yield b.data_ptr()
        todo.extend(module._modules.values())


def _kind_of(z: Any) -> Hashable:
    if isinstance(z, Tensor):
        return z.shape, z.stride(), z.dtype, z.device, z.is_inference()
    return type(z), z
