"""docs/engine.md: the small engine computes what `three_pass` computes, and refuses what it cannot do."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import threepass

PAGE = Path(__file__).parents[1] / "docs" / "engine.md"
CODE = "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S))
pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")


class Block(nn.Module):
    """A DAG: a shortcut, norms, a bare parameter, and a weight that is computed from parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x):
        h = self.first(x)
        return self.head(h + F.gelu(self.inner(self.norm(h))) * self.scale)


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), (6,)


def cnn():
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, stride=2), nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)), (2, 10, 10)


def dag():
    return Block(), (6,)


@pytest.fixture(scope="module")
def engine():
    namespace: dict = {"__name__": "page"}
    exec(compile(CODE, str(PAGE), "exec"), namespace)
    return SimpleNamespace(**namespace)


def test_it_has_at_most_200_lines():
    assert len(CODE.splitlines()) <= 200


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("make", [mlp, cnn, dag])
def test_it_agrees_with_three_pass(engine, make, mode, alpha):
    torch.manual_seed(0)
    model, shape = make()
    model.double()
    x, y = torch.randn(5, *shape).double(), torch.randint(3, (5,))
    small = engine.three_pass(model, F.cross_entropy, x, y, alpha, mode)
    real = threepass.three_pass(model, F.cross_entropy, x, y, alpha=alpha, mode=mode)
    assert small.grads.keys() == real.grads.keys()
    for name, g in real.grads.items():
        assert (small.grads[name] - g).norm() <= 1e-12 * g.norm(), name
    for name in ("loss", "input_loss", "input_grad"):
        torch.testing.assert_close(getattr(small, name), getattr(real, name), rtol=1e-12, atol=0)


def test_the_modes_differ(engine):
    """Otherwise the test above would not tell one from the other."""
    torch.manual_seed(0)
    model, x, y = mlp()[0].double(), torch.randn(5, 6).double(), torch.randint(3, (5,))
    paper, exact = (engine.three_pass(model, F.cross_entropy, x, y, 0.0, mode).grads for mode in ("paper", "exact"))
    assert (paper["0.weight"] - exact["0.weight"]).norm() > 1e-2 * exact["0.weight"].norm()


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Dropout(), "draws random numbers"),
        (nn.ReLU(inplace=True), "writes to its arguments"),
        (lambda h: torch.cat([h, h], 1)[:, :3], "takes a list of tensors"),
        (lambda h: h.unbind(1)[0], "returns several tensors"),
    ],
)
def test_it_refuses_what_it_cannot_do(engine, layer, reason):
    class Net(nn.Linear):
        def forward(self, x):
            return layer(super().forward(x))

    with pytest.raises(NotImplementedError, match=reason):
        engine.three_pass(Net(6, 3), lambda u, y: u.square().mean(), torch.randn(5, 6), None)


def test_a_loss_without_the_input_is_an_error(engine):
    model = nn.Linear(6, 3)
    with pytest.raises(ValueError, match="does not depend on x"):
        engine.three_pass(model, lambda u, y: model.weight.sum(), torch.randn(5, 6), None)
