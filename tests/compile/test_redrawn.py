"""Random numbers that a captured step draws again: checkpointed blocks and operations that run in several passes.

Without checkpoints every mask is drawn once, so a captured step without them, at the same seed, is what a captured step
with them is compared with. Where dropout is the only source of randomness, so is double backward with its masks.
"""

import contextlib
from functools import partial
from unittest import mock

import pytest
import torch
from checkpointed_models import Inner, Model, Scaled, batch, plainly
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import threepass
from threepass.compile.check import check
from threepass.compile.randomness import seeds_op, uniform
from threepass.compile.trace import trace
from threepass.core.engine import Task, run
from threepass.core.options import Options
from threepass.errors import CaptureError
from threepass.tape import record
from threepass.train.sam import sam

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning", "error::threepass.UncompiledWarning")


class Net(nn.Module):
    """Blocks on sequences, with or without checkpoints around them, and dropout before and after."""

    def __init__(self, make, checkpointed=True, **options):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(make() for _ in range(2))
        self.checkpointed, self.options = checkpointed, {"use_reentrant": False} | options

    def forward(self, x):
        x = F.dropout(self.first(x), 0.2)
        for block in self.blocks:
            x = checkpoint(block, x, **self.options) if self.checkpointed else block(x)
        return self.last(F.dropout(x, 0.3).mean(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).transpose(1, 2).flatten(2))


class Recurrent(nn.GRU):
    def __init__(self):
        super().__init__(8, 8, 2, dropout=0.4, batch_first=True)

    def forward(self, x):
        return super().forward(x)[0]


class Nested(nn.Module):
    """Checkpoints inside of a checkpoint, whose function draws before, between and after them."""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.Tanh())
        self.b = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8))

    def forward(self, x):
        x = F.dropout(checkpoint(self.a, F.dropout(x, 0.2), use_reentrant=False), 0.2)
        return F.dropout(checkpoint(self.b, x, use_reentrant=False), 0.3)


class Drawing(nn.Module):
    """A function that draws, between two layers."""

    def __init__(self, draw):
        super().__init__()
        self.a, self.b, self.draw = nn.Linear(8, 8), nn.Linear(8, 8), draw

    def forward(self, x):
        return self.b(torch.tanh(self.draw(self.a(x))))


class Masked(torch.autograd.Function):
    """Dropout as people write it; the library runs it again in pass 3."""

    @staticmethod
    def forward(ctx, x):
        mask = torch.bernoulli(torch.full_like(x, 0.5))
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, d):
        return d * ctx.saved_tensors[0]


class TwoOutputs(Scaled):
    def forward(self, x):
        a, b = F.dropout(self.layer(x)), F.dropout(x, 0.2)
        return torch.cat([a * b, a + b], -1).unflatten(-1, (2, -1)).unbind(-2)


class WithTwoOutputs(nn.Module):
    """A block that cannot be one operation on the tape, inside of one that is: torch alone recomputes it."""

    def __init__(self):
        super().__init__()
        self.inside = TwoOutputs(8)

    def forward(self, x):
        a, b = self.inside(x)
        return a * b


def in_place():
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4, inplace=True), nn.Linear(8, 8), nn.Dropout1d(0.2))


def encoder(**options):
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True, **options)


DROPOUT = {"encoder": encoder, "encoder, norm first": partial(encoder, norm_first=True), "attention": Attention}
BLOCKS = DROPOUT | {
    "nested": Nested,
    "recurrent": Recurrent,
    "in place": in_place,
    "two outputs": WithTwoOutputs,
    "noise": lambda: Drawing(lambda z: z + torch.randn_like(z) * torch.rand(8).to(z)),
    "probabilities": lambda: Drawing(lambda z: z * torch.bernoulli(z.sigmoid().detach())),
    "gumbel": lambda: Drawing(F.gumbel_softmax),
    "alpha dropout": lambda: Drawing(lambda z: F.feature_alpha_dropout(F.alpha_dropout(z, 0.3, True), 0.4, True)),
    "a function of the user's": lambda: Drawing(lambda z: Masked.apply(z)),
}


def sequences():
    torch.manual_seed(2)
    return torch.randn(3, 2, 8).double(), torch.randint(4, (3,))


def net_of(make, **options):
    torch.manual_seed(0)
    return Net(make, **options).double()


def dropout():
    return Drawing(F.dropout)


