"""Einsum, tensordot and matrix products have a fast rule and give double backward's gradients."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import threepass

# equation, shape of x, shapes of the weights; x is the first operand
EQUATIONS = [
    ("bij,bjk->bik", (2, 3, 4), [(2, 4, 5)]),
    ("nci,ij->ncj", (2, 3, 4), [(4, 5)]),
    ("ij,ij->i", (3, 4), [(3, 4)]),
    ("bhid,bhjd->bhij", (2, 3, 4, 5), [(2, 3, 6, 5)]),
    ("ni,nj->nij", (3, 4), [(3, 2)]),
    ("ni,oij,nj->no", (3, 4), [(5, 4, 2), (3, 2)]),
    ("ni,ij,jk,kl", (3, 4), [(4, 2), (2, 5), (5, 3)]),
    ("ii->i", (3, 3), []),
    ("iji->j", (3, 4, 3), []),
    ("iii,i->", (3, 3, 3), [(3,)]),
    ("ii,ij->j", (3, 3), [(3, 4)]),
    ("ij->", (3, 4), []),
    ("ij->ji", (3, 4), []),
    ("ij,kl->l", (3, 4), [(2, 5)]),
    ("...i,ij->...j", (2, 3, 4), [(4, 5)]),
    ("...ij,...jk->...ik", (2, 1, 3, 4), [(5, 4, 6)]),
    ("...i,j...->ij", (2, 4), [(3, 2)]),
    ("i...,i...", (3, 4), [(3, 4)]),
    (" a b , b A ", (3, 4), [(4, 2)]),
    ("ij,jk->ik", (3, 1), [(4, 2)]),
    ("ij,jk->ijk", (3, 4), [(1, 2)]),
]


class Einsum(nn.Module):
    """Weights and a layer upstream, or two activations, in one equation; then a curved function."""

    def __init__(self, equation, shape, weights, of_activations=False):
        super().__init__()
        self.equation, self.of_activations = equation, of_activations
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(s)) for s in weights])
        self.inner = nn.Linear(shape[-1], shape[-1])

    def forward(self, x):
        z = torch.tanh(self.inner(x))
        others = [w * z.mean() for w in self.weights] if self.of_activations else list(self.weights)
        return torch.sin(torch.einsum(self.equation, z, *others))


def loss(output, g, y):
    return (output**2).mean() + (g**3).sum()


def by_double_backward(model, x):
    x = x.clone().requires_grad_()
    output = model(x)
    (g,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return torch.autograd.grad(loss(output, g, None), list(model.parameters()))


def agrees(model, x):
    expected = by_double_backward(model, x)
    found = threepass.gradient_step(model, loss, x).grads
    for (name, _), g in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(found[name], g, rtol=1e-12, atol=1e-12 * float(g.abs().max()))


@pytest.mark.parametrize("of_activations", [False, True])
@pytest.mark.parametrize(("equation", "shape", "weights"), EQUATIONS, ids=[e for e, *_ in EQUATIONS])
def test_einsum(equation, shape, weights, of_activations):
    torch.manual_seed(0)
    model, x = Einsum(equation, shape, weights, of_activations).double(), torch.randn(shape).double()
    agrees(model, x)
    assert {row.rule for row in threepass.coverage(model, x)} == {"fast"}


@pytest.mark.parametrize(
    "call", [lambda a, w: torch.einsum("ni,ij->nj", [a, w]), lambda a, w: torch.einsum(a, [0, 1], w, [1, 2])]
)
def test_other_forms_of_the_call(call):
    class Net(Einsum):
        def forward(self, x):
            return torch.sin(call(torch.tanh(self.inner(x)), self.weights[0]))

    torch.manual_seed(0)
    model, x = Net("", (3, 4), [(4, 5)]).double(), torch.randn(3, 4).double()
    agrees(model, x)


@pytest.mark.parametrize(("equation", "shape"), [("ij,jk", (3, 4, 2)), ("ij->kk", (3, 4)), ("i1->i", (3, 4))])
def test_wrong_equations_have_torchs_own_error(equation, shape):
    model, x = Einsum(equation, shape, []).double(), torch.randn(shape).double()
    with pytest.raises(RuntimeError, match="einsum"):
        model(x)
    with pytest.raises(RuntimeError, match="einsum"):
        threepass.gradient_step(model, loss, x)


def test_operands_are_contracted_in_the_order_of_opt_einsum(monkeypatch):
    """As torch.einsum does where opt_einsum is installed."""
    asked = []

    def contract_path(equation, *operands, optimize):
        asked.append((equation, optimize))
        return [(1, 2), (0, 1)], None

    library = SimpleNamespace(contract_path=contract_path)
    backend = SimpleNamespace(enabled=True, is_available=lambda: True, strategy="auto", get_opt_einsum=lambda: library)
    monkeypatch.setattr("threepass.rules.product.opt_einsum", backend)
    torch.manual_seed(0)
    model, x = Einsum("ni,ij,jk->nk", (3, 4), [(4, 2), (2, 5)]).double(), torch.randn(3, 4).double()
    agrees(model, x)
    assert asked == [("ni,ij,jk->nk", "auto")]


class Tensordot(Einsum):
    """The same with the dimensions that are summed over in place of an equation."""

    def forward(self, x):
        z = torch.tanh(self.inner(x))
        (w,) = self.weights
        return torch.sin(torch.tensordot(z, w * z.mean() if self.of_activations else w, self.equation))


@pytest.mark.parametrize("of_activations", [False, True])
@pytest.mark.parametrize(
    ("dims", "shape", "weight"),
    [
        (1, (3, 2, 4), (4, 5)),
        (2, (3, 2, 4), (2, 4, 5)),
        (0, (3, 4), (2, 3)),
        (([2, 1], [0, 2]), (3, 2, 4), (4, 5, 2)),
        (([-1], [-2]), (3, 2, 4), (4, 2)),
        (([0, 1], [0, 1]), (3, 4), (3, 4)),
        (([1], [0]), (3, 1), (4, 5)),
        (([1], [0]), (3, 4), (1, 5)),
    ],
)
def test_tensordot(dims, shape, weight, of_activations):
    torch.manual_seed(0)
    model, x = Tensordot(dims, shape, [weight], of_activations).double(), torch.randn(shape).double()
    agrees(model, x)
    assert {row.rule for row in threepass.coverage(model, x)} == {"fast"}


@pytest.mark.parametrize("equation", ["ni,oij,nj->no", "...i,ij->...j"])
def test_captured(equation, graph_only):
    (shape, weights), *_ = [(shape, weights) for e, shape, weights in EQUATIONS if e == equation]
    torch.manual_seed(0)
    model, x = Einsum(equation, shape, weights).double(), torch.randn(shape).double()
    r = threepass.GradientStep(model, loss, compile="require")(x)
    for (name, _), g in zip(model.named_parameters(), by_double_backward(model, x), strict=True):
        torch.testing.assert_close(r.grads[name], g, rtol=1e-12, atol=1e-12 * float(g.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype):
    torch.manual_seed(0)
    model, x = Einsum("nci,ij->ncj", (2, 3, 4), [(4, 5)]), torch.randn(2, 3, 4)
    with torch.autocast("cpu", dtype):
        found = threepass.gradient_step(model, loss, x).grads
    expected = threepass.gradient_step(model, loss, x).grads
    for name, g in expected.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], g, rtol=0.1, atol=0.1 * float(g.abs().max()))
