"""Rewrites of a captured step's graph, which has the operations of all three passes.

    products    computes weight gradients early; writes out the factors `alpha=` and thin matrix products
    mixes       computes a mix that several weights use once
    recompute   activations that passes 2 and 3 recompute, so that they need not be kept in memory
    gates       pass 3 reads the gates of ReLUs from pass 2's errors
    sums        computes each reduction once, and early
    fuse_*      puts in our own kernels where they are faster, in place of the formulas of rules (`kernels/fusible.py`)
    tf32        rounds the operands of our convolutions to TF32 where they are computed
    strides     makes the graph independent of the strides that the traced tensors had

`graph` has functions that create and replace nodes, `readers` those that look at the nodes next to a node.
"""

import torch
from torch.fx import GraphModule

from .fuse_activation import fuse_activations
from .fuse_attention import pack_errors
from .fuse_batch_norm import fuse_batch_norms
from .fuse_conv import fuse
from .fuse_layer_norm import fuse_layer_norms
from .gates import mark_gates
from .graph import write_out_formulas
from .mixes import open_mixes, share_mixes
from .products import take_products_early, write_out_alphas, write_out_thin_products
from .recompute import recompute_activations, recompute_convolutions, recompute_rectified_norms
from .sums import keep_gated_sums, keep_sums_of_errors
from .tf32 import round_signals

_aten = torch.ops.aten


def apply(graph: GraphModule, kernels: bool) -> None:
    """Applies all rewrites in place; kernels: also those that put in our own kernels."""
    write_out_alphas(graph.graph)
    share_mixes(graph.graph)
    recompute_rectified_norms(graph.graph)
    recompute_activations(graph.graph)
    take_products_early(graph.graph)
    mark_gates(graph.graph)
    recomputed = recompute_convolutions(graph.graph)
    if kernels:
        write_out_thin_products(graph.graph)
        fuse(graph.graph)
        fuse_layer_norms(graph.graph)
        fuse_activations(graph.graph)
        pack_errors(graph.graph)
        keep_gated_sums(graph.graph)
        fuse_batch_norms(graph.graph)
        round_signals(graph.graph)
        write_out_formulas(graph.graph)
    for node in recomputed:
        if node.target is _aten.convolution.default:  # `share_sums` would merge it with that of pass 1
            node.target = torch.ops.threepass.convolution.default
    keep_sums_of_errors(graph.graph)
    open_mixes(graph.graph)
    graph.graph.eliminate_dead_code()
