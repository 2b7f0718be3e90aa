"""variances: against hand-written passes, and against the paper's equations for wide nets."""

import copy
import json
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import threepass
from threepass import models
from threepass.init import init_, variance
from threepass.inspect.variances import Row, Variances, predicted, variances
from threepass.study import init_study

FIELDS = ("v", "u", "pass2", "pass3", "both")


def random_error(u, y):
    """Its gradient, the error at the output, does not depend on the weights, as the equations assume."""
    return (u * y).mean()


def var(z):
    return z.var(correction=0).item()


def mean_table(sizes, activation, scheme, nonlinearity, draws=6, batch=128):
    torch.manual_seed(0)
    tables = []
    for _ in range(draws):
        model = models.mlp(*sizes, activation=activation)
        init_(model, scheme, nonlinearity)
        x, y = torch.randn(batch, sizes[0]), torch.randn(batch, sizes[-1])
        tables.append(variances(model, random_error, x, y))
    fields = (*FIELDS, "error")
    return [{q: sum(getattr(r, q) for r in rows) / draws for q in fields} for rows in zip(*tables, strict=True)]


def test_by_hand():
    """A sigmoid perceptron, section 3's recursions: Delta v = W^T Delta u, nabla v^{l+1} = f'(u) W nabla v."""
    torch.manual_seed(0)
    sizes = (5, 7, 6, 3)
    model = models.mlp(*sizes, activation="sigmoid").double()
    x, y = torch.randn(8, 5).double(), torch.randn(8, 3).double()
    weights, biases = [m.weight.detach() for m in model[1::2]], [m.bias.detach() for m in model[1::2]]
    v, u = [x], []
    for w, b in zip(weights, biases, strict=True):
        u.append(v[-1] @ w.T + b)
        v.append(torch.sigmoid(u[-1]))
    slopes = [z * (1 - z) for z in v[1:-1]]
    delta_u = [-(u[-1] - y) / 8]
    delta_v = [delta_u[0] @ weights[2]]
    for w, slope in zip(weights[1::-1], slopes[::-1], strict=True):
        delta_u.insert(0, slope * delta_v[0])
        delta_v.insert(0, delta_u[0] @ w)
    nabla = [-delta_v[0]]
    for w, slope in zip(weights, slopes, strict=False):
        nabla.append(slope * (nabla[-1] @ w.T))
    found = variances(model, lambda out, y: (out - y).square().sum() / 16, x, y)
    expected = [
        [var(z) for z in (v[i], u[i], delta_v[i], nabla[i], delta_v[i] + nabla[i], delta_u[i])] for i in range(3)
    ]
    assert [r.layer for r in found] == ["1", "3", "5"]
    for row, values in zip(found, expected, strict=True):
        assert [row.v, row.u, row.pass2, row.pass3, row.both, row.error] == pytest.approx(values, rel=1e-10, abs=1e-25)
    assert found[0].pass2 == found[0].pass3
    assert found[0].both == 0


