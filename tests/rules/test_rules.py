"""Fast rules: push is the Jacobian, pull its transpose, grad their derivative by the weight."""

import functools

import pytest
import torch
from close import assert_close, plain_grads
from rule_properties import (
    check_curve_is_the_derivative_of_the_jacobian,
    check_pull_is_its_transpose,
    check_push_is_the_jacobian,
    made,
    r,
    tapped,
)
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import threepass
from threepass.rules.table import Linearization, key_of, name_of, rule_for

torch.manual_seed(0)


# name, function, arguments (the activation first), positions of the weights, positions of additive ones
GRID = [
    ("linear", F.linear, (r(4, 5), r(3, 5), r(3)), [1], [2]),
    ("linear-1d", F.linear, (r(5), r(3, 5), r(3)), [1], [2]),
    ("conv1d", torch.conv1d, (r(2, 4, 9), r(6, 2, 3), r(6), 2, 1, 1, 2), [1], [2]),
    ("conv2d", torch.conv2d, (r(2, 3, 7, 7), r(4, 3, 3, 3), r(4), 2, 1), [1], [2]),
    ("conv2d-same", torch.conv2d, (r(2, 3, 5, 5), r(4, 3, 3, 3), None, 1, "same", 2), [1], []),
    ("conv3d", torch.conv3d, (r(2, 2, 4, 4, 4), r(3, 2, 2, 2, 2), r(3)), [1], [2]),
    ("conv-transpose", torch.conv_transpose2d, (r(2, 4, 3, 3), r(4, 3, 3, 3), r(6), 2, 1, 1, 2), [1], [2]),
    ("batch-norm", torch.batch_norm, (r(5, 3, 2), r(3), r(3), None, None, True, 0.1, 1e-5, False), [1], [2]),
    (
        "batch-norm-eval",
        torch.batch_norm,
        (r(5, 3, 2), r(3), r(3), r(3), r(3).exp(), False, 0.1, 1e-5, False),
        [1],
        [2],
    ),
    ("layer-norm", torch.layer_norm, (r(5, 2, 3), (2, 3), r(2, 3), r(2, 3)), [2], [3]),
    ("layer-norm-plain", torch.layer_norm, (r(5, 6), (6,)), [], []),
    ("rms-norm", torch.rms_norm, (r(5, 6), (6,), r(6), 0.1), [2], []),
    ("group-norm", torch.group_norm, (r(5, 4, 3, 2), 2, r(4), r(4), 0.1), [2], [3]),
    ("instance-norm", torch.instance_norm, (r(5, 3, 4), r(3), r(3), None, None, True, 0.1, 0.1, False), [1], [2]),
    ("relu", torch.relu, (r(4, 5),), [], []),
    ("tanh", torch.tanh, (r(4, 5),), [], []),
    ("sigmoid", torch.sigmoid, (r(4, 5),), [], []),
    ("silu", torch._C._nn.silu, (3 * r(4, 5),), [], []),
    ("gelu", F.gelu, (3 * r(4, 5),), [], []),
    ("softplus", F.softplus, (3 * r(4, 5), 2.0, 4.0), [], []),
    ("exp", torch.exp, (r(4, 5),), [], []),
    ("sin", torch.sin, (r(4, 5),), [], []),
    ("cos", torch.cos, (r(4, 5),), [], []),
    ("sqrt", torch.sqrt, (r(4, 5).exp(),), [], []),
    ("leaky-relu", torch._C._nn.leaky_relu, (r(4, 5), 0.2), [], []),
    ("square", torch.square, (r(4, 5),), [], []),
    ("rsqrt", torch.rsqrt, (r(4, 5).exp(),), [], []),
    ("reciprocal", torch.reciprocal, (r(4, 5).exp(),), [], []),
    ("log", torch.log, (r(4, 5).exp(),), [], []),
    ("abs", torch.abs, (r(4, 5),), [], []),
    ("rsub-number", torch.rsub, (r(4, 5), 1), [], []),
    ("rsub-weight", functools.partial(torch.rsub, alpha=3), (r(4, 5), r(3, 1, 5)), [], [1]),
    ("matmul-weight", torch.matmul, (r(2, 4, 5), r(5, 3)), [1], []),
    ("matmul-vector", torch.matmul, (r(2, 4, 5), r(5)), [1], []),
    ("outer-weight", torch.outer, (r(4), r(5)), [1], []),
    ("std", torch.std, (r(4, 5), 0), [], []),
    ("std-biased", torch.std, (r(4, 5, 3), (0, -1), False, True), [], []),
    ("std-whole", functools.partial(torch.std, correction=2), (r(4, 5),), [], []),
    ("diagonal", torch.diagonal, (r(4, 5, 3), 1, -1, 0), [], []),
    ("repeat", torch.Tensor.repeat, (r(4, 1, 2), 2, 3, 5, 1), [], []),
    ("norm", torch.linalg.norm, (r(4, 5), None, -1), [], []),
    ("norm-whole", torch.linalg.norm, (r(4, 5),), [], []),
    ("pow-3", torch.pow, (r(4, 5), 3), [], []),
    ("pow-1", torch.pow, (r(4, 5) * torch.tensor([0.0, 1, 1, 1, 1]), 1), [], []),
    ("pow-half", torch.pow, (r(4, 5).exp(), -0.5), [], []),
    ("add-number", torch.add, (r(4, 5), -2.5), [], []),
    ("add-weight", functools.partial(torch.add, alpha=3), (r(4, 5), r(3, 1, 5)), [], [1]),
    ("sub-weight", torch.sub, (r(4, 1), r(5)), [], [1]),
    ("mul-number", torch.mul, (r(4, 5), -2.5), [], []),
    ("mul-weight", torch.mul, (r(4, 1), r(3, 1, 5)), [1], []),
    ("div-number", torch.div, (r(4, 5), -2.5), [], []),
    ("div-constant", torch.div, (r(4, 1), r(5).exp()), [], []),
    ("reshape", torch.reshape, (r(4, 6), (2, -1, 3)), [], []),
    ("unsqueeze", torch.unsqueeze, (r(4, 6), 1), [], []),
    ("transpose", torch.transpose, (r(4, 6, 2), 0, -1), [], []),
    ("permute", torch.permute, (r(4, 6, 2), (1, -1, 0)), [], []),
    ("expand", torch.Tensor.expand, (r(4, 1), 3, -1, 2), [], []),
    ("neg", torch.neg, (r(4, 5),), [], []),
    ("sum", torch.sum, (r(4, 5),), [], []),
    ("sum-dims", torch.sum, (r(4, 5, 2), (0, -1)), [], []),
    ("mean-kept", torch.mean, (r(4, 5, 2), 1, True), [], []),
    ("slice", torch.Tensor.__getitem__, (r(4, 5), (slice(1, 3), None, -1)), [], []),
    ("length", torch.linalg.vector_norm, (r(4, 5), 2, 1), [], []),
    ("length-kept", torch.linalg.vector_norm, (r(4, 5, 2), 2, (0, -1), True), [], []),
    ("length-whole", torch.linalg.vector_norm, (r(4, 5),), [], []),
    ("rows", torch.Tensor.__getitem__, (r(4, 5), torch.tensor([0, 3, -1, 0, 2])), [], []),
    ("index-select", torch.index_select, (r(4, 5), 1, torch.tensor([0, 3, 4, 0])), [], []),
    ("gather", torch.gather, (r(4, 5), 1, torch.tensor([[0, 3], [4, 0], [1, 1], [2, 2]])), [], []),
    ("gelu-tanh", functools.partial(F.gelu, approximate="tanh"), (3 * r(4, 5),), [], []),
    ("cross-entropy", torch._C._nn.cross_entropy_loss, (3 * r(4, 5), torch.tensor([0, 3, 4, 0]), None, 1), [], []),
    (
        "cross-entropy-ignored",
        torch._C._nn.cross_entropy_loss,
        (r(4, 5), torch.tensor([0, -100, 4, 0]), None, 1),
        [],
        [],
    ),
]
EACH = pytest.mark.parametrize(("func", "args", "weights", "added"), [g[1:] for g in GRID], ids=[g[0] for g in GRID])


