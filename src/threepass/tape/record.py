"""The tape: what pass 1 records for the later passes.

Pass 1 runs the user's model once, under a `TorchFunctionMode` that sees every torch function call. A tensor is

* active, when it depends on the input: errors and tangents are propagated along these;
* a weight, when it is a parameter or computed from parameters alone: it gets a gradient;
* a constant, otherwise.

A call with an active argument becomes an `Operation` on the tape, in order, and runs with its weights detached, so that
pass 2 computes errors and no weight gradients. A call without one runs unchanged: weight norm, LoRA's product or a
class token's `expand` give a weight with an autograd history, through which its gradient is passed on to the
parameters. The tape is a straight-line program, so pass 3 does not run the user's code again: hooks are called once,
buffers and random state change once, and control flow stays as it was in pass 1.

An operation is one torch function call, or one call of an `autograd.Function` or a custom op. Of torch functions that
are written in Python (`F.batch_norm`, `F.relu`, `F.multi_head_attention_forward`) the calls inside are recorded.
"""

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .._torch_compat import (
    DisableTorchFunction,
    gradient_edge,
    has_saved_tensor_hooks,
    innermost_transform,
)
from ..errors import CaptureError, Place, first_line_of
from ..numerics.precision import HALF
from ..rules.sync_batch_norm import groups_of, largest
from ..rules.table import Rule, Tap, rule_for
from .activity import ActivityTracker
from .arguments import flatten, tensors_in, unflatten
from .checkpointed import (
    Block,
    Recomputed,
    can_be_recorded_again,
    find_passed_errors,
    free_chained_arguments,
    recompute_from,
    without_tensors,
)
from .inner_dropout import body_in_trace
from .intercept import REPLACED, intercepting_functions, with_separate_histories
from .operation import Operation, results_of, without_contents
from .replay import as_recorded, is_random
from .signals import ActivationMeta, Signals
from .state import random_state
from .traits import traits_of

Places = list[tuple[int, Tensor]]  # tensors with their positions among the arguments or the results of a call


Roles = tuple[Places, Places, Places]  # the tensors among the arguments of a call: all, the active ones, the weights


class Input(NamedTuple):
    """An input of the net: the tensor as it was given, the leaf for pass 2, and the copy that the model runs on."""

    source: Tensor
    leaf: Tensor
    meta: ActivationMeta


