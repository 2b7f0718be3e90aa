"""Attention: its tangent and its exact-mode pass, written out and as kernels.

The kernels run on a GPU where there is one, and else in Triton's interpreter, in a process of its own: whether a kernel
is interpreted is settled when Triton is imported.
"""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from interpreter import interpreted, needs_triton
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import threepass
from threepass.compile.rewrite.fuse_attention import pack_errors
from threepass.kernels.attention import attention_bend, attention_bend_packed, attention_tangent
from threepass.rules import attention, generic
from threepass.rules.attention import Heads, Scores, _batched_bend, _batched_tangent, curved, tangent
from threepass.rules.table import rule_for

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
KERNELS = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a GPU, or Triton's interpreter")
SDPA = F.scaled_dot_product_attention

draw = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
NOT_SELF = ~torch.eye(4, 4, dtype=torch.bool)
BLIND = torch.tensor([[True, True, False, True], [False] * 4, [True] * 4, [False, False, True, False]])

# name, shapes of q, k and v, arguments
CALLS = [
    ("plain", [(2, 3, 4, 5)] * 3, {}),
    ("scale", [(2, 4, 5)] * 3, {"scale": 0.3}),
    ("causal", [(2, 3, 4, 5)] * 3, {"is_causal": True}),
    ("bool-mask", [(2, 4, 5)] * 3, {"attn_mask": NOT_SELF}),
    ("blind-row", [(2, 4, 5)] * 3, {"attn_mask": BLIND}),
    ("float-mask", [(2, 3, 4, 5)] * 3, {"attn_mask": draw(3, 4, 4)}),
    ("cross", [(2, 3, 4, 5), (2, 3, 7, 5), (2, 3, 7, 6)], {}),
    ("cross-causal", [(2, 3, 4, 5), (2, 3, 7, 5), (2, 3, 7, 6)], {"is_causal": True}),
    ("two-dimensions", [(4, 5)] * 3, {}),
    ("broadcast", [(2, 3, 4, 5), (1, 3, 7, 5), (1, 3, 7, 6)], {}),
]
EACH = pytest.mark.parametrize(("shapes", "kwargs"), [c[1:] for c in CALLS], ids=[c[0] for c in CALLS])
PRESENT = pytest.mark.parametrize("present", [(0, 1, 2), (0,), (1,), (2,), (1, 2), ()], ids=str)


def only(signals, present):
    return [s if i in present else None for i, s in enumerate(signals)]


def made(values, kwargs):
    return rule_for(SDPA).make(SDPA(*values, **kwargs), *values, **kwargs)


@PRESENT
@EACH
def test_push_is_the_jvp(shapes, kwargs, present):
    values, t = [draw(s) for s in shapes], only([draw(s) for s in shapes], present)
    with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        duals = [z if s is None else forward_ad.make_dual(z, s) for z, s in zip(values, t, strict=True)]
        u, expected = forward_ad.unpack_dual(SDPA(*duals, **kwargs))
    expected = torch.zeros_like(u) if expected is None else expected
    torch.testing.assert_close(made(values, kwargs).push(*t), expected, rtol=1e-12, atol=1e-13)


def double_backward(values, kwargs, t, d, r):
    """R{d} of q, k and v: the derivative of < J' d , t > by them, and J' r."""
    leaves = [z.clone().requires_grad_() for z in values]
    with sdpa_kernel(SDPBackend.MATH):
        u = SDPA(*leaves, **kwargs)
    total = torch.zeros((), dtype=u.dtype) if r is None else (u * r).sum()
    if d is not None:
        errors = torch.autograd.grad(u, leaves, d, create_graph=True)
        total = sum(((e * s).sum() for e, s in zip(errors, t, strict=True) if s is not None), total)
    return torch.autograd.grad(total, leaves, materialize_grads=True) if total.requires_grad else [None] * 3


