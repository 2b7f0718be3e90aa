"""The grid once more, compiled: the captured step's gradients and buffers are the eager one's, in both modes."""

import copy

import pytest
import torch
from cases import CASES
from close import assert_close

import threepass

UNCAPTURED = {  # a value of a tensor decides what is computed, or an operation has no shape function
    "control-flow": "is read out of a tensor",
    "packed-lstm": "is read out of a tensor",
    "batch-norm-1d-plain": "is read out of a tensor",  # momentum=None: the average depends on a counter
    "custom-op": "register_fake",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("case", [c for c in CASES if not c.random], ids=str)
def test_a_compiled_step_is_the_eager_one(case, mode):
    model, loss_fn, x, y = case.build()
    twin = copy.deepcopy(model)
    step = threepass.ThreePass(model, loss_fn, alpha=0.3, mode=mode, compile="require")
    if case.name in UNCAPTURED:
        with pytest.raises(threepass.CaptureError, match=UNCAPTURED[case.name]):
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
