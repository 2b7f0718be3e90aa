"""coverage and alignment: what a user sees of their own model."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import threepass
from threepass.inspect.alignment import Agreement

X, Y = torch.randn(6, 3, 8, 8), torch.tensor([0, 1, 2, 3, 0, 1])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.gamma = nn.Parameter(torch.ones(4, 1, 1))
        self.head = parametrizations.weight_norm(nn.Linear(144, 4))
        self.spare, self.frozen = nn.Linear(2, 2, bias=False), nn.Conv2d(4, 4, 1, bias=False).requires_grad_(False)

    def forward(self, x):
        return self.head(F.dropout(self.frozen(torch.hypot(self.norm(self.conv(x)), self.gamma))).flatten(1))


def test_coverage_names_every_parameter_and_changes_nothing():
    model = Net()
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    table = threepass.coverage(model, X)
    rows = {row.parameter: (row.operation, row.rule) for row in table}
    assert rows == {
        "conv.weight": ("conv2d", "fast"),
        "conv.bias": ("conv2d", "fast"),
        "norm.weight": ("batch_norm", "fast"),
        "norm.bias": ("batch_norm", "fast"),
        "gamma": ("hypot", "generic"),
        "head.bias": ("linear", "fast"),
        "head.parametrizations.weight.original0": ("linear", "fast"),
        "head.parametrizations.weight.original1": ("linear", "fast"),
        "spare.weight": ("-", "none"),
        "frozen.weight": ("-", "none"),
    }
    assert {row.parameter for row in table} == {n for n, _ in model.named_parameters()}
    why = {row.parameter: row.why for row in table}
    assert why["frozen.weight"] == "frozen"
    assert why["head.parametrizations.weight.original0"].endswith("then the chain rule")
    assert "parameter" in str(table).splitlines()[0]
    assert len(str(table).splitlines()) == len(table) + 1
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)


def test_coverage_of_a_token_model():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 2))
    rows = {row.parameter: row for row in threepass.coverage(model, torch.randint(0, 7, (5, 3)))}
    assert rows["0.weight"].operation == "(upstream of the input)"
    assert rows["2.weight"].rule == "fast"


def test_alignment_is_one_where_nothing_is_curved():
    """With a linear loss a ReLU net's third pass is the whole gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    found = threepass.alignment(model, lambda out, y: (out * y).sum() / 6, X.double(), torch.randn(6, 4).double())
    assert found.cosine == pytest.approx(1, abs=1e-12)
    assert found.norm_ratio == pytest.approx(1, abs=1e-12)
    assert found.by_parameter["1.weight"].cosine == pytest.approx(1, abs=1e-12)


def test_alignment_measures_and_changes_nothing():
    torch.manual_seed(0)
    model = Net()
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = threepass.alignment(model, F.cross_entropy, X, Y)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    terms = []
    for mode in ("paper", "exact"):
        fresh = copy.deepcopy(model)
        torch.set_rng_state(rng)
        with pytest.warns() if mode == "paper" else torch.enable_grad():
            terms.append(threepass.three_pass(fresh, F.cross_entropy, X, Y, mode=mode, separate=True).third_grads)
    paper, exact = (torch.cat([g.flatten() for g in t.values()]).double() for t in terms)
    assert found.cosine == pytest.approx(F.cosine_similarity(paper, exact, dim=0).item(), abs=1e-6)
    assert found.norm_ratio == pytest.approx((paper.norm() / exact.norm()).item(), rel=1e-6)
    assert found.by_parameter.keys() == terms[0].keys()
    weight, bias = (next(line for line in str(found).splitlines() if line.startswith(p)) for p in ("conv.w", "conv.b"))
    assert weight.split()[1] == f"{found.by_parameter['conv.weight'].cosine:+.3f}"
    assert not terms[0]["conv.bias"].any()
    assert bias.split() == ["conv.bias", "-", "0"]
    assert str(found).splitlines()[-1].startswith("-: paper mode's third pass is exactly zero for biases")
    assert "-: paper" not in str(threepass.Alignment(0.5, 1.0, {"w": Agreement(0.5, 1.0)}))
    assert abs(found.cosine) < 0.9
