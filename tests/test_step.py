"""ThreePass in a training loop."""

import inspect
from collections import UserDict

import pytest
import torch
from close import assert_close
from torch import nn
from torch.nn import functional as F

import threepass
from threepass.errors import AccumulationWarning, BatchDimensionWarning, LabelWarning, LossReductionWarning, MaskWarning
from threepass.step import _log_default_alpha


def setting():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4)).double()
    return model, torch.randn(8, 5).double(), torch.randint(0, 4, (8,))


def grads(model):
    return {n: p.grad for n, p in model.named_parameters()}


def test_adds_to_grad():
    model, x, y = setting()
    r = threepass.ThreePass(model, F.cross_entropy, alpha=0.3)(x, y)
    assert_close(grads(model), r.grads, 0.0)
    assert_close(r.grads, threepass.three_pass(model, F.cross_entropy, x, y, alpha=0.3).grads, 0.0)
    threepass.ThreePass(model, F.cross_entropy, alpha=0.3)(x, y)
    assert_close(grads(model), {n: 2 * g for n, g in r.grads.items()}, 1e-14)


def test_accumulation_over_parts_is_the_whole_batch():
    model, x, y = setting()
    whole = threepass.three_pass(model, F.cross_entropy, x, y, strength=0.5, mode="exact")
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.5, mode="exact", batch_size=8)
    for a, b in zip(x.split(2), y.split(2), strict=True):
        step(a, b)
    assert_close(grads(model), whole.grads, 1e-12)


def test_alpha_may_be_a_schedule():
    model, x, y = setting()
    step = threepass.ThreePass(model, F.cross_entropy, alpha=lambda calls: 1 / (1 + calls))
    for calls in range(3):
        r = step(x, y)
        expected = threepass.three_pass(model, F.cross_entropy, x, y, alpha=1 / (1 + calls))
        assert_close(r.grads, expected.grads, 0.0)


@pytest.mark.parametrize("options", [{"alpha": 0.3}, {"strength": 0.5}])
def test_every_second_call_leaves_the_third_pass_out(options):
    model, x, y = setting()
    step = threepass.ThreePass(model, F.cross_entropy, every=2, **options)
    full = threepass.three_pass(model, F.cross_entropy, x, y, **options)
    plain = threepass.three_pass(model, F.cross_entropy, x, y, alpha=1.0)
    back = options.get("alpha", 1.0)
    assert_close(step(x, y).grads, full.grads, 0.0)
    assert_close(step(x, y).grads, {n: back * g for n, g in plain.grads.items()}, 1e-14)
    assert_close(step(x, y).grads, full.grads, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"alpha": 2.0}, "alpha must"), ({"every": 0}, "every must"), ({"alpha": lambda calls: 7}, "alpha must")],
)
def test_bad_options_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        threepass.ThreePass(setting()[0], F.cross_entropy, **options)


def test_training_shrinks_the_loss_and_the_input_loss():
    torch.manual_seed(1)
    x = torch.randn(128, 10)
    y = torch.randint(0, 2, (128,))  # labels without a rule: fitting them takes steep functions

    def train(**options):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 2))
        step = threepass.ThreePass(model, F.cross_entropy, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for _ in range(100):
            optimizer.zero_grad()
            r = step(x, y)
            losses.append(r.loss.item())
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
        return losses, r.input_loss.item()

    plain, three = train(alpha=1.0), train(strength=1.0)
    assert three[0][-1] < 0.7 * three[0][0]
    assert three[1] < 0.4 * plain[1]


def test_state_goes_on_after_a_resume(tmp_path):
    model, x, y = setting()
    options = {"alpha": lambda calls: 1 / (1 + calls), "every": 2}
    step = threepass.ThreePass(model, F.cross_entropy, **options)
    for _ in range(3):
        step(x, y)
    torch.save({"step": step.state_dict()}, tmp_path / "checkpoint.pt")
    resumed = threepass.ThreePass(model, F.cross_entropy, **options)
    resumed.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"])
    assert resumed.state_dict() == step.state_dict() == {"calls": 3}
    for calls in (3, 4):
        expected = threepass.three_pass(model, F.cross_entropy, x, y, alpha=1 / (1 + calls), separate=True)
        grads = expected.grads
        if calls % 2:
            grads = {n: g / (1 + calls) for n, g in expected.backprop_grads.items()}
        assert_close(resumed(x, y).grads, grads, 1e-12)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"step": 3}, r"state_dict\(\) of a ThreePass.*got \['step'\]"),
        ({"calls": 3, "lr": 1}, r"got \['calls', 'lr'\]"),
        (3, "got int"),
        ({"calls": -1}, "an integer >= 0, got -1"),
        ({"calls": True}, "got True"),
        ({"calls": "3"}, "got '3'"),
    ],
)
def test_other_states_are_refused(state, message):
    step = threepass.ThreePass(setting()[0], F.cross_entropy)
    with pytest.raises(ValueError, match=message):
        step.load_state_dict(state)
    assert step.calls == 0


