"""Models that once went wrong, or would where a tape is careless: against plain autograd, double backward and twins."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from close import assert_close, plain_grads
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import threepass

D = torch.float64
Y = torch.tensor([0, 1, 2, 3])


class Net(nn.Module):
    def __init__(self, forward, **parts):
        super().__init__()
        self.f = forward
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)
        self.to(D)

    def forward(self, x):
        return self.f(self, x)


def draw(*shape):
    torch.manual_seed(sum(shape))
    return torch.randn(shape, dtype=D)


def check(forward, shape, loss_fn=F.cross_entropy, **parts):
    """Every parameter that plain training reaches gets its gradient, and exact mode is double backward."""
    torch.manual_seed(0)
    model, x = Net(forward, **parts), draw(*shape)
    expected = plain_grads(model, loss_fn, x, Y)
    assert_close(threepass.three_pass(model, loss_fn, x, Y, alpha=1.0).grads, expected, 1e-12)
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(loss_fn(model(leaf * 1), Y), leaf, create_graph=True)
    names = list(expected)
    wanted = [dict(model.named_parameters())[n] for n in names]
    double = torch.autograd.grad(0.5 * dx.square().sum(), wanted, allow_unused=True)
    exact = threepass.three_pass(model, loss_fn, x, Y, mode="exact", separate=True).third_grads
    triples = zip(names, wanted, double, strict=True)
    assert_close(exact, {n: torch.zeros_like(p) if g is None else g for n, p, g in triples}, 1e-10)


def twins(one, other, shape, **parts):
    """Two ways to write the same net: the same third pass in paper mode."""
    torch.manual_seed(0)
    model, x = Net(one, **parts), draw(*shape)
    a = threepass.three_pass(model, F.cross_entropy, x, Y, separate=True)
    model.f = other
    b = threepass.three_pass(model, F.cross_entropy, x, Y, separate=True)
    assert_close(a.third_grads, b.third_grads, 1e-12)
    assert_close(a.backprop_grads, b.backprop_grads, 1e-12)


def _add(h, x):
    h += x
    return h


def _token(h, x):
    h[:, 0] = 1.0
    return h


@pytest.mark.parametrize(
    ("write", "twin"),
    [
        (lambda h, x: F.relu(h, inplace=True), lambda h, x: F.relu(h)),
        (_add, lambda h, x: h + x),
        (_token, lambda h, x: torch.cat([torch.ones_like(h[:, :1]), h[:, 1:]], 1)),
        (lambda h, x: h.mul_(2.0), lambda h, x: h * 2.0),
    ],
    ids=["relu", "add", "write", "mul"],
)
@pytest.mark.parametrize(
    "layer",
    [
        lambda: (nn.Linear(5, 5), lambda f, x: f(x)),
        lambda: (nn.LSTM(5, 5, batch_first=True), lambda f, x: f(x)[0]),
        lambda: (nn.GRU(5, 5, batch_first=True), lambda f, x: f(x)[0]),
        lambda: (nn.MultiheadAttention(5, 1, batch_first=True), lambda f, x: f(x, x, x)[0]),
        lambda: (nn.Conv1d(3, 3, 1), lambda f, x: f(x)),
        lambda: (nn.InstanceNorm1d(3, affine=True), lambda f, x: f(x)),
        lambda: (nn.Linear(5, 5), lambda f, x: torch.einsum("nti,oi->nto", x, f.weight) + f.bias),
    ],
    ids=["linear", "lstm", "gru", "attention", "conv", "instance-norm", "einsum"],
)
@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
def test_writing_in_place_to_what_a_layer_returns(layer, write, twin):
    torch.manual_seed(0)
    f, call = layer()
    parts = {"a": f, "head": nn.Linear(15, 4)}

    def forward(change):
        return lambda s, x: s.head(torch.tanh(change(call(s.a, x), x)).flatten(1))

    check(forward(write), (4, 3, 5), **parts)
    twins(forward(write), forward(twin), (4, 3, 5), **parts)


def _cell(s, x):
    h, c = s.a(x)
    h *= 0.5
    return s.head(h + c)


def _partly(s, x):
    o, (h, c) = s.a(x)
    o.relu_()
    return s.head(o.sum(1) + h[0] * c[0])


def _complex_write(s, x):
    h = s.a(x).view(4, 3, 2)
    torch.view_as_complex(h).mul_(1 + 2j)
    return s.head(torch.tanh(h.flatten(1)))


def _index_list(s, x):
    h, index = s.a(x), [0, 1]
    g = h[:, index]
    index[0] = 3
    return s.head(g * torch.tanh(h[:, index]))


def _shape_list(s, x):
    h, shape = s.a(x), [4, 6]
    g = h.reshape(shape)
    shape[1:] = [2, 3]
    return s.head(torch.sin(h.reshape(shape)).flatten(1) * g)


def _hidden_write(write):
    def forward(s, x):
        h = s.a(x)
        e = h.sigmoid()
        with torch.no_grad():
            write(h)
        return s.head(e)

    return forward


def _through_a_constant(s, x):
    b = torch.zeros(6, dtype=x.dtype)
    b[:2].copy_(s.w)
    return s.head(s.a(x) * b)


def _expanded(s, x):
    g = s.a(x).view(-1, 6, 1)
    g.sigmoid_()
    return s.head((x[..., None] * g.expand(-1, 6, 3)).flatten(1))


def _reshaped_in_place(s, x):
    h = s.a(x)
    v = h.view(-1)
    h.unsqueeze_(1)
    h.tanh_()
    return s.head(h.squeeze(1) + v.view(4, 6))


def _by_keyword(s, x):
    h = F.linear(weight=s.w, input=x)
    h = torch.relu(input=h).view(4, 3, 2)
    return s.head(F.scaled_dot_product_attention(h, value=torch.tanh(h), key=h * 2).flatten(1))


def _device_context(s, x):
    with torch.device("cpu"):
        return s.head(Double.apply(s.a(x)))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return 2 * a

    @staticmethod
    def backward(ctx, d):
        return 2 * d


LINEAR = {"a": nn.Linear(6, 6), "head": nn.Linear(6, 4)}


@pytest.mark.parametrize(
    ("forward", "parts"),
    [
        (_cell, {"a": nn.LSTMCell(6, 6), "head": nn.Linear(6, 4)}),
        (lambda s, x: s.head(torch.fft.rfft(s.a(x)).abs()), {"a": nn.Linear(6, 6), "head": nn.Linear(4, 4)}),
        (_complex_write, LINEAR),
        (_index_list, {"a": nn.Linear(6, 6), "head": nn.Linear(2, 4)}),
        (_shape_list, LINEAR),
        (_hidden_write(lambda h: h.mul_(2)), LINEAR),
        (_hidden_write(lambda h: h.detach().mul_(2)), LINEAR),
        (_through_a_constant, {**LINEAR, "w": draw(2)}),
        (_expanded, {"a": nn.Linear(6, 6), "head": nn.Linear(18, 4)}),
        (_reshaped_in_place, LINEAR),
        (_by_keyword, {"w": draw(6, 6), "head": nn.Linear(6, 4)}),
        (_device_context, LINEAR),
        (lambda s, x: s.head(x @ s.w @ s.w.T), {"w": draw(6, 6), "head": nn.Linear(6, 4)}),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_writes_views_and_keywords(forward, parts):
    check(forward, (4, 6), **parts)


def test_outputs_that_are_partly_written():
    check(_partly, (4, 3, 5), a=nn.LSTM(5, 5, batch_first=True), head=nn.Linear(5, 4))


def test_hooks_on_activations():
    def forward(s, x):
        h = s.a(x)
        h.register_hook(lambda d: d * 0.5)
        return s.head(torch.tanh(h))

    torch.manual_seed(0)
    model, x = Net(forward, **LINEAR), draw(4, 6)
    expected = plain_grads(model, F.cross_entropy, x, Y)
    assert_close(threepass.three_pass(model, F.cross_entropy, x, Y, alpha=1.0).grads, expected, 1e-12)
    with pytest.raises(threepass.UnsupportedError, match="hook on a tensor changes its gradient"):
        threepass.three_pass(model, F.cross_entropy, x, Y, mode="exact")
    seen = []

    def watching(s, x):
        h = s.a(x)
        h.register_hook(lambda d: seen.append(d.shape))
        return s.head(torch.tanh(h))

    check(watching, (4, 6), **LINEAR)
    assert seen


def test_hooks_of_computed_weights_fire_once():
    torch.manual_seed(0)
    model, x = Net(lambda s, x: s.head(x @ s.w.t()), w=draw(6, 6), head=nn.Linear(6, 4)), draw(4, 6)
    expected = plain_grads(model, F.cross_entropy, x, Y)["w"]
    model.w.register_hook(lambda g: g * 0.5)
    torch.testing.assert_close(threepass.three_pass(model, F.cross_entropy, x, Y, alpha=1.0).grads["w"], expected)
    threepass.ThreePass(model, F.cross_entropy, alpha=1.0)(x, Y)
    torch.testing.assert_close(model.w.grad, 0.5 * expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_hidden_code_at_the_end_or_writing_in_place_is_refused(monkeypatch):
    @torch.jit.script
    def focal(out: Tensor, y: Tensor) -> Tensor:
        p = torch.softmax(out, -1)
        return -((1 - p) ** 2 * torch.log(p)).gather(1, y[:, None]).mean()

    @torch.jit.script
    def doubled(z: Tensor) -> Tensor:
        return z.mul_(2.0)

    for scripted in (focal, doubled):
        del scripted._torchdynamo_inline  # the Python functions, which functions of a file do not have
    monkeypatch.setattr("threepass.tape.script.translated", lambda scripted: None)

    def writing(s, x):
        h = s.a(x)
        doubled(h)
        return s.head(torch.tanh(h))

    model, x = Net(lambda s, x: s.head(torch.tanh(s.a(x))), **LINEAR), draw(4, 6)
    for mode in ("paper", "exact"):
        with pytest.raises(threepass.UnsupportedError, match=r"loss_fn: its result .*was computed by"):
            threepass.three_pass(model, focal, x, Y, mode=mode)
        with pytest.raises(threepass.UnsupportedError, match="tanh: one of its arguments"):
            threepass.three_pass(Net(writing, **LINEAR), F.cross_entropy, x, Y, mode=mode)


def test_state_carried_from_call_to_call():
    """Truncated backpropagation through time: the old state is detached where it is used."""

    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head, self.state = nn.GRUCell(6, 5), nn.Linear(5, 4), None

        def forward(self, x):
            self.state = self.cell(x, None if self.state is None else self.state.detach())
            return self.head(self.state)

    model, plain, x = Stateful().to(D), Stateful().to(D), draw(4, 6)
    plain.load_state_dict(model.state_dict())
    for _ in range(3):
        expected = plain_grads(plain, F.cross_entropy, x, Y)
        assert_close(threepass.three_pass(model, F.cross_entropy, x, Y, alpha=1.0).grads, expected, 1e-12)


@pytest.mark.parametrize(
    "weight",
    [
        lambda w: torch.autograd.grad((w**3).sum(), w, create_graph=True)[0],
        lambda w: torch.autograd.grad((w**3).sum(), w)[0],
        torch.func.grad(lambda w: (w**3).sum()),
        torch.func.vmap(lambda w: w.sin() * w),
    ],
    ids=["autograd.grad", "detached", "func.grad", "vmap"],
)
def test_weights_that_are_computed_where_no_mode_sees_it(weight):
    check(lambda s, x: s.head(torch.tanh(s.a(x)) * weight(s.w)), (4, 6), w=draw(6), **LINEAR)


@pytest.mark.parametrize(
    "layer",
    [
        lambda w, a: a * w.type_as(a),
        lambda w, a: a * w.to(a),
        lambda w, a: a * w.to(torch.complex128).real.type_as(a),
        lambda w, a: a + w.expand_as(a),
        lambda w, a: a * w.expand(4, 6).mT.view_as(a.mT).mT,
        lambda w, a: torch.mul(*torch.broadcast_tensors(w, a)),
        lambda w, a: a * checkpoint(lambda a: a * w.type_as(a), a, use_reentrant=False),
    ],
    ids=["type_as", "to", "another dtype", "expand_as", "view_as", "one of several results", "in a checkpoint"],
)
def test_weights_that_depend_on_the_metadata_of_activations(layer):
    check(lambda s, x: s.head(layer(s.w, s.a(x).tanh())), (4, 6), w=draw(6), **LINEAR)


def test_a_model_that_sets_requires_grad_of_its_input():
    """As wav2vec2's feature encoder does in training, for activation checkpoints."""

    def forward(s, x):
        x.requires_grad = True
        return s.head(torch.tanh(s.a(x)))

    torch.manual_seed(0)
    model, x = Net(forward, **LINEAR), draw(4, 6)
    got = threepass.three_pass(model, F.cross_entropy, x, Y, mode="exact").grads
    assert not x.requires_grad
    model.f = lambda s, x: s.head(torch.tanh(s.a(x)))
    assert_close(got, threepass.three_pass(model, F.cross_entropy, x, Y, mode="exact").grads, 1e-14)


