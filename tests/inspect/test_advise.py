"""advise: the mode and strength that fit a model, what they cost, and that asking changes nothing."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import threepass
from threepass.errors import LossReductionWarning
from threepass.inspect import advise as advising
from threepass.inspect.advise import SMOOTH, starting_strength
from threepass.rules.linearity import OPERATIONS

X, Y = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 0, 1])


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(advising, "ROUNDS", 3)


def net(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), *between, nn.Flatten(), nn.Linear(144, 4))


def test_a_relu_net_is_advised_paper_mode():
    advice = threepass.advise(net(nn.ReLU()), F.cross_entropy, X, Y)
    assert (advice.mode, advice.norms, advice.activations) == ("paper", (), ())
    assert advice.alignment.cosine > 0.5
    assert advice.cost == advice.step_seconds["paper"] / advice.step_seconds["plain"]
    assert min(advice.step_seconds.values()) > 0


def test_a_loss_that_is_a_sum_is_said():
    with pytest.warns(LossReductionWarning, match="a sum over the batch, not a mean"):
        threepass.advise(net(nn.ReLU()), nn.CrossEntropyLoss(reduction="sum"), X, Y)


def test_norms_are_advised_exact_mode_and_named():
    advice = threepass.advise(net(nn.BatchNorm2d(4), nn.GELU(), nn.GroupNorm(2, 4)), F.cross_entropy, X, Y)
    assert advice.mode == "exact"
    assert advice.norms == ("batch_norm", "group_norm")
    assert advice.activations == ("gelu",)
    text = str(advice)
    for word in ('mode="exact"', "batch_norm, group_norm", f"{advice.alignment.cosine:.2f}", f"({advice.cost:.2f}x)"):
        assert word in text
    assert repr(advice) == text


def test_a_model_in_eval_mode_is_measured_in_training_mode():
    model = net(nn.BatchNorm2d(4), nn.ReLU()).eval()
    advice = threepass.advise(model, F.cross_entropy, X, Y)
    assert (advice.norms, advice.mode) == (("batch_norm",), "exact")
    assert "in eval mode; this was measured in training mode" in str(advice)
    assert not any(module.training for module in model.modules())


def test_batch_norm_that_is_frozen_in_training_is_no_curved_norm():
    model = net(nn.BatchNorm2d(4), nn.ReLU())
    model[1].eval()
    advice = threepass.advise(model, F.cross_entropy, X, Y)
    assert advice.norms == ()
    assert "eval mode" not in str(advice)
    assert [module.training for module in model] == [True, False, True, True, True]


def sure_of_its_batch(*between: nn.Module) -> nn.Sequential:
    """What is left of such a net's error is curvature of the loss, which paper mode's third pass leaves out."""
    model = net(*between)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("activation", "mode", "words"),
    [(nn.Tanh(), "exact", "below 0.5"), (nn.ReLU(), "paper", "neither norms nor smooth activations")],
)
def test_a_low_cosine_counts_where_activations_are_smooth(activation, mode, words):
    """Rectifier nets train well in paper mode all the same, as the recipe of MNIST shows."""
    advice = threepass.advise(sure_of_its_batch(activation), F.cross_entropy, X, Y)
    assert advice.alignment.cosine < 0.5
    assert advice.mode == mode
    assert words in str(advice)


def test_a_batch_that_is_not_finite_gets_no_advice():
    with pytest.raises(ValueError, match="the loss is nan on this batch: look for NaN or infinity in x, y"):
        threepass.advise(net(nn.ReLU()), F.cross_entropy, X * float("nan"), Y)


def test_the_ratio_is_that_of_the_two_gradients():
    model = net(nn.ReLU()).double()
    advice = threepass.advise(model, F.cross_entropy, X.double(), Y)
    r = threepass.three_pass(model, F.cross_entropy, X.double(), Y, strength=1.0, mode=advice.mode, separate=True)
    third, back = (torch.cat([g.flatten() for g in t.values()]).norm() for t in (r.third_grads, r.backprop_grads))
    assert advice.gradient_ratio == pytest.approx((third / back).item(), rel=1e-9)


def test_the_strength_follows_the_units_of_the_input():
    """The penalty of pixels from 0 to 255 is 255² times smaller than that of the same pixels from 0 to 1."""
    model = net(nn.ReLU())
    with torch.no_grad():
        model[0].weight.div_(255)
    advice = threepass.advise(model, F.cross_entropy, 255 * X, Y)
    assert advice.strength > 10
    assert 1e-3 <= advice.strength * advice.gradient_ratio <= 0.3


@pytest.mark.parametrize("ratio", [0.0, float("nan"), float("inf")])
def test_without_a_ratio_the_strength_is_the_usual_one(ratio):
    assert starting_strength(ratio) == 0.1


def test_advise_changes_nothing():
    model = net(nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with torch.no_grad():
        threepass.advise(model, F.cross_entropy, X, Y)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_token_model_with_its_input_inside():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 2))
    ids = torch.randint(0, 7, (5, 3))
    advice = threepass.advise(model, F.cross_entropy, {"input": ids}, torch.tensor([0, 1, 0, 1, 1]), input_at="0")
    assert advice.mode == "paper"


def test_no_smooth_activation_is_affine():
    assert {*SMOOTH}.isdisjoint(OPERATIONS)
