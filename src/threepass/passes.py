"""Passes over a captured step's graph: what one compiler's view of all three passes makes possible.

Gates. In pass 2 a rectifier's backward closes gates by the sign of its output u, in pass 3 its tangent does so again,
and u has to be kept for that. But the error that comes out of pass 2's gate is kept anyway, for the weight before it.
So pass 2 marks a closed gate in it by minus zero, and pass 3 reads the mark there: u is free as soon as pass 2 is past
it, and a net of rectifiers needs no more memory than in plain training.

Rectified norms. Of u = relu(norm(z)) passes 2 and 3 need no more than z and a few numbers a channel, and z they read
anyhow: they make u again from it, in the kernels that read z. Plain training must keep u for a weight's gradient; here
that takes the mix. The same goes for smooth activations in pass 3.

Residual errors. What comes back behind a residual block is read by many: it is made once, as a tensor of its own.

Products. A weight's gradient goes behind its operands. Where backpropagation has one of its own (half formats, by our
kernels), that is in pass 2, so that again nothing needs u behind it.

Forgotten signals. Where half formats need a in pass 3, a and d of all layers are kept, and at its start a tangent and
a mix beside them. So two of the largest signals are forgotten behind pass 2, and made again where pass 3 comes to them,
by when it has let go of as many errors: two products more in a hundred.

Mixes. A mix that two weights take is made once.

Alphas. Inductor folds the sum of two matrix products into one call and forgets the factor of `add(a, b, alpha=c)` on
the way (seen in torch 2.13), so that the factor becomes a product of its own.

Thin products. For a product with a side of a few (a classifier's), a matrix kernel takes longer than reading the
matrices; written as sums, it is fused with what is around it.

Sums. Pass 3 needs statistics that pass 1 took; once the compiler has written both out as sums, one of the two goes. And
the compiler puts a sum off until it is read, for a gradient at the very end, too far from other sums of the same tensor
to take them in one go: it goes back to its operands.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from ._torch_compat import (
    FakeTensorMode,
    arguments_of,
    batch_norm_functional,
    batch_norm_legit,
    to_copy,
    tree_map,
)
from .kernels.pointwise import can_gate, rectified
from .precision import HALF, accumulate_dtype, mix_of, round_of

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
        from .kernels.fuse import fuse
        from .kernels.fuse_activation import fuse_activations
        from .kernels.fuse_attention import pack_errors
        from .kernels.fuse_batch_norm import fuse_batch_norms
        from .kernels.fuse_layer_norm import fuse_layer_norms

        write_out_thin_products(graph.graph)
        fuse(graph.graph)
        fuse_layer_norms(graph.graph)
        fuse_activations(graph.graph)
        pack_errors(graph.graph)
        keep_gated_sums(graph.graph)
        fuse_batch_norms(graph.graph)
    for node in again:
        if node.target is _aten.convolution.default:  # `share_sums` would find that it is there already
            node.target = torch.ops.threepass.convolution.default
    keep_sums_of_errors(graph.graph)
    open_mixes(graph.graph)
    graph.graph.eliminate_dead_code()


_SUMS = {_aten.var_mean.correction, _aten.var.correction, _aten.sum.dim_IntList, _aten.sum.default, _aten.mean.dim,
         _aten.amax.default, _aten.mm.default, _aten.bmm.default, _aten.convolution.default}  # fmt: skip


def share_sums(graph: Graph) -> None:
    """Takes equal reductions and products once. The graph must be functional: no operation in it writes to a tensor."""
    first: dict[Any, Node] = {}
    same: dict[Node, Node] = {}

    def known(value: Any) -> Any:
        return same.get(value, value) if isinstance(value, Node) else repr(value)  # 0.0, -0.0 and False are not equal

    for node in list(graph.nodes):
        if node.op != "call_function" or node.is_impure() or is_random(node):
            continue
        key = (node.target, map_aggregate((node.args, node.kwargs), known))
        same[node] = twin = first.setdefault(_hashable(key), node)
        is_output = any(user.op == "output" for user in node.users)  # two gradients are to be two tensors
        if twin is not node and node.target in _SUMS and not is_output:
            node.replace_all_uses_with(twin)
            graph.erase_node(node)


def take_sums_early(graph: Graph) -> None:
    """Puts each sum over images, and what only it reads, behind the last of its operands."""
    for node in list(graph.nodes):
        if node.target is not _aten.sum.dim_IntList or node.args[0].meta["val"].dim() != 4:
            continue
        chain, todo = {node}, list(node.all_input_nodes)
        while todo:
            n = todo.pop()
            if n not in chain and is_elementwise(n) and all(user in chain for user in n.users):
                chain.add(n)
                todo += n.all_input_nodes
        operands = {n for z in chain for n in z.all_input_nodes if n.op != "placeholder"} - chain
        place = {n: i for i, n in enumerate(graph.nodes)}
        if operands:
            last = max(operands, key=lambda n: place[n])
            for z in sorted(chain, key=lambda n: place[n]):
                last.append(z)
                last = z


def take_products_early(graph: Graph) -> None:
    """Moves the weight gradients of convolutions to directly after the last of their operands."""
    for node in list(graph.nodes):
        if node.target is _aten.convolution_backward.default and list(node.args[10]) == [False, True, False]:
            last = max(node.all_input_nodes)
            if last.op == "call_function":
                last.append(node)
                for result in node.users:
                    node.append(result)


def is_elementwise(node: Node) -> bool:
    """Whether the compiler would make a node's value where it is read."""
    known = node.target is to_copy.default or getattr(node.target, "is_view", False)
    return known or torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_ours(node: Node) -> bool:
    """Whether a node calls an operation of this library, which the compiler takes as it is."""
    return getattr(node.target, "namespace", "") == "threepass"