@pytest.mark.parametrize(
    "part",
    [
        torch.func.grad(lambda z: z.sin().sum()),
        lambda z: torch.func.vjp(torch.sin, z)[1](torch.ones_like(z))[0],
        lambda z: torch.func.jvp(torch.sin, (z,), (z,))[1],
    ],
    ids=["grad", "vjp", "jvp"],
)
def test_transforms_of_activations_are_refused_in_words(part):
    model = Net(lambda s, x: s.head(part(s.a(x))), **LINEAR)
    with pytest.raises(threepass.UnsupportedError, match=r"torch\.func|gradient_step"):
        threepass.three_pass(model, F.cross_entropy, draw(4, 6), Y)


@pytest.mark.parametrize(
    ("forward", "modes"),
    [
        (lambda s, x: s.head(torch.bernoulli(s.a(x).sigmoid()) + s.a(x) - s.a(x).detach()), ("paper", "exact")),
        (lambda s, x: s.head(torch.normal(s.a(x), 1.0) + s.a(x)), ("paper", "exact")),
        (lambda s, x: s.head(torch._standard_gamma(s.a(x).exp())), ("paper",)),  # PyTorch knows one derivative of it
    ],
)
def test_random_operations_draw_once(forward, modes):
    model, x = Net(forward, **LINEAR), draw(4, 6)
    for mode in modes:
        torch.manual_seed(3)
        model(x)
        after = torch.get_rng_state()
        torch.manual_seed(3)
        threepass.three_pass(model, F.cross_entropy, x, Y, mode=mode)
        assert torch.equal(torch.get_rng_state(), after)


