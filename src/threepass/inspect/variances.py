"""Variances of the signals at every layer, measured, and as the paper's section on initialisation predicts them.

At the input v^i of layer i = 0 .. d - 1, with the paper's signs,

    Delta v^i = -dl/dv^i, the signal of pass 2,    nabla v^i = t, that of pass 3, from nabla v^0 = +dl/dx = -Delta v^0.

A variance is over all units and the batch, about their mean; l is the mean over the batch, and t_0 = dl/dx, as with
`reduction="batch"`. Measured in plain PyTorch, autograd back and forward-mode AD forth, without the engine.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._torch_compat import tree_leaves, tree_map
from ..core.options import Options, check_loss, check_model, check_x
from ..init import LAYERS, Fans, gain
from ..tape.inputs import call_model, is_float, module_output_as_input
from ..tape.state import autograd_enabled, unchanged_on_error


@dataclass(frozen=True)
class Row:
    """At one layer u = W v the variances of v, u, Delta v (pass2), nabla v (pass3), their sum, and Delta u (error)."""

    layer: str
    v: float
    u: float
    pass2: float
    pass3: float
    both: float
    error: float


@dataclass(frozen=True)
class Variances:
    """A row for every linear or convolution layer, in execution order."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Row:
        return self.rows[i]

    def __str__(self) -> str:
        width = max([len("layer"), *(len(r.layer) for r in self.rows)])
        head = f"{'layer':<{width}}     Var[v]     Var[u]     pass 2     pass 3       both"
        lines = [
            f"{r.layer:<{width}}  " + "  ".join(f"{z:9.3g}" for z in (r.v, r.u, r.pass2, r.pass3, r.both)) for r in self
        ]
        return "\n".join([head, *lines])


def variances(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], x: Any, y: Any, input_at: str | None = None
) -> Variances:
    """Measures the variances of v, Delta v, nabla v and Delta v + nabla v at every layer on one batch; changes nothing.

    v is a layer's input, Delta v = -dl/dv its signal in pass 2, and nabla v = t that in pass 3. A layer is a call of an
    `nn.Linear` or convolution module; products with bare parameters are not included.
    """
    check_model(model)
    check_x(x, Options(input_at=input_at))
    with autograd_enabled(), sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward-mode AD
        inputs = _Inputs()
        with unchanged_on_error(model, always=True):
            with _watching(model, _before) as calls:
                loss = loss_fn(_output(model, x, inputs, input_at), y)
            check_loss(loss)
            edges = [edge for _, seen in calls if seen is not None for edge in seen[2:]]
            d = torch.autograd.grad(loss, [*inputs.leaves, *edges], allow_unused=True) if loss.requires_grad else ()
        errors = iter(d[len(inputs.leaves) :])
        if all(g is None for g in d[: len(inputs.leaves)]):
            raise ValueError("the loss does not depend on the input: is it computed from detached tensors?")
        dx = [torch.zeros_like(z) if g is None else g for z, g in zip(inputs.leaves, d, strict=False)]

        with (
            forward_ad.dual_level(),
            torch.no_grad(),
            unchanged_on_error(model, always=True),
            _watching(model, _tangent) as tangents,
        ):
            _output(model, x, _Inputs(dx), input_at)

    rows = []
    for (name, seen), (_, t) in zip(calls, tangents, strict=True):
        d_v, d_u = (next(errors), next(errors)) if seen is not None else (None, None)
        if d_v is not None and d_u is not None:
            t = torch.zeros_like(d_v) if t is None else t
            rows.append(Row(name, seen[0], seen[1], var(d_v), var(t), var(t.double() - d_v), var(d_u)))
    return Variances(tuple(rows))


