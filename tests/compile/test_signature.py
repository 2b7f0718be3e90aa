"""Signatures: whatever changes between two calls, a compiled step gives what the eager one gives.

Most tests leave out Inductor, which takes seconds a program, and run the traced programs as they are.
"""

import collections
import contextlib
import copy
import functools
import random
import re
import time
import types
import warnings
from argparse import Namespace as Namespaces
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from close import assert_close
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import threepass
from threepass.compile import inductor
from threepass.compile.signature import Signature, flattened, input_signature
from threepass.models import plain

pytestmark = [
    pytest.mark.usefixtures("graph_only"),
    pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning", "ignore::threepass.LeftOutWarning"),
]
FACTOR = 1.0
SHIFT = torch.zeros(3, dtype=torch.float64)


@dataclass
class Settings:
    gain: float = 1.0


class Namespace:
    """Numbers that people keep in a class."""

    gain = 1.0
    gains: ClassVar = [1.0]

    class Inner:
        gain = 1.0

    @staticmethod
    def multiplied(u):
        return u * Namespace.gains[0]


class Stored:
    """Answers for what it has no attribute of."""

    def __init__(self):
        self.store = {"gain": 1.0}

    def __getattr__(self, name):
        return vars(self)["store"][name]

    def __getitem__(self, name):
        return self.store[name]


class Defaults:
    gain = 1.0


class Identity(torch.autograd.Function):
    factor = 1.0

    @staticmethod
    def forward(ctx, u):
        return u.view_as(u)

    @staticmethod
    def backward(ctx, d):
        return d * Identity.factor


@functools.lru_cache
def remembered():
    return Namespace.Inner.gain


def elsewhere(net, u):
    """A helper that reads more than the module's own code names."""
    options = net.arguments.model.encoder.layer
    return u * options.width * net.stored.gain * net.user["scale"] * net.defaults.gain * float(net.array[0])


class Net(nn.Module):
    """Reads its numbers from everywhere that people keep them."""

    power = 1.0

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop, self.act = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.0), nn.Tanh()
        self.last = nn.Linear(5, 3)
        self.register_buffer("offset", torch.zeros(3))
        self.temperature = 1.0
        self.scale = torch.ones(5, dtype=torch.float64)
        self.settings = Settings()
        self.gains, self.options, self.pair = [1.0, 1.0], {"bias": 0.0}, (1.0, 0.5)
        self.nested = {"inner": [1.0]}
        self.arguments = Namespaces(model=Namespaces(encoder=Namespaces(layer=Namespaces(width=1.0))))
        self.stored, self.user, self.defaults = Stored(), collections.UserDict(scale=1.0), Defaults()
        self.array = np.ones(2)
        self.ordered, self.blocks = {"shift": 0.5, "factor": 0.5}, nn.ModuleDict({"a": nn.Tanh(), "b": nn.Softplus()})

    def forward(self, x):
        for name, value in self.ordered.items():
            x = x + value if name == "shift" else x * value
        for name, block in self.blocks.items():
            x = block(x) if name < "c" else -block(x)
        x = elsewhere(self, Namespace.multiplied(Identity.apply(x))) * Namespace.gain * remembered()
        gain = self.gains[0] * self.pair[0] * FACTOR * self.power * self.settings.gain * self.nested["inner"][0]
        u = self.drop(self.act(self.norm(self.first(x)))) * self.scale + self.options["bias"]
        return self.last(u) * (gain / self.temperature) + (self.offset + SHIFT)


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.ones(3))
        self.smoothing = 0.1

    def forward(self, out, y):
        target, times = y
        return times * F.cross_entropy(out, target, self.weight, label_smoothing=self.smoothing * self.training)


def weighted(out, y, weight=None, power=1.0, gains=()):
    return y[1] * F.cross_entropy(out * power + sum(gains), y[0], weight)


class Objective:
    def __init__(self):
        self.strength, self.weight, self.steps = 1.0, torch.ones(3, dtype=torch.float64), 0

    def helper(self, out):
        return out * self.strength

    def loss(self, out, y):
        return y[1] * F.cross_entropy(self.helper(out), y[0], self.weight)