def test_threads():
    models = [Net(lambda s, x: s.head(Double.apply(torch.tanh(s.a(x)))), **LINEAR) for _ in range(4)]
    x = draw(4, 6)
    expected = [threepass.three_pass(m, F.cross_entropy, x, Y, mode="exact").grads for m in models]
    original = torch.autograd.Function.__dict__["apply"]
    failed = []

    def work(i):
        try:
            for _ in range(5):
                got = threepass.three_pass(models[i], F.cross_entropy, x, Y, mode="exact").grads
                assert_close(got, expected[i], 1e-12)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed
    assert torch.autograd.Function.__dict__["apply"] is original


def test_buffers_that_cannot_be_written_to():
    model = Net(lambda s, x: s.head(s.a(x) * s.mask), **LINEAR)
    model.register_buffer("mask", torch.ones(1, 6, dtype=D).expand(4, 6))
    threepass.coverage(model, draw(4, 6))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        threepass.three_pass(model, F.cross_entropy, draw(4, 5), Y)


def test_sparse_embeddings():
    model = nn.Sequential(nn.Embedding(7, 6, sparse=True), nn.Flatten(), nn.Linear(18, 4)).to(D)
    dense = nn.Sequential(nn.Embedding(7, 6), nn.Flatten(), nn.Linear(18, 4)).to(D)
    dense.load_state_dict(model.state_dict())
    ids = torch.randint(0, 7, (4, 3))
    for options in ({"separate": True}, {"alpha": 0.3}, {"alpha": 0.3, "mode": "exact"}):
        a, b = (threepass.three_pass(m, F.cross_entropy, ids, Y, **options) for m in (model, dense))
        assert_close({n: g.to_dense() for n, g in a.grads.items()}, b.grads, 1e-12)