@PRESENT
@pytest.mark.parametrize("signals", ["d r", "d", "r"])
@EACH
def test_bend_is_double_backward(shapes, kwargs, signals, present):
    values, t = [draw(s) for s in shapes], only([draw(s) for s in shapes], present)
    u = SDPA(*values, **kwargs)
    d = torch.randn_like(u) if "d" in signals else None
    r = torch.randn_like(u) if "r" in signals else None
    got = made(values, kwargs).bend([r], [d], t)
    for g, e, z in zip(got, double_backward(values, kwargs, t, d, r), values, strict=True):
        g, e = (torch.zeros_like(z) if s is None else s for s in (g, e))
        torch.testing.assert_close(g, e, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_formats_give_the_arguments_format(dtype):
    """As under autocast: the arguments in float32, the call in half."""
    values, t = [draw(2, 6, 8).float() for _ in range(3)], [draw(2, 6, 8).to(dtype) for _ in range(3)]
    d, r = draw(2, 6, 8).to(dtype), draw(2, 6, 8).to(dtype)
    u = SDPA(*(z.to(dtype) for z in values))
    m = rule_for(SDPA).make(u, *values)
    at, along = Heads(*(z.to(dtype).double() for z in values)), Heads(*(z.double() for z in t))
    scores = Scores(8**-0.5)
    push, bent = m.push(*t), m.bend([r], [d], t)
    assert push.dtype == dtype
    assert [g.dtype for g in bent] == [torch.float32] * 3
    expected = [tangent(at, along, scores), *curved(at, along, d.double(), r.double(), scores)]
    for g, e in zip([push, *bent], expected, strict=True):
        assert (g - e).norm() < 4 * torch.finfo(dtype).eps * e.norm()


def test_calls_that_it_leaves_to_the_generic_rule():
    q = draw(2, 4, 5, 6)
    assert rule_for(SDPA).make(q, q, q, q, dropout_p=0.1) is None
    assert rule_for(SDPA).make(q, q, q[:, :2], q[:, :2], enable_gqa=True) is None


class Reads(nn.Module):
    """Queries from the input, keys and values from a memory that does not depend on it, then from the input."""

    def __init__(self):
        super().__init__()
        self.q, self.out = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("memory", draw(3, 7, 6))

    def forward(self, x):
        h = x + SDPA(self.q(x), self.memory, self.memory)
        return SDPA(h, h, self.out(h), is_causal=True).mean(1)


def test_exact_mode_goes_through_bend(monkeypatch):
    model, x, y = Reads().double(), draw(3, 4, 6), torch.tensor([0, 1, 5])
    leaf = x.clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        (dx,) = torch.autograd.grad(F.cross_entropy(model(leaf), y), leaf, create_graph=True)
        expected = torch.autograd.grad(0.5 * dx.square().sum(), list(model.parameters()))
    derive = generic.derive

    def without_attention(op, *args, **kwargs):
        assert op.func is not SDPA
        return derive(op, *args, **kwargs)

    monkeypatch.setattr(generic, "derive", without_attention)
    r = threepass.three_pass(model, F.cross_entropy, x, y, mode="exact", separate=True)
    for (name, _), e in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(r.third_grads[name], e, rtol=1e-10, atol=1e-14)


def operations(func, *args):
    return {node.target for node in make_fx(func)(*args).graph.nodes if node.op == "call_function"}


def test_on_a_cpu_the_formulas_are_in_the_graph():
    """Nothing opaque: the compiler can fuse them."""
    q = draw(2, 3, 4, 5)
    m = made([q] * 3, {})
    for seen in (operations(m.push, q, q, q), operations(lambda d: m.bend([d], [d], [q] * 3), q)):
        assert torch.ops.aten.bmm.default in seen
        assert {target.namespace for target in seen if isinstance(target, torch._ops.OpOverload)} == {"aten"}


def test_the_package_does_not_import_the_kernels():
    code = "import sys, threepass; assert not [name for name in sys.modules if 'triton_kernel' in name]"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": "src"})


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="runs the interpreter")
def test_the_kernels_in_tritons_interpreter():
    interpreted("test_attention", "-k", "test_kernel")


@pytest.fixture
def kernels():
    from threepass.kernels.attention import triton_kernel

    return triton_kernel


def kernel_signals(queries, keys, n, w, present, dtype):
    """q, k, v, their tangents, d and r as the kernels get them; rounded, and in odd layouts."""
    q, t_q = draw(2, 2, queries, n), draw(2, queries, 2, n).transpose(1, 2)
    k, t_k = draw(2, 2, n, keys).mT, draw(1, 2, keys, n).expand(2, 2, keys, n)
    v, t_v = draw(2, keys, 3, 2, w)[:, :, 1].transpose(1, 2), draw(2, 2, keys, w)
    d, r = draw(2, queries, 2, w).transpose(1, 2), draw(2, 2, queries, w)
    *t, r = only([t_q, t_k, t_v, r], present)
    return [None if z is None else z.to(DEVICE, dtype) for z in (q, k, v, *t, d, r)]


