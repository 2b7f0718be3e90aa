"""Captured steps: the same numbers as eager ones, one program for every signature, and a clear fallback."""

import copy
import math
import warnings
from collections import Counter, UserDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from close import assert_close
from narrow_slopes import bf16_slopes
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import threepass
from threepass.bench.timing import peak_bytes
from threepass.compile.capture import capture
from threepass.compile.inductor import warm_up
from threepass.compile.rewrite import gates, tf32
from threepass.compile.rewrite.sums import share_sums
from threepass.compile.trace import trace
from threepass.core.engine import Task, run
from threepass.core.options import Options
from threepass.kernels import conv
from threepass.models import mlp, plain, resnet, vit

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning", "ignore::DeprecationWarning")


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return self[1](checkpoint(self[0], x, use_reentrant=False))


NETS = {
    "mlp": (lambda: mlp(12, 9, 8, 10), (5, 12)),
    "gelu": (lambda: mlp(12, 9, 10, activation=nn.GELU), (5, 12)),
    "plain": (lambda: plain(8, width=4), (4, 3, 8, 8)),
    "resnet": (lambda: resnet(8, width=4), (4, 3, 8, 8)),
    "vit": (lambda: vit(image=8, width=12, depth=1), (4, 3, 8, 8)),
    "pooled": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10)),
               (4, 3, 8, 8)),
    "checkpointed": (lambda: Checkpointed(mlp(12, 9, 8), mlp(8, 10)), (5, 12)),
}  # fmt: skip


def problem(name, dtype=torch.float64):
    torch.manual_seed(0)
    make, shape = NETS[name]
    return make().to(dtype), torch.randn(shape, dtype=dtype), torch.randint(10, shape[:1])


def same(got, expected, tolerance):
    assert_close(dict(enumerate(got)), dict(enumerate(expected)), tolerance)


def step_of(model, x, y, **options):
    """The step that `ThreePass(compile=True)` captures, as a function of tensors."""
    options = Options(**options)

    def step(x, y, weights):
        r = run(Task(model, F.cross_entropy, x, y), options, weights=(weights[0], weights[1]))
        return [*r.grads.values(), r.loss, r.input_loss, r.input_grad]

    return step, [x, y, torch.tensor([options.back, options.third], dtype=torch.float64)]


def everything(r):
    return [*r.grads.values(), r.loss, r.input_loss, r.input_grad]


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("name", NETS)
def test_the_graph_computes_what_the_step_does(name, mode):
    model, x, y = problem(name)
    expected = everything(threepass.three_pass(copy.deepcopy(model), F.cross_entropy, x, y, alpha=0.3, mode=mode))
    step, inputs = step_of(model, x, y, alpha=0.3, mode=mode)
    program = trace(step, inputs)
    same(program(*inputs), expected, 1e-12)
    moved = [inputs[0] * 0.7, *inputs[1:]]
    same(program(*moved), step(*moved), 1e-12)


# Up to torch 2.12, Inductor takes the sums of float64 attention on a CPU for float32.
OLD_ATTENTION = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


@pytest.mark.skipif(not OLD_ATTENTION, reason="attention in float64 is compiled since torch 2.13")
def test_attention_that_does_not_compile_runs_eagerly():
    model, x, y = problem("vit")
    step = threepass.ThreePass(model, F.cross_entropy, alpha=0.3, compile=True)
    with pytest.warns(threepass.UncompiledWarning, match="expected scalar type Double"):
        step(x, y)
    expected = threepass.three_pass(copy.deepcopy(model), F.cross_entropy, x, y, alpha=0.3)
    same([p.grad for p in model.parameters()], list(expected.grads.values()), 1e-10)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("mlp", "exact"),
        ("plain", "paper"),
        pytest.param("resnet", "exact", marks=pytest.mark.slow),
        pytest.param("vit", "paper", marks=pytest.mark.skipif(OLD_ATTENTION, reason="see OLD_ATTENTION")),
    ],
)
def test_compiled_is_eager_to_ten_digits(name, mode):
    model, x, y = problem(name)
    twin = copy.deepcopy(model)
    step = threepass.ThreePass(model, F.cross_entropy, alpha=0.3, mode=mode, compile=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", threepass.UncompiledWarning)
        for _ in range(2):
            model.zero_grad()
            r = step(x, y)
            expected = threepass.three_pass(twin, F.cross_entropy, x, y, alpha=0.3, mode=mode)
    same(everything(r), everything(expected), 1e-10)
    same([r.output], [expected.output], 1e-10)
    same([p.grad for p in model.parameters()], list(expected.grads.values()), 1e-10)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):  # running statistics: once a call
        torch.testing.assert_close(ours, theirs)
    assert len(step.compiled.programs) == 1
    assert step.compiled.compile_seconds > 0
    assert step.compiled.graph_bytes is None


