"""Rewrites of a captured step's graph: it computes the same, and less of it is kept."""

import copy
from types import SimpleNamespace

import pytest
import torch
from close import assert_close
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import threepass
from threepass import models
from threepass.compile.inductor import warm_up
from threepass.compile.rewrite import products, sums
from threepass.compile.trace import trace
from threepass.core.engine import Task, run
from threepass.core.options import Options
from threepass.kernels import batch_norm
from threepass.numerics.precision import mix_of

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
aten = torch.ops.aten


def step_of(model, mode, alpha=0.3):
    def step(weights, x, y):
        r = run(Task(model, F.cross_entropy, x, y), Options(alpha, mode=mode), weights=(weights[0], weights[1]))
        return list(r.grads.values())

    return step


def program_of(model, x, y, mode):
    """The traced step, and its inputs."""
    inputs = [torch.tensor([0.3, 0.7], dtype=torch.float64), x, y]
    saved = copy.deepcopy(model.state_dict())
    program = trace(step_of(model, mode), inputs)
    model.load_state_dict(saved)
    return program, inputs


def agrees(model, x, y, mode):
    program, inputs = program_of(model, x, y, mode)
    expected = threepass.three_pass(copy.deepcopy(model), F.cross_entropy, x, y, alpha=0.3, mode=mode).grads
    assert_close(dict(zip(expected, program(*inputs), strict=True)), expected, 1e-10)
    return program.graph.graph


def readers(graph, target):
    """Of every call of the target, who reads it."""
    return [{str(user.target) for user in node.users} for node in graph.nodes if node.target is target]


