"""Products of groups of rows, each with a matrix of its own (`torch.nn.functional.grouped_mm`), in a captured step.

Mixtures of experts are made of them. PyTorch's operation has fake tensors in bfloat16 only, and no float64, in which
programs are checked, so a captured step calls it by an operation of our own.
"""

import torch
from torch import Tensor
from torch.fx import Graph

from .._torch_compat import grouped_mm
from .rewrite.graph import value_of


@torch.library.custom_op("threepass::grouped_mm", mutates_args=())
def grouped_mm_op(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """a @ b by groups, of which `offs` has the ends.

    They are groups of rows of a, each with its own matrix of b; of columns of b, each with its own matrix of a; or, of
    two matrices, of what is summed over.
    """
    if a.dtype != torch.float64:
        return grouped_mm(a, b, offs, bias, out_dtype).contiguous()
    if offs is None:
        return torch.bmm(a, b)
    out = a.new_zeros(_shape(a, b, offs))
    starts = [0, *offs.tolist()]
    for i, group in enumerate(map(slice, starts, starts[1:])):
        if a.dim() == 2 and b.dim() == 2:
            out[i] = a[:, group] @ b[group]
        elif a.dim() == 2:
            out[group] = a[group] @ b[i]
        else:
            out[:, group] = a[i] @ b[:, group]
    return out


@grouped_mm_op.register_fake
def _(a, b, offs=None, bias=None, out_dtype=None):
    return a.new_empty(_shape(a, b, offs), dtype=out_dtype or a.dtype)


def _shape(a: Tensor, b: Tensor, offs: Tensor | None) -> tuple[int, ...]:
    if a.dim() == 3 and b.dim() == 3:
        return a.shape[0], a.shape[1], b.shape[2]
    rows, columns = a.shape[-2], b.shape[-1]
    return (len(offs), rows, columns) if offs is not None and a.dim() == b.dim() == 2 else (rows, columns)


def declare_grouped_products(graph: Graph) -> None:
    """Grouped products by the operation above. On a GPU, those of other dtypes than bfloat16 read `offs`: they stay."""
    for node in graph.find_nodes(op="call_function", target=grouped_mm):
        a = value_of(node.args[0])
        if a.device.type == "cpu" or a.dtype == torch.bfloat16:
            node.target = torch.ops.threepass.grouped_mm.default