class Record(ActivityTracker):
    """The operations of pass 1 in execution order, the inputs, and the list of problems."""

    def __init__(self, device: str, module_paths: bool = False, blocks: bool = False):
        super().__init__()
        self.blocks = blocks  # checkpointed functions as one operation each
        self.device = device
        self.module_paths = module_paths  # note in which module an operation runs, for messages
        self.operations: deque[Operation] = deque()  # in execution order
        self.inputs: list[Input] = []
        self.needs_input_errors = False  # R{d} of the inputs is needed, as it is inside of a block
        self.has_internal_input = False  # the input is the output of a module, not x
        self.half: set[torch.dtype] = set()  # the half-precision dtypes that operations ran in
        self.recording = True
        self.checkpointed = False
        self._no_autocast = device, False, torch.get_autocast_dtype(device)
        self._block: dict[ActivationMeta, GradientEdge] | None = None  # in a checkpointed function: of its results
        self._open_functions: list[Callable[..., Any]] = []  # the Python functions whose calls are being recorded

    def add_input(self, z: Tensor) -> Tensor:
        """Makes z an input of the net; returns the copy to run the model on, which may be written to."""
        with DisableTorchFunction():
            leaf = z.detach().requires_grad_()
            start = leaf.clone()
            self.inputs.append(Input(z, leaf, self._register(start)))
        return start

    def add_weights(self, given: list[Tensor]) -> None:
        """Makes weights of those tensors of x and y that are no inputs and were computed from parameters before."""
        with DisableTorchFunction():
            self._mark_computed(given)

    def sources(self) -> list[Tensor]:
        """The inputs, as they were given."""
        return [given.source for given in self.inputs]

    def signals(self) -> "Signals":
        return Signals(self._aliased)

    def prune(self, outputs: Sequence[ActivationMeta] = ()) -> None:
        """Drops the operations that pass 3 does not need, and sets for the others what is needed of them downstream.

        Pass 3 goes on to the outputs (in exact mode, the loss), and to the last operation that has weights. What
        neither depends on, such as distances of which the model takes the argmin alone, needs no derivatives.
        """
        self._resolve_blocks(chained=not outputs)
        read_downstream: set[Any] = set(self._signal_keys(outputs))
        operations = []
        for op in reversed(self.operations):
            if self._aliased and self._is_alias(op):
                continue  # a view, whose signal aliases that of its base
            op.pushes = not read_downstream.isdisjoint(self._signal_keys(op.outputs))
            if op.pushes or op.weights:
                reads = list(dict.fromkeys([z for _, z in op.active]))
                keys = self._signal_keys(reads)
                op.last_reads = [z for z, key in zip(reads, keys, strict=True) if key is z and z not in read_downstream]
                operations.append(op)
                read_downstream.update(keys)
        self.operations = deque(reversed(operations))
        self._storages.clear_operations()  # from here on, the tape has the only reference to an operation

    def _resolve_blocks(self, chained: bool) -> None:
        blocks = [op for op in self.operations if isinstance(op, Block)]
        if blocks:
            read = {z for op in self.operations for _, z in op.active}
            for block in blocks:
                block.resolve_output(read)
            self.operations = deque(op for op in self.operations if op.outputs)  # of others, nothing is read
            if chained:
                free_chained_arguments([block for block in blocks if block.outputs], self._aliased)
            else:
                find_passed_errors(self.operations, self._aliased)

    def consume(self) -> Iterator[Operation]:
        """The operations in execution order; the tape drops each, so that its activations can be freed."""
        while self.operations:
            yield self.operations.popleft()

    def carries_mix(self) -> bool:
        """Whether pass 3 can carry the mix alone: the net is piecewise linear from its inputs to its last weight."""
        if self._aliased or self.problems:
            return False
        return all(op.carries_mix for op in reversed(self.operations))  # the last are the smallest in most nets

    def has_cheap_products(self) -> bool:
        """Whether all weights but those of the last layer have cheap products."""
        others = [op for op in self.operations if op.weights][:-1]
        return bool(others) and not self.problems and all(op.has_cheap_products for op in others)

    def max_over_ranks(self) -> Callable[[Tensor], Tensor] | None:
        """A function that gives the maximum of a value over ranks; None unless operations sum signals over ranks.

        The scales of signals that are summed have to be equal.
        """
        groups = groups_of(self.operations)
        return partial(largest, groups=groups) if groups else None

    def needs_error(self, z: ActivationMeta) -> bool:
        """Whether R{d} of z is needed: of an input, only where weights upstream of it are trained."""
        return self.needs_input_errors or all(
            z is not given.meta or given.source.requires_grad for given in self.inputs
        )

    def _signal_keys(self, metas: Sequence[ActivationMeta]) -> Sequence[Any]:
        """What the signals of activations are stored under: those of aliases under their storage."""
        return [z.storage if z.storage in self._aliased else z for z in metas] if self._aliased else metas

    def _is_alias(self, op: Operation) -> bool:
        """Whether its signal aliases that of its argument, as a view's does."""
        storage = op.outputs[0].storage
        return storage in self._aliased and not op.written and any(z.storage == storage for _, z in op.active)

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """For pass 2, where activation checkpoints recompute parts of the model: as in pass 1, without recording."""
        self.recording = False
        with contextlib.ExitStack() as stack:
            if self.checkpointed:
                stack.enter_context(intercepting_functions())
                stack.enter_context(self)
            yield

    @contextlib.contextmanager
    def checkpointing(self, function, args, kwargs) -> Iterator[Callable[..., Any]]:
        """Makes one `Block` of the operations of a checkpointed function, if it can be recorded again alone."""
        if not (self.blocks and self.recording and torch.is_grad_enabled()) or self._block is not None:
            yield function
            return
        values, spec = flatten(args, kwargs)
        active = [(i, self._lookup(z)) for i, z in enumerate(values) if isinstance(z, Tensor) and self.is_active(z)]
        known = [(i, z) for i, z in active if z is not None]
        values = [v.detach() if isinstance(v, Tensor) and self.is_active(v) else v for v in values]
        before, autocast = len(self.operations), self._autocast()
        self._block = {}
        recomputed = Recomputed(function, self._recomputed_from)
        try:
            yield recomputed
        finally:
            edges, self._block = self._block, None
        inside = list(itertools.islice(self.operations, before, None))
        if len(known) == len(active) and can_be_recorded_again(inside, [z for _, z in known]) and not self._aliased:
            weights = [weight for op in inside for weight in op.weights]
            module = self.path[-1] if self.path else ""
            block = Block(function, values, spec, known, weights, module, autocast, None, None, inside=inside)
            block.edges = edges
            recomputed.is_block = True
            self._replace(inside, block)

    def _recomputed_from(self, z: Any) -> Any:
        """In a trace, what pass 2 recomputes a block from in place of z, an argument: of activations, copies."""
        if not (isinstance(z, Tensor) and self.is_active(z)):
            return z
        leaf = recompute_from(z.detach()).requires_grad_()
        start = leaf.view_as(leaf)  # active, as z: not a leaf
        self._register(start)
        return start

    def _replace(self, inside: list[Operation], block: Block) -> None:
        """Puts a block in the place of its operations, and frees their tensors."""
        for op in inside:
            self.operations.pop()
            without_tensors(op)
        self._storages.forget(inside)
        self._storages.add_operation(block)
        self.operations.append(block)

    def record_error(self, op: Operation, error: Exception) -> None:
        """Adds an error in an operation to the list of problems, so that the pass goes on to find the others.

        To be called where the error is handled: errors of other kinds are raised again.
        """
        if isinstance(error, (torch.OutOfMemoryError, CaptureError)):
            raise error
        if isinstance(error, (NotImplementedError, RuntimeError)):
            advice = "give it a rule: see docs/add-a-rule.md"
            self.problems.append(Place(op.module, op.name, first_line_of(error), advice))
        elif not isinstance(error, (TypeError, AttributeError)) or not self.problems:
            raise error  # of these two: after a problem, signals may be missing

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        traits = traits_of(func)
        if traits.is_metadata or innermost_transform() is not None:
            return func(*args, **kwargs)
        body = traits.body or body_in_trace(func, args, kwargs)
        if body is not None and func not in self._open_functions:
            if func is Tensor.register_hook:
                return self._register_hook(*args, **kwargs)
            if func is torch.autograd.grad and self.recording:
                return self._own_gradient(func, *args, **kwargs)
            self._open_functions.append(func)
            try:
                with self:
                    return body(*args, **kwargs)
            finally:
                self._open_functions.pop()
        values, spec = flatten(args, kwargs)
        tensors, active, weights = self._roles(values)
        if active and torch.is_grad_enabled():
            replaced = REPLACED[func](func, values, spec) if func in REPLACED else None
            if replaced is None:
                return self._operation(func, traits, values, spec, (tensors, active, weights))
            func, values, spec = replaced
            return self._operation(func, traits_of(func), values, spec, self._roles(values))
        if tensors and traits.writes:
            self._copy_for_readers(tensors[0][1])
        out = func(*args, **kwargs)
        if weights or active:
            self._mark_computed([*tensors_in(out), *(z for _, z in tensors[:1])])
        return out

    def _roles(self, values: list[Any]) -> Roles:
        tensors: Places = []
        active: Places = []
        weights: Places = []
        for i, z in enumerate(values):
            if isinstance(z, Tensor):
                tensors.append((i, z))
                if z.requires_grad:
                    (weights if z.is_leaf or id(z) in self._computed else active).append((i, z))
        return tensors, active, weights

    def _operation(self, func, traits, values, spec, roles: Roles):
        """Runs a call with active arguments, with its weights detached, and records it if its results are active."""
        tensors, active, weights = roles
        known: list[tuple[int, ActivationMeta]] = []
        unknown: list[Tensor] = []
        for i, z in active:
            meta = self._lookup(z)
            if meta is None:
                unknown.append(z)
            else:
                known.append((i, meta))
        if unknown and self.recording and self._mark_hidden_weights(unknown):
            return self.__torch_function__(func, (), *unflatten(values, spec))
        for i, z in weights:
            values[i] = z.detach()
        recorded, rng = list(values), random_state(self.device) if is_random(func, traits, values) else None
        writes = self.recording and traits.writes
        if writes:
            values[0] = self._prepare_write(func, tensors[0][1], recorded, weights)
        rule = self._rule(func, spec, active)
        may_write = rule is None or traits.writes or traits.is_user_defined  # torch functions that have a rule say so
        versions = [_version(values[i]) for i, _ in tensors] if may_write else []
        args, kwargs = unflatten(values, spec)
        autocast = self._autocast()
        tap = rule.tap(*args, **kwargs) if rule is not None and rule.tap is not None else None
        if tap is not None:
            out = tap.output
        elif rng is None:
            out = func(*args, **kwargs)
        else:
            with as_recorded(func, autocast, None):
                out = func(*args, **kwargs)
        if not self.recording:
            return out
        out = with_separate_histories(out)
        written = _written(values, tensors, versions) if may_write else []
        outputs = _outputs(out, values, tensors, written)
        if not outputs:
            return out
        if unknown:
            known = self._known_or_report(func, active)
        module = self.path[-1] if self.path else ""
        op = Operation(func, recorded, spec, known, weights, module, autocast, rng, rule, written)
        if written and not writes and any(i in written for i, _ in (*active, *weights)):
            reason = "modifies an argument in place, but its name does not end in an underscore"
            self.problem(op.name, reason, f"rename it to {op.name}_, or return a new tensor instead")
        if known:
            self._storages.add_operation(op, has_constants=len(tensors) > len(active) + len(weights))
        self._append(op, outputs, tap)
        return out

    def _known_or_report(self, func, active: Places) -> list[tuple[int, ActivationMeta]]:
        metas = [(i, self._lookup(z) or self._lookup_or_report(func, z)) for i, z in active]
        return [(i, meta) for i, meta in metas if meta is not None]

    def _autocast(self) -> tuple[str, bool, torch.dtype]:
        if not torch.is_autocast_enabled(self.device):
            return self._no_autocast
        return self.device, True, torch.get_autocast_dtype(self.device)

    def _rule(self, func, spec, active) -> Rule | None:
        rule = rule_for(func)
        fits = rule is not None and active[-1][0] < rule.arity and (not spec[1] or rule.names.issuperset(spec[1]))
        return rule if fits else None

    def _append(self, op: Operation, outputs: Places, tap: Tap | None) -> None:
        if not op.active:  # its arguments come from operations that were not recorded: problems already
            for _, u in outputs:
                self._register(u)
            return
        self.operations.append(op)
        self.checkpointed = self.checkpointed or has_saved_tensor_hooks()
        first = outputs[0][1]
        base = first._base if len(outputs) == 1 else None
        if tap is not None:
            op.error_edges, op.leaves, op.saved = [gradient_edge(tap.input)], tap.leaves, tap.saved
        elif base is not None and (op.written or self._lookup(base) is None):
            # A write through a view, now or later, replaces the view's node in the autograd graph: use its base's.
            op.base, op.error_edges = self._register(base), [gradient_edge(base)]
        else:
            op.error_edges = [gradient_edge(u) for _, u in outputs]
        for i, u in outputs:
            op.output_indices.append(i)
            op.outputs.append(self._register(u))
            if u.dtype in HALF:
                self.half.add(u.dtype)
        if self._block is not None:
            self._block |= zip(op.outputs, op.error_edges, strict=True)
        if op.rule is not None and op.rule.several:
            op.output = [without_contents(u) for _, u in outputs]
        elif op.rule is not None and len(outputs) == 1:
            if op.rule.reads == "u":
                op.output, op.values[0] = first.detach(), without_contents(op.values[0])
            else:
                op.output = without_contents(first)
        op.free_unread()

    def _own_gradient(self, func, *args, **kwargs):
        """`torch.autograd.grad` in the model: of weights it gives weights."""
        if any(map(self.is_active, tensors_in((*args, *kwargs.values())))):
            self.problem(
                "autograd.grad",
                "the model computes a gradient of its own output (forces, say)",
                "return the scalar itself (the energy, say) and use threepass.gradient_step for a loss on its gradient",
            )
        out = func(*args, **kwargs)
        self._mark_computed(tensors_in(out))
        return out

    def _register_hook(self, z: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Registers a hook that also records the error as the hook changes it: `autograd.grad` returns it unchanged."""
        meta = self._lookup(z) if self.is_active(z) else None
        producer = next((op for op in reversed(self.operations) if meta in op.outputs), None)
        if meta is None or producer is None:
            return z.register_hook(hook)

        op, i = producer, producer.outputs.index(meta)

        def recording_hook(d: Tensor) -> Tensor | None:
            changed = hook(d)
            if changed is not None:
                op.hooked_errors[i] = changed
            return changed

        return z.register_hook(recording_hook)


def _outputs(out: Any, values: list[Any], tensors: Places, written: list[int]) -> Places:
    """The results of a call that require grad, with their positions: those that are not unchanged arguments."""
    if isinstance(out, Tensor) and not written:
        for _, z in tensors:
            if z is out:
                return []
        return [(0, out)] if out.requires_grad else []
    unchanged = {id(z) for i, z in tensors if i not in written}
    results = list(enumerate(results_of(out, values, written)))
    outputs = {id(u): (i, u) for i, u in reversed(results) if u.requires_grad and id(u) not in unchanged}
    return sorted(outputs.values(), key=lambda output: output[0])


def _written(values: list[Any], tensors: Places, versions: list[int]) -> list[int]:
    """The positions of the tensors whose versions have changed."""
    return [i for (i, _), version in zip(tensors, versions, strict=True) if _version(values[i]) != version]


def _version(z: Tensor) -> int:
    return 0 if z.is_inference() else z._version