def test_alpha_moves_within_one_program_and_every_k_has_two(graph_only):
    model, x, y = problem("mlp")
    alphas = [0.1, 0.4, 0.7, 0.2]
    step = threepass.ThreePass(model, F.cross_entropy, alpha=lambda calls: alphas[calls], every=2, compile=True)
    for i, alpha in enumerate(alphas):
        expected = run(Task(model, F.cross_entropy, x, y), Options(alpha), runs_third_pass=i % 2 == 0)
        same(everything(step(x, y)), everything(expected), 1e-12)
    assert len(step.compiled.programs) == 2
    step.alpha = lambda calls: 0.3
    expected = run(Task(model, F.cross_entropy, x[:2], y[:2]), Options(0.3))
    for _ in range(3):  # eagerly, captured, without the third pass, captured
        same(everything(step(x[:2], y[:2])), everything(expected), 1e-12)
        step.calls += 1
    assert len(step.compiled.programs) == 3


def test_gradients_add_up_and_hooks_fire(graph_only):
    model, x, y = problem("mlp")
    seen = []
    step = threepass.ThreePass(model, F.cross_entropy, compile=True)
    step(x, y)
    step(x, y)
    one = threepass.three_pass(model, F.cross_entropy, x, y).grads
    same([p.grad for p in model.parameters()], [2 * g for g in one.values()], 1e-12)
    model[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    step(x, y)
    same(seen, [3 * one["1.weight"]], 1e-12)


@pytest.mark.parametrize("compile", [False, "require"])
def test_a_loss_that_no_trained_parameter_has_part_in(compile, graph_only):
    """As with loss.backward(), `p.grad` stays as it is; here the loss depends on frozen parameters alone."""
    model, x, y = problem("mlp")
    model.requires_grad_(False).append(nn.Module())
    model[-1].forward, model[-1].spare = torch.sin, nn.Parameter(torch.ones(2, dtype=torch.float64))
    step = threepass.ThreePass(model, F.cross_entropy, batch_size=2 * len(x), compile=compile)
    assert step(x, y).grads == {}
    assert not step.loss(x, y).requires_grad
    assert all(p.grad is None for p in model.parameters())


def test_terms_apart_and_strength(graph_only):
    model, x, y = problem("mlp")
    step = threepass.ThreePass(model, F.cross_entropy, strength=2.0, separate=True, compile=True)
    r, expected = step(x, y), threepass.three_pass(model, F.cross_entropy, x, y, strength=2.0, separate=True)
    for field in ("grads", "backprop_grads", "third_grads"):
        same(list(getattr(r, field).values()), list(getattr(expected, field).values()), 1e-12)


def test_another_place_in_memory_is_another_kind(graph_only):
    model, x, y = problem("mlp")
    step = threepass.ThreePass(model, F.cross_entropy, compile=True)
    step(x, y)
    model[1].weight.data = model[1].weight.data * 2
    expected = threepass.three_pass(model, F.cross_entropy, x, y)
    same(everything(step(x, y)), everything(expected), 1e-12)
    model.eval()
    step(x, y)
    assert len(step.compiled.programs) == 3


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.mean() > 0 else 2 * super().forward(x)


class Sloped(nn.Linear):
    def forward(self, x):
        return F.rrelu(super().forward(x), training=True)


class Drawing(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.rand(10, generator=GENERATOR)


GENERATOR = torch.Generator()


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [
        (Drawing(8, 10), (4, 8), r"draws random numbers from a torch\.Generator.* Leave generator= out"),
        (Branching(8, 10), (4, 8), "in Branching.forward: .* a value is read out of a tensor"),
        (Sloped(8, 10), (4, 8), r"draws random numbers by aten\.rrelu.* pass them in x or y"),
    ],
)
def test_what_cannot_be_captured_runs_eagerly_and_says_why_once(model, shape, reason):
    x, y = torch.randn(shape), torch.randint(10, shape[:1])
    step = threepass.ThreePass(model, F.cross_entropy, compile=True)
    torch.manual_seed(1), GENERATOR.manual_seed(1)
    with pytest.warns(threepass.UncompiledWarning, match=f"runs eagerly .* with the same results.*({reason})"):
        r = step(x, y)
    torch.manual_seed(1), GENERATOR.manual_seed(1)
    same(everything(r), everything(threepass.three_pass(model, F.cross_entropy, x, y)), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x, y)


@pytest.mark.parametrize("inplace", [False, True])
def test_rrelu_is_captured_in_evaluation(inplace, graph_only):
    """It draws no random numbers there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 10), nn.RReLU(inplace=inplace), nn.Linear(10, 10)).double().eval()
    x, y = torch.randn(4, 8).double(), torch.randint(10, (4,))
    step = threepass.ThreePass(model, F.cross_entropy, compile="require")
    same(everything(step(x, y)), everything(threepass.three_pass(model, F.cross_entropy, x, y)), 1e-12)


def test_what_eager_refuses_is_refused_and_nothing_has_changed():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = copy.deepcopy(model.state_dict())
    step = threepass.ThreePass(model, lambda out, y: out, compile=True)
    with pytest.raises(ValueError, match="must return a scalar"):
        step(torch.randn(5, 4), None)
    same(list(model.state_dict().values()), list(before.values()), 0)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("first", ["good", "bad"])
def test_a_call_that_fails_eagerly_too_is_no_failed_capture(first, graph_only):
    """A wrong label in one call: the step is captured when the labels are right."""
    model, x, y = problem("mlp")
    step = threepass.ThreePass(model, F.cross_entropy, compile=True)
    if first == "good":
        step(x, y)
    for size in (2, 2, 3, 3, 3, len(x)) if first == "good" else (len(x),) * 4:
        with pytest.raises(IndexError, match=r"out of (bounds|range)"):
            step(x[:size], y[:size] + 1000)
    step(x, y)
    assert len(step.compiled.programs) == 1
    step(x[:2], y[:2])
    step(x[:2], y[:2])
    assert len(step.compiled.programs) == 2


class Tokens(nn.Module):
    """Tokens, some of which are summed by an index; dropout and batch norm have states that calls move."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(9, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)

    def forward(self, tokens, places):
        h = F.dropout(self.norm(self.embedding(tokens)), 0.2, self.training)
        return self.head(h + torch.zeros_like(h).index_add(0, places, h)[-1 - places])


@pytest.mark.parametrize("sizes", [(12, 12, 12), (12, 10, 8, 7)])
def test_indices_out_of_range_are_an_error_that_changes_nothing(sizes, graph_only):
    """Inductor's loops would end the process. Of a program for one size, and of one for many."""
    torch.manual_seed(0)
    model = Tokens()
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.1, mode="exact", input_at="embedding", compile=True)
    for n in sizes:
        x, y = (torch.arange(n) % 9, torch.arange(n)), torch.arange(n) % 5
        y[2] = -100  # the label that is ignored
        step(x, y)
    assert step.compiled.programs.entries[-1].uses >= 2

    def state():
        return [z.clone() for p in model.parameters() for z in (p, p.grad)] + [z.clone() for z in model.buffers()]

    before, rng, calls = state(), torch.get_rng_state(), step.calls
    for k, name, value in [(0, "embedding", 9), (0, "embedding", -1), (1, "ind", n), (2, "nll_loss", 5)]:
        bad = [x[0].clone(), x[1].clone(), y.clone()]
        bad[k][3] = value
        with pytest.raises(IndexError, match=rf"index {value} is out of range for {name}"):
            step(tuple(bad[:2]), bad[2])
    same(state(), before, 0)
    assert torch.equal(torch.get_rng_state(), rng)
    assert step.calls == calls
    step(x, y)


