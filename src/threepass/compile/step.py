"""`ThreePass(compile=True)` and `GradientStep(compile=True)`: every signature of a call captured once, then replayed.

`signature.py` says what a captured program depends on, `programs.py` when one is captured and how many are kept. The
weights of the two terms and the seed of its random numbers are inputs of the program, so that they may move. What
Python does besides computing tensors (printing, say) happens when a program is captured, not at every call.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from .._torch_compat import (
    TreeSpec,
    foreach_add_,
    has_gradient_hooks,
    number_of_dispatch_modes,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from ..core import engine, gradient_loss
from ..core.engine import Result, Task
from ..core.gradient_loss import GradientOptions, GradientResult
from ..core.options import Options, check_model
from ..core.scaler import scaled
from ..core.sharded import is_fully_sharded
from ..errors import CaptureError
from ..numerics.precision import weights_dtype
from ..rules.sync_batch_norm import has_synchronized_norm
from ..tape.state import unchanged_on_error
from .capture import Build, Captured, capture
from .check import Outputs
from .cuda_graph import CudaGraph
from .dependencies import PLAIN, Attribute
from .dynamic import Dimensions
from .programs import Programs
from .signature import Signature, flattened, input_signature
from .sizes import Sizes, inputs_in_words, layout_of
from .trace import Program

AnyResult = Result | GradientResult


@dataclass(frozen=True)
class Call:
    """One call of a step: the passes to capture, and what their program depends on besides the model and its inputs."""

    passes: Callable[[Any, Any, tuple[Tensor, Tensor], Tensor], AnyResult]  # of x, y, the terms' weights and the seed
    kind: tuple[Hashable, ...]
    label: str
    watched: dict[str, Any]  # the model, the loss, and other functions of the user's, by their names
    weights: tuple[float, float] = (1.0, 1.0)  # of the two terms, (back, third)
    has_terms: bool = False  # the gradients are back * one term + third * another


def three_pass_call(model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], options: Options, third: bool) -> Call:
    third = third and (options.third > 0 or options.separate)

    def passes(x: Any, y: Any, weights: tuple[Tensor, Tensor], seed: Tensor) -> Result:
        return engine.run(Task(model, loss_fn, x, y), options, runs_third_pass=third, weights=weights, seed=seed)

    kind = (
        options.mode, options.scale(2), options.input_at, options.wrt, options.batch_size, options.separate,
        options.ranks, options.back > 0, third, options.strength is None,
    )  # fmt: skip
    label = f"{options.mode} mode{'' if third else ' without the third pass'}"
    watched = {"model": model, "loss_fn": loss_fn, "penalty": options.penalty}
    return Call(passes, kind, label, watched, (options.back, options.third), third)


def gradient_call(model: nn.Module, loss_fn: Callable[[Any, Any, Any], Tensor], options: GradientOptions) -> Call:
    def passes(x: Any, y: Any, weights: tuple[Tensor, Tensor], seed: Tensor) -> GradientResult:
        return gradient_loss.run(Task(model, loss_fn, x, y), options, seed=seed)

    kind = (options.wrt, options.input_at, options.separate)
    return Call(passes, kind, "gradient step", {"model": model, "loss_fn": loss_fn, "value_fn": options.value_fn})


@dataclass
class CapturedStep:
    """A captured call, and how its flat outputs make a result.

    graph_memory: the addresses of all gradients that CUDA graphs of this model write, of which each replay may
    overwrite any, because the graphs share a pool of memory.
    """

    captured: Captured
    parameters: list[nn.Parameter]
    names: list[str]  # of the parameters, in the order of the outputs that are added to `p.grad`
    kind: Any  # the class of the result
    dicts: list[str]  # the fields of the result with gradients by name, which follow in the outputs
    leaves: list[Any]  # of the rest of the result; a `_Place` is an index into the outputs that remain
    spec: TreeSpec
    overwritten: list[Attribute]  # attributes of modules that hold a tensor of the last forward: the last outputs
    graph_memory: set[int]

    @property
    def check_seconds(self) -> float:
        return self.captured.check_seconds

    @property
    def graph_bytes(self) -> int | None:
        return self.captured.graph_bytes

    def __call__(
        self, weights: Tensor, seed: Tensor, tensors: list[Tensor], scaler: GradScaler | None = None, add: bool = True
    ) -> Any:
        """Runs the step; adds to `p.grad`, times the scale of a scaler, unless add=False."""
        static = self.captured.graph is not None
        if static:
            self._keep_sums()
        outputs = self.captured(weights, seed, *tensors)
        count = len(self.parameters)
        if add:
            self._add(scaled(outputs[:count], scaler))
        starts = [i * count for i in range(1, len(self.dicts) + 1)]
        named = [dict(zip(self.names, outputs[i : i + count], strict=True)) for i in starts]
        rest = outputs[(len(self.dicts) + 1) * count :]
        for (module, name), z in zip(reversed(self.overwritten), reversed(rest), strict=False):
            vars(module)[name] = z.clone() if static else z
        found = [rest[leaf.place] if isinstance(leaf, _Place) else leaf for leaf in self.leaves]
        others = tree_unflatten(found, self.spec)
        if static:  # copies of what people keep from call to call; input_grad and grads stay in the graph's memory
            copied = {name: tree_map(_copy, z) for name, z in others.items() if name != "input_grad"}
            others = others | copied
        missing = dict.fromkeys(self.kind.GRADIENTS)
        return self.kind(**(others | missing | dict(zip(self.dicts, named, strict=True))))

    def _keep_sums(self) -> None:
        """A `p.grad` that lies in the graphs' memory is a sum so far: the replay must not overwrite it."""
        for p in self.parameters:
            if p.grad is not None and p.grad.data_ptr() in self.graph_memory:
                p.grad = p.grad.clone()

    @torch.no_grad()
    def _add(self, grads: Sequence[Tensor]) -> None:
        is_sparse = any(p.grad is not None and p.grad.is_sparse for p in self.parameters)
        if is_sparse or has_gradient_hooks(self.parameters):
            with torch.enable_grad():
                torch.autograd.backward(self.parameters, [g.clone() for g in grads])
            return
        sums = [(p.grad, g) for p, g in zip(self.parameters, grads, strict=True) if p.grad is not None]
        if sums:
            foreach_add_([s for s, _ in sums], [g for _, g in sums])
        taken: set[int] = set()
        for p, g in zip(self.parameters, grads, strict=True):
            if p.grad is None:
                p.grad = g if g.data_ptr() not in taken else g.clone()
                taken.add(g.data_ptr())


