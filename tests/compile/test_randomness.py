"""Random numbers of captured steps: from the seed alone, and of the right distribution."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from threepass.compile.randomness import normal, seeds_op, uniform
from threepass.compile.trace import trace
from threepass.core.engine import Task, run
from threepass.core.options import Options
from threepass.errors import CaptureError


def seed(value):
    return torch.tensor(value, dtype=torch.int32)


def test_uniform_and_normal_numbers():
    u = torch.stack([uniform([20_000], seed(i)) for i in (0, 1, 2, 12345, -7)]).double()
    assert 0 < u.min() < u.max() < 1
    assert (u.mean(1) - 0.5).abs().max() < 5 / (12 * u.shape[1]) ** 0.5
    counts = torch.histc(u[3], 20, 0, 1)
    assert ((counts - 1000).square() / 1000).sum() < 60  # chi squared, 19 degrees of freedom
    between = torch.corrcoef(u) - torch.eye(5)
    assert between.abs().max() < 0.04  # other seeds, other numbers
    along = torch.corrcoef(torch.stack([u[0, :-1], u[0, 1:]]))[0, 1]
    assert abs(along) < 0.04
    n = normal([20_000], seed(3)).double()
    assert abs(n.mean()) < 0.03
    assert abs(n.std() - 1) < 0.03
    assert abs((n**4).mean() - 3) < 0.4


def test_places_are_multiplied_only_together_with_the_seed():
    """Inductor computes multiples of a mere index with constants that Triton refuses, being beyond 32 bits."""
    graph = make_fx(lambda seed: uniform([4, 384], seed))(seed(5)).graph
    (given,) = graph.find_nodes(op="placeholder")
    products = graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    integer = [node for node in products if node.meta["val"].dtype == torch.int32]
    assert integer
    for node in integer:
        assert given in ancestors(node)


def ancestors(node):
    return {z for source in node.all_input_nodes for z in (source, *ancestors(source))}


def test_seeds_of_a_step_do_not_collide():
    found = torch.cat([seeds_op(seed(step), 200) for step in range(200)])
    assert len(found.unique()) > 0.9999 * len(found)


class Noisy(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.a, self.b, self.draw = nn.Linear(6, 400), nn.Linear(400, 5), draw

    def forward(self, x):
        return self.b(self.draw(self.a(x)))


DRAWS = {
    "dropout": lambda z: F.dropout(z, 0.3),
    "feature dropout": lambda z: F.dropout1d(z.unsqueeze(0), 0.3).squeeze(0),
    "noise": lambda z: z + torch.randn_like(z),
    "uniform noise": lambda z: z * torch.rand_like(z),
    "new noise": lambda z: z + torch.randn(z.shape, dtype=z.dtype) + torch.rand(z.shape[1], dtype=z.dtype),
    "in place": lambda z: z + torch.empty_like(z).normal_(0, 0.1) + torch.empty_like(z).uniform_(-1, 1),
    "gumbel": lambda z: F.gumbel_softmax(z, hard=False),
    "attention": lambda z: F.scaled_dot_product_attention(*3 * [z.view(-1, 20, 20)], dropout_p=0.3).reshape(z.shape),
    "permutation": lambda z: z[torch.randperm(len(z))] + torch.randint(3, (len(z), 1)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_seed_alone_decides(name):
    torch.manual_seed(0)
    model = Noisy(DRAWS[name]).double()

    def step(weights, seed, x, y):
        r = run(Task(model, F.cross_entropy, x, y), Options(), weights=(weights[0], weights[1]), seed=seed)
        return [*r.grads.values(), r.loss]

    weights, x, y = torch.tensor([0.1, 0.9]).double(), torch.randn(4, 6).double(), torch.randint(5, (4,))
    program = trace(step, [weights, seed(1), x, y])
    assert program.draws
    state = torch.get_rng_state()
    first, again, other = (program(weights, seed(i), x, y) for i in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])


def test_dropout_keeps_the_part_that_it_is_told_to():
    model = nn.Sequential(nn.Dropout(0.3), nn.Linear(1000, 3)).double()

    def step(weights, seed, x, y):
        r = run(Task(model, lambda out, y: out.sum(), x, y), Options(), weights=(weights[0], weights[1]), seed=seed)
        return [r.input_grad]

    x = torch.ones(50, 1000).double()
    program = trace(step, [torch.tensor([0.1, 0.9]).double(), seed(0), x, x])
    (grad,) = program(torch.tensor([0.1, 0.9]).double(), seed(9), x, x)
    kept = (grad != 0).double()
    assert abs(kept.mean() - 0.7) < 4 * (0.21 / kept.numel()) ** 0.5
    assert (kept.mean(0) - 0.7).abs().max() < 0.35  # no place is always open or closed
    torch.testing.assert_close(
        grad[kept == 1].abs().mean(), (model[1].weight.sum(0).abs() / 0.7).mean(), rtol=0.1, atol=0
    )


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        heads = 2 if "enable_gqa" in options else 4
        self.q, self.kv = nn.Linear(6, 4 * 3).double(), nn.Linear(6, 2 * heads * 3).double()
        self.options = options

    def forward(self, x):
        q, k, v = (z.unflatten(-1, (-1, 3)).transpose(1, 2) for z in (self.q(x), *self.kv(x).chunk(2, -1)))
        return F.scaled_dot_product_attention(q, k, v, **self.options).mean((1, 2))


def program_of(model, x, y, **options):
    """A step of a net as a program of (weights of the terms, seed): the gradients and the input loss."""

    def step(weights, seed, x, y):
        r = run(Task(model, F.cross_entropy, x, y), Options(**options), weights=(weights[0], weights[1]), seed=seed)
        return [*r.grads.values(), r.input_loss]

    program = trace(step, [torch.ones(2).double(), seed(1), x, y])
    return lambda weights, i: program(torch.tensor(weights).double(), seed(i), x, y)


WITHOUT_SOME = torch.ones(5, 5, dtype=torch.bool).tril().index_fill(0, torch.tensor(2), False)  # a row has nothing left
ATTENTIONS = {
    "plain": {},
    "scale": {"scale": 0.7},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": WITHOUT_SOME},
    "added": {"attn_mask": torch.arange(25.0).view(5, 5).double().sin()},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_with_dropout_is_attention(name, mode):
    """With a dropout that drops nothing, the operations of a captured step give what the fused one gives."""
    torch.manual_seed(0)
    model, x, y = Attention(**ATTENTIONS[name]), torch.randn(4, 5, 6).double(), torch.randint(3, (4,))
    expected = run(Task(model, F.cross_entropy, x, y), Options(mode=mode, strength=1.0))
    model.options["dropout_p"] = 1e-13
    got = program_of(model, x, y, mode=mode, strength=1.0)([1.0, 1.0], 1)
    for ours, theirs in zip(got, [*expected.grads.values(), expected.input_loss], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_all_passes_of_attention_have_one_mask():
    """The third term in exact mode against finite differences of the input loss, under one seed."""
    torch.manual_seed(0)
    model, x, y = Attention(dropout_p=0.4), torch.randn(4, 5, 6).double(), torch.randint(3, (4,))
    program = program_of(model, x, y, mode="exact", strength=1.0)
    *grads, _ = program([0.0, 1.0], 7)
    direction, epsilon, values = [torch.randn_like(p) for p in model.parameters()], 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            for p, v in zip(model.parameters(), direction, strict=True):
                p.add_(v, alpha=sign * epsilon)
            values.append(program([0.0, 1.0], 7)[-1].item())
            for p, v in zip(model.parameters(), direction, strict=True):
                p.sub_(v, alpha=sign * epsilon)
    slope = sum((g * v).sum().item() for g, v in zip(grads, direction, strict=True))
    assert slope == pytest.approx((values[0] - values[1]) / (2 * epsilon), rel=1e-6)


def test_what_cannot_be_repeated_is_refused():
    model = Noisy(lambda z: z + torch.poisson(torch.ones_like(z)))

    def step(weights, seed, x, y):
        r = run(Task(model, F.cross_entropy, x, y), Options(), weights=(weights[0], weights[1]), seed=seed)
        return list(r.grads.values())

    with pytest.raises(CaptureError, match=r"aten\.poisson.*pass them in x or y"):
        trace(step, [torch.tensor([0.1, 0.9]), seed(0), torch.randn(4, 6), torch.randint(5, (4,))])
