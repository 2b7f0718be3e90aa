"""Operations with dropout inside, in a captured step: attention and recurrent layers as the operations they consist of.

Such an operation draws its mask itself, inside its kernel, where it cannot be computed from a seed
(`compile/randomness.py`). Written out, the mask is that of an ordinary dropout, which the tape keeps. The gradients are
those of the fused operation with that mask, in both modes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._torch_compat import is_traced

ATTENTION = F.scaled_dot_product_attention
RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def body_in_trace(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """What a trace runs in place of a call with dropout inside; None for every other call."""
    if (func is not ATTENTION and func not in RECURRENT) or not is_traced():
        return None
    if func is ATTENTION:
        dropout_p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        return _attention if dropout_p > 0 else None
    is_padded = len(args) == 9 and isinstance(args[2], (list, tuple))  # other calls are of packed sequences
    return partial(_layer_by_layer, func) if is_padded and args[4] > 1 and args[5] > 0 and args[6] else None


def _layer_by_layer(
    func: Callable[..., Any],
    z: Tensor,
    hx: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """`torch.lstm` and its siblings, with their arguments: a call for each layer, and dropout between two of them."""
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    directions, count = 2 if bidirectional else 1, len(weights) // num_layers
    last: list[Sequence[Tensor]] = []
    for layer in range(num_layers):
        own = [h.narrow(0, layer * directions, directions) for h in states]
        own_weights = list(weights[layer * count : (layer + 1) * count])
        options = (has_biases, 1, 0.0, train, bidirectional, batch_first)
        z, *state = func(z, own[0] if isinstance(hx, Tensor) else own, own_weights, *options)
        last.append(state)
        if layer < num_layers - 1:
            z = F.dropout(z, dropout)
    return z, *(torch.cat(each) for each in zip(*last, strict=True))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`, with its argument names."""
    if enable_gqa:
        key, value = (z.repeat_interleave(query.shape[-3] // z.shape[-3], -3) for z in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = scores.softmax(-1) if attn_mask is None else _masked_softmax(scores, attn_mask)
    return F.dropout(weights, dropout_p) @ value


def _masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """mask: False for what is left out, or a number to add. Rows that are left out altogether are zero, not NaN."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -torch.inf)
    is_empty = (mask == -torch.inf).all(-1, keepdim=True)
    return (scores + mask.masked_fill(is_empty, 0.0)).softmax(-1).masked_fill(is_empty, 0.0)