@dataclass(frozen=True)
class _Place:
    place: int


def _copy(z: Any) -> Any:
    return z.clone() if isinstance(z, Tensor) else z


class Unavailable:
    """Stands in `r.output` for an object that a captured program cannot recreate, such as a cache of keys and values.

    Its tensors would be those of the capture. Whoever reads an attribute of it gets an error that says so.
    """

    def __init__(self, kind: str):
        self._kind = kind

    def __repr__(self) -> str:
        return f"<a {self._kind}, not available from a captured step>"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the model returned a {self._kind} here; a captured step returns only tensors, in tuples, lists, dicts "
            "and containers that PyTorch knows. Run this step with compile=False, or let the model return the tensors"
        )


def _constant(leaf: Any) -> Any:
    return leaf if isinstance(leaf, PLAIN) else Unavailable(type(leaf).__name__)


class CompiledSteps:
    """The captured steps of one `ThreePass` or `GradientStep`."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Tensor], compile: bool | str = True):
        self.model, self.loss_fn = model, loss_fn
        self.programs: Programs[CapturedStep] = Programs(Signature(model, loss_fn), compile)
        self._weights: dict[Hashable, Tensor] = {}
        self._seed: Tensor | None = None
        self._newest: CudaGraph | None = None  # keeps the graphs' memory pool alive when others make room
        self._graph_memory: set[int] = set()

    def __reduce__(self) -> Any:
        """Copies and pickles have no programs, which belong to this model's memory: they capture their own."""
        return _without_programs, (self.model, self.loss_fn, self.programs.compile, self.max_programs)

    @property
    def max_programs(self) -> int:
        """How many programs are kept; the least recently used ones make room for others."""
        return self.programs.max_programs

    @max_programs.setter
    def max_programs(self, most: int) -> None:
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ValueError(f"max_programs must be a positive integer, got {most!r}")
        self.programs.max_programs = most

    @property
    def compile_seconds(self) -> float:
        return sum(step.captured.compile_seconds for step in self.programs)

    @property
    def check_seconds(self) -> float:
        """What the checks of all programs took."""
        return sum(step.check_seconds for step in self.programs)

    @property
    def graph_bytes(self) -> int | None:
        """The memory of all CUDA graphs; None where there are none."""
        return self.programs.graph_bytes

    def reset(self) -> None:
        """Discards all programs, so that every signature is captured again."""
        self.programs.reset()
        self._newest = None

    def report(self) -> str:
        """The programs, with their inputs, how often they were used, and what capturing them took."""
        return self.programs.report()

    __repr__ = report

    def __call__(
        self,
        x: Any,
        y: Any,
        call: Call,
        eager: Callable[[], AnyResult],
        calls: int,
        scaler: GradScaler | None = None,
        add: bool = True,
    ) -> Any:
        """The step after so many calls, added to `p.grad` if `add`; `eager` runs it where there is no program."""
        step = None
        self.model, self.loss_fn = call.watched["model"], call.watched["loss_fn"]  # attributes of the step: may change
        try:
            self._check_environment()
            flat, spec = flattened(x, y)
        except CaptureError as error:
            self.programs.refuse(error)
        else:
            self.programs.signature.watch(call.watched)
            step = self.programs.find(
                (spec, *call.kind),
                input_signature(flat),
                lambda: self._captured(flat, spec, call),
                lambda: f"{call.label}, {inputs_in_words(flat)}",
                sizes=lambda: self._sizes(flat, spec, call),
            )
            if step is not None and step.captured.overwrites((x, y)):
                self.programs.refuse(
                    CaptureError("x or y shares memory with a buffer that the step writes to; pass a clone() of it"),
                    "shared memory",
                )
                step = None
        if step is None:
            return self.programs.eagerly(eager, next(self.model.parameters()).device)
        with torch.inference_mode(False):
            tensors, weights = [z for z in flat if isinstance(z, Tensor)], self._weights_of(call.weights)
            step.captured.check_indices(weights, self._seed_for(None, calls), *tensors)
            seed = self._seed_for(step.captured.program, calls)
            return step(weights, seed, tensors, scaler, add)

    def _check_environment(self) -> None:
        """Raises where a program cannot do what an eager step does."""
        if is_fully_sharded(self.model):
            raise CaptureError(
                "fully_shard gathers parameters and reduces gradients in hooks, which a captured program would not run"
            )
        if has_synchronized_norm(self.model):
            raise CaptureError(
                "SyncBatchNorm communicates between the ranks in every pass. Capturing a program runs extra passes, so "
                "a rank that captures while another does not would deadlock"
            )
        if number_of_dispatch_modes():
            raise CaptureError("a TorchDispatchMode is active, which would not see the operations of a compiled step")

    def _sizes(self, flat: list[Any], spec: TreeSpec, call: Call) -> Sizes[CapturedStep]:
        tensors = [z for z in flat if isinstance(z, Tensor)]
        with torch.inference_mode(False):  # they are kept for other calls
            fixed = [self._weights_of(call.weights), self._seed_for(None, 0)]

        def make(varying: Dimensions) -> CapturedStep:
            if any(step.captured.has_kernels for step in self.programs):
                raise CaptureError("the step uses kernels of threepass, which are compiled for fixed sizes")
            return self._captured(flat, spec, call, frozenset((i + len(fixed), k) for i, k in varying))

        def serves(step: CapturedStep) -> bool:
            with torch.inference_mode(False):
                return step.captured.serves([*fixed, *tensors])

        def label(dynamic: Dimensions) -> str:
            return f"{call.label}, {inputs_in_words(flat, dynamic)}"

        return Sizes(layout_of(flat), tuple(z.shape for z in tensors), make, serves, label)

    def _weights_of(self, weights: tuple[float, float]) -> Tensor:
        """(back, third) on the model's device; each pair is sent there once."""
        p = next(self.model.parameters())
        key = (weights, p.device, p.dtype)
        if key not in self._weights:
            if len(self._weights) > 4096:  # a schedule that never repeats itself
                self._weights.clear()
            dtype = weights_dtype(self.model.parameters())
            self._weights[key] = torch.tensor(weights, dtype=dtype, device=p.device)
        return self._weights[key]

    def _seed_for(self, program: Program | None, calls: int) -> Tensor:
        """The seed of a call: from PyTorch's generator where the model draws random numbers, else the call's number."""
        p = next(self.model.parameters())
        if self._seed is None or self._seed.device != p.device:
            self._seed = torch.zeros((), dtype=torch.int32, device=p.device)
        if program is not None and program.draws:
            self._seed.random_()
        elif program is not None and program.is_seeded:
            self._seed.fill_(calls % 2**31)
        return self._seed

    def _captured(self, flat: list[Any], spec: TreeSpec, call: Call, varying: Dimensions | None = None) -> CapturedStep:
        with torch.inference_mode(False):
            step = _capture(self, flat, spec, call, varying)
        if step.captured.graph is not None:
            self._newest = step.captured.graph
            self._graph_memory.update(z.data_ptr() for z in step.captured.outputs)
        return step


