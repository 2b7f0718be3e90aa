"""What the graph of a captured step computes, moves and keeps alive: the benchmark's guard, without a clock.

Counted in the graph that is compiled: products of matrices and convolutions (exactly), the bytes that go in and out of
these, and the most bytes alive at once. Bytes are relative to plain training's graph. A change that makes a step do
more work, move more or keep more fails here; where it does less, the bounds are to be drawn tighter.
"""

import functools
import operator

import pytest
import torch
from torch import Tensor
from torch.fx import Interpreter
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from threepass import models
from threepass.bench.limits import layers, total, work
from threepass.bench.methods import METHODS, OPTIONS
from threepass.compile.trace import trace
from threepass.core.engine import Task, run
from threepass.core.options import Options
from threepass.kernels.batch_norm import rectified

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")

aten = torch.ops.aten
# Its last results, the new statistics, are copied to buffers at the very end of a graph: each result has its own life.
BATCH_NORM = aten._native_batch_norm_legit_functional.default
PRODUCTS = {aten.convolution, aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
NETS = {
    "plain20": {"width": 4},
    "resnet8": {"width": 4},
    "vit": {"image": 16, "width": 24, "depth": 2},
    "mlp": {"sizes": (768, 64, 64, 10)},
}


class Graph(Interpreter):
    """Runs a traced graph once, and counts."""

    def __init__(self, program, inputs):
        super().__init__(program.graph, garbage_collect_values=False)
        self.owner = {}  # of a view: the node whose memory it shows
        self.size = {}  # bytes of a node's tensors
        self.products = self.traffic = 0
        with torch.no_grad():
            self.run(*program.state, *inputs)

    def run_node(self, node):
        result = super().run_node(node)
        places = {place(z): n for n in node.all_input_nodes for z in tensors(self.env[n])}
        shared = [places[place(z)] for z in tensors(result) if place(z) in places]
        is_part = node.target is operator.getitem and node.args[0].target is BATCH_NORM
        self.owner[node] = self.owner[shared[0]] if shared and not is_part else node
        fused = node.target is rectified and not any(is_product(user) for user in node.users)
        self.size[node] = 0 if fused or node.target is BATCH_NORM else sum(map(nbytes, tensors(result)))
        packet = getattr(node.target, "overloadpacket", None)
        if packet in PRODUCTS:
            self.products += 1
            self.traffic += self.size[node] + sum(self.size[n] for n in node.all_input_nodes)
        elif packet is aten.convolution_backward:  # two products, d (x) a -> gradient and d, w -> error of a
            halves = sum(node.args[-1][:2])
            self.products += halves
            self.traffic += halves * sum(self.size[n] for n in node.args[:3])
        return result

    @property
    def peak(self):
        """The most bytes alive at once, where a node's result lives until its last reader, or its views'."""
        nodes = list(self.module.graph.nodes)
        last = {self.owner[z]: i for i, node in enumerate(nodes) for z in (node, *node.all_input_nodes)}
        now = most = 0
        for i, node in enumerate(nodes):
            if node.op == "call_function" and self.owner[node] is node:
                now += self.size[node]
            most = max(most, now)
            now -= sum(
                self.size[z]
                for z in {self.owner[n] for n in (node, *node.all_input_nodes)}
                if last[z] == i and z.op == "call_function"
            )
        return most


def is_product(node):
    return getattr(node.target, "overloadpacket", None) in {*PRODUCTS, aten.convolution_backward}


def tensors(result):
    return [z for z in tree_leaves(result) if isinstance(z, Tensor)]


def place(z):
    return z.untyped_storage().data_ptr()


def nbytes(z):
    return z.numel() * z.element_size()


def problem(net):
    torch.manual_seed(0)
    model = models.by_name(net, **NETS[net])
    return model, [torch.randn(16, 3, 16, 16), torch.randint(10, (16,)), torch.randn(16, 10)]


@functools.cache
def graph_of(net, method):
    """What `ThreePass(compile=True)` captures; of plain training, the step alone."""
    model, batch = problem(net)
    if method == "plain":
        return Graph(trace(lambda *batch: list(METHODS[method](model, *batch)), batch), batch)
    options = Options(**OPTIONS[method])

    def step(x, y, weights):
        return list(run(Task(model, F.cross_entropy, x, y), options, weights=(weights[0], weights[1])).grads.values())

    inputs = [*batch[:2], torch.tensor([options.back, options.third])]
    return Graph(trace(step, inputs), inputs)


@pytest.mark.parametrize(
    ("net", "plain", "paper", "exact"),
    [
        # n layers take 3n - 1, 4n - 1 (the tangent of the scores is not needed) and 6n - 1
        ("plain20", 59, 79, 119),
        ("resnet8", 23, 31, 47),
        ("mlp", 8, 11, 17),
    ],
)
def test_products_are_those_of_the_maths(net, plain, paper, exact):
    assert [graph_of(net, method).products for method in ("plain", "paper", "exact")] == [plain, paper, exact]


def test_attention_adds_no_more_products_than_now():
    assert graph_of("vit", "plain").products == 29
    assert graph_of("vit", "paper").products <= 49
    assert graph_of("vit", "exact").products <= 93


@pytest.mark.parametrize(
    ("net", "paper", "exact"),
    [("plain20", 1.37, 2.03), ("resnet8", 1.42, 2.07), ("vit", 1.92, 3.46), ("mlp", 1.89, 2.42)],
)
def test_bytes_in_and_out_of_products(net, paper, exact):
    plain = graph_of(net, "plain").traffic
    assert graph_of(net, "paper").traffic <= paper * plain
    assert graph_of(net, "exact").traffic <= exact * plain


@pytest.mark.parametrize(
    ("net", "paper", "exact"),
    [("plain20", 1.0, 1.83), ("resnet8", 1.23, 1.71), ("vit", 1.52, 2.19), ("mlp", 1.18, 2.86)],
)
def test_bytes_alive_at_once(net, paper, exact):
    """plain-20's third pass needs no more memory than plain training: it carries the mix, and gates are marks in d."""
    plain = graph_of(net, "plain").peak
    assert graph_of(net, "paper").peak <= paper * plain
    assert graph_of(net, "exact").peak <= exact * plain


@pytest.mark.parametrize("net", ["plain20", "mlp"])
def test_the_counted_limits_are_what_the_graph_does(net):
    """In nets of products alone, the least bytes of `limits` are those of the graph, but for the scores' tangent."""
    model, batch = problem(net)
    found = layers(model, batch[0])
    for method in ("plain", "paper"):
        assert graph_of(net, method).traffic == pytest.approx(total(work(found, method)).bytes, rel=0.01)


@pytest.mark.parametrize("net", NETS)
def test_alpha_1_is_plain_training(net):
    graph, plain = graph_of(net, "alpha1"), graph_of(net, "plain")
    assert (graph.products, graph.traffic) == (plain.products, plain.traffic)
