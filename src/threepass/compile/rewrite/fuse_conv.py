"""Puts the convolution kernels into a captured step's graph, with the elementwise operations around them.

    pass 1   relu(conv(a) + b)                    forward with relu
    pass 2   gate of a convolution's input error  backward_input with relu_output
    pass 3   gate of conv(mix) + b                forward with gate
             gate of conv(t)                      forward with relu_output
             the same, and its mix                forward_tangent
    weights  the product, and the sum of d        backward_weight

Convolutions of more channels than `FEW`, of another kind, or of more than `BARE` channels and with nothing to fuse or
many pixels, stay with the framework's kernels, which are faster or as fast there; but not those from or to the `THIN`
channels of an image. `kernels/conv` has these limits.
"""

import operator
from typing import Any

import torch
from torch.fx import Graph

from ...kernels import conv
from ...kernels.batch_norm import rectified
from ...kernels.conv import LIMITLESS, PIXELS, PIXELS_OF_WEIGHT, THIN, Geometry, has_few_channels
from .gates import gated, marked
from .graph import insert_call, replace_call, value_of
from .readers import widen

_aten = torch.ops.aten
_GATES = (marked, _aten.threshold_backward.default)


def fuse(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.target is _aten.convolution.default and _fits_forward(node):
            _fuse_forward(graph, node)
        elif node.target is _aten.convolution_backward.default and _fits_backward(node):
            _fuse_backward(graph, node)


def _fits_forward(node: Any) -> bool:
    a, w = value_of(node.args[0]), value_of(node.args[1])
    return (
        Geometry(*node.args[3:9]).is_ours
        and conv.fits(node.args[3][0], a, weight=w.shape)
        and a.dtype == w.dtype
        and has_few_channels(w, value_of(node), LIMITLESS if w.shape[1] <= THIN else PIXELS if _gate_after(node) else 0)
    )


def _fits_backward(node: Any) -> bool:
    d, a, w = (value_of(z) for z in node.args[:3])
    mask = list(node.args[10])
    closed = mask[0] and any(_error_gate(result) for result in node.users)
    return (
        Geometry(*node.args[4:10]).is_ours
        and conv.fits(node.args[4][0], d, a, weight=w.shape)
        and d.dtype == w.dtype
        and mask in ([True, False, False], [False, True, False])
        and has_few_channels(
            w, d, LIMITLESS if w.shape[1] <= THIN else PIXELS_OF_WEIGHT if mask[1] else PIXELS if closed else 0
        )
    )


def _gate_after(node: Any) -> Any:
    """The rectifier, or the gate, that alone reads the node."""
    (user, *others) = node.users
    is_gate = user.target in (_aten.relu.default, gated, marked) or (
        user.target is _aten.threshold_backward.default and user.args[2] == 0
    )
    return user if not others and is_gate and user.args[0] is node else None


def _error_gate(result: Any) -> Any:
    """The gate of an input error, unless it is made from a norm's input, which the norm's own kernels read."""
    after = _gate_after(result)
    return after if after is not None and after.target in _GATES and after.args[1].target is not rectified else None


def _fuse_forward(graph: Graph, node: Any) -> None:
    a, w, bias, (stride, _) = node.args[:4]
    after = _gate_after(node)
    if after is not None and after.target is _aten.relu.default:
        replace_call(after, torch.ops.threepass.conv3x3.default, (a, w, bias, stride, True, None))
    elif after is not None and after.target is gated:
        replace_call(after, torch.ops.threepass.conv3x3.default, (a, w, bias, stride, False, after.args[1]))
    elif after is not None and bias is None and (mix := _mix_after(after)) is not None:
        u, _, ratio, seed = mix.args
        with graph.inserting_before(after):
            arguments = (a, w, stride, u, ratio, seed)
            both = insert_call(graph, torch.ops.threepass.conv3x3_tangent.default, arguments)
        replace_call(after, operator.getitem, (both, 0))
        replace_call(mix, operator.getitem, (both, 1))
    elif _error_gate(node) is not None and after.target is not marked:
        replace_call(after, torch.ops.threepass.conv3x3.default, (a, w, bias, stride, False, None, after.args[1]))
    else:
        replace_call(node, torch.ops.threepass.conv3x3.default, (a, w, bias, stride, False, None))


def _mix_after(gate: Any) -> Any:
    """The mix a + ratio t of a gate's output a with the tangent t that passes it."""
    mixes = [
        n for n in gate.users if n.target is torch.ops.threepass.mix.default and n.args[:2] == (gate.args[1], gate)
    ]
    return mixes[0] if len(mixes) == 1 and max(mixes[0].args[2:]) < gate else None


def _fuse_backward(graph: Graph, node: Any) -> None:
    d, a, w = node.args[:3]
    stride, (for_input, _, _) = node.args[4][0], node.args[10]
    (result,) = node.users
    if for_input:
        size = list(value_of(a).shape[2:])
        after = _error_gate(result)
        target, relu_output = (result, None) if after is None else (after, after.args[1])
        replace_call(target, torch.ops.threepass.conv3x3_input.default, (d, w, stride, size, relu_output))
        return
    channels_last = value_of(w).is_contiguous(memory_format=torch.channels_last)
    with graph.inserting_before(node):
        both = insert_call(graph, torch.ops.threepass.conv3x3_weight.default, (d, a, stride, channels_last))
        product = insert_call(graph, operator.getitem, (both, 0))
    widen(graph, result, product)
    for total in list(d.users):
        whole = total.target is _aten.sum.dim_IntList and len(total.args) == 2 and not total.kwargs
        if whole and list(total.args[1]) == [0, 2, 3] and both < total:
            replace_call(total, operator.getitem, (both, 1))
