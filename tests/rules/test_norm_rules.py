"""Norms by their own formulas: against the finite-difference oracle, double backward, and plain autograd."""

import copy

import oracle
import pytest
import torch
from close import assert_close, plain_grads, restored
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import threepass
from threepass.core.engine import Task, backward, forward
from threepass.core.options import Options
from threepass.core.plan import make_plan
from threepass.rules import generic
from threepass.rules import norm as norm_rules
from threepass.tape.record import Record

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
D = torch.float64


class TwoReaders(nn.Module):
    """What batch norm reads is also read upstream and downstream of it."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.head = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x):
        a = self.a(x)
        before = torch.tanh(a)
        u = self.norm(a)
        return self.head(before * u + a.square())


class Residual(nn.Module):
    """A block whose last scale is zero, then a ReLU of x + 0, with x zero where an earlier ReLU is closed."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.norm = (
            nn.Conv2d(2, 3, 3, padding=1),
            nn.Conv2d(3, 3, 3, padding=1),
            nn.BatchNorm2d(3),
        )
        self.head = nn.Linear(48, 4)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        return self.head(torch.relu(x + self.norm(self.conv(x))).flatten(1))


def net(conv, norm, *, width, act=nn.Tanh):
    return nn.Sequential(conv, norm, act(), nn.Flatten(), nn.Linear(width, 4))


def frozen(model, *names):
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def scaled(model, *values):
    with torch.no_grad():
        next(m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)).weight.copy_(
            torch.tensor(values)
        )
    return model


def flat(norm):
    return net(nn.Linear(5, 6), norm, width=6)


def image(norm):
    return net(nn.Conv2d(2, 3, 3), norm, width=12)


CASES = {
    "1d": (lambda: flat(nn.BatchNorm1d(6)), (6, 5)),
    "1d-sequence": (lambda: net(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), width=12), (5, 2, 5)),
    "2d": (lambda: image(nn.BatchNorm2d(3)), (5, 2, 4, 4)),
    "3d": (lambda: net(nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3), width=24), (5, 2, 3, 3, 3)),
    "channels-last": (lambda: image(nn.BatchNorm2d(3)).to(memory_format=torch.channels_last), (5, 2, 4, 4)),
    "large-eps": (lambda: image(nn.BatchNorm2d(3, eps=0.5)), (5, 2, 4, 4)),
    "no-affine": (lambda: image(nn.BatchNorm2d(3, affine=False)), (5, 2, 4, 4)),
    "no-statistics": (lambda: image(nn.BatchNorm2d(3, track_running_stats=False)), (5, 2, 4, 4)),
    "scale-frozen": (lambda: frozen(image(nn.BatchNorm2d(3)), "1.weight"), (5, 2, 4, 4)),
    "shift-frozen": (lambda: frozen(image(nn.BatchNorm2d(3)), "1.bias"), (5, 2, 4, 4)),
    "both-frozen": (lambda: frozen(image(nn.BatchNorm2d(3)), "1.weight", "1.bias"), (5, 2, 4, 4)),
    "zero-scale": (lambda: scaled(image(nn.BatchNorm2d(3)), 0.0, -0.7, 0.0), (5, 2, 4, 4)),
    "tiny-scale": (lambda: scaled(image(nn.BatchNorm2d(3)), 1e-12, -0.7, -1e-30), (5, 2, 4, 4)),
    "zero-scale-residual": (lambda: scaled(Residual(), 0.0, 0.0, 0.0), (5, 2, 4, 4)),
    "two-readers": (TwoReaders, (6, 5)),
    "two-norms": (lambda: flat(nn.Sequential(nn.BatchNorm1d(6), nn.BatchNorm1d(6))), (6, 5)),
    "norm-first": (lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 4)), (6, 5)),
    "shared-norm": (lambda: flat(nn.Sequential(s := nn.BatchNorm1d(6), nn.Tanh(), s)), (6, 5)),
    "layer-norm": (lambda: flat(nn.LayerNorm(6, eps=0.1)), (6, 5)),
    "layer-norm-scale-frozen": (lambda: frozen(flat(nn.LayerNorm(6)), "1.weight"), (6, 5)),
    "group-norm": (lambda: net(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4, eps=0.1), width=16), (5, 2, 4, 4)),
    "group-norm-plain": (lambda: net(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4, affine=False), width=16), (5, 2, 4, 4)),
    "instance-norm": (lambda: net(nn.Conv2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True), width=27), (5, 2, 4, 4)),
    "rms-norm": (lambda: flat(nn.RMSNorm(6, eps=0.1)), (6, 5)),
    "rms-norm-own-eps": (lambda: flat(nn.RMSNorm(6)), (6, 5)),
}
EACH = pytest.mark.parametrize("name", CASES)


