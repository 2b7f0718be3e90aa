"""bf16 and fp16 lose no part of the third pass systematically."""

import pytest
import torch
from narrow import BATCH, WIDTH, loss_of_scale, net
from torch import nn

import threepass

FORMATS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def slopes(kind, dtype, autocast, ratio, alpha, draws=12):
    """By weight, over draws: the slope of what is added to alpha * backprop on float64's (1 - alpha) * third pass."""
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(draws):
        torch.manual_seed(seed)
        model = net(kind).double()
        x = torch.randn(BATCH, *((3, 8, 8) if kind == "conv" else (WIDTH,))).double()
        r = torch.randn(BATCH, 10).double()
        if not autocast:  # the same rounded weights and inputs on both sides
            model, x, r = model.to(dtype).double(), x.to(dtype).double(), r.to(dtype).double()
        first = threepass.three_pass(model, loss_of_scale(1.0), x, r)
        loss_fn = loss_of_scale(ratio * float(x.abs().max() / first.input_grad.abs().max()))
        exact = threepass.three_pass(model, loss_fn, x, r, alpha=alpha, separate=True)
        low = model.float() if autocast else model.to(dtype)
        x_low, r_low = (z.float() if autocast else z.to(dtype) for z in (x, r))
        with torch.autocast("cpu", dtype, enabled=autocast):
            mixed = threepass.three_pass(low, loss_fn, x_low, r_low, alpha=alpha)
            without = threepass.three_pass(low, loss_fn, x_low, r_low, alpha=1.0)
        for name, g in mixed.grads.items():
            assert torch.isfinite(g).all()
            expected = (1 - alpha) * exact.third_grads[name]
            if expected.any():
                got = g.double() - alpha * without.grads[name].double()
                found.setdefault(name, []).append(((got * expected).sum().item(), expected.square().sum().item()))
    result = {}
    for name, pairs in found.items():
        each = torch.tensor([a / b for a, b in pairs])
        result[name] = each.mean().item(), each.std().item() / len(each) ** 0.5
    return result


@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
@FORMATS
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "cast"])
@pytest.mark.parametrize("kind", ["linear", "conv", "norm"])
@pytest.mark.parametrize("ratio", [1e-5, 1e-3, 1e-2])
@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.8])
def test_slope_of_the_third_pass_is_one(kind, dtype, autocast, ratio, alpha):
    for name, (slope, error) in slopes(kind, dtype, autocast, ratio, alpha).items():
        assert error <= 0.05, f"{name}: slope {slope:.3f} +- {error:.3f}"
        assert abs(slope - 1) <= 3 * error + 0.02, f"{name}: slope {slope:.3f} +- {error:.3f}"


def test_the_slope_test_can_fail():
    """What the naive mix leaves of t in bf16: nothing, at alpha .5."""
    a, t = torch.randn(1000), torch.randn(1000) * 1e-4
    naive = torch.lerp(t.bfloat16(), a.bfloat16(), 0.5).float() - (0.5 * a.bfloat16()).float()
    assert abs((naive @ t / (t @ t)).item() / 0.5) < 0.1


@FORMATS
@pytest.mark.filterwarnings("ignore::threepass.errors.LossReductionWarning")
def test_step_rounds_half_gradients_without_bias(dtype):
    """p.grad is in the parameter's own format; over draws it still holds all of the third pass."""
    kept = []
    for seed in range(40):
        torch.manual_seed(seed)
        model = nn.Linear(200, 100, bias=False).to(dtype)
        x, r = torch.randn(16, 200).to(dtype), torch.randn(16, 100).to(dtype)

        def loss_fn(out, y):
            return (out * y).sum() / 256

        terms = threepass.three_pass(model, loss_fn, x, r, alpha=0.5, separate=True)
        threepass.ThreePass(model, loss_fn, alpha=0.5)(x, r)
        assert model.weight.grad.dtype == dtype
        third = 0.5 * terms.third_grads["weight"].double()
        got = model.weight.grad.double() - 0.5 * terms.backprop_grads["weight"].double()
        kept.append(((got * third).sum() / third.square().sum()).item())
    slope, error = torch.tensor(kept).mean().item(), torch.tensor(kept).std().item() / len(kept) ** 0.5
    assert error <= 0.05
    assert abs(slope - 1) <= 3 * error


def test_tiny_errors_survive_fp16():
    """dl/dx is under fp16's smallest number here; the third pass is there all the same."""
    torch.manual_seed(0)
    model = net("linear").double()
    x, r = torch.randn(BATCH, WIDTH).double(), torch.randn(BATCH, 10).double() * 1e-3
    x, r, model = x.half().double(), r.half().double(), model.half().double()

    def loss_fn(out, y):
        return (out * y).sum() / BATCH

    exact = threepass.three_pass(model, loss_fn, x, r, separate=True)
    low = threepass.three_pass(model.half(), loss_fn, x.half(), r.half(), separate=True)
    for name, g in exact.third_grads.items():
        if g.any():
            assert (low.third_grads[name].double() - g).norm() < 0.03 * g.norm(), name


class Joined(nn.Module):
    """As autocast runs a U-Net on a GPU: its norm in float32, and `cat` of that with a convolution's half format."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.second, self.head = nn.Conv2d(8, 8, 1), nn.Conv2d(16, 5, 1)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            z = nn.functional.gelu(self.norm(self.first(x).float()))
        return self.head(torch.cat([z, self.second(z)], 1))


@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_signals_have_the_format_of_what_they_belong_to(mode):
    torch.manual_seed(0)
    model, x, y = Joined(), torch.randn(4, 3, 6, 6), torch.randint(5, (4, 6, 6))
    step = {"strength": 10.0, "mode": mode, "separate": True}
    expected = threepass.three_pass(model, nn.functional.cross_entropy, x, y, **step).third_grads
    with torch.autocast("cpu", torch.bfloat16):
        assert model.second(x[:, [0] * 8]).dtype == torch.bfloat16
        found = threepass.three_pass(model, nn.functional.cross_entropy, x, y, **step).third_grads
    for name, g in expected.items():
        assert (found[name] - g).norm() <= 0.05 * g.norm(), name