def test_an_error_is_no_call():
    model, x, y = setting()
    step = threepass.ThreePass(model, F.cross_entropy)
    with pytest.raises(RuntimeError):
        step(x[:, :3], y)
    assert step.state_dict() == {"calls": 0}


def loop(step, model, parts, updates=4):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(updates):
        optimizer.zero_grad()
        for a, b in parts:
            step(a, b)
        optimizer.step()


@pytest.mark.parametrize("compile", [False, True])
def test_accumulation_without_batch_size_is_said_once(compile, graph_only):
    model, x, y = setting()
    parts = list(zip(x.split(2), y.split(2), strict=True))
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.1, compile=compile)
    with pytest.warns(AccumulationWarning, match="gradients of 4 calls were accumulated.*Pass batch_size=") as caught:
        loop(step, model, parts, updates=4)
    assert [w.filename for w in caught if w.category is AccumulationWarning] == [__file__]
    loop(threepass.ThreePass(model, F.cross_entropy, strength=0.1, compile=compile, batch_size=8), model, parts)
    loop(threepass.ThreePass(model, F.cross_entropy, strength=0.1, compile=compile), model, parts[:1], updates=3)


def test_gradients_that_are_only_looked_at_are_no_accumulation():
    model, x, y = setting()
    step = threepass.ThreePass(model, F.cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        step(x, y)
        optimizer.step()
        for p in model.parameters():
            p.grad.zero_()


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        lambda out, y: F.cross_entropy(out, y, reduction="none").sum(),
        lambda out, y: (out - F.one_hot(y, 4)).square().sum(),
    ],
)
def test_a_summed_loss_is_said_once(loss_fn):
    model, x, y = setting()
    step = threepass.ThreePass(model, loss_fn)
    with pytest.warns(LossReductionWarning, match=r"a sum over the batch, not a mean.*8\^2 times") as caught:
        step(x, y)
    assert [w.filename for w in caught if w.category is LossReductionWarning] == [__file__]
    step(x, y)
    threepass.ThreePass(model, loss_fn)(x[:1], y[:1])


@pytest.mark.parametrize(
    "loss_fn",
    [
        F.cross_entropy,
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 4]).double()),
        lambda out, y: F.cross_entropy(out, y) + torch.rand(()),
        lambda out, y: (F.cross_entropy(out, y, reduction="none") * torch.arange(8)).mean(),
    ],
)
def test_other_losses_are_not_taken_for_sums(loss_fn):
    model, x, y = setting()
    torch.manual_seed(3)
    threepass.ThreePass(model, loss_fn)(x, y)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    loss_fn(model(x), y)
    assert torch.equal(after, torch.get_rng_state())


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids, mask):
        return self.head((self.embedding(ids) * mask[..., None]).mean(1))


@pytest.mark.parametrize("form", ["dict", "tuple", "additive"])
def test_a_floating_point_mask_is_no_input(form):
    ids, mask, y = torch.randint(0, 9, (5, 6)), torch.ones(5, 6), torch.arange(5) % 3
    x = {"ids": ids, "mask": mask} if form == "dict" else (ids, mask if form == "tuple" else mask * -1e9)
    with pytest.warns(MaskWarning, match=r"is a floating-point mask.*input_at=\"embeddings\"") as caught:
        threepass.ThreePass(Masked(), F.cross_entropy)(x, y)
    assert [w.filename for w in caught if w.category is MaskWarning] == [__file__]
    threepass.ThreePass(Masked(), F.cross_entropy)((ids, mask.long()), y)
    threepass.ThreePass(Masked(), F.cross_entropy, input_at="embedding")(x, y)
    threepass.ThreePass(Masked(), F.cross_entropy)((ids, torch.rand(5, 6)), y)
    threepass.ThreePass(Masked(), F.cross_entropy)(UserDict(ids=ids, mask=mask.long()), y)


