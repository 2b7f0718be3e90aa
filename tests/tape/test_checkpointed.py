"""Checkpointed blocks: the same numbers as without checkpointing, in the memory that checkpointing is for."""

import copy

import pytest
import torch
from checkpointed_models import ALONE, APART, Model, Scaled, batch, norm_last, plainly
from torch import nn
from torch.nn import functional as F

from threepass import three_pass
from threepass.bench.timing import peak_bytes
from threepass.tape import record

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")


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


@pytest.mark.parametrize(("mode", "between"), [("paper", 1), ("exact", 2)])
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


class Graph(nn.Module):
    """Blocks that read one another's outputs: alone, twice, two of them, beside another operation, and in vain."""

    def __init__(self, checkpointed=True):
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(7))
        self.head, self.checkpointed = nn.Linear(6, 4), checkpointed

    def forward(self, x):
        def run(k, *args):
            return Model.run(self, self.blocks[k], *args)

        a = run(0, x)  # read by one block, as two of its arguments
        b = run(1, a, a)  # read by two blocks
        c, d = run(2, b), run(3, b)
        e = run(4, c)  # read by a block and by the head
        unread = run(6, e).argmax(1, keepdim=True)
        return self.head(run(5, e, d) + e.sin() + 0 * unread)


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("frozen", [(), (1,), (5,)])
def test_blocks_that_read_one_another(mode, frozen, blocks):
    torch.manual_seed(0)
    model, (x, y) = Graph().double(), batch()
    for k in frozen:
        model.blocks[k].requires_grad_(False)
    results = []
    for model.checkpointed in (True, False):
        r = three_pass(model, F.cross_entropy, x, y, mode=mode, separate=True)
        results.append((r, [], torch.get_rng_state()))
    check_same(results)
    if not frozen:
        assert len(blocks[0]) == 6  # of the seventh, nothing is read that depends on the input
        assert [block.gets_error for block in blocks[0]] == [mode == "exact" and k in (0, 2, 3) for k in range(6)]
