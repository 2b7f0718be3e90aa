"""How the gradients of passes 2 and 3 are combined: which options and nets give which case."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from threepass.core.engine import Task, forward
from threepass.core.options import Options
from threepass.core.plan import MixForm, Plan, Terms, make_plan
from threepass.rules import affine
from threepass.tape.record import Record
from threepass.tracing import tracing_for

WEIGHTS = torch.tensor(0.3), torch.tensor(0.7)
HALF = [torch.bfloat16, torch.float16]


def plan(
    options: Options, *, activation=nn.ReLU, third=True, compiled=False, traced=False, dtype=torch.float32
) -> Plan:
    """traced: of a captured step that no compiler sees."""
    model = nn.Sequential(nn.Conv1d(3, 4, 2), activation(), nn.Flatten(), nn.Linear(12, 2)).to(dtype)
    tape = Record("cpu")
    x, y = torch.randn(5, 3, 4, dtype=dtype), torch.randint(2, (5,))
    _, loss = forward(Task(model, F.cross_entropy, x, y), tape, options)
    tape.prune([tape.meta_of(loss)] if options.exact and third else [])
    with tracing_for(compiled):
        return make_plan(tape, options, 5, third, WEIGHTS if compiled or traced else None)


@pytest.mark.parametrize("captured", [{}, {"traced": True}, {"compiled": True}], ids=["eager", "traced", "compiled"])
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_cases(mode, captured):
    paper = mode == "paper"
    assert plan(Options(mode=mode), **captured).terms is (Terms.MIXED_SIGNAL if paper else Terms.JOINT_BACKWARD)
    smooth = plan(Options(mode=mode), activation=nn.Tanh, **captured).terms
    assert smooth is (Terms.MIXED_PRODUCT if paper else Terms.JOINT_BACKWARD)
    assert plan(Options(mode=mode, separate=True), **captured).terms is Terms.SEPARATE
    assert plan(Options(mode=mode), third=False, **captured).terms is Terms.BACKPROP_ONLY
    assert plan(Options(mode=mode), **captured).exact is not paper
    assert plan(Options(mode=mode), third=False, **captured).exact is False


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_half_formats_form_no_mix_but_the_relative_one(mode, dtype):
    assert plan(Options(mode=mode), dtype=dtype).terms is Terms.SEPARATE
    compiled = plan(Options(mode=mode), dtype=dtype, compiled=True)
    assert (compiled.terms, compiled.mix_form) == (Terms.MIXED_PRODUCT, MixForm.RELATIVE)
    assert plan(Options(alpha=0, mode=mode), dtype=dtype, compiled=True).terms is Terms.SEPARATE  # nothing to divide by
    assert plan(Options(mode=mode), dtype=dtype, traced=True).terms is Terms.SEPARATE  # nothing is fused


def test_cheap_products_stay_separate_in_half_formats(monkeypatch):
    monkeypatch.setattr(affine.conv_kernels, "is_faster", lambda *arguments: True)
    assert plan(Options(), dtype=torch.bfloat16, compiled=True).terms is Terms.SEPARATE
    assert plan(Options(mode="exact"), dtype=torch.bfloat16, compiled=True).terms is Terms.MIXED_PRODUCT
    assert plan(Options(), compiled=True).terms is Terms.MIXED_SIGNAL


def test_errors_carry_the_weight_of_a_relative_mix():
    compiled = plan(Options(), compiled=True)
    assert compiled.mix_form is MixForm.RELATIVE
    assert compiled.back == 1
    assert compiled.error_scale == compiled.loss_error == WEIGHTS[0]
    half = plan(Options(), compiled=True, dtype=torch.float16)  # would round the weight in every error
    assert half.back is WEIGHTS[0]
    assert half.error_scale == half.error_unit == 4


def test_a_step_without_a_compiler_frees_activations_itself():
    assert plan(Options()).frees_activations
    assert plan(Options(), traced=True).frees_activations
    assert not plan(Options(), activation=nn.Tanh).frees_activations


def test_in_a_compiled_step_the_compiler_frees_activations():
    assert not plan(Options(), compiled=True).frees_activations
