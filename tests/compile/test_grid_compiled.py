"""The grid once more, compiled: the captured step's gradients and buffers are the eager one's, in both modes.

A captured step draws other random numbers than the eager one, so the cases that draw are not compared with it. They are
captured, where the check compares the program with its graph before the rewrites, which draws the same numbers, and
run. `test_randomness.py` tests the numbers.
"""

import copy

import pytest
import torch
from cases import CASES
from close import assert_close

import threepass

UNCAPTURED = {  # a tensor's value is read, an operation has no shape function, or it draws and has no form with a seed
    "control-flow": "is read out of a tensor",
    "positions": "is read out of a tensor",
    "packed-lstm": "is read out of a tensor",
    "batch-norm-1d-plain": "is read out of a tensor",  # momentum=None: the average depends on a counter
    "custom-op": "register_fake",
    "dropout-2d-alpha": r"draws random numbers by aten\.rrelu",
}


CASES_WITHOUT_DRAWS = [c for c in CASES if not c.random]
CASES_THAT_DRAW = [c for c in CASES if c.random]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("case", CASES_WITHOUT_DRAWS, ids=str)
def test_a_compiled_step_is_the_eager_one(case, mode):
    check_captured(case, mode, "require")


@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning", "error::threepass.UncompiledWarning")
@pytest.mark.parametrize("mode", [pytest.param("paper", marks=pytest.mark.slow), "exact"])
@pytest.mark.parametrize("case", CASES_WITHOUT_DRAWS, ids=str)
def test_a_captured_step_without_a_compiler_is_the_eager_one(case, mode):
    check_captured(case, mode, "trace")


def check_captured(case, mode, compile):
    model, loss_fn, x, y = case.build()
    twin = copy.deepcopy(model)
    step = threepass.ThreePass(model, loss_fn, alpha=0.3, mode=mode, compile=compile)
    if case.name in UNCAPTURED:
        with pytest.raises((threepass.CaptureError, threepass.UncompiledWarning), match=UNCAPTURED[case.name]):
            step(x, y)
        return
    for _ in range(2):  # the second call replays
        model.zero_grad()
        r = step(x, y)
        expected = threepass.three_pass(twin, loss_fn, x, y, alpha=0.3, mode=mode)
        assert_close(r.grads, expected.grads, 1e-10)
        assert_close({n: p.grad for n, p in model.named_parameters() if n in r.grads}, expected.grads, 1e-10)
        for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert step.compiled is not None
    torch.testing.assert_close(r.loss, expected.loss)


@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("case", CASES_THAT_DRAW, ids=str)
@pytest.mark.usefixtures("graph_only")
def test_a_case_that_draws_is_captured_and_its_seed_decides(case, mode):
    check_seeds(case, mode)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("case", CASES_THAT_DRAW, ids=str)
def test_a_case_that_draws_is_compiled_and_its_seed_decides(case, mode):
    check_seeds(case, mode)


def check_seeds(case, mode):
    model, loss_fn, x, y = case.build()
    step = threepass.ThreePass(model, loss_fn, alpha=0.3, mode=mode, compile="require")
    if case.name in UNCAPTURED:
        with pytest.raises(threepass.CaptureError, match=UNCAPTURED[case.name]):
            step(x, y)
        return
    results = []
    for seed in (1, 2, 1):
        model.zero_grad()  # else the next call adds to the tensors of `grads`
        torch.manual_seed(seed)
        results.append(step(x, y).grads)
    first, other, again = results
    assert_close(again, first, 0.0)
    assert not any(torch.equal(g, other[name]) for name, g in first.items())
    assert len(step.compiled.programs) == 1
