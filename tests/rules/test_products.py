"""Einsum and matrix products have a fast rule and give double backward's gradients."""

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
