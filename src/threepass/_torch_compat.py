"""Every private name of torch that the library uses, each with the versions in which it was seen to be there.

"Private" is what torch may move or drop without a word: a name with a leading underscore, or one below such a module or
below `torch.fx.experimental`. A new torch that breaks the library breaks it here. `make test-versions` runs the tests
on each version; a test refuses such names elsewhere.
"""

from typing import Any

import torch

# seen in 2.10 to 2.13: the tracer that is at work, or None
from torch.fx.experimental.proxy_tensor import get_proxy_mode

# seen in 2.10 to 2.13: the TorchFunctionModes at work, the innermost one last
from torch.overrides import _get_current_function_mode_stack as function_modes

# seen in 2.10 to 2.13: hides an operation from all dispatch modes, such as a tracer
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes

# seen in 2.10 to 2.13: nested containers, flat and back
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "DisableTorchFunction",
    "OpOverload",
    "OpOverloadPacket",
    "TreeSpec",
    "batch_norm_backward",
    "batch_norm_forward",
    "foreach_copy_",
    "function_modes",
    "function_modes_enabled",
    "get_proxy_mode",
    "has_saved_tensor_hooks",
    "no_dispatch_modes",
    "overload_of",
    "safe_softmax",
    "set_mkldnn_enabled",
    "silu",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]

# seen in 2.10 to 2.13: torch.library gives objects of these classes, and no public name for them
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket

# seen in 2.10 to 2.13: no torch function mode or override sees what runs inside
DisableTorchFunction = torch._C.DisableTorchFunction

# seen in 2.10 to 2.13: whether the modes on the stack are asked at all (not inside DisableTorchFunction)
function_modes_enabled = torch._C._is_torch_function_mode_enabled

# seen in 2.10 to 2.13: what F.silu calls, and what a mode is shown of it
silu = torch._C._nn.silu

# seen in 2.10 to 2.13: copies many tensors in one launch
foreach_copy_ = torch._foreach_copy_

# seen in 2.10 to 2.13: softmax, zero in a row that is masked as a whole
safe_softmax = torch.ops.aten._safe_softmax

# seen in 2.10 to 2.13: batch norm with the choice of its implementation, and the backward pass of that choice
batch_norm_forward = torch.ops.aten._batch_norm_impl_index
batch_norm_backward = torch.ops.aten._batch_norm_impl_index_backward


def overload_of(op: torch.library.CustomOpDef) -> Any:
    """The operation behind `torch.library.custom_op`'s object; seen in 2.10 to 2.13."""
    return op._opoverload


def has_saved_tensor_hooks() -> bool:
    """Whether saved-tensor hooks are set, as a checkpoint does; seen in 2.10 to 2.13."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def set_mkldnn_enabled(enabled: bool) -> bool:
    """Switches oneDNN's kernels on or off for all threads, and returns what was set; seen in 2.10 to 2.13.

    `torch.backends.mkldnn.flags` sets the precision of float32 products along with it.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(enabled)
    return before