@EACH
def test_push_is_the_jacobian(func, args, weights, added):
    check_push_is_the_jacobian(func, args)


@EACH
def test_pull_is_its_transpose(func, args, weights, added):
    check_pull_is_its_transpose(func, args)


@EACH
def test_curve_is_the_derivative_of_the_jacobian(func, args, weights, added):
    check_curve_is_the_derivative_of_the_jacobian(func, args, weights, added)


@EACH
def test_weight_gradients(func, args, weights, added):
    u, m = made(func, args)
    d, t = torch.randn_like(u), torch.randn_like(args[0])
    leaves = [z.clone().requires_grad_() if i in (0, *weights, *added) else z for i, z in enumerate(args)]
    out = func(*leaves)
    wanted = [leaves[i] for i in (*weights, *added)]
    back = torch.autograd.grad(out, wanted, d, retain_graph=True) if wanted else []
    (d_a,) = torch.autograd.grad(out, leaves[0], d, create_graph=True)
    third = torch.autograd.grad((d_a * t).sum(), [leaves[i] for i in weights]) if weights else []
    for i, b, s in zip(weights, back, third, strict=False):
        product = m.grad[args[i]]
        torch.testing.assert_close(product(d, m.signal), b)
        if tapped(func, args):
            torch.testing.assert_close(m.third[args[i]](d_a.detach(), t), s)
            continue
        torch.testing.assert_close(product(d, m.tangent(t)), s)
        mix = torch.lerp(m.tangent(t), m.signal, 0.3)
        torch.testing.assert_close(product(d, mix), 0.3 * b + 0.7 * s)
    for i, b in zip(added, back[len(weights) :], strict=True):
        torch.testing.assert_close(m.add[args[i]](d), b)


