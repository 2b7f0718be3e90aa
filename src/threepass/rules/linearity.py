"""Which operations are known to be linear in all their arguments together, or piecewise so."""

from typing import Any

from torch import Tensor

from .table import key_of, name_of


def is_flat(func: Any) -> bool:
    """Whether an operation is known to be affine, or piecewise so, in all its arguments together: R{d} gets no term."""
    return key_of(func) is func and name_of(func).removesuffix("_") in _FLAT


def is_homogeneous(func: Any, values: list[Any], active: list[int]) -> bool:
    """Whether u = J a, with nothing added: then the mix of u is J times the mix of a."""
    if key_of(func) is not func or any(isinstance(v, Tensor) and i not in active for i, v in enumerate(values)):
        return False
    name = name_of(func).removesuffix("_")
    return name in _HOMOGENEOUS or (name in ("add", "sub") and len(active) == 2)


# fmt: off
_HOMOGENEOUS = frozenset({
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "cat", "chunk", "clone", "concat", "concatenate",
    "contiguous", "flatten", "flip", "leaky_relu", "max_pool1d", "max_pool2d", "max_pool3d", "mean", "movedim", "neg",
    "permute", "pixel_shuffle", "pixel_unshuffle", "relu", "reshape", "select", "split", "squeeze", "stack", "sum", "t",
    "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "upsample_nearest2d", "view", "view_as",
})
_FLAT = frozenset({
    "__getitem__", "__setitem__", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "add", "amax", "amin", "avg_pool1d",
    "avg_pool2d", "avg_pool3d", "broadcast_to", "cat", "chunk", "clamp", "clamp_max", "clamp_min", "clone", "concat",
    "concatenate", "constant_pad_nd", "contiguous", "copy", "cumsum", "diagonal", "double", "expand", "expand_as",
    "flatten", "flip", "float", "fold", "gather", "hardshrink", "hardsigmoid", "hardtanh", "hstack", "index_select",
    "interpolate", "leaky_relu", "masked_fill", "max_pool1d", "max_pool2d", "max_pool3d", "maximum", "mean",
    "minimum", "moveaxis", "movedim", "narrow", "neg", "pad", "permute", "pixel_shuffle", "pixel_unshuffle", "ravel",
    "relu", "relu6", "repeat", "repeat_interleave", "reshape", "roll", "select", "softshrink", "split",
    "split_with_sizes",
    "squeeze", "stack", "sub", "sum", "swapaxes", "t", "tensor_split", "threshold", "tile", "to", "transpose", "tril",
    "triu", "type_as", "unbind", "unflatten", "unfold", "unsqueeze", "upsample_bilinear2d", "upsample_nearest2d",
    "view", "view_as", "vstack", "where",
})
# fmt: on
