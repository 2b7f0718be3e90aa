"""Passes over a captured step's graph: what one compiler's view of all three passes makes possible.

    products    weight gradients early, alphas and thin products written out
    mixes       a mix that several weights take, once
    recompute   signals that passes 2 and 3 recompute, so that they need not be kept
    gates       pass 3's gates of rectifiers, read off pass 2's errors
    sums        reductions, each taken once and early
    fuse_*      kernels of our own where they are faster, in place of the formulas that rules offer (`fusible.py`)
    strides     independence of the strides that the traced tensors had

`graph` has what they do to nodes, `neighbours` what they ask of the nodes next to one.
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
from .recompute import activate_again, forget, rectify_again
from .sums import keep_gated_sums, keep_sums_of_errors

_aten = torch.ops.aten


def apply(graph: GraphModule, kernels: bool) -> None:
    """Alphas, mixes, norms, products, gates, signals, and, with `kernels`, our own kernels where they are faster."""
    write_out_alphas(graph.graph)
    share_mixes(graph.graph)
    rectify_again(graph.graph)
    activate_again(graph.graph)
    take_products_early(graph.graph)
    mark_gates(graph.graph)
    again = forget(graph.graph)
    if kernels:
        write_out_thin_products(graph.graph)
        fuse(graph.graph)
        fuse_layer_norms(graph.graph)
        fuse_activations(graph.graph)
        pack_errors(graph.graph)
        keep_gated_sums(graph.graph)
        fuse_batch_norms(graph.graph)
        write_out_formulas(graph.graph)
    for node in again:
        if node.target is _aten.convolution.default:  # `share_sums` would find that it is there already
            node.target = torch.ops.threepass.convolution.default
    keep_sums_of_errors(graph.graph)
    open_mixes(graph.graph)
    graph.graph.eliminate_dead_code()
