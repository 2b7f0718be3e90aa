"""`threepass.loss` and `ThreePass.loss`: a loss whose backward() gives the gradients of three passes."""

import copy

import pytest
import torch
from close import assert_close
from torch import nn
from torch.nn import functional as F

import threepass
from threepass.errors import AccumulationWarning

OPTIONS = [{"alpha": 0.3}, {"alpha": 0.3, "reduction": "sample"}, {"strength": 0.5, "mode": "exact"}]


def problem(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).to(dtype)
    return model, torch.randn(6, 5, dtype=dtype), torch.randint(4, (6,))


def grads(model) -> dict:
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_are_those_of_the_step_times_what_the_loss_is_multiplied_by(options):
    model, x, y = problem()
    r = threepass.three_pass(model, F.cross_entropy, x, y, **options)
    loss = threepass.loss(model, F.cross_entropy, x, y, **options)
    torch.testing.assert_close(loss.detach(), r.loss)
    assert all(p.grad is None for p in model.parameters())
    (3 * loss).backward()
    assert_close(grads(model), {name: 3 * g for name, g in r.grads.items()}, 1e-14)


def test_it_adds_to_other_losses_and_to_what_is_there():
    model, x, y = problem()
    expected = threepass.three_pass(model, F.cross_entropy, x, y).grads
    decay = sum(p.square().sum() for p in model.parameters())
    for _ in range(2):
        (threepass.loss(model, F.cross_entropy, x, y) + decay).backward(retain_graph=True)
    both = {name: 2 * expected[name] + 4 * p.detach() for name, p in model.named_parameters()}
    assert_close(grads(model), both, 1e-14)


def test_a_second_backward_is_refused_as_for_any_loss():
    model, x, y = problem()
    loss = threepass.loss(model, F.cross_entropy, x, y)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def loop_by_losses(step, model, parts, updates=3, set_to_none=True, takes_step=lambda update: True):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for update in range(updates):
        for part in parts:
            (step.loss(*part) / len(parts)).backward()
        step.loss(*parts[0])  # only looked at
        if takes_step(update):
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_by_losses_without_batch_size_is_said_once_where_it_matters(set_to_none):
    model, x, y = problem()
    parts = list(zip(x.split(2), y.split(2), strict=True))
    step = threepass.ThreePass(model, F.cross_entropy, alpha=0.3)
    with pytest.warns(AccumulationWarning, match=r"gradients of 3 calls were .* all 3 calls") as caught:
        loop_by_losses(step, model, parts, set_to_none=set_to_none)
    assert [w.filename for w in caught] == [__file__]
    for options in ({"strength": 0.5}, {"alpha": 0.3, "reduction": "sample"}, {"alpha": 0.3, "batch_size": 6}):
        loop_by_losses(threepass.ThreePass(model, F.cross_entropy, **options), model, parts)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_updates_that_are_skipped_are_no_accumulation(set_to_none):
    model, x, y = problem()
    step = threepass.ThreePass(model, F.cross_entropy, alpha=0.3)
    loop_by_losses(step, model, [(x, y)], 6, set_to_none, takes_step=lambda update: update > 2)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_losses_of_micro_batches_divided_by_their_number_give_the_whole(options):
    model, x, y = problem()
    expected = threepass.three_pass(model, F.cross_entropy, x, y, **options).grads
    step = threepass.ThreePass(model, F.cross_entropy, batch_size=6, **options)
    for part in zip(x.split(2), y.split(2), strict=True):
        (step.loss(*part) / 3).backward()
    assert_close(grads(model), expected, 1e-13)
    assert step.calls == 3


def test_the_result_and_the_schedule_are_those_of_the_step():
    model, x, y = problem()
    step = threepass.ThreePass(model, F.cross_entropy, alpha=lambda calls: 0.5 / (1 + calls), every=2)
    twin = copy.deepcopy(model)
    other = threepass.ThreePass(twin, F.cross_entropy, alpha=lambda calls: 0.5 / (1 + calls), every=2)
    for _ in range(3):
        step.loss(x, y).backward()
        r = other(x, y)
        torch.testing.assert_close(step.result.input_loss, r.input_loss)
        torch.testing.assert_close(step.result.output, r.output)
    assert_close(grads(model), grads(twin), 1e-14)


def test_hooks_on_parameters_fire_once():
    model, x, y = problem()
    seen = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    expected = threepass.three_pass(model, F.cross_entropy, x, y).grads["0.weight"]
    threepass.loss(model, F.cross_entropy, x, y).backward()
    (only,) = seen
    torch.testing.assert_close(only, expected)


def test_a_scaler_scales_the_loss():
    model, x, y = problem(torch.float32)
    expected = threepass.three_pass(model, F.cross_entropy, x, y).grads
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = copy.deepcopy(dict(model.named_parameters()))
    scaler.scale(threepass.loss(model, F.cross_entropy, x, y)).backward()
    assert_close(grads(model), {name: 1024 * g for name, g in expected.items()}, 1e-6)
    scaler.step(optimizer)
    moved = {name: (before[name] - p).detach() / 0.1 for name, p in model.named_parameters()}
    assert_close(moved, expected, 1e-4)
    with pytest.raises(ValueError, match=r"scaler\.scale"):
        threepass.ThreePass(model, F.cross_entropy, scaler=scaler).loss(x, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_parameters_get_gradients_of_their_own_dtype(dtype):
    model, x, y = problem(dtype)
    expected = threepass.three_pass(model, F.cross_entropy, x, y, strength=0.5).grads
    threepass.loss(model, F.cross_entropy, x, y, strength=0.5).backward()
    assert {p.grad.dtype for p in model.parameters()} == {dtype}
    assert_close(grads(model), expected, 0.02)


def test_compiled(graph_only):
    model, x, y = problem()
    step = threepass.ThreePass(model, F.cross_entropy, alpha=0.3, compile="require")
    losses = [step.loss(x, y), step.loss(2 * x, y)]
    assert all(p.grad is None for p in model.parameters())
    sum(losses).backward()
    one, two = (threepass.three_pass(model, F.cross_entropy, z, y, alpha=0.3).grads for z in (x, 2 * x))
    assert_close(grads(model), {name: one[name] + two[name] for name in one}, 1e-12)


def test_a_loss_on_the_input_gradient():
    model, x, _ = problem()

    def loss_fn(output, g, y):
        return (g - y).square().mean() + output.square().mean()

    y = torch.randn(6, 5).double()
    expected = threepass.gradient_step(model, loss_fn, x, y)
    step = threepass.GradientStep(model, loss_fn)
    loss = step.loss(x, y)
    torch.testing.assert_close(loss.detach(), expected.loss)
    (2 * loss).backward()
    assert_close(grads(model), {name: 2 * g for name, g in expected.grads.items()}, 1e-14)
    torch.testing.assert_close(step.result.input_grad, expected.input_grad)


def test_a_summed_loss_is_noticed():
    model, x, y = problem()
    step = threepass.ThreePass(model, nn.CrossEntropyLoss(reduction="sum"), strength=0.1)
    with pytest.warns(threepass.errors.LossReductionWarning, match="is a sum over the batch"):
        step.loss(x, y)


def test_arguments_in_the_wrong_order():
    model, *_ = problem()
    with pytest.raises(TypeError, match="the model comes first"):
        threepass.ThreePass(F.cross_entropy, model)