class OwnLoss(Masked):
    def forward(self, ids, labels):
        return {"loss": F.mse_loss(self.head(self.embedding(ids).mean(1)), labels)}


@pytest.mark.parametrize("labels", [torch.rand(5, 3), torch.eye(5, 3)], ids=["numbers", "one hot"])
def test_floating_point_labels_are_no_input(labels, recwarn):
    x = {"ids": torch.randint(0, 9, (5, 6)), "labels": labels}
    with pytest.warns(LabelWarning, match=r"x\['labels'\] contains floating-point labels.*input_at=\"embeddings\""):
        threepass.ThreePass(OwnLoss(), None)(x)
    threepass.ThreePass(OwnLoss(), None, input_at="embedding")(x)
    assert not recwarn


def test_a_model_of_torch_compile_is_said():
    model, x, y = setting()
    for wrapped in (torch.compile(model), model):
        with pytest.warns(
            threepass.UncompiledWarning, match="runs the original module eagerly.*compile=True"
        ) as caught:
            step = threepass.ThreePass(wrapped, F.cross_entropy, alpha=0.3)
        assert [w.filename for w in caught if w.category is threepass.UncompiledWarning] == [__file__]
        grads = list(step(x, y).grads.values())
        expected = threepass.three_pass(setting()[0], F.cross_entropy, x, y, alpha=0.3).grads.values()
        assert all(torch.equal(g, e) for g, e in zip(grads, expected, strict=True))
        model.compile()
    threepass.ThreePass(torch.compile(model), F.cross_entropy, compile=True)


def test_a_result_prints_in_one_line():
    model, x, y = setting()
    r = threepass.three_pass(model, F.cross_entropy, x, y)
    expected = (
        f"Result(loss={r.loss:.4g}, input_loss={r.input_loss:.4g}, grads of 4 parameters; also output, input_grad)"
    )
    assert repr(r) == expected
    assert "third_grads" in repr(threepass.three_pass(model, F.cross_entropy, x, y, separate=True))


def test_a_step_prints_its_options():
    model, _, _ = setting()
    step = threepass.ThreePass(model, F.cross_entropy, mode="exact", strength=0.3, penalty="l1")
    assert repr(step) == "ThreePass(Sequential, mode='exact', strength=0.3, penalty='l1')"
    step = threepass.ThreePass(model, F.cross_entropy, lambda calls: 0.5 - 0.1 * calls, reduction="sample")
    step.calls = 1
    assert repr(step) == "ThreePass(Sequential, mode='paper', alpha=0.4, reduction='sample')"


class LastStep(nn.Module):
    """Classes from the last step of a recurrent net."""

    def __init__(self, batch_first: bool, transposes: bool = False):
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 6, batch_first=batch_first), nn.Linear(6, 4)
        self.transposes = transposes

    def forward(self, x):
        out, _ = self.lstm(x.transpose(0, 1) if self.transposes else x)
        return self.head(out[:, -1] if self.lstm.batch_first else out[-1])


def encoder(batch_first: bool) -> nn.Sequential:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=batch_first)
    return nn.Sequential(nn.Linear(5, 4), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(4, 1))


def mean_square(output, y):
    return (output - y).square().mean()


@pytest.mark.parametrize(
    ("model", "loss_fn", "y"),
    [(LastStep(False), F.cross_entropy, torch.arange(4)), (encoder(False), mean_square, torch.zeros(7, 4, 1))],
)
def test_samples_along_dimension_1_are_said_once(model, loss_fn, y):
    step = threepass.ThreePass(model, loss_fn, strength=0.1, mode="exact")
    x = torch.randn(7, 4, 5)
    with pytest.warns(BatchDimensionWarning, match=r"\(7, 4, 5\).*4 samples.*1\.75 times.*batch_first=True") as caught:
        step(x, y)
    assert [w.filename for w in caught] == [__file__]
    step(x, y)


