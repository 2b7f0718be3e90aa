"""No waste: operations counted below autograd, by a dispatch mode."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import threepass
from threepass.tape.storage_index import StorageIndex

aten = torch.ops.aten


class Count(TorchDispatchMode):
    """Convolutions forward and backward by half, and matrix products."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.convolution.default:
            self.seen["conv"] += 1
        elif func is aten.convolution_backward.default:
            self.seen["conv to input"] += args[-1][0]
            self.seen["conv to weight"] += args[-1][1]
        elif func in (aten.mm.default, aten.addmm.default):
            self.seen["mm"] += 1
        return func(*args, **(kwargs or {}))


def count(call) -> Counter:
    with Count() as counter:
        call()
    return counter.seen


def test_the_papers_net():
    model = threepass.models.plain(20)
    assert sum(isinstance(m, nn.Conv2d) for m in model) == 19
    assert sum(isinstance(m, nn.Linear) for m in model) == 1


X, Y = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])


def test_paper_mode_is_four_units_a_layer():
    model = threepass.models.plain(20)
    seen = count(lambda: threepass.three_pass(model, F.cross_entropy, X, Y))
    most = {"conv": 2 * 19, "conv to input": 19, "conv to weight": 19, "mm": 3}  # the last tangent goes nowhere
    assert seen <= Counter(most)


def test_exact_mode_is_six_units_a_layer():
    model = threepass.models.plain(20)
    seen = count(lambda: threepass.three_pass(model, F.cross_entropy, X, Y, mode="exact"))
    assert seen <= Counter({"conv": 2 * 19, "conv to input": 19 + 18, "conv to weight": 2 * 19, "mm": 6})


def test_alpha_one_is_plain_training_and_the_first_layers_input():
    model = threepass.models.plain(20)
    plain = count(lambda: F.cross_entropy(model(X), Y).backward())
    seen = count(lambda: threepass.three_pass(model, F.cross_entropy, X, Y, alpha=1.0))
    assert seen <= plain + Counter({"conv to input": 1})


def test_skipped_third_pass_costs_what_alpha_one_does():
    model = threepass.models.plain(8)
    step = threepass.ThreePass(model, F.cross_entropy, every=2)
    counts = [count(lambda: step(X, Y)) for _ in range(3)]
    one = count(lambda: threepass.three_pass(model, F.cross_entropy, X, Y, alpha=1.0))
    assert counts[1] <= one
    assert one < counts[0] == counts[2]


def test_frozen_layers_cost_no_weight_gradient_and_no_tangent_after_the_last_trained_one():
    model = threepass.models.plain(8)
    model.requires_grad_(False)
    model[0].requires_grad_(True)
    seen = count(lambda: threepass.three_pass(model, F.cross_entropy, X, Y))
    assert seen["conv to weight"] <= 1
    assert seen["conv"] <= 7


@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_transformer_products(mode):
    """Linear layers around attention: four products each in paper mode, six in exact mode, at most."""
    layers = 3
    block = nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)])

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            q, k, v = (f(x) for f in self.block)
            return F.scaled_dot_product_attention(q, k, v).mean(1)

    x = torch.randn(4, 5, 8)
    seen = count(lambda: threepass.three_pass(Net(), F.cross_entropy, x, torch.tensor([0, 1, 2, 3]), mode=mode))
    assert seen["mm"] <= (4 if mode == "paper" else 6) * layers


def test_a_piecewise_linear_discriminator_is_four_units_a_layer():
    """A loss on its output and on its input gradient: double backward takes six, but for the first R{d}."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.LeakyReLU(0.2), nn.Conv2d(4, 4, 3), nn.LeakyReLU(0.2), nn.Flatten(), nn.LazyLinear(1)
    )
    model(X)
    seen = count(lambda: threepass.gradient_step(model, lambda output, g, y: output.mean() + g.square().sum(), X))
    assert seen <= Counter({"conv": 2 * 2, "conv to input": 2, "conv to weight": 2, "mm": 4})

    def double_backward():
        x = X.clone().requires_grad_()
        output = model(x)
        (g,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (output.mean() + g.square().sum()).backward()

    assert sum(n for name, n in count(double_backward).items() if name.startswith("conv")) >= 2 * 6 - 1


class Names(TorchDispatchMode):
    """Counts ATen calls by name."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
def test_batch_norm_is_computed_again_in_exact_mode_alone(mode):
    """Pass 3 has its statistics from pass 1, and only the curvature needs the normalised input."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(3600, 2))
    with Names() as names:
        threepass.three_pass(model, F.cross_entropy, X, Y, mode=mode)
    assert names.seen["native_batch_norm"] == (1 if mode == "paper" else 2)


def test_views_are_moved_as_they_are():
    """The parts of q, k and v: one unbind in pass 1 and one in pass 3, and a stack in each backward pass."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (3, 2)), Gated(), nn.Linear(2, 2))
    with Names() as names:
        threepass.three_pass(model, F.cross_entropy, torch.randn(5, 4), torch.arange(5) % 2, mode="exact")
    assert names.seen["unbind"] == names.seen["stack"] == 2


class Gated(nn.Module):
    def forward(self, x):
        a, b, c = x.unbind(1)
        return a * b + c


def test_a_model_without_writes_does_not_have_the_tape_look_for_readers(monkeypatch):
    looked = []
    monkeypatch.setattr(StorageIndex, "_add_readers", lambda self, op, positions: looked.append(op.name))
    norm = nn.BatchNorm1d(4)  # counts its batches in place
    three = nn.Sequential(nn.Linear(4, 4), norm, nn.ReLU(), nn.Linear(4, 2))
    with pytest.warns(threepass.NormalizationWarning):
        threepass.three_pass(three, F.cross_entropy, torch.randn(5, 4), torch.arange(5) % 2)
    assert norm.num_batches_tracked == 1
    assert looked == []
