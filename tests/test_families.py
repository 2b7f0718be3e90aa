"""What people train is captured: the same numbers as eager steps, family by family."""

import copy
import warnings

import pytest
import torch
from close import assert_close
from families import FAMILIES, in_float64, make
from torch.utils._pytree import tree_leaves

import threepass

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning", "ignore::DeprecationWarning")

MODES = ["paper", "exact"]
QUICK = [("schnet", "paper"), ("bert_mask", "exact"), ("swin", "paper"), ("unet", "paper")]


@pytest.fixture
def traced_only(monkeypatch):
    """Captured steps without the compiler: the capture and all rewrites of the graph are the same."""
    monkeypatch.setattr("threepass.capture._compiled", lambda program, inputs: lambda values: program.graph(*values))


def numbers(r):
    """Everything that a step gives, by name."""
    tensors = [z for z in tree_leaves((r.output, r.input_grad)) if isinstance(z, torch.Tensor)]
    return r.grads | {"loss": r.loss, "input_loss": r.input_loss} | {f"tensor {i}": z for i, z in enumerate(tensors)}


def check(name, mode, batches=2):
    """A captured step against eager ones, on several batches: none may keep numbers of the first."""
    model, loss_fn, *_ = in_float64(make(FAMILIES[name]))
    twin = copy.deepcopy(model)
    step = threepass.ThreePass(model, loss_fn, alpha=0.3, mode=mode, compile=True)
    for seed in range(batches):
        _, _, x, y = in_float64(make(FAMILIES[name], seed=seed))
        expected = threepass.three_pass(twin, loss_fn, x, y, alpha=0.3, mode=mode)
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error", threepass.UncompiledWarning)
            r = step(x, y)
        assert_close(numbers(r), numbers(expected), 1e-10)
        assert_close({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected.grads, 1e-10)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(step.compiled.steps) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_captured_and_agrees_with_eager(name, mode, traced_only):
    check(name, mode)


@pytest.mark.parametrize(("name", "mode"), QUICK)
def test_compiled_families_agree_with_eager(name, mode):
    check(name, mode)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), [(n, m) for n in FAMILIES for m in MODES if (n, m) not in QUICK])
def test_all_compiled_families_agree_with_eager(name, mode):
    check(name, mode)
