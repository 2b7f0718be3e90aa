"""Activation checkpointing in captured steps: the numbers of eager steps, in the memory that checkpointing is for."""

import copy

import checkpointed_models
import pytest
import torch
from checkpointed_models import Model, batch, plainly
from torch import nn
from torch.nn import functional as F

import threepass
from threepass.bench.timing import peak_bytes

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")

CASES = checkpointed_models.ALONE | checkpointed_models.APART


def captured_and_eager(model, x, y, **options):
    """The results of two steps each."""
    found = []
    for compile in ("trace", False):
        own = copy.deepcopy(model)
        step = threepass.ThreePass(own, F.cross_entropy, compile=compile, **options)
        results = [step(x, y) for _ in range(2)]
        found.append(
            [z.clone() for r in results for z in (r.loss, r.input_loss, r.input_grad)]
            + [p.grad for p in own.parameters()]
            + list(own.buffers())
        )
    return found


@pytest.mark.parametrize("name", [name for name in CASES if name != "dropout"])  # those are in test_redrawn.py
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_captured_steps_are_eager_steps(name, mode):
    f, make = CASES[name]
    torch.manual_seed(0)
    model = Model(f, make(), make()).double()
    captured, eager = captured_and_eager(model, *batch(), mode=mode, strength=0.3)
    for ours, theirs in zip(captured, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


BLOCKS = 6  # of ten activations each


def deep_net(checkpointed: bool, dropout: float):
    """A deep net of blocks with ten activations each: without blocks, memory grows by these, and by the masks."""
    torch.manual_seed(0)
    layers = lambda: (nn.Linear(32, 32), nn.Tanh(), *([nn.Dropout(dropout)] if dropout else []))  # noqa: E731
    make = lambda: nn.Sequential(*(layer for _ in range(5) for layer in layers()))  # noqa: E731
    return Model(plainly, *(make() for _ in range(BLOCKS)), checkpointed=checkpointed, width=32)


def bytes_of_steps(mode, compile, dropout):
    """With checkpoints and without, the size of an activation as unit."""
    x, y = torch.randn(2048, 32), torch.randint(4, (2048,))
    kept = {}
    for checkpointed in (True, False):
        step = threepass.ThreePass(deep_net(checkpointed, dropout), F.cross_entropy, mode=mode, compile=compile)
        step(x, y)  # captures
        step(x, y)
        kept[checkpointed] = peak_bytes(lambda step=step: step(x, y), cuda=False) / x.nbytes
    return kept[True], kept[False]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("mode", "between"), [("paper", 1), ("exact", 2)])
def test_memory_of_traced_steps_is_that_of_block_boundaries(mode, between, dropout):
    checkpointed, whole = bytes_of_steps(mode, "trace", dropout)
    assert checkpointed < between * BLOCKS + 3 * 10 + (5 if dropout else 0)  # five masks of one block
    assert whole > (20 if dropout else 10) * (BLOCKS - 2)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("mode", "most"), [("paper", BLOCKS + 3 * 10), ("exact", 12 * BLOCKS)])
def test_memory_of_compiled_steps(mode, most, dropout):
    """Inductor runs some operations of exact mode's recomputed blocks earlier than the graph has them."""
    checkpointed, whole = bytes_of_steps(mode, "require", dropout)
    assert checkpointed < most
    assert whole > 1.2 * checkpointed


def test_one_program_serves_batches_of_several_sizes():
    f, make = CASES["norm last"]
    torch.manual_seed(0)
    model = Model(f, make(), make()).double()
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.3, compile="trace")
    for samples in (5, 7, 9, 11):
        x, y = torch.randn(samples, 6).double(), torch.randint(4, (samples,))
        model.zero_grad()
        step(x, y)
        expected = threepass.three_pass(model, F.cross_entropy, x, y, strength=0.3).grads
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-10, atol=1e-13)
    assert len(step.compiled.programs) == 2  # of the first size, and of all others