def test_attention_push():
    q, k, v = r(2, 3, 4), r(2, 5, 4), r(2, 5, 6)
    t = [torch.randn_like(z) for z in (q, k, v)]
    for kwargs in ({}, {"scale": 0.3}, {"attn_mask": r(3, 5)}, {"attn_mask": r(3, 5) > -1}, {"is_causal": True}):
        m = rule_for(F.scaled_dot_product_attention).make(v[:, :3], q, k, v, **kwargs)
        for present in ((0, 1, 2), (0,), (1,), (2,)):
            given = [s if i in present else None for i, s in enumerate(t)]
            h = 1e-6
            ends = [
                F.scaled_dot_product_attention(
                    *(z if s is None else z + e * h * s for z, s in zip((q, k, v), given, strict=True)), **kwargs
                )
                for e in (1, -1)
            ]
            torch.testing.assert_close(m.push(*given), (ends[0] - ends[1]) / (2 * h), rtol=1e-6, atol=1e-8)


SEVERAL = [  # functions of two activations, as functions of them alone, with their places in the call
    ("add", torch.add, lambda a, b: (a, b), (r(4, 5), r(4, 5)), (0, 1)),
    ("sub-broadcast", torch.sub, lambda a, b: (a, b), (r(4, 1), r(3, 1, 5)), (0, 1)),
    ("div", torch.div, lambda a, b: (a, b), (r(4, 5), r(4, 5).exp()), (0, 1)),
    ("div-broadcast", torch.div, lambda a, b: (a, b), (r(4, 1), r(3, 1, 5).exp()), (0, 1)),
    ("mul", torch.mul, lambda a, b: (a, b), (r(4, 5), r(4, 5)), (0, 1)),
    ("mul-broadcast", torch.mul, lambda a, b: (a, b), (r(4, 1), r(3, 1, 5)), (0, 1)),
    ("cat", torch.cat, lambda a, b: ([a, b], 1), (r(4, 5), r(4, 2)), (0, 1)),
    ("stack", torch.stack, lambda a, b: ([a, b], -1), (r(4, 5), r(4, 5)), (0, 1)),
    ("where", torch.where, lambda a, b: (WHERE, a, b), (r(4, 5), r(5)), (1, 2)),
    ("matmul", torch.matmul, lambda a, b: (a, b), (r(2, 1, 4, 5), r(3, 5, 2)), (0, 1)),
    ("bmm", torch.bmm, lambda a, b: (a, b), (r(2, 4, 5), r(2, 5, 3)), (0, 1)),
    ("outer", torch.outer, lambda a, b: (a, b), (r(4), r(3)), (0, 1)),
    ("einsum", torch.einsum, lambda a, b: ("nij,jk->kn", a, b), (r(2, 3, 4), r(4, 5)), (1, 2)),
    ("rsub", torch.rsub, lambda a, b: (a, b), (r(4, 1), r(3, 1, 5)), (0, 1)),
    (
        "scatter-sum",
        torch.scatter_reduce,
        lambda a, b: (a, 1, INDEX.expand(4, 6), b, "sum"),
        (r(4, 5), r(4, 6)),
        (0, 3),
    ),
    ("index-add", torch.index_add, lambda a, b: (a, 1, INDEX, b), (r(4, 5), r(4, 6)), (0, 3)),
    ("scatter-add", torch.scatter_add, lambda a, b: (a, 1, INDEX.expand(4, 6), b), (r(4, 5), r(4, 6)), (0, 3)),
]
INDEX = torch.tensor([0, 3, 3, 1, 0, 4])
WHERE = torch.tensor([True, False, False, True, True])