@pytest.mark.parametrize("ratio", [1e-3, 1e-2])
@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("kind", ["linear", "conv", "norm"])
def test_slope_of_the_third_pass_is_one_in_a_captured_bf16_step(kind, alpha, ratio):
    """Of what is added to alpha * backprop, on float64's (1 - alpha) * third pass: no part is lost systematically."""
    slopes = bf16_slopes(kind, alpha, ratio, compile_=False)
    assert abs(slopes.mean() - 1) <= 3 * slopes.std() / len(slopes) ** 0.5 + 0.02
    assert slopes.std() / len(slopes) ** 0.5 < 0.2


def test_slope_of_the_third_pass_is_one_in_a_compiled_bf16_step():
    slopes = bf16_slopes("linear", 0.5, 1e-2, compile_=True)
    assert abs(slopes.mean() - 1) <= 3 * slopes.std() / len(slopes) ** 0.5 + 0.02
    assert slopes.std() / len(slopes) ** 0.5 < 0.1


def test_gates_are_marked_and_read_by_bits():
    u = torch.tensor([1.0, 2.0, 0.0, -0.0, 3.0])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        g = torch.tensor([0.5, -0.0, 7.0, -0.0, 0.0], dtype=dtype)
        d = gates.marked(g, u.to(dtype))
        assert d.tolist() == [0.5, 0, 0, 0, 0]
        assert torch.signbit(d).tolist() == [False, False, True, True, False]
        s = torch.arange(1.0, 6.0).to(dtype)
        assert gates.gated(s, d).tolist() == [1, 2, 0, 0, 5]