def predicted(
    fans: Sequence[Fans],
    weights: Sequence[float],
    nonlinearity: str = "relu",
    x: float = 1.0,
    error: float = 1.0,
    correlated: bool = False,
) -> Variances:
    """The same table by the paper's equations (eq1) to (eq4), linear or rectifier, for a chain of layers.

    Args:
        fans: (n_i, n_{i+1}) of every layer.
        weights: Var[W^i] of every layer.
        nonlinearity: between the layers; "relu", or "linear", "tanh" or "sigmoid" for the linear equations.
        x: Var[x], of inputs with mean 0.
        error: Var[Delta u^d], at the output of the last layer. The paper's nets end in an activation, and its equations
            start one step later: from Var[Delta v^d], which is `error`, or 2 `error` for ReLU.
        correlated: (eq3) and (eq4) as they become without the paper's assumption that nabla v^0 and the weights, and
            Delta v^i and nabla v^i, are independent.

    The equations treat nabla v^0 as if drawn anew. But with J = dv^i/dx it is -J^T Delta v^i. So, with M = J J^T,
    nabla v^i = -M Delta v^i, and with p = 1 / g, the part of the units that are on,

        Var[nabla v^i] = m2 Var[Delta v^i]                              m1 = tr M / n_i   = prod p n Var[W]
        Var[Delta v^i + nabla v^i] = (1 - 2 m1 + m2) Var[Delta v^i]     m2 = tr M^2 / n_i

    where (eq3) and (eq4) have m1^2 n_i / n_0 for m2, and no 2 m1. From one wide layer to the next
    m2 -> Var[W]^2 (p^2 n n' m2 + p n^2 m1^2). With one width and p n Var[W] = 1 that is m2 = 1 + i for linear layers
    and 1 + 2 i for ReLU, against 1 in (eq3). At the input the sum is zero.

    `v` of ReLU is that of a rectified normal u, (1 - 1/pi) / 2 Var[u]; the paper has E[v^2] = Var[u] / 2.
    """
    p = 1 / gain(nonlinearity)
    layers = list(zip(fans, weights, strict=True))
    back = [error]
    for (_, n_out), w in reversed(layers):  # eq2, from the last layer: Var[Delta u^{i+1}], then Var[Delta v^i]
        back.append(back[-1] * (p if len(back) > 1 else 1) * n_out * w)
    pass2 = back[:0:-1]
    rows, v, square, m1, m2 = [], x, x, 1.0, 1.0
    for i, ((n_in, n_out), w) in enumerate(layers):
        u = square * n_in * w  # eq1
        pass3 = (m2 * pass2[i]) if correlated else pass2[0] * m1  # eq3
        both = (1 - 2 * m1 + m2) * pass2[i] if correlated else pass2[i] + pass3  # eq4
        error_u = error if i == len(layers) - 1 else p * pass2[i + 1]
        rows.append(Row(str(i), v, u, pass2[i], pass3, both, error_u))
        v, square = (u, u) if p == 1 else ((1 - 1 / torch.pi) / 2 * u, u / 2)
        m1, m2 = p * n_in * w * m1, w**2 * (p**2 * n_in * n_out * m2 + p * n_in**2 * m1**2)
    return Variances(tuple(rows))


def var(z: Tensor) -> float:
    return z.detach().double().var(correction=0).item()


class _Inputs:
    """The net's inputs: leaves in pass 1, and, given their tangents, duals in pass 3."""

    def __init__(self, tangents: Sequence[Tensor] | None = None):
        self.leaves: list[Tensor] = []
        self._tangents = None if tangents is None else iter(tangents)

    def add_input(self, z: Tensor) -> Tensor:
        if self._tangents is not None:
            return forward_ad.make_dual(z.detach().clone(), next(self._tangents))
        self.leaves.append(z.detach().clone().requires_grad_())
        return self.leaves[-1].clone()  # the model may write to it

    def is_active(self, z: Tensor) -> bool:
        return False


def _output(model: nn.Module, x: Any, inputs: Any, input_at: str | None) -> Any:
    x = dict(x) if isinstance(x, Mapping) else x
    with contextlib.ExitStack() as stack:
        if input_at is None and any(map(is_float, tree_leaves(x))):
            x = tree_map(lambda z: inputs.add_input(z) if is_float(z) else z, x)
        else:
            stack.enter_context(module_output_as_input(model, inputs, input_at))
        return call_model(model, x)


@contextlib.contextmanager
def _watching(model: nn.Module, measure: Callable[[Tensor, Tensor], Any]) -> Iterator[list[tuple[str, Any]]]:
    """Collects measure(v, u) of every call of a layer, with its name."""
    calls: list[tuple[str, Any]] = []

    def watch(name: str, layer: nn.Module):
        def hook(module, args, kwargs, u):
            calls.append((name, measure(args[0] if args else kwargs["input"], u)))

        return layer.register_forward_hook(hook, with_kwargs=True)

    handles = [watch(name, m) for name, m in model.named_modules() if isinstance(m, LAYERS)]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _before(v: Tensor, u: Tensor) -> tuple[float, float, GradientEdge, GradientEdge] | None:
    """The variances of v and u, and the edges at which pass 2 gives their errors; None if v does not depend on x."""
    return (var(v), var(u), get_gradient_edge(v), get_gradient_edge(u)) if v.requires_grad else None


def _tangent(v: Tensor, u: Tensor) -> Tensor | None:
    t = forward_ad.unpack_dual(v).tangent
    return None if t is None else t.clone()