class World:
    """A model, a loss of one of four kinds, inputs, and everything that a change can turn."""

    def __init__(self, kind: str):
        torch.manual_seed(0)
        self.model, self.objective = Net().double(), Objective()
        self.module, self.keywords = Loss().double(), {"power": 1.0, "gains": [0.0], "weight": torch.ones(3).double()}
        factor = 1.0

        def closed(out, y):
            return factor * weighted(out, y)

        self.cell = closed.__closure__[0]
        losses = {
            "module": self.module,
            "closure": closed,
            "partial": functools.partial(weighted, **self.keywords),
            "method": self.objective.loss,
        }
        self.loss = losses[kind]
        self.handles: dict[str, object] = {}
        self.rows, self.times, self.strided, self.autocast = 4, 1.0, False, False

    def inputs(self, seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(self.rows, 8 if self.strided else 4, dtype=torch.float64, generator=g)
        x = x[:, ::2] if self.strided else x
        return x, (torch.randint(3, (self.rows,), generator=g), self.times)

    def hook(self, name, register):
        """Adds a hook, or takes it away."""
        if name in self.handles:
            self.handles.pop(name).remove()
        else:
            self.handles[name] = register()

    def close(self):
        for handle in self.handles.values():
            handle.remove()
        globals().update(FACTOR=1.0, SHIFT=torch.zeros(3, dtype=torch.float64))
        Net.power = Namespace.gain = Namespace.Inner.gain = Namespace.gains[0] = Defaults.gain = Identity.factor = 1.0
        remembered.cache_clear()
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_flash_sdp(True)
        torch.backends.cudnn.benchmark = False
        torch.set_float32_matmul_precision("highest")
        torch.set_default_dtype(torch.float32)


def replaced(owner, name, v):
    """Another tensor in the place of a tensor attribute, parameter or buffer."""
    old = getattr(owner, name)
    new = old.detach() + 0.1 * v
    setattr(owner, name, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)


def toggled(p):
    p.requires_grad_(not p.requires_grad)


def multiplied(v):
    return lambda module, args, out: out * v


CELL = types.CellType(1.0)


def reading_hook():
    def hook(module, args, out):
        return out * factor

    factor = 0.0
    return types.FunctionType(hook.__code__, globals(), "hook", None, (CELL,))


def renamed(entries, old, new):
    """The last entry of a dict under another name, or the first one last."""
    entries[new] = entries.pop(old)


def another_dict(module, name, **entries):
    setattr(module, name, collections.OrderedDict(getattr(module, name), **entries))


def scaled_error(module, grad_input, grad_output):
    return tuple(None if g is None else 2 * g for g in grad_input)


# w: the world; v: one of a few numbers, so that what was comes back now and then
CHANGES = {
    "number": lambda w, v: setattr(w.model, "temperature", v),
    "tensor attribute": lambda w, v: replaced(w.model, "scale", v),
    "contents of a tensor attribute": lambda w, v: w.model.scale.mul_(v),
    "data of a tensor attribute": lambda w, v: setattr(w.model.scale, "data", w.model.scale.data + v),
    "number to tensor": lambda w, v: setattr(w.model, "temperature", torch.tensor(v, dtype=torch.float64)),
    "new attribute": lambda w, v: setattr(w.model, "power", v),
    "class attribute": lambda w, v: setattr(Net, "power", v),
    "class": lambda w, v: setattr(Namespace, "gain", v),
    "list of a class": lambda w, v: Namespace.gains.__setitem__(0, v),
    "class in a class, through a cache": lambda w, v: (remembered.cache_clear(), setattr(Namespace.Inner, "gain", v)),
    "class of a function": lambda w, v: setattr(Identity, "factor", v),
    "class of an object": lambda w, v: setattr(Defaults, "gain", v),
    "instead of the class of an object": lambda w, v: setattr(w.model.defaults, "gain", v),
    "arguments that a helper reads": lambda w, v: setattr(w.model.arguments.model.encoder.layer, "width", v),
    "answers of an object": lambda w, v: w.model.stored.store.update(gain=v),
    "mapping": lambda w, v: w.model.user.update(scale=v),
    "array": lambda w, v: w.model.array.__setitem__(0, v),
    "configuration": lambda w, v: setattr(w.model.settings, "gain", v),
    "another configuration": lambda w, v: setattr(w.model, "settings", Settings(v)),
    "list": lambda w, v: w.model.gains.__setitem__(0, v),
    "dict": lambda w, v: w.model.options.update(bias=v),
    "tuple": lambda w, v: setattr(w.model, "pair", (v, 0.5)),
    "order of a dict": lambda w, v: renamed(w.model.ordered, *2 * [next(iter(w.model.ordered))]),
    "order of submodules": lambda w, v: renamed(w.model.blocks._modules, *2 * [next(iter(w.model.blocks))]),
    "name of a submodule": lambda w, v: renamed(w.model.blocks._modules, [*w.model.blocks][-1], f"c{v}"),
    "another dict of submodules": lambda w, v: another_dict(w.model.blocks, "_modules", c=nn.Sigmoid()),
    "another dict of hooks": lambda w, v: another_dict(w.model.act, "_forward_hooks", hook=multiplied(v)),
    "nested list": lambda w, v: w.model.nested["inner"].__setitem__(0, v),
    "global number": lambda w, v: globals().update(FACTOR=v),
    "global tensor": lambda w, v: globals().update(SHIFT=torch.full((3,), v, dtype=torch.float64)),
    "buffer": lambda w, v: replaced(w.model, "offset", v),
    "contents of a buffer": lambda w, v: w.model.offset.add_(v),
    "parameter": lambda w, v: replaced(w.model.first, "weight", v),
    "contents of a parameter": lambda w, v: w.model.first.weight.data.mul_(v),
    "data of a parameter": lambda w, v: setattr(w.model.first.weight, "data", w.model.first.weight.data * v),
    "transposed parameter": lambda w, v: setattr(
        w.model.last.weight, "data", w.model.last.weight.data.t().contiguous().t()
    ),
    "frozen weight": lambda w, v: toggled(w.model.first.weight),
    "frozen bias": lambda w, v: toggled(w.model.last.bias),
    "evaluation": lambda w, v: w.model.train(not w.model.training),
    "evaluation of one layer": lambda w, v: w.model.norm.train(not w.model.norm.training),
    "momentum": lambda w, v: setattr(w.model.norm, "momentum", v / 4),
    "dropout": lambda w, v: setattr(w.model.drop, "p", 0.0 if w.model.drop.p else 1.0),
    "activation": lambda w, v: setattr(w.model, "act", nn.Tanh() if v == 1 else nn.Sigmoid() if v > 1 else nn.ReLU()),
    "forward": lambda w, v: setattr(w.model.act, "forward", lambda x: torch.sin(v * x)),
    "forward hook": lambda w, v: w.hook("forward", lambda: w.model.first.register_forward_hook(multiplied(v))),
    "forward pre-hook": lambda w, v: w.hook(
        "pre", lambda: w.model.last.register_forward_pre_hook(lambda module, args: (args[0] * v,))
    ),
    "order of hooks": lambda w, v: (
        w.model.act._forward_hooks.update({-2: multiplied(v), -3: lambda module, args, out: out + v}),
        w.model.act._forward_hooks.move_to_end(-2),
    ),
    "another hook in its place": lambda w, v: w.model.act._forward_hooks.update({-1: multiplied(v)}),
    "backward hook": lambda w, v: w.hook("back", lambda: w.model.act.register_full_backward_hook(scaled_error)),
    "backward pre-hook": lambda w, v: w.hook(
        "back pre", lambda: w.model.norm.register_full_backward_pre_hook(lambda module, d: (d[0] * v,))
    ),
    "hook with a variable": lambda w, v: w.hook("cell", lambda: w.model.norm.register_forward_hook(reading_hook())),
    "variable of a hook": lambda w, v: setattr(CELL, "cell_contents", v),
    "hook on all modules": lambda w, v: w.hook(
        "global", lambda: nn.modules.module.register_module_forward_hook(multiplied(v))
    ),
    "hook on a parameter": lambda w, v: w.hook("parameter", lambda: w.model.last.weight.register_hook(lambda g: g * v)),
    "loss module: buffer": lambda w, v: replaced(w.module, "weight", v),
    "loss module: evaluation": lambda w, v: w.module.train(not w.module.training),
    "loss module: number": lambda w, v: setattr(w.module, "smoothing", v / 8),
    "loss closure: variable": lambda w, v: setattr(w.cell, "cell_contents", v),
    "loss partial: list": lambda w, v: w.keywords["gains"].append(v),
    "loss method: number": lambda w, v: setattr(w.objective, "strength", v),
    "loss method: tensor": lambda w, v: replaced(w.objective, "weight", v),
    "loss method: something that it does not read": lambda w, v: setattr(w.objective, "steps", w.objective.steps + 1),
    "rows": lambda w, v: setattr(w, "rows", 4 + int(2 * v)),
    "number in y": lambda w, v: setattr(w, "times", v),
    "strides of x": lambda w, v: setattr(w, "strided", not w.strided),
    "autocast": lambda w, v: setattr(w, "autocast", not w.autocast),
    "deterministic algorithms": lambda w, v: torch.use_deterministic_algorithms(v > 1),
    "attention kernels": lambda w, v: torch.backends.cuda.enable_flash_sdp(v <= 1),
    "cuDNN's search": lambda w, v: setattr(torch.backends.cudnn, "benchmark", v > 1),
    "TF32": lambda w, v: torch.set_float32_matmul_precision("high" if v > 1 else "highest"),
    "default dtype": lambda w, v: torch.set_default_dtype(torch.float64 if v > 1 else torch.float32),
}  # fmt: skip
NEUTRAL = {  # the program stays right, or does not come into it
    "contents of a tensor attribute", "contents of a buffer", "contents of a parameter", "hook on a parameter",
    "loss method: something that it does not read", "rows", "number in y", "strides of x", "autocast",
}  # fmt: skip


@contextlib.contextmanager
def world(kind="module"):
    made = World(kind)
    try:
        yield made
    finally:
        made.close()


def check(w, step, seed):
    """A compiled step against an eager one: gradients, loss, output, and what happened to buffers."""
    x, y = w.inputs(seed)
    buffers = [*w.model.buffers(), *w.module.buffers()]
    before = [b.clone() for b in buffers]
    with torch.autocast("cpu", torch.bfloat16, enabled=w.autocast):
        eager = threepass.ThreePass(w.model, w.loss, alpha=0.3)
        found = []
        for made in (eager, step):
            w.model.zero_grad()
            r = made(x, y)
            grads = {n: p.grad.clone() for n, p in w.model.named_parameters() if p.grad is not None}
            moved = {f"buffer {i}": b.double().clone() for i, b in enumerate(buffers)}
            rest = {"loss": r.loss, "input loss": r.input_loss, "output": r.output, "input gradient": r.input_grad}
            found.append({**grads, **moved, **{k: z.clone() for k, z in rest.items()}})
            if made is eager:
                for b, contents in zip(buffers, before, strict=True):
                    b.copy_(contents)
    assert found[0].keys() == found[1].keys()
    assert_close(found[1], found[0], 1e-10)


COMPILED = inductor.compiled  # `graph_only` replaces it in every test
KINDS = ["module", "closure", "partial", "method"]
SEQUENCES = st.lists(
    st.tuples(st.sampled_from(sorted(CHANGES)), st.sampled_from([0.5, 1.0, 1.5])), min_size=5, max_size=12
)


@settings(max_examples=5, phases=[Phase.generate])  # each change is a capture: shrinking would take minutes
@given(st.sampled_from(KINDS), SEQUENCES, st.integers(1, 4))
@pytest.mark.filterwarnings("ignore::threepass.UncompiledWarning")
def test_whatever_changes_compiled_is_eager(kind, changes, most):
    with world(kind) as w:
        step = threepass.ThreePass(w.model, w.loss, alpha=0.3, compile=True)
        step.compiled.max_programs = most
        check(w, step, 0)
        for name, v in changes:
            CHANGES[name](w, v)
            for seed in range(2):
                check(w, step, seed)
        assert 1 <= len(step.compiled.programs) <= most


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_noticed(name):
    """By the quick look and by the full description alike."""
    kind = name.split()[1].strip(":") if name.startswith("loss ") else "module"
    with world(kind) as w:
        if name == "variable of a hook":
            CHANGES[name](w, 1.0)
            CHANGES["hook with a variable"](w, 1.0)
        signature = Signature(w.model, w.loss)
        before = signature.state()
        assert signature.state() is before
        CHANGES[name](w, 1.5)
        after = signature.state()
        if name in NEUTRAL:
            assert after is before
        else:
            assert after != before
            assert Signature(w.model, w.loss).state() == after
            assert next(before.changes(after))


SCRIPT = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.out = torch.nn.Linear(3, 2), 1.0

    def forward(self, x):
        class Scaled:
            factor = gain  # a global that the body of a class reads
        return self.layer(x) * self.out * Scaled.factor * (lambda: shift)()

class Read(torch.nn.Module):
    def forward(self, x):
        return x * globals()["out"]
"""


def test_variables_of_a_script_that_are_named_as_attributes():
    script: dict[str, object] = {"__name__": "script", "gain": 1.0, "shift": 0.5, "layer": 1.0, "out": 1.0}
    exec(SCRIPT, script)
    signature, by_string = Signature(script["Net"](), F.mse_loss), Signature(script["Read"](), F.mse_loss)
    before = signature.state()
    for name in ("out", "layer"):  # `out` of `self.out`
        script[name] = 2.0
        assert signature.state() is before
    read = by_string.state()
    script["out"] = 3.0
    assert by_string.state() != read
    for name in ("gain", "shift"):
        script[name] = 2.0
        assert signature.state() != before
        before = signature.state()


def test_dicts_and_hooks_in_another_order():
    """Of an OrderedDict and of a plain dict, in place: sizes and values stay what they are."""
    with world() as w:
        w.model.act.register_forward_hook(multiplied(2.0))
        last = w.model.act.register_forward_hook(lambda module, args, out: out + 1)
        signature = Signature(w.model, w.loss)
        states = [signature.state()]
        w.model.act._forward_hooks.move_to_end(last.id, last=False)
        states.append(signature.state())
        w.model.act._forward_hooks = collections.OrderedDict()
        states.append(signature.state())
        w.model.act.register_forward_hook(multiplied(2.0))
        states.append(signature.state())
        assert len(set(states)) == 4


def test_a_capture_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    before = [(str(model), {**vars(m)}) for m in model.modules()]
    step = threepass.ThreePass(model, F.cross_entropy, compile="require")
    step(torch.randn(4, 4).double(), torch.randint(3, (4,)))
    assert [(str(model), vars(m)) for m in model.modules()] == before


def test_changes_with_the_compiler(monkeypatch):
    monkeypatch.setattr(inductor, "compiled", COMPILED)
    with world() as w:
        step = threepass.ThreePass(w.model, w.loss, alpha=0.3, compile="require")
        for name in ("number", "forward hook", "loss module: buffer"):
            CHANGES[name](w, 1.5)
            for seed in range(2):
                check(w, step, seed)
        assert [entry.uses for entry in step.compiled.programs.entries] == [2, 2, 2]


def test_a_state_that_comes_again_finds_its_program():
    with world() as w:
        step = threepass.ThreePass(w.model, w.loss, alpha=0.3, compile="require")
        for seed in range(4):
            w.model.train(seed % 2 == 0)
            check(w, step, seed)
            w.model.temperature = 2.0
            check(w, step, seed)
            w.model.temperature = 1.0
        assert [entry.uses for entry in step.compiled.programs.entries] == [2, 2, 2, 2]


def test_objects_that_die_are_not_mistaken_for_those_that_take_their_address():
    with world() as w:
        signature = Signature(w.model, w.loss)
        states = []
        for v in range(20):
            w.model.scale = torch.full((5,), float(v), dtype=torch.float64)
            states.append(signature.state())
        assert len(set(states)) == 20


def test_dicts_that_were_written_to_are_compared_by_value():
    """The quick look passes over modules' dicts that nobody wrote to."""
    model = nn.Sequential(nn.PReLU(), nn.Dropout(0.5))
    signature = Signature(model, F.mse_loss)
    state, weight = signature.state(), model[0].weight
    for _ in range(2):
        model.eval()
        model.train()
        model[0]._parameters["weight"] = None
        model[0]._parameters["weight"] = weight
        assert signature.state() is state
        model[0].weight = nn.Parameter(weight.detach())  # equal, of one element, at the same address
        assert signature.state() != state
        model[0].weight = weight
        assert signature.state() is state
        model[1].p = 0.25
        assert signature.state() != state
        model[1].p = 0.5


def test_elements_of_a_dict_that_lists_its_own_values():
    class Listed(dict):
        def values(self):
            return [*super().values()]

    model = nn.Dropout(0.5)
    model.tensors = Listed(a=torch.ones(1))
    signature = Signature(model, F.mse_loss)
    state = signature.state()
    assert signature.state() is state
    model.tensors["a"] = torch.ones(1)
    assert signature.state() != state


def test_the_quick_look_is_quick():
    """At most 30 microseconds on plain-20 by `benchmarks/signature.py`; here with room for a busy machine."""
    model, x, y = plain(20), torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)
    signature = Signature(model, F.cross_entropy)
    times = []
    for _ in range(300):
        began = time.perf_counter()
        signature.state()
        input_signature(flattened(x, y)[0])
        times.append(time.perf_counter() - began)
    assert min(times[1:]) < 100e-6


