"""Formulas that are one node of a step that is traced for kernels, and written out if no kernel takes their place."""

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from threepass.compile.rewrite.graph import write_out_formulas
from threepass.compile.trace import trace
from threepass.core.engine import Task, run
from threepass.core.options import Options
from threepass.kernels import norm
from threepass.kernels.fusible import FORMULAS, fusible
from threepass.tracing import one_node_each

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")


@fusible("twice_the_sine")
def twice_the_sine(z: Tensor) -> Tensor:
    return 2 * z.sin()


def graph_of(kernels: bool) -> torch.fx.GraphModule:
    with one_node_each(kernels):
        return make_fx(lambda z: twice_the_sine(z))(torch.randn(3))


def targets(graph) -> list:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_without_kernels_a_formula_is_traced():
    assert twice_the_sine.op not in targets(graph_of(kernels=True).graph)  # on a device that has none


@pytest.mark.usefixtures("traced_for_kernels")
def test_with_kernels_a_formula_is_one_node_until_it_is_written_out():
    assert twice_the_sine.op not in targets(graph_of(kernels=False).graph)
    module = graph_of(kernels=True)
    assert targets(module.graph) == [twice_the_sine.op]
    write_out_formulas(module.graph)
    module.recompile()
    assert targets(module.graph) == [twice_the_sine.formula]
    z = torch.randn(3)
    torch.testing.assert_close(module(z), 2 * z.sin(), rtol=0, atol=0)


def arguments_of_formulas() -> dict:
    """For each formula, arguments as the rules give them."""
    a, t, d = (torch.randn(4, 6, dtype=torch.bfloat16) for _ in range(3))
    w = torch.rand(6) + 0.5
    x_hat, rstd, _ = norm.normalized(a, [1], 1e-5)
    group = (x_hat, rstd, [1], True)
    return {
        "norm_normalized": (a, [1], 1e-5),
        "norm_jacobian": (t, *group),
        "norm_scaled": (x_hat, w, torch.bfloat16),
        "norm_pulled": (d, w, *group),
        "norm_curved": (d, t, w, *group),
        "norm_curved_at_input": (d, t, rstd, *group),
        "norm_scale_gradient": (d, x_hat, [0], [6]),
        "norm_scale_gradient_at_input": (d, t, w, [0]),
        "activation_curve": (d, t, a, "silu"),
        "twice_the_sine": (a,),
    }


def test_every_formula_can_be_one_node():
    given = {f"threepass::{name}": args for name, args in arguments_of_formulas().items()}
    assert set(given) == {op.name() for op in FORMULAS}
    for op in FORMULAS:
        torch.library.opcheck(op, given[op.name()])


class Net(nn.Module):
    """Norms over rows, groups and channels, and activations."""

    def __init__(self):
        super().__init__()
        self.conv, self.batch, self.group = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.layer, self.rms, self.head = nn.LayerNorm(36), nn.RMSNorm(36), nn.Linear(144, 10)

    def forward(self, x: Tensor) -> Tensor:
        z = F.silu(self.group(self.batch(self.conv(x))))
        return self.head(self.rms(F.gelu(self.layer(z.flatten(2)))).flatten(1))


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.usefixtures("traced_for_kernels")
def test_what_no_kernel_replaces_is_the_formula(mode):
    """In float64, which no kernel takes."""
    torch.manual_seed(0)
    model, x, y = Net().double(), torch.randn(5, 3, 8, 8).double(), torch.arange(5)
    options = Options(alpha=0.3, mode=mode)

    def step(x, y, weights=None):
        weights = None if weights is None else (weights[0], weights[1])
        return list(run(Task(model, F.cross_entropy, x, y), options, weights=weights).grads.values())

    inputs = [x, y, torch.tensor([0.3, 0.7], dtype=torch.float64)]
    program = trace(step, inputs)
    used = {node.target for node in program.plain.graph.nodes} & set(FORMULAS)
    assert norm.jacobian.op in used
    assert not {node.target for node in program.graph.graph.nodes} & set(FORMULAS)
    torch.testing.assert_close(program(*inputs), step(x, y), rtol=1e-10, atol=1e-12)
