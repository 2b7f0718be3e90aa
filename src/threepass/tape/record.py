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
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from .._torch_compat import DisableTorchFunction, has_saved_tensor_hooks
from ..errors import CaptureError, Place
from ..numerics.precision import HALF
from ..rules.table import Rule, rule_for
from .activity import Activations
from .arguments import flatten, tensors_in, unflatten
from .intercept import DROPOUT, apart, drawn_once, functions_seen, python_body, writes_to
from .operation import Operation, results_of
from .replay import as_recorded, is_random, nothing_drawn_in_a_trace
from .signals import Signals, Spot, storage_of
from .state import random_state


class Record(Activations):
    """Pass 1's tape: the operations in order, the inputs, and the places that cannot be gone through."""

    def __init__(self, device: str, module_paths: bool = False):
        super().__init__()
        self.device = device
        self.module_paths = module_paths  # note in which module an operation runs, for messages
        self.operations: deque[Operation] = deque()  # in execution order
        self.inputs: list[tuple[Tensor, Tensor, Spot]] = []  # as given, as a leaf, the copy that the model gets
        self.inside = False  # the input is the output of a module, not x
        self.half: set[torch.dtype] = set()  # the half-precision formats that operations ran in
        self.recording = True
        self.checkpointed = False
        self._makers: dict[Spot, tuple[Operation, int]] = {}
        self._inside: list[Callable[..., Any]] = []  # the Python functions being looked into

    def add_input(self, z: Tensor) -> Tensor:
        """Makes z an input of the net; returns the copy to go on with, which may be written to."""
        with DisableTorchFunction():
            leaf = z.detach().requires_grad_()
            start = leaf.clone()
            self.inputs.append((z, leaf, self._settle(start)))
        return start

    def signals(self) -> "Signals":
        return Signals(self._shared)

    def prune(self, to_loss: bool) -> None:
        """Drops the operations that pass 3 does not need, and sets for the others what is needed of them downstream.

        to_loss: pass 3 goes on to the loss; else to the last operation that has weights.
        """
        read_downstream: set[Any] = set()
        operations = []
        for op in reversed(self.operations):
            storage = op.outputs[0].storage
            if storage in self._shared and not op.written and any(z.storage == storage for _, z in op.active):
                continue  # a view of storage that its signals share: nothing moves
            op.pushes = to_loss or any(self._where(u) in read_downstream for u in op.outputs)
            if op.pushes or op.weights:
                spots = {id(z): z for _, z in op.active}.values()
                op.last_reads = [
                    z for z in spots if self._where(z) not in read_downstream and z.storage not in self._shared
                ]
                operations.append(op)
                read_downstream.update(map(self._where, spots))
        self.operations = deque(reversed(operations))
        self._makers = {}
        self._readers.clear()  # from here on, the tape has the only reference to an operation

    def consume(self) -> Iterator[Operation]:
        """The operations in execution order; the tape drops each, so that its activations can be freed."""
        while self.operations:
            yield self.operations.popleft()

    def carries_mix(self) -> bool:
        """Whether pass 3 can carry the mix alone: the net is piecewise linear from its inputs to its last weight."""
        if self._shared or self.problems:
            return False
        return all(op.carries_mix for op in self.operations)

    def has_cheap_products(self) -> bool:
        """Whether all weights but those of the last layer have cheap products."""
        others = [op for op in self.operations if op.weights][:-1]
        return bool(others) and not self.problems and all(op.has_cheap_products for op in others)

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
                stack.enter_context(nothing_drawn_in_a_trace("what an activation checkpoint runs again"))
                stack.enter_context(functions_seen())
                stack.enter_context(self)
            yield

    @contextlib.contextmanager
    def explaining(self, op: Operation) -> Iterator[None]:
        """What an operation cannot do goes on the list of problems, and the pass goes on to find the others."""
        try:
            yield
        except (torch.OutOfMemoryError, CaptureError):
            raise
        except TypeError:
            if not self.problems:  # after a problem, signals may be missing
                raise
        except (NotImplementedError, RuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.problems.append(Place(op.module, op.name, reason, "give it a rule: see docs/add-a-rule.md"))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.register_hook:
            return self._register_hook(*args, **kwargs)
        if func is torch.autograd.grad and self.recording:
            self._check_own_gradient((*args, *kwargs.values()))
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
        rule = self._rule(func, spec, active)
        tap = rule.tap(*args, **kwargs) if rule is not None and rule.tap is not None else None
        with as_recorded(func, autocast, None) if rng is not None else contextlib.nullcontext():
            out = func(*args, **kwargs) if tap is None else tap.output
        if not self.recording:
            return out
        out = apart(out)
        written = [i for (i, _), v in zip(tensors, versions, strict=True) if _version(values[i]) != v]
        unchanged = {id(z) for i, z in tensors if i not in written}
        results = list(enumerate(results_of(out, values, written)))
        outputs = {id(u): (i, u) for i, u in reversed(results) if u.requires_grad and id(u) not in unchanged}
        if not outputs:
            return out
        spots = [(i, spot or self._known(func, z)) for i, z, spot in active]
        known = [(i, spot) for i, spot in spots if spot is not None]
        module = self.path[-1] if self.path else ""
        op = Operation(func, kept, spec, known, weights, module, autocast, rng, rule, written)
        if not writes and any(i in written for i, *_ in (*active, *weights)):
            self.problem(op.name, "writes to its arguments unannounced", "end its name with an underscore")
        self._append(op, sorted(outputs.values(), key=lambda output: output[0]))
        if tap is not None:
            op.edges, op.leaves = [get_gradient_edge(tap.input)], tap.leaves
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
        self.checkpointed |= has_saved_tensor_hooks()
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

    def _check_own_gradient(self, arguments: tuple[Any, ...]) -> None:
        if any(map(self.is_active, tensors_in(arguments))):
            self.problem(
                "autograd.grad",
                "the model computes a gradient of its own output (forces, say)",
                "return the value itself, and put the loss on its gradient by threepass.gradient_step",
            )

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
