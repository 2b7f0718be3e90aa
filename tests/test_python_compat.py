"""What newer versions of Python do otherwise."""

import sys

import pytest
import torch

import threepass
from threepass import _python_compat
from threepass.rules import table

LAZY = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"
SOURCE = """
import torch

def loss_fn(out: Known.Elsewhere, g: Unknown, y: Unknown) -> Unknown:
    return (out - y).square().mean() + g.square().sum()

def rule(u, a: Unknown):
    return None

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Unknown):
        return 2 * a
"""


@pytest.fixture
def functions():
    """Of a script whose annotations name what is imported for type checkers only."""
    script = {"__name__": "script"}
    exec(compile(LAZY + SOURCE, "<script>", "exec", dont_inherit=True), script)
    return script


def test_losses_and_rules_may_have_annotations_that_cannot_be_evaluated(functions, monkeypatch):
    monkeypatch.setattr(table, "_RULES", dict(table._RULES))
    model, x, y = torch.nn.Linear(3, 1), torch.randn(2, 3), torch.zeros(2, 1)
    found = threepass.gradient_step(model, functions["loss_fn"], x, y)
    assert found.loss.isfinite()
    threepass.rule(functions["Twice"])(functions["rule"])
    with pytest.raises(ValueError, match="is a Python function"):
        threepass.rule(functions["loss_fn"])


def test_signatures(functions):
    assert list(_python_compat.signature_of(functions["loss_fn"]).parameters) == ["out", "g", "y"]
    assert list(_python_compat.signature_of(functions["Twice"].forward).parameters) == ["ctx", "a"]
