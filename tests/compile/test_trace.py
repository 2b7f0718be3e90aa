"""`compile="trace"`: captured steps that no compiler has seen give the eager step's numbers in fewer calls."""

import copy
import pickle
import warnings

import pytest
import torch
from close import assert_close
from torch import nn
from torch.fx import Graph, GraphModule, Interpreter
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import threepass
from threepass._torch_compat import OpOverload, aten_foreach_copy
from threepass.compile import inductor
from threepass.compile import trace as tracing
from threepass.compile.rewrite import simplify
from threepass.models import mlp, plain, resnet, vit

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning", "ignore::DeprecationWarning")

NETS = {
    "mlp": (lambda: mlp(12, 9, 8, 10), (5, 12)),
    "gelu": (lambda: mlp(12, 9, 10, activation=nn.GELU), (5, 12)),
    "plain": (lambda: plain(8, width=4), (4, 3, 8, 8)),
    "resnet": (lambda: resnet(8, width=4), (4, 3, 8, 8)),
    "vit": (lambda: vit(image=8, width=12, depth=2), (4, 3, 8, 8)),
    "pooled": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10)),
        (4, 3, 8, 8),
    ),
    "recurrent": (lambda: Last(nn.LSTM(6, 5, batch_first=True)), (4, 3, 6)),
    "encoder": (lambda: Last(nn.TransformerEncoderLayer(6, 2, 9, dropout=0.0, batch_first=True)), (4, 3, 6)),
}


