"""Puts the activations' kernel into a captured step's graph, where an activation's input error is summed over rows.

In pass 2, and in exact mode's last backward pass, where it adds the term with f'' and recomputes u for the gradient of
the weight downstream: kept since pass 1, u would be an eighth of a ViT's memory.

The rule cannot offer both terms as one operation: the kernel is used only where the layer upstream sums the error (over
rows, for its bias). Elsewhere Inductor fuses f' r, which may be GELU's with one exponential, and f'' d t separately.

The other GELUs, in half dtypes on a GPU, are decomposed with one exponential (`half_gelu.py`).
"""

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from ..._torch_compat import to_copy
from ...kernels import activation
from ...kernels.activation import KINDS, half_gelu
from .graph import insert_call, only_reader, replace_call, value_of
from .readers import column_sums, is_fused_into_its_reader, widen

_aten = torch.ops.aten
_add, _mm, _copy = _aten.add.Tensor, _aten.mm.default, to_copy.default
_IN_HALF = {_aten.gelu.default: half_gelu.gelu, _aten.gelu_backward.default: half_gelu.gelu_backward}


def fuse_activations(graph: Graph) -> None:
    for node in list(graph.nodes):
        for kind, f in KINDS.items():
            if node.target is f.backward and node.kwargs == f.options:
                _fuse(graph, node, kind)
    for node in graph.nodes:
        if node.target in _IN_HALF and not node.kwargs and half_gelu.is_faster(value_of(node)):
            replace_call(node, _IN_HALF[node.target], node.args)


def _fuse(graph: Graph, node: Any, kind: str) -> None:
    """The call in place of f'(a) r, or of that and f''(a) d t."""
    r, a = node.args
    d, t, errors = _bend_after(node, a) or (None, None, [node])
    signals = [z for z in (a, r, d, t) if z is not None]
    sums = [n for e in errors for n in column_sums(e)]
    fits = activation.fits(*map(value_of, signals)) and value_of(errors[0]).dtype == value_of(a).dtype
    early = all(z < node for z in signals)
    if not sums or not early or not fits or any(map(is_fused_into_its_reader, signals[1:])):
        return
    outputs = [] if d is None else _recomputed_outputs(node, a, KINDS[kind].value)
    with graph.inserting_before(node):
        arguments = (r, a, kind, d, t, bool(outputs))
        whole = insert_call(graph, torch.ops.threepass.activation_error.default, arguments)
        e, total, u = (insert_call(graph, operator.getitem, (whole, i)) for i in range(3))
    for n in sums:
        widen(graph, n, total)
    for n in errors:
        n.replace_all_uses_with(e)
    for n in outputs:
        _move(n, u)


def _bend_after(node: Any, a: Any) -> tuple[Any, Any, list[Any]] | None:
    """d, t and the sums e, in the dtype in which they are read, of which the node is the first term."""
    total = only_reader(node, _add)
    curve = None if total is None or total.kwargs else total.args[1]
    if curve is None or curve.target is not activation.curve.op or curve.args[2] is not a:
        return None
    d, t, *_ = curve.args
    readers = list(total.users)
    narrow = readers and all(n.target is _copy and n.kwargs == {"dtype": value_of(a).dtype} for n in readers)
    return d, t, readers if narrow else [total]


def _recomputed_outputs(node: Any, a: Any, value: Any) -> list[Any]:
    """The nodes that compute u = f(a) for products alone, which can run after this node."""
    waiting = []
    for u in [n for n in a.users if n.target is value and n.kwargs == node.kwargs]:
        views = [n for n in u.users if n.target is _aten.view.default]
        products = [n for view in views for n in view.users]
        late = all(n.target is _mm and all(node < reader for reader in n.users) for n in products)
        if views and len(views) == len(u.users) and late and products:
            waiting.append(u)
    return waiting


def _move(old: Any, u: Node) -> None:
    """Gives u to the users of old, and moves them after it."""
    for view in list(old.users):
        products = [n for n in view.users if n < u]
        view.replace_input_with(old, u)
        u.append(view)
        for n in products:
            view.append(n)
