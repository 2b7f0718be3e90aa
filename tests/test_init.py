"""init_: the moments of what is drawn, the equation that "balanced" solves, and where it has no solution."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from threepass import models
from threepass.init import NO_ROOT, SCHEMES, fans, init_, variance
from threepass.inspect.variances import predicted

CHAINS = {
    "one width": [(64, 64)] * 5,
    "widening": [(27, 144), (144, 144), (144, 288), (288, 576)],
    "narrowing": [(784, 512), (512, 10)],
    "mixed": [(100, 300), (300, 200), (200, 40), (40, 400), (400, 10)],
    "wide, then ever narrower": [(16, 160), *((160 - 10 * i, 150 - 10 * i) for i in range(14))],
}


def equation(n: float, m: float, v: float, product: float, g: float) -> tuple[float, float]:
    """Both sides of (init1), g = 1, or (init2), g = 2, as printed."""
    left = m * v / g - 1
    right = m * v / g * (n * v / g - 1) * product
    return left, right


@pytest.mark.parametrize(("nonlinearity", "g"), [("relu", 2), ("linear", 1), ("tanh", 1), ("sigmoid", 1)])
def test_variances_are_the_schemes(nonlinearity, g):
    chain = [(30, 50), (50, 20)]
    expected = {
        "xavier": [2 / 80, 2 / 70],
        "kaiming": [g / 30, g / 50],
        "geometric": [g / math.sqrt(1500), g / math.sqrt(1000)],
        "xavier-relu": [2 * g / 80, 2 * g / 70],
        "kaiming-out": [g / 50, g / 20],
    }
    for scheme, values in expected.items():
        assert [c.variance for c in variance(scheme, chain, nonlinearity)] == pytest.approx(values)
        assert all(c.scheme == scheme and not c.note for c in variance(scheme, chain, nonlinearity))


@pytest.mark.parametrize("g", [1, 2])
@pytest.mark.parametrize("name", CHAINS)
def test_balanced_solves_the_equation_or_says_so(name, g):
    product = 1.0
    for (n, m), found in zip(CHAINS[name], variance("balanced", CHAINS[name], ("", "linear", "relu")[g]), strict=True):
        if found.note:
            assert (found.scheme, found.note) == ("geometric", NO_ROOT)
            assert found.variance == pytest.approx(g / math.sqrt(n * m))
            assert m / n < 4 * product / (1 + product) ** 2  # no real root
        else:
            left, right = equation(n, m, found.variance, product, g)
            assert found.scheme == "balanced"
            assert left == pytest.approx(right, rel=1e-9, abs=1e-9)
        product *= n * m * found.variance**2 / g**2


def test_balanced_takes_the_nearer_root():
    """The first layer of 16 to 64 has the roots (1 +- sqrt(3/4)) / 8; of one width, both are the geometric value."""
    assert variance("balanced", [(16, 64)])[0].variance == pytest.approx((1 - math.sqrt(0.75)) / 8)
    for found in variance("balanced", [(64, 64)] * 20):
        assert found.variance == pytest.approx(2 / 64)
        assert not found.note


def test_where_balanced_has_no_solution():
    notes = {name: [bool(c.note) for c in variance("balanced", chain)] for name, chain in CHAINS.items()}
    assert not any(notes["one width"] + notes["widening"])
    assert all(notes["narrowing"])
    assert notes["mixed"][:3] == [False, False, True]  # P = .10 after the first: 4 P / (1 + P)^2 = .33, below 200 / 300
    assert not any(layer.note for layer in init_(models.plain(20), "balanced"))
    assert all(layer.note for layer in init_(models.mlp(784, 512, 10), "balanced"))


@pytest.mark.parametrize("nonlinearity", ["linear", "relu"])
def test_balanced_levels_equation_four(nonlinearity):
    """What it is made for: by the paper's equations Var[Delta v + nabla v] is the same in every layer."""
    chain = CHAINS["widening"]
    rows = predicted(chain, [c.variance for c in variance("balanced", chain, nonlinearity)], nonlinearity)
    for a, b in pairwise(r.both for r in rows):
        assert a == pytest.approx(b)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Linear(300, 400), (300, 400)),
        (nn.Conv1d(60, 90, 5), (300, 450)),
        (nn.Conv2d(32, 64, 3, groups=2), (144, 288)),
        (nn.Conv3d(8, 16, (1, 5, 3)), (120, 240)),
        (nn.ConvTranspose2d(64, 32, 3, groups=2), (288, 144)),
    ],
    ids=lambda z: type(z).__name__,
)
def test_moments(scheme, layer, size):
    layer.weight.requires_grad_(False)
    (row,) = init_(nn.Sequential(layer), scheme, generator=torch.Generator().manual_seed(0))
    assert (row.n_in, row.n_out) == fans(layer) == size
    w = layer.weight.double() / math.sqrt(row.variance)
    assert abs(w.mean()) < 4 / math.sqrt(w.numel())
    assert abs(w.square().mean() - 1) < 4 * math.sqrt(2 / w.numel())
    assert abs(w.pow(4).mean() - 3) < 4 * math.sqrt(96 / w.numel())  # normal
    assert not layer.bias.any()
    assert layer.weight.is_leaf
    assert not layer.weight.requires_grad


def test_the_generator_decides():
    draws = []
    for seed in (0, 0, 1):
        model, before = models.plain(8), torch.get_rng_state()
        init_(model, "geometric", generator=torch.Generator().manual_seed(seed))
        assert torch.equal(torch.get_rng_state(), before)
        draws.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_norms_and_embeddings_stay():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6))
    table = model[0].weight.detach().clone()
    report = init_(model, "kaiming")
    assert [layer.name for layer in report] == ["1"]
    assert len(report) == 1
    assert torch.equal(model[0].weight, table)
    assert model[2].weight.eq(1).all()
    assert len(init_(nn.ReLU(), "balanced")) == 0


def test_the_report_says_what_was_done():
    lines = str(init_(models.mlp(784, 512, 10), "balanced")).splitlines()
    assert len(lines) == 3
    assert "784" in lines[1]
    assert lines[1].endswith(NO_ROOT)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            nn.Linear(2, 2),
            ("orthogonal",),
            "scheme must be one of xavier, kaiming, geometric, balanced, xavier-relu, kaiming-out, got 'orthogonal'",
        ),
        (nn.Linear(2, 2), ("xavier", "gelu"), "nonlinearity must be one of relu, linear, tanh, sigmoid, got 'gelu'"),
        (nn.Sequential(nn.LazyLinear(2)), ("xavier",), "layer '0' has no size yet: run the model once"),
        (nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2))), ("xavier",), "'0' has a parametrized weight"),
    ],
    ids=["scheme", "nonlinearity", "lazy", "parametrized"],
)
def test_errors_are_one_line(model, options, message):
    with pytest.raises(ValueError, match=message) as error:
        init_(model, *options)
    assert "\n" not in str(error.value)


def test_only_layers_have_fans():
    with pytest.raises(TypeError, match="fan-out, got ReLU"):
        fans(nn.ReLU())