class Quantise(torch.autograd.Function):
    """A learned step size: piecewise in a, so that its backward depends on the weight through the mask alone."""

    @staticmethod
    def forward(ctx, a, w):
        ctx.save_for_backward(a, w)
        return (a / w).round().clamp(-2, 2) * w

    @staticmethod
    def backward(ctx, d):
        a, w = ctx.saved_tensors
        inside = (a / w).abs() < 2
        return d * inside, (d * torch.where(inside, (a / w).round() - a / w, (a / w).sign() * 2)).sum()


def nearest(m, x):
    """Vector quantisation; the backward of cdist cannot be differentiated, and does not have to be."""
    h = m.a(x)
    code = m.code[torch.cdist(h, m.code).argmin(1)]
    return m.head(h.tanh() + code)


def distances_of_views(m, x):
    h = m.a(x) * 1.0
    near = torch.cdist(h[:, :3], h[:, 3:]).diagonal().argsort()
    h[:, 0] = x[:, 1] ** 2
    return m.head(h[near])


@pytest.mark.parametrize("forward", [nearest, distances_of_views])
def test_operations_that_the_loss_does_not_depend_on_need_no_second_derivative(forward):
    def measured(output, y):
        torch.cdist(output, output).mean()  # a figure that nobody differentiates
        return F.cross_entropy(output, y)

    check(forward, (4, 6), measured, code=draw(3, 6), **LINEAR)
    model, x = Net(forward, code=draw(3, 6), **LINEAR), draw(4, 6)
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(leaf * 1).pow(2).sum(), leaf, create_graph=True)
    expected = torch.autograd.grad(g.pow(3).sum(), [model.a.weight, model.head.weight])
    r = threepass.gradient_step(model, lambda output, g, y: g.pow(3).sum(), x, value_fn=lambda z: z.pow(2).sum())
    names = ("a.weight", "head.weight")
    assert_close({n: r.grads[n] for n in names}, dict(zip(names, expected, strict=True)), 1e-10)


