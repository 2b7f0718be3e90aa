"""Torch's operations whose second derivative is zero, in all their active arguments together.

Affine: u = J a + b, where J and b may depend on the piece that a is in (the signs of a ReLU's input, for example):
everywhere in this package, piecewise affine counts as affine. Exact mode adds no term to R{d} and needs neither d nor t
of the operation.

Piecewise linear: u = J a, where J may depend on the piece. The mix of u is then J times the mix of a, so that pass 3
can carry the mix through the operation.

Linear: u = J a with one J. The tangent of u is then the operation of the tangent of a.
"""

from enum import Flag
from typing import Any

from torch import Tensor

from .names import key_of, name_of


class Linearity(Flag):
    """What is known of an operation; each flag implies those that it contains."""

    AFFINE = 1
    PIECEWISE_LINEAR = 3
    LINEAR = 7
    LINEAR_IN_BOTH = 9  # in two tensors together; affine in one of them, with a constant for the other


AFFINE, PIECEWISE, LINEAR = Linearity.AFFINE, Linearity.PIECEWISE_LINEAR, Linearity.LINEAR
IN_BOTH = Linearity.LINEAR_IN_BOTH

# fmt: off
OPERATIONS = {  # by the name that the tape records, without the underscore of in-place variants
    "__getitem__": AFFINE, "__setitem__": AFFINE, "adaptive_avg_pool1d": LINEAR, "adaptive_avg_pool2d": LINEAR,
    "adaptive_avg_pool3d": LINEAR, "adaptive_max_pool1d": PIECEWISE, "adaptive_max_pool2d": PIECEWISE,
    "adaptive_max_pool3d": PIECEWISE, "add": IN_BOTH, "amax": AFFINE, "amin": AFFINE, "avg_pool1d": LINEAR,
    "avg_pool2d": LINEAR, "avg_pool3d": LINEAR, "broadcast_to": AFFINE, "cat": LINEAR, "chunk": LINEAR, "clamp": AFFINE,
    "clamp_max": AFFINE, "clamp_min": AFFINE, "clone": LINEAR, "col2im": AFFINE, "concat": LINEAR,
    "concatenate": LINEAR, "constant_pad_nd": AFFINE, "contiguous": LINEAR, "copy": AFFINE, "cumsum": AFFINE,
    "diagonal": AFFINE, "double": AFFINE, "expand": AFFINE, "expand_as": AFFINE, "flatten": LINEAR, "flip": LINEAR,
    "float": AFFINE, "gather": AFFINE, "hardshrink": AFFINE, "hardsigmoid": AFFINE, "hardtanh": AFFINE,
    "hstack": AFFINE, "index_add": AFFINE, "index_select": AFFINE, "leaky_relu": PIECEWISE, "masked_fill": AFFINE,
    "max_pool1d": PIECEWISE, "max_pool2d": PIECEWISE, "max_pool3d": PIECEWISE, "maximum": AFFINE, "mean": LINEAR,
    "minimum": AFFINE, "moveaxis": AFFINE, "movedim": LINEAR, "narrow": AFFINE, "neg": LINEAR, "pad": AFFINE,
    "permute": LINEAR, "pixel_shuffle": LINEAR, "pixel_unshuffle": LINEAR, "ravel": AFFINE, "relu": PIECEWISE,
    "relu6": AFFINE, "repeat": AFFINE, "repeat_interleave": AFFINE, "reshape": LINEAR, "roll": AFFINE, "rsub": IN_BOTH,
    "scatter_add": AFFINE, "select": LINEAR, "softshrink": AFFINE, "split": LINEAR, "split_with_sizes": AFFINE,
    "squeeze": LINEAR, "stack": LINEAR, "sub": IN_BOTH, "sum": LINEAR, "swapaxes": AFFINE, "t": LINEAR,
    "tensor_split": AFFINE, "threshold": AFFINE, "tile": AFFINE, "to": AFFINE, "transpose": LINEAR, "tril": AFFINE,
    "triu": AFFINE, "type_as": AFFINE, "unbind": LINEAR, "unflatten": LINEAR, "unfold": LINEAR, "unsqueeze": LINEAR,
    "upsample_bilinear2d": AFFINE, "upsample_nearest2d": LINEAR, "view": LINEAR, "view_as": LINEAR, "vstack": AFFINE,
    "where": AFFINE,
}
# fmt: on


def is_affine(func: Any) -> bool:
    """Whether an operation is known to be affine in all its arguments together."""
    return AFFINE in _linearity(func)


def is_piecewise_linear(func: Any, values: list[Any], active: list[int]) -> bool:
    """Whether a call is known to be piecewise linear: no tensor but the active ones is among its arguments."""
    if any(isinstance(v, Tensor) and i not in active for i, v in enumerate(values)):
        return False
    linearity = _linearity(func)
    return PIECEWISE in linearity or (IN_BOTH in linearity and len(active) == 2)


def is_linear(func: Any) -> bool:
    """Whether an operation of active arguments alone is known to be linear: t -> op(t)."""
    return LINEAR in _linearity(func)


def is_linear_in_both(func: Any) -> bool:
    """Whether an operation of two tensors is known to be linear in both together, as a sum is."""
    return IN_BOTH in _linearity(func)


def _linearity(func: Any) -> Linearity:
    if key_of(func) is not func:  # user-defined, whatever its name
        return Linearity(0)
    name = name_of(func)
    return OPERATIONS.get(name if name.endswith("__") else name.removesuffix("_"), Linearity(0))