class Last(nn.Module):
    """The last entry of a sequence, which is the first that its input has numbers for."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        z = self.inner(x)
        return (z[0] if isinstance(z, tuple) else z)[:, -1]


def problem(name, dtype=torch.float64):
    torch.manual_seed(0)
    make, shape = NETS[name]
    return make().to(dtype), torch.randn(shape, dtype=dtype), torch.randint(5, shape[:1])


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """Neither Inductor nor Triton may be asked for anything, and no step may run eagerly."""

    def called(*args):
        raise AssertionError('compile="trace" called the compiler')

    monkeypatch.setattr(inductor, "compiled", called)
    monkeypatch.setattr(inductor, "warm_up", called)
    with warnings.catch_warnings():
        warnings.simplefilter("error", threepass.UncompiledWarning)
        yield


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def everything(r):
    return dict(enumerate([*r.grads.values(), r.loss, r.input_loss, r.input_grad, r.output]))


@pytest.mark.parametrize("options", [{}, {"mode": "exact"}, {"separate": True}, {"penalty": "l1", "mode": "exact"}],
                         ids=["paper", "exact", "separate", "l1"])  # fmt: skip
@pytest.mark.parametrize("name", NETS)
def test_the_numbers_are_those_of_the_eager_step(name, options):
    model, x, y = problem(name)
    twin = copy.deepcopy(model)
    step = threepass.ThreePass(model, F.cross_entropy, alpha=0.3, compile="trace", **options)
    for _ in range(2):
        model.zero_grad()
        r = step(x, y)
        expected = threepass.three_pass(twin, F.cross_entropy, x, y, alpha=0.3, **options)
    assert_close(everything(r), everything(expected), 1e-10)
    assert_close({n: p.grad for n, p in model.named_parameters()}, expected.grads, 1e-10)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):  # running statistics: once a call
        torch.testing.assert_close(ours, theirs)
    if options.get("separate"):
        assert_close(r.third_grads, expected.third_grads, 1e-10)
    assert len(step.compiled.programs) == 1


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("name", NETS)
def test_it_takes_fewer_calls_than_the_eager_step(name, mode, monkeypatch):
    model, x, y = problem(name, torch.float32)
    options, graphs = {"alpha": 0.3, "mode": mode}, []
    monkeypatch.setattr(tracing, "simplify", lambda graph: (simplify.simplify(graph), graphs.append(graph)))
    threepass.ThreePass(model, F.cross_entropy, compile="trace", **options)(x, y)
    (graph,) = graphs
    eager = threepass.ThreePass(copy.deepcopy(model), F.cross_entropy, **options)
    eager(x, y)  # the checks of a first call
    with Calls() as calls:
        eager(x, y)
    assert 0 < sum(isinstance(node.target, torch._ops.OpOverload) for node in graph.nodes) < calls.count


def test_operations_are_called_without_the_python_of_their_overloads(monkeypatch):
    model, x, y = problem("vit")
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.3, compile="trace")
    expected = {name: g.clone() for name, g in step(x, y).grads.items()}
    calls = []
    called = OpOverload.__call__
    monkeypatch.setattr(OpOverload, "__call__", lambda op, *a, **k: (calls.append(op), called(op, *a, **k))[1])
    torch.ops.aten.relu.default(x)
    assert len(calls) == 1
    assert_close(step(x, y).grads, expected, 1e-12)
    assert all(op.namespace == "threepass" for op in calls[1:])  # inside of operations of our own
    assert len(calls) < 5


@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_in_autocast_it_is_as_near_to_float32_as_the_eager_step(mode):
    model, x, y = problem("vit", torch.float32)

    def grads(autocast, **compile):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            r = threepass.ThreePass(copy.deepcopy(model), F.cross_entropy, alpha=0.3, mode=mode, **compile)(x, y)
        return torch.cat([g.flatten().double() for g in r.grads.values()])

    exact = grads(False)
    eager, traced = ((grads(True, **compile) - exact).norm() for compile in ({}, {"compile": "trace"}))
    assert 0 < traced < 1.5 * eager


def test_dropout_draws_other_numbers_at_every_call_and_one_seed_gives_one_result():
    model = nn.Sequential(nn.Linear(12, 40), nn.Dropout(0.5), nn.Tanh(), nn.Linear(40, 10)).double()
    x, y = torch.randn(5, 12, dtype=torch.float64), torch.randint(10, (5,))
    step = threepass.ThreePass(model, F.cross_entropy, alpha=0.3, compile="trace")
    losses = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        losses.append(float(step(x, y).loss))
    assert losses[0] == losses[2] != losses[1]


def test_sizes_that_change_have_one_dynamic_program():
    model, twin = mlp(12, 9, 10).double(), mlp(12, 9, 10).double()
    twin.load_state_dict(model.state_dict())
    step = threepass.ThreePass(model, F.cross_entropy, alpha=0.3, compile="trace")
    for n in (5, 6, 7, 9, 11):
        x, y = torch.randn(n, 12, dtype=torch.float64), torch.randint(10, (n,))
        expected = threepass.three_pass(twin, F.cross_entropy, x, y, alpha=0.3)
        assert_close(everything(step(x, y)), everything(expected), 1e-10)
    assert len(step.compiled.programs) == 2


def test_a_loss_on_the_gradient():
    model = mlp(6, 9, 1, activation=nn.SiLU).double()
    x, forces = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)

    def loss(output, g, y):
        return output.square().mean() + (-g - y).square().mean()

    expected = threepass.gradient_step(model, loss, x, forces)
    r = threepass.GradientStep(model, loss, compile="trace")(x, forces)
    assert_close(r.grads, expected.grads, 1e-10)
    assert_close({"loss": r.loss, "g": r.input_grad}, {"loss": expected.loss, "g": expected.input_grad}, 1e-10)


def test_pickles_keep_the_option():
    step = threepass.ThreePass(mlp(12, 9, 10), F.cross_entropy, compile="trace")
    for again in (pickle.loads(pickle.dumps(step)), copy.deepcopy(step)):
        assert again.compiled.programs is not step.compiled.programs
        again(torch.randn(5, 12), torch.randint(10, (5,)))  # `no_compiler` would refuse
        assert len(again.compiled.programs) == 1


def test_a_wrong_simplification_is_refused(monkeypatch):
    def wrong(graph):
        node = next(n for n in graph.nodes if n.target is torch.ops.aten.mm.default)
        with graph.inserting_after(node):
            more = graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.1))
        node.replace_all_uses_with(more, lambda user: user is not more)

    monkeypatch.setattr(tracing, "simplify", wrong)
    step = threepass.ThreePass(mlp(12, 9, 10).double(), F.cross_entropy, compile="trace")
    with pytest.warns(threepass.UncompiledWarning, match="compile=\"?'?trace'?\"?: this step runs eagerly .* because"):
        step(torch.randn(5, 12, dtype=torch.float64), torch.randint(10, (5,)))


def test_nodes_that_do_nothing_are_dropped_and_views_are_made_once():
    aten, graph = torch.ops.aten, Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3, 4)

    def call(target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = target(*(a.meta["val"] if hasattr(a, "meta") else a for a in args))
        return node

    flat = call(aten.reshape.default, call(aten.expand.default, x, [2, 3, 4]), [6, 4])
    back = call(aten.reshape.default, flat, [2, 3, 4])  # x
    turned, again = (call(aten.permute.default, back, [2, 0, 1]) for _ in range(2))
    graph.output((turned, again, call(aten.relu.default, turned), call(aten.relu.default, turned)))
    simplify.simplify(graph)
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [aten.permute.default] + 2 * [
        aten.relu.default
    ]


def test_factors_of_one_and_numbers_that_are_there_already_are_dropped():
    aten, graph = torch.ops.aten, Graph()
    x, scale = graph.placeholder("x"), graph.placeholder("scale")
    x.meta["val"], scale.meta["val"] = torch.empty(2, 3), torch.empty(())

    def call(target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = target(*(a.meta["val"] if hasattr(a, "meta") else a for a in args))
        return node

    one, twin = (call(aten.reciprocal.default, call(aten.mul.Tensor, scale, 1.0)) for _ in range(2))
    scaled = [call(aten.mul.Tensor, call(aten.div.Tensor, x, 1), one), call(aten.mul.Tensor, x, twin)]
    wider = call(
        aten.mul.Tensor, call(aten.mul.Tensor, call(aten.ne.Scalar, x, 0), 1.0), 2.0
    )  # truth values to numbers
    graph.output((*scaled, wider, call(aten.mul.Tensor, x, 1.0)))  # x itself is no result
    simplify.simplify(graph)
    assert [n.target.overloadpacket for n in graph.nodes if n.op == "call_function"] == [
        aten.reciprocal, aten.mul, aten.mul, aten.ne, aten.mul, aten.mul, aten.mul,
    ]  # fmt: skip
    assert [node.args for node in scaled] == [(x, one), (x, one)]


def test_buffers_of_one_dtype_are_written_in_one_call():
    aten, graph = torch.ops.aten, Graph()
    buffers = [graph.placeholder(name) for name in "abc"]
    values = [torch.zeros(2), torch.zeros(3), torch.zeros((), dtype=torch.int64)]
    for node, value in zip(buffers, values, strict=True):
        node.meta["val"] = value
    written = [graph.call_function(aten.add.Tensor, (node, 1)) for node in buffers]
    for node, value, new in zip(buffers, values, written, strict=True):
        new.meta["val"] = value
        graph.call_function(aten.copy_.default, (node, new))
    graph.output(())
    simplify.simplify(graph)
    graph.lint()
    assert 0 < sum(n.target is aten_foreach_copy for n in graph.nodes) <= 2
    Interpreter(GraphModule(nn.Module(), graph)).run(*values)
    assert [z.tolist() for z in values] == [[1.0, 1.0], [1.0, 1.0, 1.0], 1]


def test_a_step_that_cannot_be_traced_runs_eagerly_with_a_warning():
    class Branching(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else super().forward(2 * x)

    model = Branching(4, 3)
    step = threepass.ThreePass(model, F.cross_entropy, compile="trace")
    with pytest.warns(threepass.UncompiledWarning, match="compile='trace': .* which also compiles the step$"):
        r = step(torch.ones(5, 4), torch.zeros(5, dtype=torch.long))
    assert_close(r.grads, {n: p.grad for n, p in model.named_parameters()}, 1e-6)


class Saved(torch.autograd.Function):
    """The sum of z * saved, whose backward returns the tensor that the forward saved."""

    @staticmethod
    def forward(ctx, z, saved):
        ctx.save_for_backward(saved)
        return (z * saved).sum()

    @staticmethod
    def backward(ctx, d):
        return ctx.saved_tensors[0], None


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(3, 4)) for _ in range(2))

    def forward(self, x):
        return x + self.a, self.b, (self.b * 1.0).t(), (x / 1).flatten()


@pytest.mark.parametrize("saved", ["parameter", "y"])
@pytest.mark.filterwarnings("ignore:loss_fn is a sum")
def test_gradients_and_results_share_no_memory_with_parameters_and_inputs(saved):
    def loss_fn(output, y):
        return Saved.apply(output[0], output[1] if saved == "parameter" else y)

    torch.manual_seed(0)
    model, x, y = Shift(), torch.randn(3, 4), torch.randn(3, 4)
    step = threepass.ThreePass(model, loss_fn, strength=0.3, compile="trace")
    r = step(x, y)
    kept, b, given = copy.deepcopy(r.output), model.b.detach().clone(), y.clone()
    torch.testing.assert_close(model.a.grad, b if saved == "parameter" else given)
    step(x, y)  # adds to p.grad
    model.zero_grad(set_to_none=False)
    assert torch.equal(model.b, b)
    assert torch.equal(y, given)
    with torch.no_grad():
        x.zero_()
        model.b.zero_()
    assert all(map(torch.equal, r.output, kept))