class Cached(nn.Linear):
    """Fills a cache at its first call, and keeps its last output for people to look at."""

    def __init__(self):
        super().__init__(4, 3)
        self.cache, self.length, self.seen = None, 0, None

    def forward(self, x):
        if self.length < len(x):
            self.cache, self.length = torch.arange(len(x), dtype=x.dtype), len(x)
        self.seen = super().forward(x) + self.cache[: len(x), None]
        return self.seen


def test_caches_and_kept_tensors_are_no_hindrance():
    torch.manual_seed(0)
    model, x, y = Cached().double(), torch.randn(4, 4).double(), torch.randint(3, (4,))
    step = threepass.ThreePass(model, F.cross_entropy, compile="require")
    expected = threepass.three_pass(copy.deepcopy(model), F.cross_entropy, x, y)
    for _ in range(4):
        got = step(x, y)
        assert_close(got.grads, expected.grads, 1e-12)
        model(x)  # keeps another tensor
    assert len(step.compiled.programs) == 1


class Hidden(nn.Module):
    """Keeps a hidden state from call to call, and starts again with another batch size."""

    def __init__(self):
        super().__init__()
        self.cell, self.last, self.hidden = nn.GRUCell(4, 5), nn.Linear(5, 3), None

    def forward(self, x):
        if self.hidden is not None and len(self.hidden) != len(x):
            self.hidden = None
        out = self.cell(x, self.hidden)
        self.hidden = out.detach()
        return self.last(out)


