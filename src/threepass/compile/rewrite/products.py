"""Products: matrix products and weight gradients.

A weight's gradient is moved to directly after its operands. Where backpropagation's term is a separate product (in half
dtypes, with our kernels), that is in pass 2, so that u is not needed later.

Inductor folds the sum of two matrix products into one call and drops the factor of `add(a, b, alpha=c)` (seen in torch
2.13), so the factor is written as a separate multiplication.

For a product with a small dimension (a classifier's), a matrix kernel takes longer than reading the matrices; written
as a sum, it is fused with its neighbours.
"""

import torch
from torch import Tensor
from torch.fx import Graph

from ...numerics.precision import accumulate_dtype
from .graph import insert_call, replace_call

_aten = torch.ops.aten


def take_products_early(graph: Graph) -> None:
    """Moves the weight gradients of convolutions to directly after the last of their operands."""
    for node in list(graph.nodes):
        if node.target is _aten.convolution_backward.default and list(node.args[10]) == [False, True, False]:
            last = max(node.all_input_nodes)
            if last.op == "call_function":
                last.append(node)
                for result in node.users:
                    node.append(result)


def write_out_alphas(graph: Graph) -> None:
    for node in graph.nodes:
        if node.target in (_aten.add.Tensor, _aten.sub.Tensor) and node.kwargs.get("alpha", 1) != 1:
            a, b = node.args
            with graph.inserting_before(node):
                scaled = insert_call(graph, _aten.mul.Tensor, (b, node.kwargs["alpha"]))
            node.args, node.kwargs = (a, scaled), {}


THIN = 16


_CACHED = 2**24  # multiplications in a thin product of long rows: it reads them several times, from a cache


def write_out_thin_products(graph: Graph) -> None:
    """Of matrices on a GPU."""
    for node in graph.nodes:
        if node.target in (_aten.mm.default, _aten.addmm.default) and not node.kwargs:
            a, b = node.args[-2:]
            (rows, length), columns = a.meta["val"].shape, b.meta["val"].shape[1]
            few = min(rows, columns) <= THIN and rows * columns * length <= _CACHED
            if a.meta["val"].is_cuda and (length <= THIN or few):
                replace_call(node, thin_product, (a, b, *node.args[:-2]))


def thin_product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b + bias, by no matrix kernel: a sum that is written out where it is short, else a reduction."""
    dtype, exact = a.dtype, accumulate_dtype(a.dtype)
    a, b = a.to(exact), b.to(exact)
    if a.shape[1] <= THIN:
        z = a[:, :1] * b[:1]
        for k in range(1, a.shape[1]):
            z = z + a[:, k : k + 1] * b[k : k + 1]
    else:
        z = (a[:, None, :] * b.t()[None, :, :]).sum(2)
    return (z if bias is None else z + bias.to(exact)).to(dtype)