def test_quantisers_are_not_refused():
    model = Net(lambda s, x: s.head(Quantise.apply(s.a(x), s.w)), w=torch.tensor(0.5), **LINEAR)
    r = threepass.three_pass(model, F.cross_entropy, draw(4, 6), Y, separate=True)
    assert not r.third_grads["w"].any()
    assert r.third_grads["head.weight"].any()


@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_a_weight_in_a_narrower_format_than_its_signal(mode):
    """Its gradient has its format."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.scale, self.shift = (
                nn.Linear(6, 4),
                nn.Parameter(torch.rand(4)),
                nn.Parameter(torch.rand(4)),
            )

        def forward(self, x):
            return self.first(x).tanh().double() * self.scale + self.shift

    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(4, 6)
    r = threepass.three_pass(model, F.cross_entropy, x, Y, mode=mode, separate=True)
    wide = threepass.three_pass(copy.deepcopy(model).double(), F.cross_entropy, x.double(), Y, mode=mode)
    for name, p in model.named_parameters():
        assert r.grads[name].dtype == p.dtype
        torch.testing.assert_close(r.grads[name].double(), wide.grads[name], rtol=1e-4, atol=1e-6)


def test_functions_that_a_forward_defines_are_not_kept():
    seen: list[weakref.ref] = []

    def forward(s, x):
        class Doubled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, z):
                return 2 * z

            @staticmethod
            def backward(ctx, d):
                return 2 * d

        seen.append(weakref.ref(Doubled))
        return s.head(Doubled.apply(s.a(x)))

    threepass.three_pass(Net(forward, **LINEAR), F.cross_entropy, draw(4, 6), Y)
    gc.collect()
    assert seen[0]() is None