def test_gates_are_read_off_the_errors_only_where_the_activation_is_not_needed():
    for options, marks in (({}, 2), ({"mode": "exact"}, 0), ({"separate": True}, 0)):
        model, x, y = problem("mlp")
        step, inputs = step_of(model, x, y, **options)
        found = Counter(node.target for node in trace(step, inputs).graph.graph.nodes)
        assert found[gates.marked] == found[gates.gated] == marks


def test_factors_of_sums_are_kept():
    """Inductor forgets the alpha of an addition of two matrix products."""

    def mixed(a):
        return [torch.add(a @ a.mT, (a[:, :4] @ a[:, :4].mT), alpha=0.3), torch.sub(a @ a.mT, a.sum(), alpha=2)]

    a = torch.randn(5, 6, dtype=torch.float64)
    same(capture(mixed, [a])(a), mixed(a), 1e-12)


def test_only_equal_sums_are_shared():
    def sums(a):
        twice = [torch.var_mean(a * 1.0, [0], correction=0)[0], torch.var_mean(a * 1.0, [0], correction=0)[0]]
        signed = [torch.where(a > 0, 0.0, z).sum() for z in (a, -a)]
        zeros = [torch.where(a > 0, zero, -0.0).sum() for zero in (0.0, -0.0)]
        return [*twice, *signed, *zeros]

    a = torch.randn(5, 6)
    program = trace(sums, [a])
    before = list(program(a))
    share_sums(program.graph.graph)
    program.graph.recompile()
    found = Counter(str(node.target) for node in program.graph.graph.nodes)
    assert found["aten.var_mean.correction"] <= 1
    assert found["aten.sum.default"] >= 4  # no two of them are equal
    same(program(a), before, 0)


def test_in_half_formats_cheap_products_leave_no_signal_for_pass_3(as_on_a_gpu):
    """Backpropagation's products are taken in pass 2, and pass 3 reads its gates off the errors, all but the last."""
    as_on_a_gpu(conv)
    model, x, y = problem("plain", torch.bfloat16)
    model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    graph = trace(*step_of(model, x, y), kernels=True).graph.graph
    signals = [n for n in graph.nodes if n.target is torch.ops.threepass.conv3x3.default and n.args[4]]
    assert 0 < len(signals) <= 7
    pass_3 = min(n for n in graph.nodes if n.target is torch.ops.threepass.conv3x3.default and not n.args[4])
    assert all(user < pass_3 for u in signals[:-1] for user in u.users)


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_take_the_place_of_convolutions_and_their_neighbours(mode, dtype, as_on_a_gpu):
    """On a CPU the operations run their plain twins."""
    as_on_a_gpu(conv)
    model, x, y = problem("plain", dtype)
    model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    step, inputs = step_of(model, x, y, mode=mode)
    ours, theirs = trace(step, inputs, kernels=True), trace(step, inputs, kernels=False)
    found = Counter(node.target for node in ours.graph.graph.nodes)
    kernels, paper, half = torch.ops.threepass, mode == "paper", dtype == torch.bfloat16
    layers = 7  # the head is linear, and the last gate is read by the mean's error
    assert found[kernels.conv3x3.default] + found[kernels.conv3x3_tangent.default] <= 2 * layers
    assert bool(found[kernels.conv3x3_tangent.default]) == (half and not paper)  # pass 3 makes mixes beside t
    assert found[kernels.conv3x3_input.default] <= (layers if paper else 2 * layers - 1)
    assert found[kernels.conv3x3_weight.default] <= (layers if paper and not half else 2 * layers)
    assert found[torch.ops.aten.convolution.default] == found[torch.ops.aten.convolution_backward.default] == 0
    same(ours(*inputs), theirs(*inputs), 1e-6 if dtype == torch.float32 else 2e-2)
    warm_up(ours.graph.graph)


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", ["frozen first layer", "computed weight"])
def test_kernels_in_nets_that_are_trained_in_part_or_by_other_weights(change, dtype, mode, as_on_a_gpu):
    as_on_a_gpu(conv)
    model, x, y = problem("plain", dtype)
    if change == "frozen first layer":
        model[0].requires_grad_(False)
    else:
        nn.utils.parametrizations.weight_norm(model[2])
    model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    step, inputs = step_of(model, x, y, mode=mode)
    ours, theirs = trace(step, inputs, kernels=True), trace(step, inputs, kernels=False)
    assert any(node.target is torch.ops.threepass.conv3x3_weight.default for node in ours.graph.graph.nodes)
    same(ours(*inputs), theirs(*inputs), 1e-5 if dtype == torch.float32 else 3e-2)