class Block(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + x


def batch(*shape):
    torch.manual_seed(0)
    return torch.randn(shape, dtype=torch.float64), torch.randint(10, shape[:1])


def normed(**options):
    """Convolutions with rectified norms between them."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, **options), nn.ReLU(),
        Block(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, **options), nn.ReLU(), nn.Conv2d(8, 8, 1)),
        nn.Flatten(), nn.Linear(8 * 36, 10),
    ).double()  # fmt: skip


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}])
def test_a_rectified_norm_is_recomputed(options, mode):
    """Its own result is read in pass 1 alone."""
    graph = agrees(normed(**options), *batch(6, 3, 6, 6), mode)
    assert any(node.target is batch_norm.rectified for node in graph.nodes)
    for names in readers(graph, aten.relu.default):
        assert names <= {"aten.convolution.default", "aten.add.Tensor"}


def test_scales_of_zero_and_channels_without_variance():
    """Gates at exactly zero stay closed."""
    net = normed()
    with torch.no_grad():
        net[1].weight[:4] = 0
        net[0].weight[5] = 0
        net[0].bias[5] = 3
    for mode in ("paper", "exact"):
        agrees(net, *batch(6, 3, 6, 6), mode)


def test_a_norm_that_does_not_train_is_left_alone():
    net = normed()
    net(batch(6, 3, 6, 6)[0])
    graph = agrees(net.eval(), *batch(6, 3, 6, 6), "paper")
    assert not any(node.target is batch_norm.rectified for node in graph.nodes)


def test_half_a_norm_on_a_cpu_is_left_alone():
    """It gives its mean rounded."""
    net, (x, y) = normed().bfloat16(), batch(6, 3, 6, 6)
    graph = program_of(net, x.bfloat16(), y, "paper")[0].graph.graph
    assert not any(node.target is batch_norm.rectified for node in graph.nodes)


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("activation", [nn.GELU(), nn.GELU("tanh"), nn.SiLU()])
def test_an_activation_is_recomputed(activation, mode):
    net = nn.Sequential(nn.Linear(12, 16), activation, nn.Linear(16, 16), activation, nn.Linear(16, 10)).double()
    graph = agrees(net, *batch(6, 12), mode)
    target = aten.silu.default if isinstance(activation, nn.SiLU) else aten.gelu.default
    calls = [node for node in graph.nodes if node.target is target]
    assert 0 < len(calls) <= 4  # for the next layer; for the mix, or for exact mode's product
    assert all(len(node.users) == 1 for node in calls)


def test_sums_over_images_are_taken_beside_their_operands():
    def f(a, b):
        return [a.sum((0, 2, 3)), a.exp().sin(), b.sum((2, 3)), ((a * b) * 2).sum((0, 2, 3))]

    inputs = [torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)]
    made = make_fx(f)(*inputs)
    before = [node.name for node in made.graph.nodes]
    sums.take_sums_early(made.graph)
    assert [node.name for node in made.graph.nodes] == before  # operands are inputs: no node to move it after

    def g(a, b):
        a, b = a.exp(), b.exp()
        c = a.sum((0, 2, 3))
        d = b
        for _ in range(10):
            d = d.sin()
        return [c, d, ((a * b) * 2).sum((0, 2, 3))]

    made = make_fx(g)(*inputs)
    sums.take_sums_early(made.graph)
    made.graph.lint()
    made.recompile()
    order = [node.name for node in made.graph.nodes]
    assert order.index("sum_2") < order.index("sin")
    torch.testing.assert_close(made(*inputs), g(*inputs))


@pytest.mark.parametrize("length", [30, 10, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_thin_products(dtype, length):
    a, b, bias = (torch.randn(shape).to(dtype) for shape in ((7, length), (length, 4), (4,)))
    torch.testing.assert_close(products.thin_product(a, b), a @ b)
    torch.testing.assert_close(products.thin_product(a, b, bias), torch.addmm(bias, a, b))


@pytest.mark.parametrize(
    ("rows", "length", "columns", "thin"),
    [
        (256, 2048, 10, True),
        (256, 10, 2048, True),
        (10, 256, 2048, True),
        (256, 2048, 64, False),
        (10**6, 64, 10, False),
    ],
)
def test_which_products_are_thin(rows, length, columns, thin):
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    a.meta["val"] = SimpleNamespace(shape=(rows, length), is_cuda=True)
    b.meta["val"] = SimpleNamespace(shape=(length, columns), is_cuda=True)
    node = graph.call_function(aten.mm.default, (a, b))
    products.write_out_thin_products(graph)
    assert (node.target is products.thin_product) == thin


@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_packed_gradients_are_the_same(packs, mode):
    torch.manual_seed(0)
    x, y = batch(6, 3, 8, 8)
    agrees(models.resnet(8).double().to(memory_format=torch.channels_last), x, y, mode)


@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_gradients_in_their_parameters_formats(packs, mode):
    """In a traced step of a bf16 net; and packed or not, to rounding."""
    torch.manual_seed(0)
    model = models.resnet(8).bfloat16()
    x, y = torch.randn(6, 3, 8, 8).bfloat16(), torch.arange(6)
    inputs = [torch.tensor([0.3, 0.7]), x, y]
    found = step_of(model, mode)(*inputs)
    expected = threepass.three_pass(model, F.cross_entropy, x, y, alpha=0.3, mode=mode).grads
    for g, p, e in zip(found, model.parameters(), expected.values(), strict=True):
        assert g.dtype == p.dtype == torch.bfloat16
        assert e.dtype == torch.float32
        assert (g.float() - e).norm() < 0.1 * e.norm()


def test_half_formats_recompute_convolutions():
    """Late ones of the largest: nothing reads them between pass 2 and the place in pass 3 where they are recomputed."""
    model, (x, y) = models.plain(20).bfloat16(), batch(6, 3, 8, 8)
    graph = program_of(model, x.bfloat16(), y, "exact")[0].graph.graph
    again = [n for n in graph.nodes if n.target is torch.ops.threepass.convolution.default]
    assert 0 < len(again) <= 2
    rectified = {n.args[0].args[:3]: n for n in graph.nodes if n.target is aten.relu.default and n.args[0] not in again}
    for z in again:
        (made,) = z.users
        twin = rectified[z.args[:3]]
        assert twin.meta["val"].shape == made.meta["val"].shape
        assert all(n < z for n in twin.users)
        assert len(made.users) >= 3  # a gate, a mix, and exact mode's product
    whole = program_of(model.double(), x, y, "exact")[0].graph.graph  # makes no mix, and needs no room for it
    assert not any(n.target is torch.ops.threepass.convolution.default for n in whole.nodes)


class Branches(nn.Module):
    """Two weights that take the same signal, as at the head of a residual block that changes its size."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.a, self.b, self.head = nn.Conv2d(4, 5, 3, padding=1), nn.Conv2d(4, 5, 1), nn.Linear(5, 10)

    def forward(self, x):
        u = self.stem(x)
        return self.head((self.a(u).tanh() + self.b(u)).mean((2, 3)))


def test_a_mix_of_two_weights_is_made_once():
    """And the factor of all mixes is one number in memory."""
    graph = agrees(Branches().double(), *batch(6, 3, 8, 8), "paper")
    targets = [node.target for node in graph.nodes]
    assert 0 < targets.count(mix_of) <= 3  # of 4 weights
    assert targets.count(torch.ops.threepass.materialized.default) <= 1


def test_errors_of_residual_blocks_are_materialized(as_on_a_gpu):
    """One operation for each, in pass 2 alone."""
    as_on_a_gpu(sums, any_format=True)
    graph = agrees(models.resnet(14).double(), *batch(6, 3, 8, 8), "paper")
    names = [str(node.target) for node in graph.nodes]
    assert 0 < names.count("threepass.gated_sum.default") <= 6  # of the stem and 6 blocks; the last one has a mark
    assert names.count("aten.threshold_backward.default") <= 18  # 24 without gated sums
    warm_up(graph)


@pytest.mark.parametrize(("mode", "back"), [("paper", 1), ("exact", 2)])
def test_the_sums_of_batch_norms_are_taken_at_once(mode, back, as_on_a_gpu):
    """Pass 3's for all 13 norms; in each backward pass 6 after residual blocks and 6 after ReLUs."""
    as_on_a_gpu(sums, batch_norm, any_format=True)
    graph = agrees(models.resnet(14).double(), *batch(6, 3, 8, 8), mode)
    names = [str(node.target) for node in graph.nodes]
    assert 0 < names.count("threepass.moments.default") <= 13 + 6 * back
    assert 0 < names.count("threepass.gated_moments.default") <= 6 * back
    assert names.count("aten.sum.dim_IntList") <= (1 if mode == "paper" else 4)  # none of a norm
    assert names.count("aten.native_batch_norm_backward.default") <= 1  # of the first norm
    assert "threepass.gated_sum.default" not in names
    warm_up(graph)


def conv(i, o):
    return nn.Conv2d(i, o, 3, padding=1)


class Net(nn.Module):
    """Convolutions c0 to c4, norms b0 and b1, a head: a base for what is to be wired."""

    def __init__(self):
        super().__init__()
        self.c0, self.c1, self.c2, self.c3, self.c4 = conv(3, 4), conv(4, 4), conv(4, 4), conv(4, 4), conv(4, 4)
        self.b0, self.b1, self.head = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.Linear(4, 10)
        self.gain, self.gate = nn.Parameter(torch.rand(1, 4, 1, 1)), nn.Linear(3, 4)

    def out(self, v):
        return self.head(v.mean((2, 3)))


class RectifiedTwice(Net):
    """A branch that ends in a rectified norm, is added, and rectified again."""

    def forward(self, x):
        u = F.relu(self.b0(self.c0(x)))
        v = F.relu(F.relu(self.b1(self.c1(u))) + self.c2(u))
        return self.out(F.relu(self.c3(v) + self.c4(v)))


class TwoNorms(Net):
    """A signal that feeds two norms."""

    def forward(self, x):
        u = self.c0(x)
        return self.out(F.relu(self.c1(F.relu(self.b0(u))) + self.c2(F.relu(self.b1(u)))))


class OneNormTwice(Net):
    def forward(self, x):
        u = self.c0(x)
        return self.out(F.relu(self.c1(F.relu(self.b0(u))) + self.c2(F.relu(self.b0(u * 2)))))


class HalfANorm(Net):
    """Centred like a batch norm, but scaled by something else."""

    def forward(self, x):
        a = self.c0(x)
        mean = torch.var_mean(a, (0, 2, 3), correction=0, keepdim=True)[1]
        gate = torch.sigmoid(3 * self.gate(x.mean((2, 3))))[:, :, None, None]
        return self.out(self.c2((a - mean) * gate * self.gain).tanh())


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("make", [RectifiedTwice, TwoNorms, OneNormTwice, HalfANorm])
def test_only_a_batch_norms_sums_are_taken_at_once(make, mode, as_on_a_gpu):
    as_on_a_gpu(sums, batch_norm, any_format=True)
    torch.manual_seed(1)
    agrees(make().double(), *batch(6, 3, 8, 8), mode)


class Bent(Net):
    """A hook that writes to a part of an error."""

    def forward(self, x):
        w = self.c1(F.relu(self.c0(x)))
        if w.requires_grad:
            w.register_hook(halve)
        return self.out(F.relu(w))


def halve(d):
    d[:, :, :1] *= 0.5


def test_no_product_moves_over_a_write():
    model, (x, y) = Bent().double(), batch(6, 3, 8, 8)
    program = trace(step_of(model, "paper", alpha=1.0), [torch.tensor([1.0, 0.0], dtype=torch.float64), x, y])
    expected = threepass.three_pass(model, F.cross_entropy, x, y, alpha=1.0).grads
    found = program(torch.tensor([1.0, 0.0], dtype=torch.float64), x, y)
    assert_close(dict(zip(expected, found, strict=True)), expected, 1e-10)


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("make", [lambda: models.resnet(8), lambda: models.vit(depth=1, image=8, patch=4)])
def test_every_node_has_its_value(make, mode):
    """What later passes, and the kernels' warm-up, take shapes from."""
    program, _ = program_of(make().double(), *batch(4, 3, 8, 8), mode)
    for node in program.graph.graph.nodes:
        assert "val" in node.meta or node.op == "output", node