def in_double(signals):
    """q, k and v, their tangents, and what else is given, in float64."""
    wide = [None if z is None else z.double() for z in signals]
    return Heads(*wide[:3]), Heads(*wide[3:6]), *wide[6:]


def assert_near(got, expected, tolerance):
    for g, e in zip(got, expected, strict=True):
        assert (g - e).norm() <= tolerance * e.norm()


SIZES = [(16, 16, 16, 16), (20, 13, 8, 24), (13, 40, 16, 16), (70, 70, 16, 16), (75, 40, 16, 8)]
CUTS = [((16, 16), (0, 1, 2, 3)), ((16, 32), (0, 1, 2, 3)), ((32, 16), (0, 1, 2, 3))]
CUTS += [((16, 16), present) for present in ((0, 3), (1, 3), (2, 3), (3,), (0, 1), (1, 2))]


@KERNELS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels_are_the_formulas(kernels, size, causal):
    *given, d, r = kernel_signals(*size, (0, 1, 2, 3), torch.float32)
    scores = Scores(0.3, causal)
    how = (0.3, causal, "tf32x3")
    assert_near([attention_tangent(*given, *how, True)], [tangent(*in_double(given), scores)], 1e-5)
    got = attention_bend(*given, d, r, *how, False)
    assert_near(got, curved(*in_double([*given, d, r]), scores), 1e-5)


@KERNELS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("blocks", "present"), CUTS, ids=str)
def test_kernels_over_several_blocks(kernels, blocks, present, causal):
    *given, d, r = kernel_signals(40, 37, 16, 16, present, torch.float32)
    cut, scores, how = kernels.Blocks(*blocks), Scores(0.3, causal), (0.3, causal, "tf32x3", True)
    expected = tangent(*in_double(given), scores)
    got = kernels.launch_tangent(*given, *how, cut)
    assert_near([got], [torch.zeros_like(got) if expected is None else expected], 1e-5)
    for cuts in ((cut, cut), kernels.Blocks(64, 64)):
        assert_near(kernels.launch_bend(*given, d, r, *how, cuts), curved(*in_double([*given, d, r]), scores), 1e-5)


@KERNELS
@pytest.mark.parametrize(("tokens", "causal"), [(64, False), (130, True)])
def test_kernels_on_views_of_one_tensor(kernels, tokens, causal):
    """q, k and v as a transformer has them, in bfloat16, in the usual blocks: full ones, and a last one of 2 tokens."""
    values, tangents = (draw(1, tokens, 3, 2, 64).to(DEVICE, torch.bfloat16).permute(2, 0, 3, 1, 4) for _ in range(2))
    d, r = draw(2, 1, tokens, 2, 64).to(DEVICE, torch.bfloat16).transpose(2, 3)
    given, how, scores = [*values, *tangents], (64**-0.5, causal, "tf32"), Scores(64**-0.5, causal)
    assert_near([attention_tangent(*given, *how, True)], [tangent(*in_double(given), scores)], 1e-2)
    expected = curved(*in_double([*given, d, r]), scores)
    assert_near(attention_bend(*given, d, r, *how, True), expected, 1e-2)
    assert_near(attention_bend_packed(*given, d, r, *how), expected, 1e-2)


@KERNELS
@pytest.mark.parametrize("widths", [(16, 16), (40, 24), (8, 24)], ids=str)
def test_kernels_in_half(kernels, widths):
    *given, d, r = kernel_signals(40, 37, *widths, (0, 1, 2, 3), torch.float16)
    scores, cut = Scores(0.3), kernels.Blocks(16, 16)
    got = kernels.launch_tangent(*given, 0.3, False, "tf32", True, cut)
    assert got.dtype == torch.float16
    assert_near([got], [tangent(*in_double(given), scores)], 1e-3)
    expected = curved(*in_double([*given, d, r]), scores)
    for cuts in ((cut, cut), kernels.Blocks(64, 64)):
        assert_near(kernels.launch_bend(*given, d, r, 0.3, False, "tf32", True, cuts), expected, 1e-3)


@KERNELS
def test_kernels_centre_what_cancels(kernels):
    """A t_S that is nearly the same for every key of a query: softmax does not feel what they share."""
    *given, d, _ = kernel_signals(40, 37, 16, 16, (0,), torch.float16)
    given[1] = (given[1] * 0.05 + 2).half()
    scores, cut = Scores(0.3), kernels.Blocks(16, 16)
    got = kernels.launch_tangent(*given, 0.3, False, "tf32", True, cut)
    assert_near([got], [tangent(*in_double(given), scores)], 2e-3)
    r_v = kernels.launch_bend(*given, d, None, 0.3, False, "tf32", True, (cut, cut))[2]
    assert_near([r_v], [curved(*in_double([*given, d, None]), scores)[2]], 2e-3)