def test_pass_3_is_the_engine_s():
    """In a layer after another the third gradient is d (x) t; with d known from the last layer's output, t is seen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1, bias=False)).double()
    x, y = torch.randn(1, 4).double(), torch.randn(1, 1).double()
    r = threepass.three_pass(model, random_error, x, y, separate=True)
    row = variances(model, random_error, x, y)[1]
    assert row.pass3 == pytest.approx(var(r.third_grads["2.weight"] / y), rel=1e-10)
    assert row.v == pytest.approx(var(r.backprop_grads["2.weight"] / y), rel=1e-10)


@pytest.mark.parametrize(("nonlinearity", "activation"), [("linear", nn.Identity), ("relu", nn.ReLU)])
@pytest.mark.parametrize("scheme", ["xavier", "kaiming", "geometric", "balanced"])
@pytest.mark.parametrize("sizes", [(512,) * 5, (192, 384, 512, 768), (768, 512, 384, 192)], ids=str)
def test_equations_of_wide_nets(sizes, scheme, nonlinearity, activation):
    """(eq1) and (eq2) hold; (eq3) and (eq4) do with the correlations that they leave out."""
    measured = mean_table(sizes, activation, scheme, nonlinearity, draws=3)
    chain = list(pairwise(sizes))
    weights = [c.variance for c in variance(scheme, chain, nonlinearity)]
    table = predicted(chain, weights, nonlinearity, 1.0, measured[-1]["error"], correlated=True)
    for i, (found, row) in enumerate(zip(measured, table, strict=True)):
        for q in (*FIELDS, "error"):
            assert found[q] == pytest.approx(getattr(row, q), rel=0.1, abs=1e-20), (i, q)


@pytest.mark.parametrize(("nonlinearity", "activation", "step"), [("linear", nn.Identity, 1), ("relu", nn.ReLU, 2)])
def test_what_equation_three_leaves_out(nonlinearity, activation, step):
    """nabla v^0 is made by the weights that it runs through: Var[nabla v^i] grows as 1 + i or 1 + 2 i; (eq3) has 1."""
    measured = mean_table((512,) * 6, activation, "geometric", nonlinearity)
    paper = predicted(
        [(512, 512)] * 5, [2 / 512 if step == 2 else 1 / 512] * 5, nonlinearity, 1.0, measured[-1]["error"]
    )
    for i, (found, row) in enumerate(zip(measured, paper, strict=True)):
        assert row.both == pytest.approx(2 * row.pass2)
        assert found["pass2"] == pytest.approx(row.pass2, rel=0.06)
        assert found["pass3"] / row.pass3 == pytest.approx(1 + step * i, rel=0.08)
        assert found["both"] / row.pass2 == pytest.approx(step * i, rel=0.08, abs=1e-12)


def test_predicted_is_the_paper_s_products():
    fans, w = [(3, 5), (5, 7), (7, 2)], [0.2, 0.3, 0.4]
    linear = predicted(fans, w, "linear", x=2.0, error=0.5)
    assert [r.v for r in linear] == pytest.approx([2, 2 * 3 * 0.2, 2 * 3 * 0.2 * 5 * 0.3])
    back = [0.5 * 2 * 0.4 * 7 * 0.3 * 5 * 0.2, 0.5 * 2 * 0.4 * 7 * 0.3, 0.5 * 2 * 0.4]
    assert [r.pass2 for r in linear] == pytest.approx(back)
    forth = [back[0], back[0] * 3 * 0.2, back[0] * 3 * 0.2 * 5 * 0.3]
    assert [r.pass3 for r in linear] == pytest.approx(forth)
    assert [r.both for r in linear] == pytest.approx([a + b for a, b in zip(back, forth, strict=True)])
    relu = predicted(fans, w, "relu", x=2.0, error=0.5)
    assert [r.u for r in relu] == pytest.approx(
        [3 * 2 * 0.2, 3 * 2 * 0.2 * 2.5 * 0.3, 3 * 2 * 0.2 * 2.5 * 0.3 * 3.5 * 0.4]
    )
    assert [r.pass2 for r in relu] == pytest.approx([back[0] / 4, back[1] / 2, back[2]])
    assert [r.pass3 for r in relu] == pytest.approx([z / 4 / 2**i for i, z in enumerate(forth)])
    with pytest.raises(ValueError, match="nonlinearity must"):
        predicted(fans, w, "swish")


@pytest.mark.parametrize("name", ["plain8", "resnet8", "vit"])
def test_any_model_and_nothing_changes(name):
    torch.manual_seed(0)
    model = models.by_name(name, **({"width": 24, "depth": 1} if name == "vit" else {"width": 4}))
    model.append(nn.Dropout()) if isinstance(model, nn.Sequential) else None
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = variances(model, F.cross_entropy, torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3]))
    after = torch.get_rng_state()
    torch.set_rng_state(rng)
    torch.randn(4, 3, 32, 32)  # the batch above
    assert torch.equal(after, torch.get_rng_state())
    assert all(torch.equal(z, state[k]) for k, z in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    assert not any(m._forward_hooks for m in model.modules())
    assert len(found) == sum(isinstance(m, (nn.Linear, nn.Conv2d)) for m in model.modules())
    assert all(getattr(r, q) > 0 for r in found.rows[1:] for q in FIELDS)
    assert found[0].pass2 == found[0].pass3
    assert len(str(found).splitlines()) == len(found) + 1


def test_in_place_activations_and_shared_layers():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    tables = [
        variances(nn.Sequential(nn.ReLU(), layer, nn.ReLU(inplace), layer), random_error, x, y)
        for inplace in (False, True)
    ]
    assert tables[0] == tables[1]
    assert [r.layer for r in tables[0]] == ["1", "1"]


def test_the_input_inside_a_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5), nn.Tanh(), nn.Flatten(), nn.Linear(15, 2))
    x, y = torch.randint(0, 7, (6, 3)), torch.randint(0, 2, (6,))
    found = variances(model, F.cross_entropy, x, y)
    assert [r.layer for r in found] == ["1", "4"]
    assert found[0].both == 0
    later = variances(model, F.cross_entropy, x, y, input_at="2")
    assert [r.layer for r in later] == ["4"]
    assert later[0].both == 0
    assert later[0].pass2 == pytest.approx(found[1].pass2)
    with pytest.raises(ValueError, match="input_at='nine' names no module"):
        variances(model, F.cross_entropy, x, y, input_at="nine")


def test_several_inputs_and_no_grad():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)

        def forward(self, p, q):
            return self.a(p) + self.b(input=q)

    p, q, y = torch.randn(5, 3), torch.randn(5, 2), torch.randn(5, 4)
    model = Two()
    with torch.no_grad():
        tables = [variances(model, F.mse_loss, x, y) for x in ((p, q), {"p": p, "q": q})]
    assert tables[0] == tables[1]
    assert [r.layer for r in tables[0]] == ["a", "b"]


def test_a_loss_without_the_input_is_refused():
    with pytest.raises(ValueError, match="does not depend on the input"):
        variances(nn.Linear(2, 2), lambda out, y: out.detach().sum(), torch.randn(3, 2), None)


def test_the_table_is_printed():
    lines = str(Variances((Row("conv", 1.0, 2.0, 3.0, 4.0, 5.0, 6.0),))).splitlines()
    assert lines[0].split() == ["layer", "Var[v]", "Var[u]", "pass", "2", "pass", "3", "both"]
    assert lines[1].split() == ["conv", "1", "2", "3", "4", "5"]


def test_the_study(tmp_path, capsys):
    before = torch.get_rng_state()
    found = init_study.run(tmp_path / "new", depth=3, width=32, batch=2, draws=1)
    assert torch.equal(torch.get_rng_state(), before)
    printed = capsys.readouterr().out
    assert '"balanced", mlp(784, 512, 10): no solution in 1 (784 to 512), 3 (512 to 10)' in printed
    assert '"balanced", plain-20: solved in every layer' in printed
    stored = json.loads((tmp_path / "new" / "init-study.json").read_text())
    assert stored["no_solution"] == found["no_solution"]
    assert {r["scheme"] for r in stored["results"]} == {"xavier", "kaiming", "geometric", "balanced"}
    assert len(stored["results"][0]["measured"]) == 3
    page = (tmp_path / "new" / "init-study.html").read_text()
    assert page.count("<figure") == 8 * 4  # nets x quantities
    assert "nan" not in page
    assert "“balanced”, mlp(784, 512, 10): no solution in 1 (784 to 512), 3 (512 to 10)." in page
    drawing = ET.parse(tmp_path / "new" / "figures" / "relu-one-width-pass3.svg")
    shown = [len(drawing.findall(f".//{{*}}g[@class='s1 {style}']")) for style in ("bare", "dashed", "points")]
    assert shown == [1, 1, 1]
    with pytest.raises(ValueError, match="depth >= 2"):
        init_study.run(tmp_path, depth=1)
