"""TorchScript is recorded operation by operation, and gives double backward's gradients."""

import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import threepass
from threepass._torch_compat import SCRIPT_DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Rates(nn.Module):
    """Branches, loops, lists, dicts, tuples, dtypes, optional arguments, a buffer that is replaced, and a submodule."""

    def __init__(self):
        super().__init__()
        self.weight, self.hidden = nn.Parameter(torch.randn(4, 3)), nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: Tensor, edges: Tensor, scale: float = 2.0, shift: Tensor | None = None) -> tuple[Tensor, int]:
        terms = [torch.tanh(self.hidden(x))]
        for i in range(2):
            terms.append(terms[i].sin() * scale / (i + 1))
        named = {"a": terms[0], "b": terms[-1]}
        z = torch.einsum("ni,ji->nj", named["a"] + named["b"], self.weight)
        z = torch.tensordot(z, self.weight, dims=([1], [0]))
        if shift is not None:
            z = z - shift
        elif x.dtype == torch.float64:
            z = z + 1
        for layer in self.layers:
            z = F.silu(layer(z)) + z[:, 1:2] * z[..., -1:]
        out = torch.zeros([int(edges.max()) + 1, z.shape[1]], dtype=z.dtype, device=z.device)
        out = out.index_add(0, edges, z.to(torch.float64)[torch.arange(z.size(0))])
        self.calls = self.calls + 1
        high, _ = out.max(dim=1, keepdim=True)
        out[:, 0] = out[:, 1] + 1.0
        assert out.dim() == 2
        return out.reshape(-1, 3) * high.sum(dim=0), out.shape[0]


class Net(nn.Module):
    def __init__(self, inner, **given):
        super().__init__()
        self.first, self.inner, self.last, self.given = nn.Linear(3, 3), inner, nn.Linear(3, 1), given

    def forward(self, x):
        out, rows = self.inner(self.first(x), torch.tensor([0, 2, 1, 0, 2]), **self.given)
        return self.last(out) * rows


def loss(output, g, y):
    return output.square().mean() + (g**3).sum()


def by_double_backward(model, x):
    x = x.clone().requires_grad_()
    output = model(x)
    (g,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return torch.autograd.grad(loss(output, g, None), list(model.parameters()))


def agrees(model, x):
    """The operations as `coverage` lists them."""
    grads = threepass.gradient_step(model, loss, x).grads
    for (name, _), expected in zip(model.named_parameters(), by_double_backward(model, x), strict=True):
        torch.testing.assert_close(grads[name], expected, rtol=1e-11, atol=1e-13, msg=name)
    report = threepass.coverage(model, x)
    assert not report.unsupported
    return {row.operation: row.rule for row in report}


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(5, 3, dtype=torch.float64)


@pytest.mark.parametrize("given", [{}, {"scale": 3}, {"shift": torch.tensor(0.5, dtype=torch.float64)}], ids=str)
def test_a_scripted_module(x, given):
    plain = Net(Rates(), **given).double()
    model = Net(torch.jit.script(plain.inner), **given).double()
    model.load_state_dict(plain.state_dict())
    operations = agrees(model, x)
    assert operations["linear"] == operations["tensordot"] == operations["einsum"] == "fast"
    ours, theirs = (threepass.gradient_step(net, loss, x).grads for net in (model, plain))
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-12, atol=1e-14)


def test_a_model_that_is_scripted_as_a_whole_and_loaded_from_a_file(x):
    whole = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 1)).double())
    agrees(whole, x)
    file = io.BytesIO()
    torch.jit.save(whole, file)
    file.seek(0)
    agrees(torch.jit.load(file), x)


def test_a_traced_module_and_a_traced_function(x):
    body = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 3)).double()

    def pairs(z):
        return (z[:, None] - z[None]).flatten(0, 1).square().sum(1, keepdim=True).add(1e-3).sqrt().expand(-1, 3)

    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.pairs = torch.jit.trace(body, x), torch.jit.trace(pairs, x)

        def forward(self, x):
            return self.pairs(self.body(x))

    agrees(Pairs(), x)


def test_buffers_of_a_scripted_module_advance_as_in_one_call(x):
    model = Net(torch.jit.script(Rates())).double()
    threepass.gradient_step(model, loss, x)
    assert model.inner.calls == 1
    threepass.coverage(model, x)
    assert model.inner.calls == 1


def test_errors_of_a_scripted_module_are_its_own(x):
    model = Net(torch.jit.script(Rates()), shift=torch.zeros(2, dtype=torch.float64)).double()
    with pytest.raises(RuntimeError, match="must match the size"):
        threepass.gradient_step(model, loss, x)
    with pytest.raises(RuntimeError, match=r"Unknown keyword argument 'unknown'"):
        threepass.gradient_step(Net(torch.jit.script(Rates()), unknown=1).double(), loss, x)


def test_dtypes_have_the_numbers_of_torchscript():
    @torch.jit.script
    def number_of(z: Tensor) -> int:
        return z.dtype

    rare = (torch.qint8, torch.quint8, torch.qint32, torch.complex32)
    for number, dtype in enumerate(SCRIPT_DTYPES):
        assert dtype in rare or number_of(torch.empty(0, dtype=dtype)) == number


class Python(nn.Module):
    """Calls Python code that is not compiled."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)

    def forward(self, x, edges):
        return self.python(self.body(x)) * half(x), 1

    @torch.jit.ignore
    def python(self, x: Tensor) -> Tensor:
        return x.sin()


@torch.jit.ignore
def half(x: Tensor) -> Tensor:
    return 0.5 * x


def test_python_code_inside(x):
    agrees(Net(torch.jit.script(Python())).double(), x)


class InAThread(nn.Module):
    def forward(self, x, edges):
        return torch.jit.wait(torch.jit.fork(torch.sin, x)), 1


def test_a_graph_that_cannot_be_translated_is_refused(x):
    with pytest.raises(threepass.UnsupportedError, match=r"last: linear: one of its arguments .*TorchScript"):
        threepass.gradient_step(Net(torch.jit.script(InAThread())).double(), loss, x)


class Distances(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        half = x[: x.shape[0] // 2]
        return (half[:, None] - x[None]).square().sum(-1, keepdim=True).reshape([-1, 1]).add(1.0).sqrt()


def test_captured_steps_with_symbols_for_sizes():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 3), torch.jit.script(Distances()), nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)
    ).double()
    captured = threepass.GradientStep(model, loss, compile="trace")
    for rows in (6, 8, 8, 10, 4):
        x = torch.randn(rows, 3, dtype=torch.float64)
        r, expected = captured(x), threepass.gradient_step(model, loss, x)
        for name, grad in expected.grads.items():
            torch.testing.assert_close(r.grads[name], grad, rtol=1e-10, atol=1e-13)
    assert len(captured.compiled.programs) == 2