def steps_of(net, calls=1, **options):
    """The results of captured steps from one seed: losses, dl/dx and gradients."""
    x, y = sequences()
    step = threepass.ThreePass(net, F.cross_entropy, **{"strength": 0.3, "compile": "trace"} | options)
    torch.manual_seed(5)
    results = []
    for _ in range(calls):
        r = step(x, y)
        results += [z.clone() for z in (r.loss, r.input_loss, r.input_grad, *r.grads.values())]
    return results


def program_of(net, x, y, passes=run, mode="exact", **more):
    """A step as a program, and its inputs."""
    options = Options(mode=mode, strength=1.0)

    def step(weights, seed, x, y):
        r = passes(Task(net, F.cross_entropy, x, y), options, weights=(weights[0], weights[1]), seed=seed, **more)
        return [*r.grads.values(), r.loss, r.input_loss, r.input_grad]

    inputs = [torch.ones(2).double(), torch.tensor(1, dtype=torch.int32), x, y]
    return trace(step, inputs, compiled=False), inputs


def check_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_draw_the_same_numbers_in_all_passes(name, mode):
    results = []
    for checkpointed in (True, False):
        program, inputs = program_of(net_of(BLOCKS[name], checkpointed=checkpointed), *sequences(), mode=mode)
        results.append(program(*inputs))
    check_same(*results)


def test_the_blocks_of_these_tests_are_one_operation_each(monkeypatch):
    found = []
    prune = record.Record.prune

    def watched(tape, *args, **kwargs):
        prune(tape, *args, **kwargs)
        found.append(sum(isinstance(op, record.Block) for op in tape.operations))

    monkeypatch.setattr(record.Record, "prune", watched)
    steps_of(net_of(Nested))
    assert found[0] == 2


def select_linear(ctx, op, *args, **kwargs):
    is_linear = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_linear else CheckpointPolicy.PREFER_RECOMPUTE


OPTIONS = {
    "reentrant": {"use_reentrant": True},
    "generators are not restored": {"preserve_rng_state": False},
    "to the end": {"early_stop": False},
    "selective": {"context_fn": partial(create_selective_checkpoint_contexts, select_linear)},
}


@pytest.mark.parametrize("compile", ["trace", False])
@pytest.mark.parametrize("name", OPTIONS)
def test_forms_of_checkpoints(name, compile):
    make = BLOCKS["a function of the user's"]
    nets = [net_of(make, **OPTIONS[name]), net_of(make, checkpointed=False)]
    ours, theirs = (steps_of(net, mode="exact", compile=compile) for net in nets)
    check_same(ours, theirs)


def masks(seed):
    """Dropout and attention in the order of their masks in a captured step: theirs, from its seed."""
    seeds = iter(seeds_op(seed, 100))

    def dropout(z, p=0.5, training=True, inplace=False):
        return z * (uniform(z.shape, next(seeds)) < 1 - p) / (1 - p)

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False):
        return dropout((q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1), dropout_p) @ v

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(F, "dropout", dropout))
    stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention))
    return stack


def double_backward(net, x, y, seed, strength):
    x = x.clone().requires_grad_()
    with masks(seed):
        loss = F.cross_entropy(net(x), y)
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    penalty = (len(x) * g).flatten(1).square().sum(1).mean() / 2
    return torch.autograd.grad(loss + strength * penalty, list(net.parameters()))


@pytest.mark.parametrize("name", [*DROPOUT, "nested"])
def test_exact_mode_is_double_backward_with_the_masks_of_the_step(name):
    net, whole = net_of(BLOCKS[name]), net_of(BLOCKS[name], checkpointed=False)
    x, y = sequences()
    step = threepass.ThreePass(net, F.cross_entropy, mode="exact", strength=0.3, compile="trace")
    drawn = []
    for _ in range(2):
        r = step(x, y)
        drawn.append(step.compiled._seed.clone())
        without = mock.patch("torch.utils.checkpoint.checkpoint", lambda f, *args, **_: f(*args))
        with without, mock.patch(f"{__name__}.checkpoint", lambda f, *args, **_: f(*args)):
            expected = double_backward(whole, x, y, drawn[-1], 0.3)
        check_same(list(r.grads.values()), expected)
    assert drawn[0] != drawn[1]


def test_gradient_steps():
    x, y = sequences()
    results = []
    for checkpointed in (True, False):
        net = net_of(Nested, checkpointed=checkpointed)
        loss = lambda out, g, y: F.cross_entropy(out, y) + g.square().sum()  # noqa: E731
        step = threepass.GradientStep(net, loss, lambda out: out.square().sum(), compile="trace")
        torch.manual_seed(5)
        results.append([*step(x, y).grads.values()])
    check_same(*results)


