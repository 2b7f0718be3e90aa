"""GradScaler in its usual lines: unscale_, clip, step, update."""

import pytest
import torch
from close import assert_close, norm
from torch import nn
from torch.nn import functional as F

import threepass

HALF = [torch.float16, torch.bfloat16]


def setting(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).to(dtype)
    return model, torch.randn(8, 5, dtype=dtype), torch.randint(0, 4, (8,))


def grads(model):
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def autocast(dtype):
    return torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)


@pytest.mark.parametrize("dtype", [*HALF, None], ids=str)
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_grad_is_scaled_and_the_step_is_not(dtype, mode):
    model, x, y = setting()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.5, mode=mode, scaler=scaler)
    with autocast(dtype):
        expected = threepass.three_pass(model, F.cross_entropy, x, y, strength=0.5, mode=mode)
        r = step(x, y)
    assert_close(r.grads, expected.grads, 0.0)
    assert_close(grads(model), {n: 65536 * g for n, g in expected.grads.items()}, 0.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    scaler.step(optimizer)
    scaler.update()
    after = {n: p.detach() for n, p in model.named_parameters()}
    assert_close(after, {n: p - 0.1 * expected.grads[n] for n, p in before.items()}, 1e-6)
    assert scaler.get_scale() == 65536


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_third_term_survives_autocast(dtype):
    """With alpha it is far smaller than the other: what is left beside float64's of it, as a slope."""
    model, x, y = setting()
    scaler = torch.amp.GradScaler("cpu")
    step = threepass.ThreePass(model, F.cross_entropy, alpha=0.5, separate=True, scaler=scaler)
    with autocast(dtype):
        r = step(x, y)
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))
    twin = setting(torch.float64)[0]
    twin.load_state_dict(model.state_dict())
    exact = threepass.three_pass(twin, F.cross_entropy, x.double(), y, alpha=0.5, separate=True).third_grads
    third = {n: 2 * (g.double() - 0.5 * r.backprop_grads[n].double()) for n, g in grads(model).items()}
    slope = sum((third[n] * exact[n]).sum() for n in exact) / norm(exact) ** 2
    assert abs(slope - 1) < 0.05


def test_unscale_clip_and_accumulation():
    model, x, y = setting(torch.float64)
    whole = threepass.three_pass(model, F.cross_entropy, x, y, alpha=0.3).grads
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = threepass.ThreePass(model, F.cross_entropy, alpha=0.3, batch_size=8, scaler=scaler)
    for part in zip(x.split(2), y.split(2), strict=True):
        step(*part)
    assert_close(grads(model), {n: 1000 * g for n, g in whole.items()}, 1e-12)
    scaler.unscale_(optimizer)
    assert_close(grads(model), whole, 1e-6)  # the scaler's 1 / scale is a float32
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    scaler.step(optimizer)
    scaler.update()
    after = {n: p.detach() for n, p in model.named_parameters()}
    assert_close(
        {n: before[n] - after[n] for n in after}, {n: g * (0.01 / norm(whole)) for n, g in whole.items()}, 1e-4
    )


@pytest.mark.parametrize("fused", [False, True])
def test_overflow_skips_the_step_and_shrinks_the_scale(fused):
    model, x, y = setting()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.5, scaler=scaler)
    with torch.no_grad():
        model[4].bias *= 1e3  # wrong by far, so that gradients are above 2
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    step(1e3 * x, y)
    assert not all(g.isfinite().all() for g in grads(model).values())
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**27
    assert_close({n: p.detach() for n, p in model.named_parameters()}, before, 0.0)
    optimizer.zero_grad()
    r = step(1e3 * x, y)
    scaler.step(optimizer)
    scaler.update()
    expected = {n: p - 0.1 * r.grads[n] for n, p in before.items()}
    assert_close({n: p.detach() for n, p in model.named_parameters()}, expected, 1e-6)


def test_a_disabled_scaler_changes_nothing():
    model, x, y = setting()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    r = threepass.ThreePass(model, F.cross_entropy, scaler=scaler)(x, y)
    assert_close(grads(model), r.grads, 0.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler.update()
    expected = {n: p - 0.1 * r.grads[n] for n, p in before.items()}
    assert_close({n: p.detach() for n, p in model.named_parameters()}, expected, 1e-6)


def test_bf16_parameters():
    model, x, y = setting(torch.bfloat16)
    scaler = torch.amp.GradScaler("cpu")
    r = threepass.ThreePass(model, F.cross_entropy, strength=0.5, scaler=scaler)(x, y)
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
    assert_close(grads(model), {n: 65536 * g for n, g in r.grads.items()}, 2**-7)


def test_sparse_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = torch.randint(0, 9, (5, 3)), torch.randint(0, 3, (5,))
    r = threepass.ThreePass(model, F.cross_entropy, scaler=scaler)(x, y)
    assert model[0].weight.grad.is_sparse
    assert_close(
        {n: g.to_dense() for n, g in grads(model).items()}, {n: 4 * g.to_dense() for n, g in r.grads.items()}, 1e-6
    )


def test_a_scaler_that_was_not_given_is_missed_by_torch():
    model, x, y = setting()
    scaler = torch.amp.GradScaler("cpu")
    r = threepass.ThreePass(model, F.cross_entropy)(x, y)
    with pytest.raises(AssertionError, match=r"did not use `?scaler\.scale"):
        scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="does not require grad"):
        scaler.scale(r.loss).backward()


def test_what_is_no_scaler():
    with pytest.raises(TypeError, match=r"torch\.amp\.GradScaler, got float"):
        threepass.ThreePass(setting()[0], F.cross_entropy, scaler=65536.0)


def test_compiled():
    model, x, y = setting()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.5, compile=True, scaler=scaler)
    for _ in range(2):
        optimizer.zero_grad()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        with autocast(torch.bfloat16):
            expected = threepass.three_pass(model, F.cross_entropy, x, y, strength=0.5).grads
            step(x, y)
            step(x, y)
        assert_close(grads(model), {n: 2 * 65536 * g for n, g in expected.items()}, 0.02)
        scaler.step(optimizer)
        scaler.update()
        change = {n: before[n] - p.detach() for n, p in model.named_parameters()}
        assert_close(change, {n: 0.2 * g for n, g in expected.items()}, 0.02)
    assert step.compiled.compile_seconds > 0