@pytest.mark.parametrize(
    ("model", "loss_fn", "x", "y"),
    [
        (LastStep(True), F.cross_entropy, torch.randn(4, 7, 5), torch.arange(4)),
        (LastStep(False, transposes=True), F.cross_entropy, torch.randn(4, 7, 5), torch.arange(4)),
        (encoder(True), mean_square, torch.randn(4, 7, 5), torch.zeros(4, 7, 1)),
        (nn.Sequential(nn.Conv2d(3, 1, 8), nn.Flatten()), mean_square, torch.randn(4, 3, 8, 8), torch.zeros(3, 4, 1)),
        (nn.Linear(5, 5), mean_square, torch.randn(4, 5), torch.zeros(5)),
        (nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), mean_square, torch.randn(1, 6, 5), torch.zeros(6)),
    ],
)
def test_samples_along_dimension_0_are_no_mistake(model, loss_fn, x, y):
    threepass.ThreePass(model, loss_fn, strength=0.1, mode="exact")(x, y)


class Pooled(nn.Linear):
    """Sums the rows of x by graph."""

    def forward(self, x, graph):
        return x.new_zeros(2, self.out_features).index_add(0, graph, super().forward(x).tanh())


def test_nodes_of_graphs_as_samples():
    """The warning's advice gives the penalty of a mean over graphs."""
    torch.manual_seed(0)
    model, y = Pooled(3, 4).double(), torch.tensor([1, 3])
    x = {"x": torch.randn(8, 3).double(), "graph": torch.arange(8) // 4}
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.1, mode="exact")
    with pytest.warns(BatchDimensionWarning, match=r"x has 8 rows .* returned 2, .* 4 times .* Divide strength by 4,"):
        step(x, y)
    got = threepass.three_pass(model, F.cross_entropy, x, y, strength=0.1 / 4, mode="exact").grads
    leaf = x["x"].clone().requires_grad_()
    loss = F.cross_entropy(model(leaf, x["graph"]), y)
    (g,) = torch.autograd.grad(loss, leaf, create_graph=True)
    of_graphs = 0.5 * (2 * g).square().sum() / 2  # dl_i/dx_i of a graph's own loss is twice the batch's
    expected = torch.autograd.grad(loss + 0.1 * of_graphs, list(model.parameters()))
    for ours, theirs in zip(got.values(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def test_alpha_and_one_target_for_each_row_are_no_mistake():
    x = {"x": torch.randn(8, 3), "graph": torch.arange(8) // 4}
    threepass.ThreePass(Pooled(3, 4), F.cross_entropy, mode="exact")(x, torch.tensor([1, 3]))
    threepass.ThreePass(nn.Linear(3, 4), F.cross_entropy, strength=0.1)(torch.randn(2, 3), torch.tensor([1, 3]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((nn.Linear(2, 2), nn.CrossEntropyLoss), r"class CrossEntropyLoss: pass an instance, CrossEntropyLoss\(\)"),
        ((nn.Linear(2, 2), "mse"), "loss_fn must be a function of the output and y, got str"),
        (
            (nn.MSELoss(), nn.Linear(2, 2)),
            r"the model \(MSELoss\) has no parameters, but loss_fn has: the arguments seem to be swapped",
        ),
        ((F.mse_loss, nn.Linear(2, 2)), "model must be a torch.nn.Module, got function: the model comes first"),
    ],
)
def test_model_and_loss_in_the_wrong_place(arguments, message):
    for step in (threepass.ThreePass, threepass.GradientStep):
        with pytest.raises(TypeError, match=message):
            step(*arguments)


def test_an_alpha_that_nobody_chose_is_logged_once(caplog):
    """With it, SGD at the learning rate of plain training takes steps a tenth as long."""
    model = nn.Linear(2, 2)
    _log_default_alpha.cache_clear()
    for chosen in ({"alpha": 0.1}, {"strength": 0.1}, {"alpha": 1.0}, {"alpha": lambda calls: 0.1}):
        threepass.ThreePass(model, F.cross_entropy, **chosen)
    assert not caplog.records
    for _ in range(2):
        threepass.ThreePass(model, F.cross_entropy)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("threepass", "WARNING")
    assert "neither strength nor alpha was given, so alpha is 0.1" in record.getMessage()
    assert inspect.signature(threepass.ThreePass).parameters["alpha"].default == 0.1