class OperandsInTF32(torch.fx.Interpreter):
    """Runs a graph; counts the products that are told that their operands are rounded, and sees that they are."""

    rounded = others = 0

    def run_node(self, n):
        if "conv3x3" in str(n.target):
            if n.kwargs.get("rounded"):
                self.rounded += 1
                operands = [self.env[z] for z in n.args[:2]]
                assert all((z.view(torch.int32) & 0x1FFF == 0).all() for z in operands), n.format_node()
            else:
                self.others += 1
        return super().run_node(n)


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("net", ["plain", "resnet", "computed weight", "frozen"])
def test_signals_are_rounded_to_tf32_where_they_are_computed(net, mode, monkeypatch, as_on_a_gpu):
    """All products but those of the image have TF32 numbers for operands, and none has to round them itself."""
    as_on_a_gpu(conv)
    model, _, y = problem("resnet" if net == "resnet" else "plain", torch.float32)
    torch.manual_seed(1)  # no ReLU of this batch opens or closes by rounding
    x = torch.randn(4, 3, 8, 8)
    if net == "computed weight":
        nn.utils.parametrizations.weight_norm(model[2])
    if net == "frozen":
        model[0].requires_grad_(False)
    model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    step, inputs = step_of(model, x, y, mode=mode)
    exact = trace(step, inputs, kernels=True)
    as_on_a_gpu(tf32)
    monkeypatch.setattr(tf32, "THIN", 3)
    rounded = trace(step, inputs, kernels=True)
    check = OperandsInTF32(rounded.graph)
    got = check.run(*rounded.state, *inputs)
    assert check.rounded > (0 if net == "resnet" else 3 * check.others)
    same(got, exact(*inputs), 5e-2 if net == "resnet" else 5e-3)
    assert not all(torch.equal(g, e) for g, e in zip(got, exact(*inputs), strict=True))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    without = trace(step, inputs, kernels=True)
    assert not any(n.kwargs.get("rounded") or n.kwargs.get("round_result") for n in without.graph.graph.nodes)


def test_the_compiler_knows_our_operations_before_it_meets_them(monkeypatch):
    """Else torch before 2.13 writes down all that their operands are made of, which grows exponentially with depth."""
    from torch._inductor import graph, lowering

    def numbers(x):
        return torch.ops.threepass.norm_numbers(x.mean((0, 2, 3)), x.std((0, 2, 3)), None, None)

    met = []
    for operation in [z for z in lowering.lowerings if getattr(z, "namespace", "") == "threepass"]:
        monkeypatch.delitem(lowering.lowerings, operation)
    make = lowering.make_fallback
    monkeypatch.setattr(graph, "make_fallback", lambda op, *args, **kwargs: (met.append(op), make(op, *args, **kwargs)))
    x = torch.randn(3, 4, 6, 6)
    captured = capture(lambda x: [numbers(x.sin())], [x])
    assert torch.ops.threepass.norm_numbers.default in lowering.lowerings
    assert torch.ops.threepass.norm_numbers.default not in met
    torch.testing.assert_close(captured(x)[0], numbers(x.sin()))


def test_a_wrong_compiler_is_noticed(monkeypatch):
    """Results that are grossly different from the eager step's are not used."""

    def spoiled(program, inputs):
        return lambda values: [z * 2 for z in program.graph(*values)]

    monkeypatch.setattr("threepass.compile.inductor.compiled", spoiled)
    model, x, y = problem("mlp")
    step = threepass.ThreePass(model, F.cross_entropy, compile=True)
    with pytest.warns(threepass.UncompiledWarning, match="the captured step computes backpropagation's part"):
        r = step(x, y)
    same(everything(r), everything(threepass.three_pass(model, F.cross_entropy, x, y)), 0)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "most"), [("paper", 1.15), ("exact", 2.0)])
