"""What people train is captured: the same numbers as eager steps, family by family."""

import copy
import warnings

import pytest
import torch
from close import assert_close
from families import FAMILIES, UNet, in_float64, make
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import threepass

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning", "ignore::DeprecationWarning")

MODES = ["paper", "exact"]
# Without code generation a case takes 2 to 10 s; the others are `slow`.
FAST = {
    "paper": {"mlp", "lstm", "dlrm", "unet", "schnet", "bert_mask", "gpt2_mask", "llama"},
    "exact": {"mlp", "schnet", "bert_mask"},
}
CASES = [
    pytest.param(name, mode, marks=() if name in FAST[mode] else pytest.mark.slow)
    for name in FAMILIES
    for mode in MODES
]


@pytest.fixture
def without_code(monkeypatch):
    """Inductor as far as its passes go: the graph that it would write code for is executed instead.

    Writing the code takes most of the time (30 to 110 s of a CPU for one of these nets).
    """
    monkeypatch.setattr("threepass.compile.inductor.compiled", _compiled_without_code)


def _compiled_without_code(program, inputs):
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad():
        run = compile_fx(program.graph, [*program.state, *inputs], inner_compile=_inductor_passes)
    return lambda values: run(*values)


def _inductor_passes(graph, inputs, **options):
    from torch._dynamo.utils import detect_fake_mode
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    with V.set_fake_mode(detect_fake_mode(inputs)):
        post_grad_passes(graph, is_inference=True)
    graph.recompile()

    def run(values):
        given = list(values)
        values.clear()
        return graph(*given)

    run._boxed_call = True
    return run


def numbers(r):
    """Everything that a step gives, by name."""
    tensors = [z for z in tree_leaves((r.output, r.input_grad)) if isinstance(z, torch.Tensor)]
    return r.grads | {"loss": r.loss, "input_loss": r.input_loss} | {f"tensor {i}": z for i, z in enumerate(tensors)}


def agree(step, twin, mode, x, y):
    """A captured step, which must not run eagerly, against an eager one of a twin of its model."""
    expected = threepass.three_pass(twin, step.loss_fn, x, y, alpha=0.3, mode=mode)
    step.model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error", threepass.UncompiledWarning)
        r = step(x, y)
    assert_close(numbers(r), numbers(expected), 1e-10)
    assert_close({n: p.grad for n, p in step.model.named_parameters() if p.grad is not None}, expected.grads, 1e-10)
    for ours, theirs in zip(step.model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def check(name, mode):
    """On two batches, with other masks and indices: a captured step may not keep anything of the first."""
    model, loss_fn, *_ = in_float64(make(FAMILIES[name]))
    twin = copy.deepcopy(model)
    step = threepass.ThreePass(model, loss_fn, alpha=0.3, mode=mode, compile=True)
    for seed in range(2):
        agree(step, twin, mode, *in_float64(make(FAMILIES[name], seed=seed))[2:])
    assert len(step.compiled.programs) == 1


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_a_family_is_captured_and_agrees_with_eager(name, mode, without_code):
    check(name, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_compiled_family_agrees_with_eager(name, mode):
    check(name, mode)


def test_images_of_several_sizes(without_code):
    torch.manual_seed(0)
    model = UNet(2, 1, classes=2, up=lambda n, m: nn.ConvTranspose2d(n, m, 2, 2)).double()
    twin = copy.deepcopy(model)
    step = threepass.ThreePass(model, F.cross_entropy, alpha=0.3, compile=True)
    for height, width in [(4, 4), (5, 6), (4, 4)]:
        x = torch.randn(2, 3, height, width, dtype=torch.float64)
        agree(step, twin, "paper", x, torch.randint(2, (2, height, width)))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        u = self.layer(x)
        if u.mean() > 0:
            u = -u
        return u


def test_what_is_not_captured_says_which_line_is_the_reason():
    step = threepass.ThreePass(Gated(), F.mse_loss, compile=True)
    with pytest.warns(threepass.UncompiledWarning) as caught:
        step(torch.randn(4, 3), torch.randn(4, 3))
    (warning,) = caught
    assert "test_families.py:" in str(warning.message)
    assert "in Gated.forward: `if u.mean() > 0:`: a value is read out of a tensor" in str(warning.message)
    assert "torch.where" in str(warning.message)