@KERNELS
@pytest.mark.parametrize("by_token", [False, True])
def test_kernels_as_operations(kernels, by_token):
    *given, d, r = kernel_signals(20, 20, 16, 16, (0, 2), torch.float32)
    how = (0.3, True, "tf32x3", by_token)
    torch.library.opcheck(attention_tangent, (*given, *how))
    torch.library.opcheck(attention_bend, (*given, d, r, *how))
    u = attention_tangent(*given, *how)
    assert u.transpose(1, 2).is_contiguous() == by_token


def way_back(*given):
    """Exact mode's errors where one weight makes q, k and v, as that weight's output lies in memory."""
    bent = torch.ops.threepass.attention_bend(*given, 0.3, False, "tf32x3", True)
    return torch.stack([z.view(z.shape) for z in bent]).permute(1, 3, 0, 2, 4).reshape(2, 20, -1)


@KERNELS
def test_kernel_writes_errors_side_by_side(kernels):
    given = kernel_signals(20, 20, 16, 16, (0, 1, 2, 3), torch.float32)
    torch.library.opcheck(attention_bend_packed, (*given, 0.3, False, "tf32x3"))
    graph = make_fx(way_back)(*given)
    pack_errors(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    seen = {node.target for node in graph.graph.nodes}
    assert torch.ops.threepass.attention_bend_packed.default in seen
    assert not {torch.ops.aten.clone.default, torch.ops.threepass.attention_bend.default} & seen
    assert torch.equal(graph(*given), way_back(*given))


@KERNELS
@pytest.mark.parametrize("other", ["order", "read", "turned"])
def test_kernel_writes_errors_apart_where_they_are_read_apart(kernels, other):
    def f(*given):
        q, k, v = torch.ops.threepass.attention_bend(*given, 0.3, False, "tf32x3", True)
        if other == "order":
            return torch.stack([k, q, v]).permute(1, 3, 0, 2, 4).reshape(2, 20, -1)
        if other == "turned":
            return torch.stack([q, k, v]).permute(1, 2, 0, 3, 4).reshape(2, -1)
        return torch.stack([q, k, v]).permute(1, 3, 0, 2, 4).reshape(2, 20, -1).sum() + q.sum()

    given = kernel_signals(20, 20, 16, 16, (0, 1, 2, 3), torch.float32)
    graph = make_fx(f)(*given)
    before = str(graph.graph)
    pack_errors(graph.graph)
    assert str(graph.graph) == before


@needs_triton
@pytest.mark.parametrize("shape", [(2, 3, 20, 16), (6, 20, 16)], ids=str)
def test_on_a_gpu_the_kernels_are_in_the_graph(monkeypatch, shape):
    """Traced on tensors without contents, so that no GPU is needed."""
    monkeypatch.setattr(attention, "_widest_head", lambda device, dtype: 64)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        m = rule_for(SDPA).make(torch.empty(shape, device="meta", dtype=q.dtype), q, q, q)

        def passes(t, d):
            return m.push(t, None, t), m.bend([None], [d], [t, None, t])

        u, bent = passes(q, q)
        assert u.shape == bent[0].shape == shape
        seen = operations(passes, q, q)
    ops = torch.ops.threepass
    assert {ops.attention_tangent.default, ops.attention_bend.default} <= seen
    assert torch.ops.aten.bmm.default not in seen


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(), (2, 3)])
def test_tangent_and_bend_in_few_launches_are_those_of_the_formulas(causal, heads):
    torch.manual_seed(0)
    widths = (5, 5, 6, 5, 5, 6, 6, 6)
    q, k, v, t_q, t_k, t_v, d, r = (torch.randn(*heads, 4, n, dtype=torch.float64) for n in widths)
    scores = Scores(0.3, causal)
    at, t = Heads(q, k, v), Heads(t_q, t_k, t_v)
    torch.testing.assert_close(_batched_tangent(at, t, scores).view(*heads, 4, 6), tangent(at, t, scores))
    bent = [s.view(z.shape) for s, z in zip(_batched_bend(at, t, d, r, scores), at, strict=True)]
    torch.testing.assert_close(bent, curved(at, t, d, r, scores))
