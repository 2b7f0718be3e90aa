"""Checkpointed blocks: the same numbers as without checkpointing, in the memory that checkpointing is for."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from threepass import three_pass
from threepass.bench.measure import peak_bytes
from threepass.tape import record

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")


class Model(nn.Module):
    """Blocks, a function f(block, x) that runs each, and a head; with or without checkpoints around f."""

    def __init__(self, f, *blocks, checkpointed=True, width=6):
        super().__init__()
        self.f, self.blocks, self.head = f, nn.ModuleList(blocks), nn.Linear(width, 4)
        self.checkpointed = checkpointed

    def run(self, function, *args, **kwargs):
        if self.checkpointed:
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        return function(*args, **kwargs)

    def forward(self, x):
        for block in self.blocks:
            x = self.f(self, block, x)
        return self.head(x)


class Scaled(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x, other=None, *, scale=1.0):
        return torch.tanh(self.layer(x)) * scale + (0 if other is None else other)


def norm_last():
    return nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.LayerNorm(6))


def view_last():
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 3), nn.Tanh(), nn.Flatten())


class Inner(nn.Sequential):
    def forward(self, x):
        return self[1](checkpoint(self[0], x, use_reentrant=False))


def plainly(model, block, x):
    return model.run(block, x)


ALONE = {  # blocks that are recorded as one operation
    "norm last": (plainly, norm_last),
    "view last": (plainly, view_last),
    "dropout": (plainly, lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))),
    "two inputs and a keyword": (lambda model, block, x: model.run(block, x, torch.sin(x), scale=0.5), Scaled),
    "residual, written to later": (lambda model, block, x: x.clone().add_(model.run(block, x)), norm_last),
    "a frozen argument": (lambda model, block, x: model.run(block, x, torch.ones(6).to(x)), Scaled),
    "a checkpoint inside": (plainly, lambda: Inner(norm_last(), nn.Linear(6, 6))),
    "a weight as an argument": (lambda model, block, x: model.run(F.linear, x, block.weight), lambda: nn.Linear(6, 6)),
}


def several_outputs(model, block, x):
    a, b = model.run(lambda x: (block(x), x.sin() * block.layer.bias), x)
    return a + b


class Leaking(Scaled):
    def forward(self, x):
        self.kept = self.layer(x)
        return torch.tanh(self.kept)


def in_place():
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))


APART = {  # blocks whose operations stay on the tape
    "several outputs": (several_outputs, Scaled),
    "a result that is not returned": (lambda model, block, x: model.run(block, x) + block.kept, Leaking),
    "an activation in a closure": (lambda model, block, x: model.run(lambda z: block(z) * x, torch.sin(x)), Scaled),
    "in place": (plainly, in_place),
    "running statistics": (plainly, lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))),
    "weight norm": (plainly, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))),
}


@pytest.fixture
def blocks(monkeypatch):
    """The blocks of a checkpointed model that are recorded as one operation, when pass 1 is over."""
    found = []
    prune = record.Record.prune

    def watched(tape, *args, **kwargs):
        prune(tape, *args, **kwargs)
        found.append([op for op in tape.operations if isinstance(op, record.Block)])

    monkeypatch.setattr(record.Record, "prune", watched)
    return found


def both(f, make, x, y, **options):
    """Results with and without checkpoints, of the same weights, random numbers and buffers."""
    torch.manual_seed(0)
    model = Model(f, make(), make()).double()
    results = []
    for checkpointed in (True, False):
        each = copy.deepcopy(model)
        each.checkpointed = checkpointed
        torch.manual_seed(1)
        r = three_pass(each, F.cross_entropy, x, y, **options)
        results.append((r, list(each.buffers()), torch.get_rng_state()))
    return results


def check_same(results):
    (r, buffers, rng), (expected, expected_buffers, expected_rng) = results
    names = ("loss", "input_loss", "input_grad", "grads", "backprop_grads", "third_grads")
    for name in names:
        torch.testing.assert_close(getattr(r, name), getattr(expected, name), rtol=1e-10, atol=1e-13, msg=name)
    torch.testing.assert_close(rng, expected_rng)
    return buffers, expected_buffers


def batch():
    torch.manual_seed(2)
    return torch.randn(5, 6).double(), torch.randint(4, (5,))


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("options", [{}, {"separate": True}, {"strength": 0.3, "penalty": "l1"}, {"alpha": 1.0}])
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_a_block_is_one_operation_and_computes_the_same(name, mode, options, blocks):
    results = both(*ALONE[name], *batch(), mode=mode, **options)
    assert len(blocks[0]) == 2
    check_same(results)


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_blocks_that_cannot_be_recorded_again_compute_the_same(name, mode, blocks):
    results = both(*APART[name], *batch(), mode=mode)
    assert not any(blocks)
    check_same(results)


def test_under_autocast(blocks):
    with torch.autocast("cpu", torch.bfloat16):
        results = both(plainly, norm_last, *batch())
    assert len(blocks[0]) == 2
    check_same(results)


def test_norms_in_blocks_are_warned_of():
    from threepass import NormalizationWarning

    x, y = batch()
    with pytest.warns(NormalizationWarning, match="layer_norm"):
        three_pass(Model(plainly, norm_last()).double(), F.cross_entropy, x, y)


@pytest.mark.parametrize(("mode", "between"), [("paper", 1), ("exact", 3)])
def test_memory_is_that_of_block_boundaries(mode, between):
    """A deep net of blocks with ten activations each: without blocks, memory would grow by all of these."""
    make = lambda: nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.Tanh())))  # noqa: E731
    torch.manual_seed(0)
    model = Model(plainly, *(make() for _ in range(12)), width=32)
    x, y = torch.randn(2048, 32), torch.randint(4, (2048,))

    def step():
        three_pass(model, F.cross_entropy, x, y, mode=mode)

    kept = {}
    for model.checkpointed in (True, False):
        kept[model.checkpointed] = peak_bytes(step, cuda=False)
    boundaries, inside = 12 * x.nbytes, 10 * x.nbytes
    assert kept[True] < between * boundaries + 3 * inside
    assert kept[False] > 12 * inside