class Keeping(nn.Linear):
    """Keeps a tensor in training mode, and reads it in evaluation."""

    def __init__(self):
        super().__init__(4, 3)
        self.kept = torch.zeros(3, dtype=torch.float64)

    def forward(self, x):
        out = super().forward(x)
        if not self.training:
            return out + self.kept
        self.kept = out.detach().mean(0)
        return out


class Masked(nn.Linear):
    """Caches a mask of one length."""

    def __init__(self):
        super().__init__(4, 3)
        self.mask = None

    def forward(self, x):
        if self.mask is None or len(self.mask) != len(x):
            self.mask = torch.ones(len(x), len(x), dtype=x.dtype).tril()
        return self.mask @ super().forward(x)


@pytest.mark.filterwarnings("ignore::threepass.UncompiledWarning")
@pytest.mark.parametrize(("make", "name"), [(Hidden, "hidden"), (Keeping, "kept"), (Masked, "mask")])
def test_tensors_that_a_module_keeps_are_those_of_the_last_call(make, name):
    torch.manual_seed(0)
    model = make().double()
    twin = copy.deepcopy(model)
    step = threepass.ThreePass(model, F.cross_entropy, alpha=0.3, compile=True)
    x, y = torch.randn(14, 4, 4).double(), torch.randint(3, (4,))
    for i, rows in enumerate([4, 4, 3, 3, 4, 4, 2, 2, 3, 3, 3, 4, 4, 4]):
        model.train(i % 4 < 3), twin.train(i % 4 < 3)
        found = step(x[i, :rows], y[:rows])
        expected = threepass.three_pass(twin, F.cross_entropy, x[i, :rows], y[:rows], alpha=0.3)
        assert_close(found.grads, expected.grads, 1e-12)
        assert_close({name: getattr(model, name)}, {name: getattr(twin, name).detach()}, 1e-12)
    assert bool(len(step.compiled.programs)) == (make is not Hidden)