def _without_programs(
    model: nn.Module, loss_fn: Callable[..., Tensor], compile: bool | str, most: int
) -> CompiledSteps:
    steps = CompiledSteps(model, loss_fn, compile)
    steps.max_programs = most
    return steps


@contextlib.contextmanager
def capturable(model: nn.Module, signature: Signature) -> Iterator[None]:
    """Around a step in a trace: refuses what the program would get wrong in silence."""
    for module in model.modules():
        if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise CaptureError(
                f"{type(module).__name__} exchanges gradients between processes in hooks, which a captured program "
                "would not run: pass its .module"
            )
    with signature.capturing():
        buffers = [id(b) for b in model.buffers()]
        yield
        if [id(b) for b in model.buffers()] != buffers:
            raise CaptureError("the model replaces a buffer by another tensor; write to it in place")


def _capture(
    steps: CompiledSteps, flat: list[Any], spec: TreeSpec, call: Call, varying: Dimensions | None
) -> CapturedStep:
    model, loss_fn, signature = steps.model, steps.loss_fn, steps.programs.signature
    names: list[str] = []
    labels: list[str] = []
    penalties: list[int] = []
    leaves: list[Any] = []
    structure: list[Any] = []  # the result's class, its fields with gradients by name, and the spec of the rest
    overwritten: list[Attribute] = []
    check_model(model)
    named = dict(model.named_parameters())

    def step(weights: Tensor, seed: Tensor, *tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        x, y = tree_unflatten([next(rest) if isinstance(z, Tensor) else z for z in flat], spec)
        with capturable(model, signature):
            r = call.passes(x, y, (weights[0], weights[1]), seed)
        grads = laid_out([named[n] for n in r.grads], list(r.grads.values()))
        results = {field.name: getattr(r, field.name) for field in fields(r)}
        dicts = [name for name in r.GRADIENTS if results[name] is not None]
        remaining = {name: z for name, z in results.items() if name not in r.GRADIENTS}
        found, result_spec = tree_flatten(remaining)
        if any(isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)) for leaf in found):
            raise CaptureError(
                "the model returns a symbolic size or a number computed from one: return a tensor, or leave it out of "
                "the output"
            )
        others = [leaf for leaf in found if isinstance(leaf, Tensor)]
        places = iter(range(len(others)))
        names[:], structure[:] = r.grads, [type(r), dicts, result_spec]
        labels[:] = [f"the gradient of {n}" for _ in ("grads", *dicts) for n in names] + _labels(remaining)
        penalties[:] = [i for i, label in enumerate(labels) if label == _IN_WORDS["input_loss"]]
        leaves[:] = [_Place(next(places)) if isinstance(leaf, Tensor) else _constant(leaf) for leaf in found]
        overwritten[:] = signature.overwritten
        last = [vars(module)[name].detach() for module, name in overwritten]
        return [*grads, *(results[name][n] for name in dicts for n in names), *others, *last]

    weights, seed = steps._weights_of(call.weights), steps._seed_for(None, 0)
    inputs = [weights, seed, *(z for z in flat if isinstance(z, Tensor))]
    restore = partial(_restored, model, loss_fn, signature)
    pool = None if steps._newest is None else steps._newest.pool
    terms = weights if call.has_terms else None
    known = Outputs(labels, penalties)
    build = Build(compiled=steps.programs.compile != "trace", pool=pool, varying=varying)
    captured = capture(step, inputs, build, restore, terms, known)
    signature.settle(captured.program.state, captured.program.are_constant(len(overwritten)))
    kind, dicts, result_spec = structure
    trained = [named[n] for n in names]
    return CapturedStep(captured, trained, names, kind, dicts, leaves, result_spec, overwritten, steps._graph_memory)