def build(name):
    torch.manual_seed(len(name))
    make, shape = CASES[name]
    model = make().to(D)
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LayerNorm) and "scale" not in name:
            for p in m.parameters():
                nn.init.normal_(p)
    x = torch.randn(shape, dtype=D)
    return model, x, torch.randint(0, 4, (shape[0],))


def run(model, x, y, **options):
    with restored(model):
        return threepass.three_pass(model, F.cross_entropy, x, y, separate=True, **options)


def double_backward(model, x, y, names):
    leaf, wanted = x.clone().requires_grad_(), {n: model.get_parameter(n) for n in names}
    with restored(model):
        (dx,) = torch.autograd.grad(F.cross_entropy(model(leaf * 1), y), leaf, create_graph=True)
        grads = torch.autograd.grad(0.5 * dx.square().sum(), list(wanted.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(wanted.items(), grads, strict=True)}


@EACH
def test_paper(name):
    model, x, y = build(name)
    r = run(model, x, y)
    with restored(model):
        assert_close(r.backprop_grads, plain_grads(model, F.cross_entropy, x, y), 1e-12)
    with restored(model):
        expected = oracle.third_grads(model, F.cross_entropy, x, y)
    assert_close(r.third_grads, {n: expected[n] for n in r.third_grads}, 1e-6)


@EACH
def test_exact(name, monkeypatch):
    model, x, y = build(name)
    seen, derive = [], generic.derive
    monkeypatch.setattr(generic, "derive", lambda op, *a, **k: seen.append(op.name) or derive(op, *a, **k))
    r = run(model, x, y, mode="exact")
    assert_close(r.third_grads, double_backward(model, x, y, r.grads), 1e-10)
    assert not [n for n in seen if "norm" in n or n == "tanh"]  # no double backward


@EACH
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_statistics_move_once_and_the_output_is_the_models(name, mode):
    model, x, y = build(name)
    twin = copy.deepcopy(model)
    out = twin(x)
    r = threepass.three_pass(model, F.cross_entropy, x, y, mode=mode)
    assert torch.equal(r.output, out)
    for b, c in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(b, c)


@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_the_error_upstream_of_batch_norm_is_stored_once(mode):
    """The convolution's d is batch norm's; the error downstream of batch norm is not stored."""
    model, x, y = build("2d")
    tape = Record("cpu")
    _, loss = forward(Task(model, F.cross_entropy, x, y), tape, Options())
    conv, norm = list(tape.operations)[:2]
    tape.prune([tape.meta_of(loss)] if mode == "exact" else [])
    _, errors = backward(tape, make_plan(tape, Options(mode=mode), len(x)), loss)
    assert (conv.name, norm.name) == ("conv2d", "batch_norm")
    assert errors[conv].d[0].data_ptr() == errors[norm].d[0].data_ptr()
    assert [tuple(z.shape) for z in errors[norm].d] == [(5, 3, 2, 2)]
    assert [tuple(z.shape) for z in errors[norm].weight_grads] == [(3,), (3,)]


@pytest.mark.parametrize("affine", [True, False])
def test_without_weights_to_train_no_error_is_kept(affine):
    model, x, y = build("both-frozen" if affine else "no-affine")
    tape = Record("cpu")
    _, loss = forward(Task(model, F.cross_entropy, x, y), tape, Options())
    norm = tape.operations[1]
    tape.prune()
    assert norm not in backward(tape, make_plan(tape, Options(), len(x)), loss)[1]


@pytest.mark.parametrize("where", ["a", "u"])
def test_hooks_beside_batch_norm(where):
    """One that changes the error of a or of u: pass 2's gradients are plain training's, and pass 3 has that error."""

    class Hooked(nn.Module):
        def __init__(self, change):
            super().__init__()
            self.a, self.norm, self.head, self.change = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 4), change

        def forward(self, x):
            a = self.a(x)
            u = self.norm(a)
            {"a": a, "u": u}[where].register_hook(self.change)
            return self.head(torch.tanh(u))

    torch.manual_seed(0)
    model, x, y = Hooked(lambda d: d * 0.5).to(D), torch.randn(6, 5, dtype=D), torch.randint(0, 4, (6,))
    expected = plain_grads(model, F.cross_entropy, x, y)
    halved = run(model, x, y)
    assert_close(halved.backprop_grads, expected, 1e-12)
    with pytest.raises(threepass.UnsupportedError, match="hook on a tensor changes its gradient"):
        run(model, x, y, mode="exact")
    model.change = lambda d: None
    whole = run(model, x, y)
    assert whole.third_grads["norm.weight"].any()
    factor = 0.25 if where == "u" else 0.5  # t is halved, and upstream of the hook d too
    torch.testing.assert_close(halved.third_grads["norm.weight"], factor * whole.third_grads["norm.weight"])
    torch.testing.assert_close(halved.third_grads["a.weight"], 0.25 * whole.third_grads["a.weight"])
    looked = run(model, x, y, mode="exact")
    assert_close(looked.third_grads, double_backward(model, x, y, looked.grads), 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "cast"])
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_half_precision(dtype, autocast, mode):
    """Within a few of the format's roundings of float64; the norm's output has the format that it has by itself."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.SiLU(),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.weight, 0.5, 2)
    model, x, y = model.to(dtype).to(D), torch.randn(64, 3, 8, 8).to(dtype).to(D), torch.randint(0, 10, (64,))
    expected = run(model, x, y, mode=mode)
    low = model.float() if autocast else model.to(dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        got = run(low, x.float() if autocast else x.to(dtype), y, mode=mode)
    for name in ("1.weight", "4.weight", "0.weight", "3.weight"):
        for a, b in ((got.backprop_grads, expected.backprop_grads), (got.third_grads, expected.third_grads)):
            slope = (a[name].double() * b[name]).sum() / b[name].square().sum()
            assert abs(slope - 1) < 0.05, f"{name}: {slope:.3f}"
            assert (a[name] - b[name]).norm() < 0.1 * b[name].norm(), name


def test_float16_keeps_the_error_at_the_output():
    """It has no number tiny enough for a scale of zero, whose gradient is there all the same."""
    torch.manual_seed(0)
    model, x, y = scaled(image(nn.BatchNorm2d(3)), 0.0, 0.7, 0.0), torch.randn(5, 2, 4, 4), torch.randint(0, 4, (5,))
    model, x = model.half().to(D), x.half().to(D)
    expected = run(model, x, y).third_grads["1.weight"]
    got = run(model.half(), x.half(), y).third_grads["1.weight"]
    assert expected.all()
    assert (got.double() - expected).norm() < 0.03 * expected.norm()


def test_checkpointed_batch_norm():
    """A checkpoint recomputes batch norm in the backward pass, from the inputs that it saved."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Tanh())
    model = nn.Sequential(block, nn.Linear(6, 4)).to(D)
    x, y = torch.randn(6, 5, dtype=D), torch.randint(0, 4, (6,))
    expected = {mode: run(model, x, y, mode=mode) for mode in ("paper", "exact")}
    plain = block.forward
    block.forward = lambda z: torch.utils.checkpoint.checkpoint(plain, z, use_reentrant=False)
    for mode, r in expected.items():
        assert_close(run(model, x, y, mode=mode).third_grads, r.third_grads, 1e-12)


