"""Rewrites that make a traced graph independent of the strides of the traced tensors."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from threepass.compile.rewrite.strides import dense_before_scatter, reshape_instead_of_view

aten = torch.ops.aten


def targets(graph):
    return [node.target for node in graph.graph.nodes]


def compiled(graph, *inputs):
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad():
        return compile_fx(graph, list(inputs))(*inputs)


def permuted_error(x):
    """The input gradient of a layer norm whose incoming gradient is permuted, then as a matrix."""
    rows = x.transpose(1, 2)
    d, *_ = aten.native_layer_norm_backward(
        rows, rows.contiguous(), [4], x.new_zeros(2, 3, 1), x.new_ones(2, 3, 1), None, None, [True, False, False]
    )
    return d.reshape(6, 4) @ torch.ones(4, 1, dtype=x.dtype)


def test_a_view_that_the_compilers_strides_do_not_allow_becomes_a_copy():
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    graph = make_fx(permuted_error)(x)
    assert aten.view.default in targets(graph)
    with pytest.raises(Exception, match="Cannot view a tensor"):
        compiled(graph, x)
    graph = make_fx(permuted_error)(x)
    reshape_instead_of_view(graph.graph)
    assert aten.view.default not in targets(graph)
    torch.testing.assert_close(compiled(graph, x), permuted_error(x))


def test_views_stay_where_their_storage_is_written_to():
    def f(x):
        base, other = x.sin(), x.cos()
        part = base.view(12)
        base.t().mul_(2)
        first, _ = other.view(2, 6).unbind()
        first.add_(1)
        return part + 1, other.view(12), x.view(12).exp()

    x = torch.randn(3, 4, dtype=torch.float64)
    graph = make_fx(f)(x)
    reshape_instead_of_view(graph.graph)
    assert targets(graph).count(aten.view.default) == 3
    assert targets(graph).count(aten.reshape.default) == 1
    graph.recompile()
    for ours, theirs in zip(graph(x), f(x), strict=True):
        torch.testing.assert_close(ours, theirs)


SCATTERS = {
    "index_add": lambda z, i, s: z.index_add(0, i, s),
    "index_put": lambda z, i, s: z.index_put((i,), s, accumulate=True),
    "index_copy": lambda z, i, s: z.index_copy(0, i.new_tensor([2, 0]), s[:2]),
    "index_fill": lambda z, i, s: z.index_fill(0, i, 2.0),
    "scatter_add": lambda z, i, s: z.scatter_add(0, i[:, None].expand(4, 3), s),
}


def test_scatters_into_expanded_tensors_start_from_a_copy():
    i, s = torch.tensor([0, 0, 1, 3]), torch.randn(4, 3, dtype=torch.float64)

    def f(i, s):
        zero, column = s.new_zeros(()).expand(5, 3), s[:, :1].sin().expand(4, 3).transpose(0, 0)
        made = [scatter(z, i, s) for scatter in SCATTERS.values() for z in (zero, column)]
        return [torch.cat([z.sin() for z in made])]

    graph = make_fx(f)(i, s)
    dense_before_scatter(graph.graph)
    graph.graph.lint()
    assert targets(graph).count(aten.clone.default) == 2 * len(SCATTERS)
    torch.testing.assert_close(compiled(graph, i, s)[0], f(i, s)[0])


def test_scatters_into_tensors_of_their_own_stay_as_they_are():
    i, s = torch.tensor([0, 0, 1, 3]), torch.randn(4, 3, dtype=torch.float64)
    graph = make_fx(lambda i, s: s.t().sin().t().index_add(0, i, s.expand(4, 3)))(i, s)
    before = targets(graph)
    dense_before_scatter(graph.graph)
    assert targets(graph) == before