def test_the_memory_of_a_compiled_rectifier_net(mode, most):
    """Relative to plain training: bytes that the allocator hands out, with Inductor's own plan of buffers."""
    torch.manual_seed(0)
    model, x, y = plain(20, width=8), torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    step, inputs = step_of(model, x, y, mode=mode)
    inputs[2] = inputs[2].float()
    three = capture(step, inputs)
    two = capture(lambda x, y: torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters())), [x, y])
    assert peak_bytes(lambda: three(*inputs), cuda=False) <= most * peak_bytes(lambda: two(x, y), cuda=False)


class Written(nn.Linear):
    """Writes to a constant that it makes anew at every call."""

    def forward(self, x):
        shift = torch.tensor([1.0, 2.0], dtype=x.dtype)
        shift += 1
        return super().forward(x) + shift.sum()


class Toggled(nn.Linear):
    """Writes to a truth value."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, x):
        self.flag.logical_not_()
        return torch.where(self.flag, super().forward(x), super().forward(2 * x))


class Hooked(nn.Sequential):
    """Changes an error in place, before a rectifier."""

    def forward(self, x):
        u = self[0](x)
        u.register_hook(lambda d: d.mul_(-1))
        return self[2](F.relu(self[0](x) + u))


class Threshold(nn.Sequential):
    """A gate that is not at zero, between two convolutions."""

    def __init__(self):
        first, second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        super().__init__(first, nn.Threshold(0.3, 0.0), second, nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))


class Shifted(nn.Module):
    """A shift of every channel, of the shape (1, C, 1, 1), after a convolution."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(256, 10)
        self.shift = nn.Parameter(torch.randn(1, 4, 1, 1))

    def forward(self, x):
        return self.head(torch.relu(self.conv(x) + self.shift).flatten(1))


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize(
    "make",
    [lambda: Written(6, 10), lambda: Toggled(6, 10), lambda: Hooked(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 10))],
)
def test_what_the_forward_writes_to_is_written_at_every_call(make, mode, graph_only):
    if mode == "exact" and make().__class__ is Hooked:
        return  # refused: a hook that changes an error
    torch.manual_seed(0)
    model, y = make().double(), torch.randint(10, (4,))
    eager = copy.deepcopy(model)
    step = threepass.ThreePass(model, F.cross_entropy, mode=mode, compile="require")
    for _ in range(3):
        x = torch.randn(4, 6).double()
        same(everything(step(x, y)), everything(threepass.three_pass(eager, F.cross_entropy, x, y, mode=mode)), 1e-12)


@pytest.mark.parametrize("make", [Threshold, Shifted])
def test_kernels_leave_other_gates_and_sums_alone(make, as_on_a_gpu):
    as_on_a_gpu(conv)
    torch.manual_seed(0)
    model = make().to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    step, inputs = step_of(model, x, torch.randint(10, (4,)))
    ours, theirs = trace(step, inputs, kernels=True), trace(step, inputs, kernels=False)
    assert any("conv3x3" in str(node.target) for node in ours.graph.graph.nodes)
    same(ours(*inputs), theirs(*inputs), 1e-5)


class Replacing(nn.Linear):
    def __init__(self):
        super().__init__(6, 10)
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return super().forward(x - self.mean)


class Reading(nn.Linear):
    def __init__(self):
        super().__init__(6, 10)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return super().forward(x * self.scale.item())


class DistributedDataParallel(nn.Sequential):
    """Known by its name: a real one needs a process group."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Replacing, "replaces a buffer by another tensor"),
        (Reading, "a value is read out of a tensor"),
        (lambda: DistributedDataParallel(nn.Linear(6, 10)), "exchanges gradients between processes"),
    ],
)
def test_what_a_program_would_get_wrong_is_not_captured(make, reason, graph_only):
    model = make()
    model, x, y = model.double(), torch.randn(4, 6).double(), torch.randint(10, (4,))
    with pytest.warns(threepass.UncompiledWarning, match=reason):
        threepass.ThreePass(model, F.cross_entropy, compile=True)(x, y)


def test_inputs_of_every_kind(graph_only):
    """Dicts of any class, one tensor given twice, parts of larger tensors, numbers that look alike."""
    model = mlp(6, 6).double()
    step = threepass.ThreePass(model, lambda out, y: ((out - y[0]) * y[1]).square().mean(), compile=True)
    x = torch.randn(4, 6).double()
    wide = torch.randn(4, 12).double()
    cases = [(x, (x, 1)), (x, (2 * x, 1)), (x, (x, True)), (wide[:, ::2], (wide[:, 1::2], 3.0)), (x, (x, 0.5))]
    for a, y in cases:
        expected = threepass.three_pass(model, step.loss_fn, a, y)
        same(everything(step(a, y)), everything(expected), 1e-12)
    named = threepass.ThreePass(model, lambda out, y: out.square().mean(), compile=True)
    for scale in (1.0, 2.0):
        found = named(UserDict(input=scale * x), None)
        expected = threepass.three_pass(model, named.loss_fn, {"input": scale * x}, None)
        same(list(found.grads.values()), list(expected.grads.values()), 1e-12)


class Counting(nn.Module):
    """A loss with state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, out, y):
        self.calls += 1
        return F.cross_entropy(out, y)