@pytest.mark.parametrize("kind", ["batch_norm", "layer_norm"])
@pytest.mark.parametrize("affine", [True, False])
def test_pytorchs_kernels_compute_the_formulas(kind, affine, monkeypatch):
    """In steps without a compiler they take the place of the formulas, which a compiled step has."""
    torch.manual_seed(0)
    a, d, t = (torch.randn(4, 3, 5, dtype=D) for _ in range(3))
    size = 3 if kind == "batch_norm" else 5
    weight, bias = (torch.randn(size, dtype=D) for _ in range(2)) if affine else (None, None)
    if affine:
        weight[0] = 0
    found = []
    for compiled in (False, True):
        monkeypatch.setattr(norm_rules, "is_for_compiler", lambda compiled=compiled: compiled)
        if kind == "batch_norm":
            lin = norm_rules.batch_norm(a, a, weight, bias, None, None, True, 0.1, 1e-5, True)
            extra = (torch.ones(3, dtype=D),)
        else:
            lin, extra = norm_rules.layer_norm(a, a, [5], weight, bias), ()
        s = lin.tangent(t)
        terms = [s, lin.push(s), lin.pull(d), lin.curve(d, t, *extra)]
        terms += [f(d, lin.signal) for f in lin.grad.values()] + [f(d) for f in lin.add.values()]
        found.append(terms + [f(d, s)[1:] for f in lin.third.values()])
    for native, formula in zip(*found, strict=True):
        torch.testing.assert_close(native, formula, rtol=1e-12, atol=1e-12)


class _AsOnAGpu(TorchDispatchMode):
    """CUDA's batch norm makes the scale's gradient like the scale: without a scale it fails, where a CPU's goes on."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.native_batch_norm_backward.default:
            weight, (_, of_scale, of_shift) = args[2], args[9]
            self.calls += 1
            assert weight is not None or not (of_scale or of_shift)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norms_backward_gets_a_scale_wherever_a_gpu_needs_one(mode, affine):
    model, x, y = (
        image(nn.BatchNorm2d(3, affine=affine)).double(),
        torch.randn(6, 2, 4, 4, dtype=D),
        torch.arange(6) % 4,
    )
    plain = threepass.three_pass(copy.deepcopy(model), F.cross_entropy, x, y, alpha=0.3, mode=mode)
    with _AsOnAGpu() as device:
        watched = threepass.three_pass(model, F.cross_entropy, x, y, alpha=0.3, mode=mode)
    assert device.calls > 1
    assert_close(watched.grads, plain.grads, 1e-12)
