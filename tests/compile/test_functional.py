"""Traced steps are functional: every write is a copy at the end, and what a step writes to moves as in an eager one."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import threepass
from threepass.compile.trace import trace
from threepass.core.engine import Task, run
from threepass.core.options import Options

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")


class Unread(nn.Module):
    """A batch norm whose output is unused, and one of which only the statistics are used."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x):
        z = self.body(x)
        self.norm(z)
        return self.head(torch.relu(z))


class InPlace(nn.Module):
    """Writes over activations, through views, and to a buffer that it then reads."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        z = self.body(x)
        self.calls += 1
        self.mean.mul_(0.9).add_(z.detach().mean(0), alpha=0.1)
        z = z * 2
        z[:, :4] += self.mean[:4]
        z[:, 4:].mul_(self.calls)
        return self.head(z.relu_())


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x):
        u = self.body(x)
        u.register_hook(lambda d: d.mul_(0.5))
        return self.head(torch.relu(u))


class Averages(nn.Module):
    """Statistics over instances and over batches in one net."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)
        self.norms = nn.Sequential(
            nn.BatchNorm2d(4),
            nn.BatchNorm2d(4, track_running_stats=False),
            nn.InstanceNorm2d(4, track_running_stats=True),
        )

    def forward(self, x):
        return self.head(self.norms(self.conv(x)).relu().mean((2, 3)))


CASES = {"unread": (Unread, (4, 6)), "in place": (InPlace, (4, 6)), "hook": (Hooked, (4, 6)),
         "averages": (Averages, (4, 3, 6, 6))}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "paper") for name in CASES), *((name, "exact") for name in CASES if name != "hook")],  # refused eagerly
)
def test_a_captured_step_writes_as_an_eager_one(name, mode):
    torch.manual_seed(0)
    make, shape = CASES[name]
    model = make().double()
    twin = copy.deepcopy(model)
    y = torch.randint(5, shape[:1])

    def step(weights, x):
        r = run(Task(model, F.cross_entropy, x, y), Options(mode=mode), weights=(weights[0], weights[1]))
        return [*r.grads.values(), r.loss, r.input_loss]

    weights, x = torch.tensor([0.1, 0.9], dtype=torch.float64), torch.randn(shape).double()
    before = copy.deepcopy(model.state_dict())
    program = trace(step, [weights, x])
    model.load_state_dict(before)
    for _ in range(2):
        x = torch.randn(shape).double()
        found = program(weights, x)
        r = threepass.three_pass(twin, F.cross_entropy, x, y, mode=mode)
        for got, expected in zip(found, [*r.grads.values(), r.loss, r.input_loss], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
        for (path, got), expected in zip(model.named_buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12, msg=path)


@pytest.mark.parametrize("name", CASES)
def test_nothing_but_copies_at_the_end_writes(name):
    torch.manual_seed(0)
    make, shape = CASES[name]
    model, y = make(), torch.randint(5, shape[:1])

    def step(weights, x):
        r = run(Task(model, F.cross_entropy, x, y), Options(), weights=(weights[0], weights[1]))
        return list(r.grads.values())

    nodes = list(trace(step, [torch.tensor([0.1, 0.9]), torch.randn(shape)]).plain.graph.nodes)
    calls = [n for n in nodes if n.op == "call_function" and hasattr(n.target, "_schema")]
    writes = [n for n in calls if n.target._schema.is_mutable]
    assert all(n.target is torch.ops.aten.copy_.default and n.args[0].op == "placeholder" for n in writes)
    assert nodes[-1 - len(writes) : -1] == writes
    unchanged = 1 if name == "averages" else 0  # an instance norm does not count its batches
    assert len(writes) == len(list(model.buffers())) - unchanged


@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_group_norms_under_autocast_have_the_formats_that_they_compute_in(mode):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
    )
    x, y, options = torch.randn(2, 3, 8, 8), torch.tensor([1, 3]), Options(strength=0.1, mode=mode)

    def step(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return list(run(Task(net, F.cross_entropy, x, y), options, warn=False).grads.values())

    program, expected = trace(step, [x, y]), step(x, y)
    for got, e in zip(program.graph(*program.state, x, y), expected, strict=True):
        assert got.dtype == e.dtype
        torch.testing.assert_close(got, e, rtol=2e-2, atol=1e-3)