@pytest.mark.parametrize("present", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize(("func", "call", "args", "places"), [g[1:] for g in SEVERAL], ids=[g[0] for g in SEVERAL])
def test_rules_of_two_activations(func, call, args, places, present):
    """Tangent, transpose and curvature against double backward; an argument that is not present is a constant."""
    leaves = [z.clone().requires_grad_() for z in args]
    u = func(*call(*leaves))
    d, e = torch.randn_like(u), torch.randn_like(u)
    t = [torch.randn_like(z) if i in present else None for i, z in enumerate(args)]
    active = {"active": places} if rule_for(func).takes_active else {}
    m = rule_for(func).make(u.detach(), *call(*args), **active)
    by_place = [None] * rule_for(func).arity
    for place, s in zip(places, t, strict=True):
        by_place[place] = s
    error = d.clone().requires_grad_()
    back = torch.autograd.grad(u, leaves, error, create_graph=True)
    phi = sum((g * s).sum() for g, s in zip(back, t, strict=True) if s is not None)
    tangent, *curved = torch.autograd.grad(phi, [error, *leaves], retain_graph=True, allow_unused=True)
    torch.testing.assert_close(m.push(*by_place), tangent)
    pulled = m.bend([e], [d], by_place)
    for place, g, c in zip(places, torch.autograd.grad(u, leaves, e), curved, strict=True):
        torch.testing.assert_close(pulled[place], g if c is None else g + c)


def test_a_length_of_zero_has_derivative_zero():
    m = rule_for(torch.linalg.vector_norm).make(r(2), torch.zeros(2, 3).double(), 2, 1)
    for z in (m.push(r(2, 3)), m.pull(r(2)), m.curve(r(2), r(2, 3))):
        assert not z.any()


def test_rules_step_aside_for_calls_they_do_not_know():
    conv = rule_for(torch.conv2d).make
    assert conv(r(4, 4, 4), r(3, 4, 4), r(4, 3, 3, 3)) is None  # one sample without a batch dimension
    assert conv(r(2, 4, 4, 4), r(2, 3, 4, 4), r(4, 3, 2, 2), None, 1, "same") is None  # padded more on one side
    assert (
        rule_for(F.scaled_dot_product_attention).make(r(2, 3, 4), r(2, 3, 4), r(2, 3, 4), r(2, 3, 4), dropout_p=0.1)
        is None
    )
    assert rule_for(torch.pow).make(r(4), r(4), r(4)) is None  # a tensor of exponents
    assert rule_for(torch.linalg.vector_norm).make(r(4), r(4, 3), 1, 1) is None
    assert rule_for(torch.Tensor.__getitem__).make(r(4), r(4, 3), (slice(None), [0, 1])) is None
    assert rule_for(torch.scatter_add).make(r(4), r(4), 0, torch.tensor([0, 1]), r(3)) is None  # reads a part of src
    assert rule_for(torch.linalg.norm).make(r(), r(4, 3), 2) is None  # of a matrix
    assert rule_for(torch.scatter_reduce).make(r(4), r(4), 0, torch.tensor([0]), r(1), "prod") is None
    assert rule_for(torch.einsum).make(r(3), "...i->i", r(2, 3)) is None
    assert rule_for(torch.erf) is None


def test_the_old_name_of_linearization():
    with pytest.warns(DeprecationWarning, match="threepass.Map is now threepass.Linearization"):
        assert threepass.Map is Linearization
    assert "Map" not in threepass.__all__


def test_names():
    class Own(torch.autograd.Function):
        pass

    assert key_of(Own.apply) is Own
    assert name_of(Own.apply) == "Own"
    assert name_of(torch.ops.aten.mul.Tensor) == "aten.mul"
    assert name_of(torch.Tensor.T.__get__) == "Tensor.T"
    assert name_of(nn.functional.linear) == "linear"


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_a_linear_layer_of_a_transposed_batch_is_one_product(mode, by_name):
    """In every pass: neither its activation nor its error nor its tangent is multiplied slice by slice."""

    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(5, 6).double(), nn.Linear(6, 3).double()

        def forward(self, x):
            z = self.first(x).tanh().transpose(0, 1)
            bias = {"bias": self.last.bias} if by_name else {}
            args = (self.last.weight,) if by_name else (self.last.weight, self.last.bias)
            return F.linear(z, *args, **bias).transpose(0, 1).mean(1)

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    model, x, y = Transposed(), torch.randn(4, 7, 5).double(), torch.randint(3, (4,))
    names: list[str] = []
    with Products():
        r = threepass.three_pass(model, F.cross_entropy, x, y, mode=mode, separate=True)
    assert not [name for name in names if "bmm" in name]
    assert_close(r.backprop_grads, plain_grads(model, F.cross_entropy, x, y), 1e-12)
    straight = nn.Sequential(model.first, nn.Tanh(), model.last)
    expected = threepass.three_pass(
        straight, lambda u, y: F.cross_entropy(u.mean(1), y), x, y, mode=mode, separate=True
    ).third_grads
    renamed = {n.replace("0.", "first.").replace("2.", "last."): g for n, g in expected.items()}
    assert_close(r.third_grads, renamed, 1e-12)


NUMBER = {  # calls with a number that multiplies an argument without a tangent
    "addcmul": lambda a, c: torch.addcmul(c, a, c, value=2.0),
    "addcdiv": lambda a, c: torch.addcdiv(c, a, c.exp(), value=2.0),
    "add_": lambda a, c: a.add_(c, alpha=2.0),
    "addmm": lambda a, c: torch.addmm(c, a, c, beta=0.5),
    "addmm, deprecated": lambda a, c: torch.addmm(0.5, c, 2.0, a, c),
    "addbmm": lambda a, c: torch.addbmm(c, a[None], c[None], beta=0.5),
    "baddbmm": lambda a, c: torch.baddbmm(c[None], a[None], c[None], beta=0.5)[0],
    "addmv": lambda a, c: torch.addmv(c[0], a, c[0], beta=0.5) * a,
    "addr": lambda a, c: torch.addr(c, a[0], c[0], beta=0.5),
}


@pytest.mark.parametrize("name", NUMBER)
@pytest.mark.filterwarnings("ignore:This overload of addmm is deprecated")
def test_numbers_that_multiply_constants_under_a_dispatch_mode(name, graph_only):
    """PyTorch's forward-mode AD ends the process there, if an argument has no tangent."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
            self.register_buffer("c", torch.randn(4, 4))

        def forward(self, x):
            return self.head(torch.tanh(NUMBER[name](self.a(x), self.c)))

    torch.manual_seed(0)
    model, x, y = Net().double(), r(4, 4), torch.randint(3, (4,))
    expected = threepass.three_pass(model, F.cross_entropy, x, y)
    with FlopCounterMode(display=False):
        assert_close(threepass.three_pass(model, F.cross_entropy, x, y).grads, expected.grads, 1e-13)
    step = threepass.ThreePass(model, F.cross_entropy, compile="require")
    assert_close(step(x, y).grads, expected.grads, 1e-12)


class StridedPointwise(TorchDispatchMode):
    """Counts weight gradients of 1 x 1 convolutions with a stride, for which oneDNN may write outside its memory."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution_backward.default and args[10][1]:
            self.calls += args[2].shape[2:].numel() == 1 and max(args[4]) > 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("shape", [(5, 6), (7,), (4, 3, 5)], ids=str)
def test_strided_pointwise_convolutions_of_few_channels_avoid_onednns_gradient(shape, mode):
    conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(shape)]
    torch.manual_seed(0)
    model = nn.Sequential(conv(3, 4, 1, stride=2), nn.GELU(), conv(4, 6, 1, stride=(1, 2, 2)[: len(shape)], groups=2))
    x = torch.randn(2, 3, *shape)
    if len(shape) == 2:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)

    def loss_fn(output, _):
        return output.square().mean()

    with StridedPointwise() as counter:
        got = threepass.three_pass(model, loss_fn, x, None, mode=mode, separate=True)
    assert counter.calls == 0
    expected = threepass.three_pass(model.double(), loss_fn, x.double(), None, mode=mode, separate=True)
    assert_close(got.third_grads, expected.third_grads, 1e-4)
    assert_close(got.backprop_grads, expected.backprop_grads, 1e-5)
