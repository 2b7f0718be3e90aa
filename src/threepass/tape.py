"""What pass 1 keeps for the passes after it.

Pass 1 runs the user's model once, under a `TorchFunctionMode` that sees every torch function call. A tensor is

* active, when it depends on the input: signals run along these;
* a weight, when it is a parameter or computed from parameters alone: it gets a gradient;
* a constant, otherwise.

A call with an active argument becomes an `Operation` on the tape, in order, and runs with its weights detached, so that
pass 2 computes errors and no weight gradients. A call without one runs as it is: weight norm, LoRA's product or a class
token's `expand` leave a weight with a history, along which the chain rule runs on to the parameters. The tape is a
straight-line program, so pass 3 needs no second run of the user's code: hooks fire once, buffers and random numbers
move once, and branches stay as pass 1 took them.

An operation is one torch function call, or one call of an `autograd.Function` or a custom op. torch functions that are
thin wrappers in Python (`F.batch_norm`, `F.relu`) are looked into, to reach the call inside; one that hides several
operations with weights (`F.multi_head_attention_forward`) is taken whole.
"""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .calls import Shape, flatten, tensors_in, unflatten
from .errors import Place
from .precision import HALF
from .replay import SILENT_WRITES, as_recorded, is_random, random_state
from .rules.table import Map, Rule, is_flat, name_of, rule_for
from .seeing import DROPOUT, SeesFunctions, apart, drawn_once, functions_seen, python_body, writes_to
from .signals import Signals, Spot, Storage, storage_of


@dataclass(slots=True, eq=False)
class Operation:
    """One call `u = op(a; p)`: its flat arguments, and which of them are active (a) or weights (p)."""

    func: Callable[..., Any]
    values: list[Any]  # the arguments; one that a later call writes to is replaced by a copy of what it was
    spec: Shape
    active: list[tuple[int, Spot]]
    weights: list[tuple[int, Tensor]]
    module: str
    autocast: tuple[str, bool, torch.dtype]
    rng: list[Tensor] | None
    rule: Rule | None
    written: list[int] = field(default_factory=list)
    picks: list[int] = field(default_factory=list)  # which of the call's results are the outputs u
    outputs: list[Spot] = field(default_factory=list)
    output: Tensor | None = None  # u, for a fast rule; its contents, if the rule reads them
    edges: list[GradientEdge] = field(default_factory=list)  # where pass 2 finds the error d of each output
    bent: dict[int, Tensor] = field(default_factory=dict)  # errors that hooks of the user's changed
    base: Spot | None = None  # of whom the output is a part, where the call writes through a view

    @property
    def name(self) -> str:
        return name_of(self.func)

    @property
    def arity(self) -> int:
        return 0 if self.rule is None else self.rule.arity

    @property
    def needs_error(self) -> bool:
        """Whether exact mode needs d of the output: for weights, and for the curvature."""
        flat = is_flat(self.func) if self.rule is None else self.rule.flat
        return bool(self.weights) or not flat

    def call(self, values: list[Any]) -> list[Tensor]:
        """The operation as a pure function of its flat arguments: what it writes to, it gets a copy of."""
        values = list(values)
        for i in (*self.written, *SILENT_WRITES.get(self.func, ())):
            values[i] = values[i].clone() if isinstance(values[i], Tensor) else values[i]
        args, kwargs = unflatten(values, self.spec)
        with as_recorded(self.func, self.autocast, self.rng):
            out = self.func(*args, **kwargs)
        results = _results(out, values, self.written)
        return [results[i] for i in self.picks]

    def map(self) -> Map | None:
        """The fast rule's map for this call; None where the generic rule serves."""
        if self.rule is None or self.output is None:
            return None
        values = list(self.values)
        for i, _ in self.active:
            values[i] = values[i].detach()
        args, kwargs = unflatten(values, self.spec)
        made = self.rule.make(self.output, *args, **kwargs)
        knows = made is not None and all(values[i] in made.grad or values[i] in made.add for i, _ in self.weights)
        return made if knows else None

    def error_at_output(self, d: Tensor | None) -> Tensor | None:
        """The output's part of the error that pass 2 found at its edge."""
        if self.base is None or d is None:
            return d
        if self.base.is_whole and self.outputs[0].is_whole and self.base.dtype == self.outputs[0].dtype:
            return d.reshape(self.outputs[0].shape)
        buffer = self.base.buffer()
        self.base.window(buffer).copy_(d)
        return self.outputs[0].window(buffer)


