"""Activations that passes 2 and 3 recompute, so that they need not be kept in memory.

Rectified norms. u = relu(norm(z)) is a function of z and of two numbers per channel. Passes 2 and 3 read z anyway, so
they recompute u in the kernels that read z. Plain training has to keep u for a weight's gradient; three passes use the
mix there. The same goes for smooth activations in pass 3.

Convolutions. Where half dtypes need a in pass 3, a and d of all layers are kept, and at the start of pass 3 a tangent
and a mix as well, which is the peak of the memory. So two of the largest rectified convolutions are freed after pass 2
and recomputed where pass 3 reads them. By then it has freed as many errors. This costs about 2 % more arithmetic.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..._torch_compat import batch_norm_functional, batch_norm_legit
from ...kernels.activation import KINDS
from ...kernels.batch_norm import rectified
from ...numerics.precision import HALF, accumulate_dtype
from .graph import insert_call

_aten = torch.ops.aten

# Batch norms in training mode, as `functional` leaves them.
_BATCH_NORMS = {batch_norm_functional.default, batch_norm_legit.no_stats}


def recompute_rectified_norms(graph: Graph) -> None:
    """In passes 2 and 3, computes rectified batch norms from their inputs."""
    for u in list(graph.nodes):
        norm = _norm_before(u)
        if norm is None:
            continue
        z, weight, bias = norm.args[:3]
        mean, rstd = (next((n for n in norm.users if n.args[1] == i), None) for i in (1, 2))
        if mean is None or rstd is None or not any(_needs_values(n, u) for n in u.users):
            continue
        if mean.meta["val"].dtype != accumulate_dtype(z.meta["val"].dtype):  # rounded, as on a CPU in half dtypes
            continue
        with graph.inserting_before(u):
            numbers = insert_call(graph, torch.ops.threepass.norm_numbers.default, (mean, rstd, weight, bias))
        for n in list(u.users):
            if _needs_values(n, u):
                _recompute_for(graph, u, n, rectified, (z, numbers))
            elif n.target is _aten.convolution_backward.default and list(n.args[10]) == [True, False, False]:
                n.replace_input_with(u, z)  # only its shape counts


def _recompute_for(graph: Graph, u: Node, reader: Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> None:
    """Computes u once more, for one of its readers."""
    with graph.inserting_before(reader):
        copy = insert_call(graph, target, args, kwargs)
    reader.replace_input_with(u, copy)


_BACKWARD = {f.value: f.backward for f in KINDS.values()}


def recompute_activations(graph: Graph) -> None:
    """After pass 2, computes smooth activations from their inputs, which their tangents read anyway."""
    place = {n: i for i, n in enumerate(graph.nodes)}
    for u in list(graph.nodes):
        if u.target not in _BACKWARD:
            continue
        (z,) = u.all_input_nodes
        error, *tangents = sorted(place[n] for n in z.users if n.target is _BACKWARD[u.target]) or [len(place)]
        for n in [n for n in u.users if tangents and place[n] > error]:
            if getattr(n.target, "is_view", False) and n.users:  # exact mode's second product reads a view of u
                min(n.users, key=lambda user: place[user]).prepend(n)
            _recompute_for(graph, u, n, u.target, u.args, u.kwargs)


def _norm_before(u: Node) -> Any:
    """Batch norm in training mode, where u is its rectified output."""
    if u.target is not _aten.relu.default:
        return None
    y: Any = u.args[0]
    is_norm = y.target is operator.getitem and y.args[1] == 0 and y.args[0].target in _BATCH_NORMS
    return y.args[0] if is_norm and len(y.users) == 1 else None


def _needs_values(n: Any, u: Node) -> bool:
    """Whether n is a gate by u, or a mix with it, which the compiler fuses, or exact mode's second product with it."""
    if n.target is _aten.threshold_backward.default:
        return n.args[1] is u and n.args[0] is not u and n.args[2] == 0
    if n.target is _aten.convolution_backward.default:
        return n.args[1] is u and list(n.args[10]) == [False, True, False]
    return n.target is torch.ops.threepass.mix.default and n.args[0] is u and n.args[1] is not u


@torch.library.custom_op("threepass::convolution", mutates_args=())
def convolution(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """PyTorch's convolution under another name, so that `share_sums` does not merge it with the one of pass 1."""
    return _aten.convolution(a, w, bias, stride, padding, dilation, transposed, output_padding, groups)


convolution.register_fake(_aten.convolution.default)


RECOMPUTED = 2  # at most so many convolutions
EARLY = 3  # not the first layers: pass 3 comes to them before it has freed as much memory as it allocates


def recompute_convolutions(graph: Graph) -> list[Node]:
    """Computes some rectified convolutions once more for pass 3; returns the new nodes."""
    place = {n: i for i, n in enumerate(graph.nodes)}
    first: dict[Any, Any] = {}
    for n in graph.nodes:
        is_gate = n.target is _aten.threshold_backward.default and n.args[2] == 0
        if is_gate and n.meta["val"].dtype in HALF and _is_rectified_product(n.args[1]):
            first.setdefault(n.args[1], n)
    late = {u: [n for n in u.users if place[n] > place[gate]] for u, gate in first.items()}
    candidates = [u for u in sorted(late, key=lambda u: place[u]) if late[u]]
    if len(candidates) <= EARLY:
        return []
    size = max(u.meta["val"].numel() for u in candidates)
    recomputed: list[Node] = []
    chosen: set[Any] = set()
    for u in reversed(candidates[EARLY:]):
        z: Any = u.args[0]
        beside = z.args[0] in chosen or any(n.args[0].args[0] is u for n in chosen)
        if u.meta["val"].numel() == size and not beside and len(chosen) < RECOMPUTED:
            chosen.add(u)
            with graph.inserting_before(min(late[u])):
                recomputed.append(insert_call(graph, z.target, z.args, z.kwargs))
                copy = insert_call(graph, _aten.relu.default, (recomputed[-1],))
            for n in late[u]:
                n.replace_input_with(u, copy)
    return recomputed


def _is_rectified_product(u: Any) -> bool:
    """Whether u is the rectified output of a convolution that nothing else reads."""
    z: Any = u.args[0] if u.target is _aten.relu.default else None
    return isinstance(z, Node) and z.target is _aten.convolution.default and len(z.users) == 1