def test_state_around_the_model_moves_once_a_call(graph_only):
    model, x, y = problem("mlp")
    loss = Counting()
    step = threepass.ThreePass(model, loss, compile=True)
    for calls in (1, 2):
        step(x, y)
        assert loss.calls == calls


@pytest.mark.filterwarnings("ignore::threepass.errors.AccumulationWarning")
def test_another_module_hook_or_parameter_is_another_kind(graph_only):
    model, x, y = problem("mlp")
    step = threepass.ThreePass(model, F.cross_entropy, compile=True)
    changes = [
        lambda: setattr(model, "2", nn.Tanh()),
        lambda: model[1].register_forward_hook(lambda module, args, out: 2 * out),
        lambda: setattr(model[1], "weight", nn.Parameter(model[1].weight.data)),
    ]
    for change in changes:
        step(x, y)
        change()
        model.zero_grad()
        expected = threepass.three_pass(model, F.cross_entropy, x, y)
        same(everything(step(x, y)), everything(expected), 1e-12)
        same([p.grad for p in model.parameters()], list(expected.grads.values()), 1e-12)
    step.compiled.reset()
    assert not len(step.compiled.programs)


def test_equal_gradients_are_tensors_of_their_own():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 10)

        def forward(self, x):
            return self.c(torch.relu(self.a(x) + self.b(x)))

    torch.manual_seed(0)
    model, x, y = Twice().double(), torch.randn(4, 6).double(), torch.randint(10, (4,))
    threepass.ThreePass(model, F.cross_entropy, compile=True)(x, y)
    assert len({p.grad.data_ptr() for p in model.parameters()}) == len(list(model.parameters()))


@dataclass
class Boxed:
    """No container that PyTorch knows."""

    scores: torch.Tensor


class Boxing(nn.Linear):
    def forward(self, x):
        return Boxed(super().forward(x))


def test_an_output_that_a_program_cannot_give_anew_is_not_an_old_one(graph_only):
    model, x, y = Boxing(6, 10).double(), torch.randn(4, 6).double(), torch.randint(10, (4,))
    step = threepass.ThreePass(model, lambda out, y: F.cross_entropy(out.scores, y), compile=True)
    r = step(x, y)
    same([r.loss], [F.cross_entropy(F.linear(x, model.weight, model.bias), y)], 1e-12)
    assert "Boxed, not available" in repr(r.output)
    with pytest.raises(AttributeError, match=r"the model returned a Boxed here.*compile=False"):
        _ = r.output.scores


def test_fixed_sizes_are_numbers_for_the_compiler(monkeypatch):
    """Symbols for sizes make slower kernels, and in torch 2.13 some of Inductor's passes fail on them."""

    def refuse(*args, **kwargs):
        raise AssertionError("a symbol was made for a size")

    monkeypatch.setattr("torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symbol", refuse)
    torch.manual_seed(0)
    conv = [nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*conv, nn.Flatten(), nn.Linear(8, 4)).double()
    x, y = torch.randn(5, 3, 9, 9).double(), torch.randint(4, (5,))
    expected = threepass.three_pass(copy.deepcopy(model), F.cross_entropy, x, y, mode="exact").grads
    found = threepass.ThreePass(model, F.cross_entropy, mode="exact", compile="require")(x, y).grads
    same(found.values(), expected.values(), 1e-12)


