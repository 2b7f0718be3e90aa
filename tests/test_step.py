"""ThreePass in a training loop."""

import pytest
import torch
from close import assert_close
from torch import nn
from torch.nn import functional as F

import threepass


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
        ({"calls": -1}, "whole number >= 0, got -1"),
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