class Record(SeesFunctions):
    """Pass 1's tape: the operations in order, the inputs, and the places that cannot be gone through."""

    def __init__(self, device: str):
        super().__init__()
        self.device = device
        self.operations: list[Operation] = []
        self.inputs: list[tuple[Tensor, Tensor, Spot]] = []  # as given, as a leaf, the copy that the model gets
        self.inside = False  # the input is the output of a module, not x
        self.half: set[torch.dtype] = set()  # the half-precision formats that operations ran in
        self.problems: list[Place] = []
        self.path: list[str] = []  # the modules being run, for messages
        self.recording = True
        self.checkpointed = False
        self._token = object()
        self._makers: dict[Spot, tuple[Operation, int]] = {}
        self._inside: list[Callable[..., Any]] = []  # the Python functions being looked into
        self._derived: dict[int, Tensor] = {}
        self._shared: set[Storage] = set()  # storage that is written to while several tensors look at it
        self._readers: dict[Storage, list[tuple[Operation, int]]] = defaultdict(list)
        self._lookers: dict[Storage, list[weakref.ref[Tensor]]] = defaultdict(list)

    def add_input(self, z: Tensor) -> Tensor:
        """Makes z an input of the net; returns the copy to go on with, which may be written to."""
        with torch._C.DisableTorchFunction():
            leaf = z.detach().requires_grad_()
            start = leaf.clone()
            self.inputs.append((z, leaf, self._settle(start)))
        return start

    def is_active(self, z: Tensor) -> bool:
        return z.requires_grad and not z.is_leaf and id(z) not in self._derived

    def signals(self) -> "Signals":
        return Signals(self._shared)

    def program(self, to_the_end: bool) -> Iterator[tuple[Operation, bool, list[Spot]]]:
        """Empties the tape into the visits of pass 3.

        Each: the operation, whether its tangent goes on (to a weight, or to the loss), the spots that it reads last.
        """
        ahead: set[Any] = set()
        visits = []
        for op in reversed(self.operations):
            storage = op.outputs[0].storage
            if storage in self._shared and not op.written and any(z.storage == storage for _, z in op.active):
                continue  # another window on the same signals: nothing moves
            pushes = to_the_end or any(self._where(u) in ahead for u in op.outputs)
            if pushes or op.weights:
                spots = {id(z): z for _, z in op.active}.values()
                last = [z for z in spots if self._where(z) not in ahead and z.storage not in self._shared]
                visits.append((op, pushes, last))
                ahead.update(map(self._where, spots))
        self.operations, self._makers = [], {}
        self._readers.clear()  # from here on an operation lives until its visit
        while visits:
            yield visits.pop()

    def wants(self, z: Spot) -> bool:
        """Whether R{d} of z goes anywhere: on along the tape, or from an input on to weights before it."""
        return all(z is not start or source.requires_grad for source, _, start in self.inputs)

    def _where(self, z: Spot) -> Any:
        return z.storage if z.storage in self._shared else z

    @contextlib.contextmanager
    def rerunning(self) -> Iterator[None]:
        """For pass 2, where activation checkpoints run parts of the model again: as in pass 1, but noting nothing."""
        self.recording = False
        with contextlib.ExitStack() as stack:
            if self.checkpointed:
                stack.enter_context(functions_seen())
                stack.enter_context(self)
            yield

    @contextlib.contextmanager
    def explaining(self, op: Operation) -> Iterator[None]:
        """What an operation cannot do goes on the list of problems, and the pass goes on to find the others."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except TypeError:
            if not self.problems:  # after a problem, signals may be missing
                raise
        except (NotImplementedError, RuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.problems.append(Place(op.module, op.name, reason, "give it a rule: see docs/add-a-rule.md"))

    def problem(self, operation: str, reason: str, advice: str) -> None:
        self.problems.append(Place(self.path[-1] if self.path else "", operation, reason, advice))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.register_hook:
            return self._register_hook(*args, **kwargs)
        if func not in self._inside and (body := python_body(func)) is not None:
            self._inside.append(func)
            try:
                with self:
                    return body(*args, **kwargs)
            finally:
                self._inside.pop()
        values, spec = flatten(args, kwargs)
        tensors = [(i, z) for i, z in enumerate(values) if isinstance(z, Tensor)]
        if torch.is_grad_enabled() and any(self.is_active(z) for _, z in tensors):
            return self._operation(func, values, spec, tensors)
        if tensors and writes_to(func):
            self._keep_for_readers(tensors[0][1])
        out = func(*args, **kwargs)
        if any(z.requires_grad for _, z in tensors):
            self._derive([*tensors_in(out), *(z for _, z in tensors[:1])])
        return out

    def _derive(self, results: list[Tensor]) -> None:
        """Results of a call on weights and constants alone: what needs a gradient is a weight."""
        for z in [w for u in results for w in (u, u._base) if w is not None]:
            if z.requires_grad and not z.is_leaf and self._spot(z) is None:
                self._derived[id(z)] = z

    def _operation(self, func, values, spec, tensors):
        """A call with an active argument: runs it with its weights detached, and notes it if its results matter."""
        if func in DROPOUT:
            func, values, spec = drawn_once(func, values, spec)
        active = [(i, z, self._spot(z)) for i, z in tensors if self.is_active(z)]
        weights = [(i, z) for i, z in tensors if z.requires_grad and not self.is_active(z)]
        for i, z in weights:
            values[i] = z.detach()
        kept, rng = list(values), random_state(self.device) if is_random(func, values) else None
        writes = self.recording and writes_to(func)
        if writes:
            values[0] = self._before_write(func, tensors[0][1], kept, weights)
        versions = [_version(values[i]) for i, _ in tensors]
        args, kwargs = unflatten(values, spec)
        autocast = (self.device, torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device))
        with as_recorded(func, autocast, None) if rng is not None else contextlib.nullcontext():
            out = func(*args, **kwargs)
        if not self.recording:
            return out
        out = apart(out)
        written = [i for (i, _), v in zip(tensors, versions, strict=True) if _version(values[i]) != v]
        unchanged = {id(z) for i, z in tensors if i not in written}
        results = list(enumerate(_results(out, values, written)))
        outputs = {id(u): (i, u) for i, u in reversed(results) if u.requires_grad and id(u) not in unchanged}
        if not outputs:
            return out
        spots = [(i, spot or self._known(func, z)) for i, z, spot in active]
        known = [(i, spot) for i, spot in spots if spot is not None]
        module, rule = self.path[-1] if self.path else "", self._rule(func, spec, active)
        op = Operation(func, kept, spec, known, weights, module, autocast, rng, rule, written)
        if not writes and any(i in written for i, *_ in (*active, *weights)):
            self.problem(op.name, "writes to its arguments unannounced", "end its name with an underscore")
        self._append(op, sorted(outputs.values(), key=lambda output: output[0]))
        return out

    def _rule(self, func, spec, active) -> Rule | None:
        rule = rule_for(func)
        fits = rule is not None and all(i < rule.arity for i, *_ in active) and set(spec[1]) <= rule.names
        return rule if fits else None

    def _append(self, op: Operation, outputs: list[tuple[int, Tensor]]) -> None:
        if not op.active:  # nothing but hidden operations before it, which are on the list of problems
            for _, u in outputs:
                self._settle(u)
            return
        self.operations.append(op)
        self.checkpointed |= torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        self.half.update({u.dtype for _, u in outputs} & set(HALF))
        first = outputs[0][1]
        base = first._base if len(outputs) == 1 else None
        if base is not None and (op.written or self._spot(base) is None):
            # A write through a view, now or later, drops the view's own node from the graph: the base has the error.
            op.base, op.edges = self._settle(base), [get_gradient_edge(base)]
        else:
            op.edges = [get_gradient_edge(u) for _, u in outputs]
        op.picks = [i for i, _ in outputs]
        op.outputs = [self._settle(u) for _, u in outputs]
        self._makers |= {spot: (op, i) for i, spot in enumerate(op.outputs)}
        if op.rule is not None and len(outputs) == 1:
            reads_u = op.rule.reads == "u"
            op.output = first.detach() if reads_u else torch.empty_like(first, device="meta")
            if reads_u:
                op.values[0] = torch.empty_like(op.values[0], device="meta")
        for i, _ in op.active:
            if i not in op.written:
                self._readers[storage_of(op.values[i])].append((op, i))

    def _spot(self, z: Tensor) -> Spot | None:
        """Where z's signal lives, if z is as this tape last saw it."""
        spot, history = getattr(z, "_threepass", (None, None))
        if spot is None or spot.token is not self._token:
            return None
        return spot if history is z.grad_fn or spot.storage in self._shared else None

    def _settle(self, z: Tensor) -> Spot:
        """Gives z a spot, or notes that the one it has goes on."""
        storage = storage_of(z)
        spot = getattr(z, "_threepass", (None, None))[0]
        if spot is None or spot.token is not self._token or spot.shape != z.shape or spot.stride != z.stride():
            spot = Spot(self._token, storage, z.shape, z.stride(), z.storage_offset(), z.dtype, z.device)
            self._lookers[storage].append(weakref.ref(z))
        setattr(z, "_threepass", (spot, z.grad_fn))  # noqa: B010
        self._derived.pop(id(z), None)
        return spot

    def _known(self, func, z: Tensor) -> Spot | None:
        if storage_of(z) in self._shared:  # it became active when something was written to its storage
            return self._settle(z)
        maker = z.grad_fn.name() if z.grad_fn is not None else "a hidden operation"
        self.problem(
            name_of(func),
            f"its argument comes from {maker}, run where torch functions are unseen (TorchScript, vmap, an extension) "
            "or in an earlier call",
            "run that part as plain PyTorch, wrap it as an autograd.Function or a custom op, or detach what is old",
        )
        return None

    def check_known(self, name: str, z: Tensor) -> None:
        """A problem, if z was made by something that the tape did not see."""
        if self._spot(z) is None and storage_of(z) not in self._shared:
            maker = z.grad_fn.name() if z.grad_fn is not None else "a hidden operation"
            self.problem(
                name,
                f"comes from {maker}, run where torch functions are unseen (TorchScript, vmap, an extension)",
                "write it in plain PyTorch",
            )

    def _keep_for_readers(self, z: Tensor) -> None:
        """Before z's storage is written to: those who read it before get a copy of what they read."""
        for reader, i in self._readers.pop(storage_of(z), ()):
            reader.values[i] = reader.values[i].detach().clone()

    def _before_write(self, func, z: Tensor, kept: list[Any], weights: list[tuple[int, Tensor]]) -> Tensor:
        """Before func writes to z: keeps the old contents for those who need them, and returns what to write to."""
        self._keep_for_readers(z)
        storage = storage_of(z)
        lookers = [looker() for looker in self._lookers[storage]]
        if z._is_view() or any(looker is not None and looker is not z for looker in lookers):
            self._shared.add(storage)
        if id(z) in self._derived:  # a weight with a history becomes an activation: the history goes on from a copy
            history = z.clone()
            self._derived[id(history)] = history
            weights[:] = [(i, history if w is z else w) for i, w in weights]
            z.detach_()
            del self._derived[id(z)]
        if rule_for(func) is None:
            kept[0] = z.detach().clone()
        return z

    def _register_hook(self, z: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """A hook on an activation: autograd finds errors before hooks, and the weights need what comes behind them."""
        spot = self._spot(z) if self.is_active(z) else None
        if spot is None or spot not in self._makers:
            return z.register_hook(hook)

        op, i = self._makers[spot]

        def watched(d: Tensor) -> Tensor | None:
            changed = hook(d)
            if changed is not None:
                op.bent[i] = changed
            return changed

        return z.register_hook(watched)


def _version(z: Tensor) -> int:
    return 0 if z.is_inference() else z._version


def _results(out: Any, values: list[Any], written: list[int]) -> list[Tensor]:
    """The tensors that a call leaves behind: what it returns, then what it wrote to."""
    return [*tensors_in(out), *(values[i] for i in written)]