def is_random(node: Any) -> bool:
    """Whether a node draws random numbers; attention does so only with a dropout of more than zero."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments = arguments_of(node.target)
    given = dict(zip((argument.name for argument in arguments), node.args, strict=False)) | node.kwargs
    drops = [given.get(argument.name, argument.default_value) for argument in arguments if "dropout" in argument.name]
    return not drops or any(drops)


def _hashable(key: Any) -> Any:
    if isinstance(key, (tuple, list)):
        return tuple(map(_hashable, key))
    return tuple((k, _hashable(v)) for k, v in key.items()) if isinstance(key, dict) else key


def write_out_alphas(graph: Graph) -> None:
    for node in graph.nodes:
        if node.target in (_aten.add.Tensor, _aten.sub.Tensor) and node.kwargs.get("alpha", 1) != 1:
            a, b = node.args
            with graph.inserting_before(node):
                scaled = call(graph, _aten.mul.Tensor, (b, node.kwargs["alpha"]))
            node.args, node.kwargs = (a, scaled), {}


def share_mixes(graph: Graph) -> None:
    """A mix that several weights take (those of a residual block's two branches) is one tensor."""
    first: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.target is torch.ops.threepass.mix.default:
            twin = first.setdefault(node.args[:3], node)  # whatever their seeds
            if twin is not node:
                node.replace_all_uses_with(twin)
                graph.erase_node(node)


THIN = 16
_CACHED = 2**24  # multiplications in a thin product of long rows, which are then read again and again


def write_out_thin_products(graph: Graph) -> None:
    """Of matrices on a GPU."""
    for node in graph.nodes:
        if node.target in (_aten.mm.default, _aten.addmm.default) and not node.kwargs:
            a, b = node.args[-2:]
            (rows, length), columns = a.meta["val"].shape, b.meta["val"].shape[1]
            few = min(rows, columns) <= THIN and rows * columns * length <= _CACHED
            if a.meta["val"].is_cuda and (length <= THIN or few):
                put(node, thin_product, (a, b, *node.args[:-2]))


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


# Batch norms in training mode, as `functional` leaves them.
_BATCH_NORMS = {batch_norm_functional.default, batch_norm_legit.no_stats}


def rectify_again(graph: Graph) -> None:
    """In passes 2 and 3, rectified batch norms from their inputs."""
    for u in list(graph.nodes):
        norm = _norm_before(u)
        if norm is None:
            continue
        z, weight, bias = norm.args[:3]
        mean, rstd = (next((n for n in norm.users if n.args[1] == i), None) for i in (1, 2))
        if mean is None or rstd is None or not any(_needs_values(n, u) for n in u.users):
            continue
        if mean.meta["val"].dtype != accumulate_dtype(z.meta["val"].dtype):  # rounded: a CPU's, of half a norm
            continue
        with graph.inserting_before(u):
            numbers = call(graph, torch.ops.threepass.norm_numbers.default, (mean, rstd, weight, bias))
        for n in list(u.users):
            if _needs_values(n, u):
                _put_again(graph, u, n, rectified, (z, numbers))
            elif n.target is _aten.convolution_backward.default and list(n.args[10]) == [True, False, False]:
                n.replace_input_with(u, z)  # only its shape counts


def _put_again(graph: Graph, u: Node, reader: Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> None:
    """Makes u once more for one that reads it."""
    with graph.inserting_before(reader):
        again = call(graph, target, args, kwargs)
    reader.replace_input_with(u, again)


def keep_gated_sums(graph: Graph) -> None:
    """The errors behind residual blocks, which several read, or a norm twice, as tensors of their own."""
    for node in graph.nodes:
        if node.target is not _aten.threshold_backward.default or node.args[2] != 0:
            continue
        if len(node.users) == 1 and "batch_norm_backward" not in str(next(iter(node.users)).target):
            continue
        total: Any = node.args[0]
        is_sum = total.target is _aten.add.Tensor and not total.kwargs and len(total.users) == 1
        made = is_sum and all(isinstance(n, Node) and not is_elementwise(n) for n in total.args)
        u: Any = node.args[1]
        z, numbers = u.args if u.target is rectified else (u, None)
        if made and can_gate(*(n.meta["val"] for n in (*total.args, z)), numbers=numbers is not None):
            put(node, torch.ops.threepass.gated_sum.default, (*total.args, z, numbers))


ACTIVATIONS = {_aten.gelu.default: _aten.gelu_backward.default, _aten.silu.default: _aten.silu_backward.default}


def activate_again(graph: Graph) -> None:
    """Behind pass 2, smooth activations from their inputs, which their tangents read anyhow."""
    place = {n: i for i, n in enumerate(graph.nodes)}
    for u in list(graph.nodes):
        if u.target not in ACTIVATIONS:
            continue
        (z,) = u.all_input_nodes
        error, *tangents = sorted(place[n] for n in z.users if n.target is ACTIVATIONS[u.target]) or [len(place)]
        for n in [n for n in u.users if tangents and place[n] > error]:
            if getattr(n.target, "is_view", False) and n.users:  # exact mode's second product reads a view of u
                min(n.users, key=lambda user: place[user]).prepend(n)
            _put_again(graph, u, n, u.target, u.args, u.kwargs)


def _norm_before(u: Node) -> Any:
    """Batch norm in training mode, where u is its rectified output."""
    if u.target is not _aten.relu.default:
        return None
    y: Any = u.args[0]
    is_norm = y.target is operator.getitem and y.args[1] == 0 and y.args[0].target in _BATCH_NORMS
    return y.args[0] if is_norm and len(y.users) == 1 else None


def _needs_values(n: Any, u: Node) -> bool:
    """Whether n is a gate by u, or a mix with it, which the compiler fuses, or exact mode's second product with it."""
    if n.target is _aten.threshold_backward.default:
        return n.args[1] is u and n.args[0] is not u and n.args[2] == 0
    if n.target is _aten.convolution_backward.default:
        return n.args[1] is u and list(n.args[10]) == [False, True, False]
    return n.target is torch.ops.threepass.mix.default and n.args[0] is u and n.args[1] is not u


def mark_gates(graph: Graph) -> None:
    """Reads pass 3's gates off pass 2's errors, wherever pass 3 needs nothing else of the rectifier's output."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    gates: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        is_gate = node.target is _aten.threshold_backward.default and node.args[2] == 0
        if is_gate and node.args[1].target is _aten.relu.default:
            gates.setdefault(node.args[1], []).append(node)
    for u, (first, *later) in gates.items():
        others = [order[user] for user in u.users if user not in gates[u]]
        if later and max(others, default=0) < order[later[0]]:
            put(first, marked, (first.args[0], u))
            for gate in later:
                put(gate, gated, (gate.args[0], first))


@torch.library.custom_op("threepass::convolution", mutates_args=())
def convolution(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """The framework's, as an operation that is not taken for one that was there before."""
    return _aten.convolution(a, w, bias, stride, padding, dilation, transposed, output_padding, groups)


convolution.register_fake(_aten.convolution.default)

FORGOTTEN, EARLY = 2, 3  # so many layers are over before pass 3 has let go of as much as it adds


def forget(graph: Graph) -> list[Node]:
    """Makes some rectified convolutions once more for pass 3; returns those convolutions."""
    place = {n: i for i, n in enumerate(graph.nodes)}
    first: dict[Any, Any] = {}
    for n in graph.nodes:
        is_gate = n.target is _aten.threshold_backward.default and n.args[2] == 0
        if is_gate and n.meta["val"].dtype in HALF and _is_rectified_product(n.args[1]):
            first.setdefault(n.args[1], n)
    late = {u: [n for n in u.users if place[n] > place[gate]] for u, gate in first.items()}
    kept = [u for u in sorted(late, key=lambda u: place[u]) if late[u]]
    if len(kept) <= EARLY:
        return []
    size = max(u.meta["val"].numel() for u in kept)
    again: list[Node] = []
    chosen: set[Any] = set()
    for u in reversed(kept[EARLY:]):
        z: Any = u.args[0]
        beside = z.args[0] in chosen or any(n.args[0].args[0] is u for n in chosen)
        if u.meta["val"].numel() == size and not beside and len(chosen) < FORGOTTEN:
            chosen.add(u)
            with graph.inserting_before(min(late[u])):
                again.append(call(graph, z.target, z.args, z.kwargs))
                made = call(graph, _aten.relu.default, (again[-1],))
            for n in late[u]:
                n.replace_input_with(u, made)
    return again


def _is_rectified_product(u: Any) -> bool:
    """Whether u is the rectified output of a convolution that nothing else reads."""
    z: Any = u.args[0] if u.target is _aten.relu.default else None
    return isinstance(z, Node) and z.target is _aten.convolution.default and len(z.users) == 1


def keep_sums_of_errors(graph: Graph) -> None:
    """An error's sum that waits for exact mode's to be added: in memory, or the compiler takes it only then.

    Behind `fuse`, whose kernels take that sum with the product.
    """
    for node in list(graph.nodes):
        is_sum = node.target is _aten.sum.dim_IntList and node.args[0].meta["val"].dim() == 4 and len(node.args) == 2
        if is_sum and _is_added(node):
            with graph.inserting_after(node):
                kept = call(graph, torch.ops.threepass.kept.default, (node,))
            node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)


def _is_added(node: Node) -> bool:
    """Whether a value, times its weight and in another format, is added to something."""
    while len(node.users) == 1 and is_elementwise(node := next(iter(node.users))):
        if node.target is _aten.add.Tensor:
            return True
    return False


def marked(g: Tensor, u: Tensor) -> Tensor:
    """A gate of g by a rectifier's output u that leaves its mark: g, with no negative zero, or minus zero where u is 0.

    Minus zero is computed, because Triton reads a literal -0.0 as 0.0; by a product, because Triton negates by
    subtracting from 0.0; and not by its bits, because the compiler looks through views of bits, and would keep u and g
    in place of the mark.
    """
    return torch.where(u > 0, torch.where(g == 0, 0.0, g), u.abs() * -2.0)


def gated(s: Tensor, mark: Tensor) -> Tensor:
    """s where the mark is not minus zero, whose bits are the least whole number's."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[mark.dtype.itemsize]
    return torch.where(mark.view(bits) == torch.iinfo(bits).min, 0.0, s)


_OPENED = {torch.ops.threepass.mix.default: mix_of, torch.ops.threepass.round.default: round_of}


def open_mixes(graph: Graph) -> None:
    """Shows the compiler what a mix and a random rounding are made of."""
    for node in graph.nodes:
        node.target = _OPENED.get(node.target, node.target)


def call(graph: Graph, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> Node:
    """A new node, with its value: passes read shapes and strides off their operands."""
    node = graph.call_function(target, args, kwargs or {})
    with FakeTensorMode(), torch.no_grad():
        node.meta["val"] = target(*map_arg(args, _image), **map_arg(kwargs or {}, _image))
    return node


def _image(node: Node) -> Any:
    """What looks like a node's value, for the fake mode that is on."""

    def like(z: Any) -> Any:
        return torch.empty_strided(z.shape, z.stride(), dtype=z.dtype, device=z.device) if isinstance(z, Tensor) else z

    return tree_map(like, node.meta["val"])


def put(node: Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> None:
    """Another call in a node's place; it may be any function of tensors, which the compiler looks into."""
    node.target, node.args, node.kwargs = target, args, kwargs or {}