_IN_WORDS = {
    "loss": "the loss", "input_loss": "the input loss", "output": "the model's output", "value": "the value",
    "input_grad": "the gradient at the input",
}  # fmt: skip


def _labels(result: dict[str, Any]) -> list[str]:
    """Names for the tensors of a result that the check compares."""
    numbers = [(name, leaf) for name, z in result.items() for leaf in tree_leaves(z) if isinstance(leaf, Tensor)]
    return [_IN_WORDS[name] for name, leaf in numbers if leaf.is_floating_point() or leaf.is_complex()]


def laid_out(parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients in their parameters' layouts, as optimizers want them."""
    if any(g.layout != torch.strided for g in grads):
        raise CaptureError(
            "a parameter has a sparse gradient, as that of nn.Embedding(sparse=True), and captured steps give dense "
            "gradients only. Use sparse=False"
        )
    pairs = zip(parameters, grads, strict=True)
    return [g if g.stride() == p.stride() else torch.empty_like(p).copy_(g) for p, g in pairs]


@contextlib.contextmanager
def _restored(model: nn.Module, loss_fn: Any, signature: Signature) -> Iterator[None]:
    """Tracing and warming up run the step: what it writes to in the model and the loss is restored."""
    modules = [model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
    with contextlib.ExitStack() as stack:
        stack.enter_context(signature.restored())
        frozen = [(p, p.detach().clone()) for m in modules for p in m.parameters() if not p.requires_grad]
        for module in modules:
            if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
                stack.enter_context(unchanged_on_error(module, always=True))
        yield
    with torch.no_grad():
        for p, contents in frozen:
            if not torch.equal(p, contents):  # elements of an expanded one share memory, so that copy_ refuses it
                p.copy_(contents)