def test_spectral_norm_by_hooks_is_captured():
    """Its weight is a view of a parameter at first, and then a tensor of the last forward."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 3)).double(), torch.randn(4, 4).double(), torch.randint(3, (4,))
    nn.utils.spectral_norm(model[0])
    twin = copy.deepcopy(model)
    step = threepass.ThreePass(model, F.cross_entropy, alpha=0.3, compile="require")
    for _ in range(3):
        expected = threepass.three_pass(twin, F.cross_entropy, x, y, alpha=0.3)
        assert_close(step(x, y).grads, expected.grads, 1e-12)
    assert len(step.compiled.programs) == 1


class Counting(nn.Linear):
    eager_calls = 2  # in which it may still be filling a cache

    def __init__(self):
        super().__init__(4, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Remembering(nn.Linear):
    eager_calls = 0

    def __init__(self):
        super().__init__(4, 3)
        self.last = torch.zeros(3, dtype=torch.float64)

    def forward(self, x):
        out = super().forward(x) + self.last
        self.last = out.detach().mean(0)
        return out


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Counting, r"the step changes model.calls while it runs \(from 2 to 3\)"),
        (Remembering, "the step reads model.last and assigns another tensor to it"),
    ],
)
def test_a_model_that_changes_itself_runs_eagerly_and_says_so(make, reason):
    torch.manual_seed(0)
    model, x, y = make().double(), torch.randn(4, 4).double(), torch.randint(3, (4,))
    twin = make().double()
    twin.load_state_dict(model.state_dict())
    step = threepass.ThreePass(model, F.cross_entropy, compile=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(5):
            got, expected = step(x, y), threepass.three_pass(twin, F.cross_entropy, x, y)
            assert_close(got.grads, expected.grads, 1e-12)
    (warning,) = seen
    assert re.search(reason, str(warning.message))
    assert len(step.compiled.programs) == 0
    required = threepass.ThreePass(make().double(), F.cross_entropy, compile="require")
    while required.calls < make.eager_calls:
        required(x, y)
    with pytest.raises(threepass.CaptureError, match=reason):
        required(x, y)


@pytest.mark.parametrize(
    ("draw", "reason"),
    [
        (random.random, "draws numbers from Python's random module"),
        (lambda: float(np.random.rand()), "or numpy.random"),
        (random.Random(0).random, r"the step changes model.draw.* while it runs"),
        (np.random.default_rng(0).random, r"the step changes model.draw.* while it runs"),
    ],
)
def test_random_numbers_of_python_are_no_constants(draw, reason):
    class Deep(nn.Linear):
        """Stochastic depth, by a branch."""

        def forward(self, x):
            return super().forward(x) if self.draw() < 0.5 else x

    model, x, y = Deep(4, 4).double(), torch.randn(4, 4).double(), torch.randint(3, (4,))
    model.draw = draw
    random.seed(0)
    np.random.seed(0)
    step = threepass.ThreePass(model, F.cross_entropy, compile=True)
    with pytest.warns(threepass.UncompiledWarning, match=reason):
        [step(x, y) for _ in range(3)]
    after = random.getstate(), np.random.rand()
    random.seed(0)
    np.random.seed(0)
    for _ in range(3):
        draw()
    assert (random.getstate(), np.random.rand()) == after  # each step drew once


class Unreadable:
    __slots__ = ("key",)

    def __hash__(self):
        return 1

    def __repr__(self):
        raise RuntimeError("closed")


class Representation(tuple):
    """A degree and a parity, and no sequence, as in e3nn."""

    def __len__(self):
        raise NotImplementedError


def test_a_tuple_that_does_not_tell_its_length():
    model, x, y = nn.Linear(4, 3).double(), torch.randn(4, 4).double(), torch.randint(3, (4,))
    model.numbers, model.names = Representation((1, -1)), Representation(("1", "o"))
    step = threepass.ThreePass(model, F.cross_entropy, compile="require")
    for expected, numbers in ((1, (1, -1)), (1, (1, -1)), (2, (2, 1))):
        model.numbers = Representation(numbers)
        step(x, y)
        assert len(step.compiled.programs) == expected


def test_an_object_that_cannot_be_examined_makes_steps_eager():
    model, x, y = nn.Linear(4, 3).double(), torch.randn(4, 4).double(), torch.randint(3, (4,))
    model.handles = {Unreadable()}
    step = threepass.ThreePass(model, F.cross_entropy, compile=True)
    with pytest.warns(threepass.UncompiledWarning, match="cannot be read, RuntimeError: closed"):
        step(x, y)