def test_calls_draw_other_masks_and_the_generators_seed_decides():
    net = net_of(dropout)
    first, again = steps_of(net, calls=2), steps_of(net, calls=2)
    check_same(first, again)
    assert first[0] != first[len(first) // 2]  # the losses of the two calls


def test_one_program_serves_batches_of_several_sizes():
    results = []
    for checkpointed in (True, False):
        net = net_of(dropout, checkpointed=checkpointed)
        step = threepass.ThreePass(net, F.cross_entropy, strength=0.3, compile="trace")
        torch.manual_seed(5)
        given = [(torch.randn(n, 5, 8).double(), torch.randint(4, (n,))) for n in (3, 4, 6, 7)]
        results.append([z.clone() for x, y in given for z in step(x, y).grads.values()])
        assert len(step.compiled.programs) == 2  # of the first size, and of all others
    # The first call with other sizes runs eagerly, and draws from the generator.
    count = len(list(net.parameters()))
    check_same(*(each[:count] + each[2 * count :] for each in results))


def test_several_programs_of_a_model():
    """In training mode with dropout, in evaluation mode without: each has a program of its own."""
    results = []
    for checkpointed in (True, False):
        net = net_of(dropout, checkpointed=checkpointed)
        step = threepass.ThreePass(net, F.cross_entropy, strength=0.3, compile="trace")
        torch.manual_seed(5)
        found = []
        for training in (True, False, True):
            net.train(training)
            found += [z.clone() for z in step(*sequences()).grads.values()]
        assert len(step.compiled.programs) == 2
        results.append(found)
    check_same(*results)


def test_the_check_refuses_a_program_that_draws_other_masks_again():
    net = Model(plainly, nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))).double()
    program, inputs = program_of(net, *batch())
    values = [*program.state, *inputs]
    check(program.plain, lambda values: program.graph(*values), values, len(program.state))
    copies = program.graph.graph.find_nodes(op="call_function", target=torch.ops.threepass.recompute_from.default)
    copied = {node for node in copies if node.meta["val"].dtype == torch.int32}
    assert len(copied) == 3  # the seed of the mask, for passes 2, 3 and R{d}
    for copy in copied:
        source = copy.args[0]
        with program.graph.graph.inserting_after(source):
            other = program.graph.graph.call_function(torch.ops.aten.add.Tensor, (source, 1))
        copy.args = (other, *copy.args[1:])
        program.graph.recompile()
        with pytest.raises(CaptureError, match="incorrectly"):
            check(program.plain, lambda values: program.graph(*values), values, len(program.state))
        copy.args = (source, *copy.args[1:])


class Counting(nn.Module):
    """Draws numbers of other shapes when it runs again."""

    def __init__(self, shapes):
        super().__init__()
        self.layer, self.shapes, self.calls = nn.Linear(6, 6), shapes, 0

    def forward(self, x):
        self.calls += 1
        for shape in self.shapes[min(self.calls, 2) - 1]:
            x = x + torch.rand(shape).to(x)
        return torch.tanh(self.layer(x)) * 2


@pytest.mark.parametrize("shapes", [([6], [1]), ([6], [6, 1]), ([6, 5], [6, 1])], ids=str)
def test_what_draws_other_numbers_when_it_runs_again_is_refused(shapes):
    shapes = [[(n,) if n != 5 else (5, 1) for n in each] for each in shapes]
    with pytest.raises(CaptureError, match="which it did not draw at first"):
        program_of(Model(plainly, Counting(shapes)).double(), *batch())


def test_without_a_seed_nothing_is_drawn_again():
    net = Model(plainly, Inner(nn.Sequential(nn.Linear(6, 6), nn.Dropout()), nn.Linear(6, 6))).double()
    with pytest.raises(CaptureError, match="has no seed"):
        trace(lambda x, y: list(threepass.three_pass(net, F.cross_entropy, x, y).grads.values()), batch())


@pytest.mark.parametrize("captured", [True, False])
def test_sam_recomputes_blocks_with_their_weights_and_masks(captured):
    """Its second pass is PyTorch's own, at other weights."""
    results = []
    for checkpointed in (True, False):
        net = net_of(in_place, checkpointed=checkpointed)
        x, y = sequences()
        if captured:
            program, inputs = program_of(net, x, y, sam, rho=0.1)
            results.append(program(*inputs))
        else:
            torch.manual_seed(5)
            results.append([*sam(Task(net, F.cross_entropy, x, y), Options(), rho=0.1).grads.values()])
    check_same(*results)