def test_a_second_capture_comes_from_inductors_cache(tmp_path, monkeypatch):
    """Buffers that a step writes to included: another process compiles nothing."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))
    x, y = torch.randn(8, 6), torch.randint(4, (8,))
    results = []
    for _ in range(2):
        counters.clear()
        each = copy.deepcopy(model)
        r = threepass.ThreePass(each, F.cross_entropy, compile="require")(x, y)
        results.append([*r.grads.values(), *each.buffers()])
        torch.compiler.reset()
    assert counters["inductor"]["fxgraph_cache_hit"] == 1
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::threepass.errors.AccumulationWarning")
def test_another_loss_or_model_of_a_step(graph_only):
    model, x, y = problem("mlp")
    step = threepass.ThreePass(model, F.cross_entropy, compile=True)
    step(x, y)
    step.loss_fn = lambda out, y: 2 * F.cross_entropy(out, y)
    for _ in range(2):
        same(everything(step(x, y)), everything(threepass.three_pass(model, step.loss_fn, x, y)), 1e-12)
        step.model = copy.deepcopy(model).requires_grad_(False)
        next(step.model.parameters()).requires_grad_(True)
        same(everything(step(x, y)), everything(threepass.three_pass(step.model, step.loss_fn, x, y)), 1e-12)
        assert next(step.model.parameters()).grad is not None
        model.zero_grad()
        step.model = model


def test_the_sign_of_a_zero_in_y(graph_only):
    model, x = mlp(6, 6).double(), torch.randn(4, 6).double()
    step = threepass.ThreePass(model, lambda out, y: (out.square() * math.copysign(2, y)).mean(), compile="require")
    for zero in (0.0, -0.0, 0.0, -0.0, -0.0):
        same([step(x, zero).loss], [threepass.three_pass(model, step.loss_fn, x, zero).loss], 1e-12)


def test_an_input_that_is_a_buffer_which_the_step_writes_to(graph_only):
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double()
    twin, x = copy.deepcopy(model), torch.randn(4, 6).double()
    step = threepass.ThreePass(model, F.mse_loss, mode="exact", compile=True)
    with pytest.warns(threepass.UncompiledWarning, match="shares memory with a buffer that the step writes to"):
        found = step(x, model[1].running_mean.expand(4, 6))
    expected = threepass.three_pass(twin, F.mse_loss, x, twin[1].running_mean.expand(4, 6), mode="exact")
    same(everything(found), everything(expected), 1e-12)


def test_a_frozen_parameter_whose_elements_share_memory(graph_only):
    model, x, y = problem("mlp")
    model[1].bias.requires_grad_(False).data = torch.ones(1).double().expand(model[1].bias.shape)
    step = threepass.ThreePass(model, F.cross_entropy, compile="require")
    same(everything(step(x, y)), everything(threepass.three_pass(model, F.cross_entropy, x, y)), 1e-12)


def test_a_sparse_sum_of_gradients(graph_only):
    model, x, y = problem("mlp")
    step = threepass.ThreePass(model, F.cross_entropy, compile="require")
    before = torch.ones_like(model[1].weight).detach()
    model[1].weight.grad = before.to_sparse()
    r = step(x, y)
    same([model[1].weight.grad], [before + r.grads["1.weight"]], 1e-12)


def test_threads_capture_one_after_the_other(graph_only):
    """Tracing patches the whole process."""
    problems = [problem("mlp") for _ in range(3)]
    steps = [threepass.ThreePass(model, F.cross_entropy, compile="require") for model, *_ in problems]
    with ThreadPoolExecutor() as pool:
        results = [pool.submit(step, x, y) for step, (_, x, y) in zip(steps, problems, strict=True)]
        for result, (model, x, y) in zip(results, problems, strict=True):
            same(everything(result.result()), everything(threepass.three_pass(model, F.cross_entropy, x, y)), 1e-12)


def test_a_dispatch_mode_sees_the_operations(graph_only):
    model, x, y = problem("mlp")
    step = threepass.ThreePass(model, F.cross_entropy, compile=True)
    step(x, y)
    counts = []
    for made in (threepass.ThreePass(model, F.cross_entropy), step):
        model.zero_grad()
        with FlopCounterMode(display=False) as mode, warnings.catch_warnings():
            warnings.simplefilter("ignore", threepass.UncompiledWarning)
            made(x, y)
        counts.append(mode.get_total_flops())
    assert counts[0] == counts[1]


def test_a_sparse_tensor_in_x_runs_eagerly(graph_only):
    class Graph(nn.Linear):
        def forward(self, x, edges):
            return super().forward(torch.sparse.mm(edges, x))

    model, x = Graph(6, 10).double(), {"x": torch.randn(4, 6).double(), "edges": torch.eye(4).double().to_sparse()}
    step = threepass.ThreePass(model, F.cross_entropy, wrt="x", compile=True)
    with pytest.warns(threepass.UncompiledWarning, match="layout torch.sparse_coo; only dense tensors"):
        step(x, torch.randint(10, (4,)))
