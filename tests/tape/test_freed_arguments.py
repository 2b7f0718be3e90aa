"""Activations whose contents no later pass reads are not kept on the tape."""

import pytest
import torch
from close import assert_close
from torch import nn
from torch.nn import functional as F

from threepass import rule, three_pass
from threepass.bench.nets import by_name
from threepass.bench.timing import peak_bytes
from threepass.models import resnet
from threepass.rules.table import _RULES, Linearization
from threepass.tape.record import Record


def recorded(call, x):
    """The operation of a call of x, the one leaf, and the tape."""
    tape = Record("cpu")
    with tape:
        call(tape.add_input(x))
    return tape.operations[-1]


def kept(op) -> list[torch.Size]:
    return [op.values[i].shape for i, _ in op.active if not op.values[i].is_meta]


MASK, INDEX, ROWS = torch.tensor([[True, False, True]] * 4), torch.tensor([2, 0, 0]), torch.ones(4, 3)
FREED = {
    "add": lambda a: a + a.detach(),
    "add a weight": lambda a: a + nn.Parameter(torch.ones(3)),
    "two activations": lambda a: torch.sub(a, a, alpha=2),
    "a number times": lambda a: a * 3,
    "a constant times": lambda a: ROWS * a,
    "divided": lambda a: a / ROWS,
    "product with a constant": lambda a: a @ ROWS.mT,
    "einsum with a constant": lambda a: torch.einsum("ij,kj->ik", a, ROWS),
    "view": lambda a: a.view(2, 6),
    "transpose": lambda a: a.mT.transpose(0, 1),
    "contiguous": lambda a: a.expand(2, 4, 3).contiguous(),
    "clone": lambda a: a.clone(),
    "cat": lambda a: torch.cat([a, ROWS, a], 1),
    "stack": lambda a: torch.stack([a, ROWS]),
    "sum": lambda a: a.sum(1),
    "mean": lambda a: a.mean(),
    "slice": lambda a: a[1:, None],
    "rows": lambda a: a[INDEX],
    "index_add": lambda a: a.index_add(0, INDEX, ROWS[:3]),
    "scatter_add": lambda a: torch.zeros(4, 3).scatter_add(0, torch.zeros(4, 3, dtype=torch.int64), a),
    "where": lambda a: torch.where(MASK, a, 0),
    "masked_fill": lambda a: a.masked_fill(MASK, -1e9),
    "unbind": lambda a: a.unbind(0)[1],
    "split": lambda a: a.split(2)[0],
    "softmax": lambda a: a.softmax(1),
}
KEPT = {
    "two factors": lambda a: a * a,
    "times a weight": lambda a: a * nn.Parameter(torch.ones(3)),
    "layer": lambda a: F.linear(a, nn.Parameter(torch.ones(2, 3))),
    "two matrices": lambda a: a @ a.mT,
    "quotient": lambda a: a / a,
    "indices of two dimensions": lambda a: a[INDEX, INDEX],
    "no dimensions": lambda a: ROWS + a.sum(),
}


@pytest.mark.parametrize("name", FREED)
def test_only_the_shape_is_kept(name):
    assert kept(recorded(FREED[name], torch.rand(4, 3))) == []


READ = ["two factors", "times a weight", "layer", "two matrices", "quotient", "no dimensions"]


@pytest.mark.parametrize("name", READ)
def test_what_derivatives_read_is_kept(name):
    op = recorded(KEPT[name], torch.rand(4, 3))
    assert len(kept(op)) == len(op.active)


def test_calls_without_a_fast_rule_keep_their_arguments():
    op = recorded(KEPT["indices of two dimensions"], torch.rand(4, 3))
    assert op.linearize() is None
    assert kept(op) == [(4, 3)]


class Written(nn.Module):
    """Writes to activations that were read before, as views too."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.a(x)
        u = torch.cat([h[:, :2] + 1, h[:, 2:] * 3], 1)
        h.mul_(2)
        h[:, 1:].tanh_()
        return self.b(u * h + h.sum(1, keepdim=True))


def test_activations_that_are_written_to_later():
    torch.manual_seed(0)
    model, x, y = Written().double(), torch.randn(4, 3).double().requires_grad_(), torch.tensor([0, 1, 1, 0])
    r = three_pass(model, F.cross_entropy, x.detach(), y, mode="exact", separate=True)
    (g,) = torch.autograd.grad(F.cross_entropy(model(x), y), x, create_graph=True)
    expected = torch.autograd.grad(0.5 * g.square().sum(), list(model.parameters()))
    assert_close(r.third_grads, dict(zip(r.third_grads, expected, strict=True)), 1e-12)


def test_a_rule_that_reads_shapes_gets_no_contents():
    @torch.library.custom_op("threepass_test::doubled", mutates_args=())
    def doubled(a: torch.Tensor) -> torch.Tensor:
        return 2 * a

    doubled.register_autograd(lambda ctx, d: 2 * d)
    seen = []
    try:

        @rule(torch.ops.threepass_test.doubled, reads="shapes", flat=True)
        def of_doubled(u, a):
            seen.append(a.is_meta)
            return Linearization(push=lambda t: 2 * t, pull=lambda r: 2 * r)

        op = recorded(lambda a: torch.ops.threepass_test.doubled(a), torch.rand(4, 3))
        assert seen == [True]
        assert op.linearize() is op.linearization
    finally:
        _RULES.pop(torch.ops.threepass_test.doubled, None)


@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
@pytest.mark.parametrize(
    ("name", "mode", "most"),
    [("encoder", "paper", 1.85), ("encoder", "exact", 1.95), ("resnet", "paper", 1.65), ("resnet", "exact", 1.8)],
)
def test_memory_of_eager_steps(name, mode, most):
    """Relative to plain training: bytes that the allocator hands out."""
    torch.manual_seed(0)
    model = by_name("encoder", depth=2) if name == "encoder" else resnet(20, width=8)
    x, y = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    plain = peak_bytes(lambda: F.cross_entropy(model(x), y).backward(), cuda=False)

    def step():
        three_pass(model, F.cross_entropy, x, y, mode=mode, strength=0.1)

    assert peak_bytes(step, cuda=False) <= most * plain
