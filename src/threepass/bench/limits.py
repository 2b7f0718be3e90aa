"""What a step cannot do without: operations, and bytes between memory and kernels, counted in one forward of the model.

A layer is an operation at which kernels must begin and end: a product with a weight (convolution, linear), a product of
two activations (attention, bmm), a norm (a reduction). Everything between them is elementwise and counted as free: it
can be done in the kernel before or after it. A layer has inputs of `a` bytes, an output of `u`, weights of `w`, and F
operations forward. Each kernel reads what it needs once and writes its result once:

    kernel         reads -> writes, of a product with a weight           F    of a norm             of two activations
    forward        a, w -> u                                             F    a -> u                a -> u           F
    error          d, w -> error of a          (pass 2)                  F    d, a -> error         d, a -> error   2F
    weight         d, a -> gradient            (plain training)          F    with `error`          -
    tangent        t, w -> tangent of u        (pass 3)                  F    t, a, d -> tangent    t, a -> tangent 2F
    mixed weight   d, a, t -> gradient         (d (x) mix)**             F    with `tangent`        -
    pull           r, w -> r of a              (exact mode's R{d})       F    r, d, a, t -> r       r, d, a, t -> r 4F
    both weights   d, r, a, t -> gradient      (d (x) mix + r (x) a)    2F    with `pull`           -

    plain          forward, error*, weight               * not of a layer whose input needs no gradient: the first
    paper          forward, error, tangent, mixed weight
    exact          forward, error, tangent, pull*, both weights
    ** in a net without curvature (ReLU, pooling) the mix itself can be pushed in place of t: then d, mix -> gradient

So the operations of a net of products are 3 sum F - F_first, 4 sum F and 6 sum F - F_first. It is a lower limit: a
mask, a bias, the second reading of a skip connection and of a batch norm's input, and the optimizer are not counted.
Weights that are computed (weight norm) count as activations.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .._torch_compat import TorchDispatchMode, cpu_attention, cpu_attention_backward, to_copy, tree_leaves

NORMS = ("batch_norm", "layer_norm", "group_norm", "rms_norm")
# Operations that keep a net piecewise linear; one that is not known counts as curved.
STRAIGHT = {
    "_adaptive_avg_pool2d", "_unsafe_view", "add", "alias", "as_strided", "avg_pool2d", "cat", "clone",
    "constant_pad_nd", "detach", "empty", "expand", "leaky_relu", "max_pool2d_with_indices", "mean", "permute", "relu",
    "slice", "squeeze", "sum", "t", "threshold", "transpose", "unsqueeze", "view",
}  # fmt: skip


def _attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(q.shape, k.shape, v.shape)


def _attention_backward(d: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(d.shape, q.shape, k.shape, v.shape)


COUNTS = flop_registry | {  # PyTorch's counts, and the one fused attention that they leave out
    cpu_attention: _attention,
    cpu_attention_backward: _attention_backward,
}


class Layer(NamedTuple):
    """A layer's kind ("weight", "norm" or "pair"), its forward operations and its bytes.

    first: its input needs no gradient; straight: the whole net is piecewise linear in its input.
    """

    kind: str
    operations: int
    a: int
    u: int
    w: int
    first: bool
    straight: bool = False


class Work(NamedTuple):
    """A kernel: its operations, the bytes that it reads and writes."""

    operations: int
    bytes: int


def layers(model: nn.Module, x: Tensor) -> list[Layer]:
    """The layers that a forward of a copy of the model runs through, in order."""
    model = copy.deepcopy(model)
    walk = _Walk({p.untyped_storage().data_ptr() for p in model.parameters()})
    with torch.enable_grad(), walk:
        model(x.detach())
    return [z._replace(straight=walk.straight) for z in walk.layers]


def operations(step: Callable[[], Any]) -> int:
    """Those of all convolutions, matrix products and attentions that run, two for each multiplication and addition."""
    with _Counter() as counter:
        step()
    return counter.operations


class _Counter(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in COUNTS:
            self.operations += COUNTS[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


class _Walk(TorchDispatchMode):
    def __init__(self, weights: set[int]):
        super().__init__()
        self.weights = weights  # addresses of their storage, which views such as w.T share
        self.layers: list[Layer] = []
        self.straight = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        name = packet.__name__
        if packet is to_copy and args[0].untyped_storage().data_ptr() in self.weights:  # autocast's, in half precision
            self.weights.add(out.untyped_storage().data_ptr())
        if any(norm in name for norm in NORMS):
            self._add("norm", 0, args[:3], out[0] if isinstance(out, tuple) else out)
        elif packet in COUNTS:
            operations = COUNTS[packet](*args, **kwargs, out_val=out)
            self._add("", operations, args, out[0] if isinstance(out, tuple) else out)
        elif name.removesuffix("_") not in STRAIGHT:
            self.straight = False
        return out

    def _add(self, kind: str, operations: int, args: Any, out: Tensor) -> None:
        tensors = [z for z in tree_leaves(args) if isinstance(z, Tensor) and z.is_floating_point()]
        w = [z for z in tensors if z.untyped_storage().data_ptr() in self.weights]
        a = [z for z in tensors if all(z is not p for p in w)]
        kind = kind or ("weight" if w else "pair")  # of two activations: attention too
        self.straight = self.straight and kind == "weight"
        first = not any(z.requires_grad for z in a)
        self.layers.append(Layer(kind, operations, _bytes(*a), _bytes(out), _bytes(*w), first))


def _bytes(*tensors: Tensor) -> int:
    return sum(z.numel() * z.element_size() for z in tensors)


def _forward(z: Layer) -> Work:
    return Work(z.operations, z.a + z.w + z.u)


def _error(z: Layer) -> Work:
    if z.kind == "weight":
        return Work(z.operations, z.u + z.w + z.a)
    return Work(2 * z.operations, z.u + z.w + z.a + z.a)


def _error_but_first(z: Layer) -> Work:
    if not z.first:
        return _error(z)
    return Work(0, z.u + z.a + z.w) if z.kind == "norm" else Work(0, 0)


def _weight(z: Layer) -> Work:
    return Work(z.operations, z.u + z.a + z.w) if z.kind == "weight" else Work(0, 0)


def _tangent(z: Layer) -> Work:
    if z.kind == "weight":
        return Work(z.operations, z.a + z.w + z.u)
    return Work(2 * z.operations, 2 * z.a + z.w + (2 if z.kind == "norm" else 1) * z.u)


def _mixed_weight(z: Layer) -> Work:
    return Work(z.operations, z.u + (1 if z.straight else 2) * z.a + z.w) if z.kind == "weight" else Work(0, 0)


def _pull(z: Layer) -> Work:
    if z.kind == "weight":
        return Work(0, 0) if z.first else Work(z.operations, z.u + z.w + z.a)
    return Work(4 * z.operations, 2 * z.u + z.w + (2 if z.first else 3) * z.a)


def _both_weights(z: Layer) -> Work:
    return Work(2 * z.operations, 2 * z.u + 2 * z.a + z.w) if z.kind == "weight" else Work(0, 0)


_PLAIN = (_forward, _error_but_first, _weight)
_EXACT = (_forward, _error, _tangent, _pull, _both_weights)
KERNELS: dict[str, tuple[Callable[[Layer], Work], ...]] = {
    "plain": _PLAIN,
    "alpha1": (_forward, _error, _weight),
    "paper": (_forward, _error, _tangent, _mixed_weight),
    "exact": _EXACT,
    "double": _EXACT,
    "sam": _PLAIN + _PLAIN,
    "finite": (_forward, _error, *_PLAIN, _error_but_first, _weight),
}


def work(net: list[Layer], method: str) -> list[Work]:
    """The kernels of a method's step."""
    return [kernel(z) for z in net for kernel in KERNELS[method]]


def total(kernels: list[Work]) -> Work:
    return Work(sum(k.operations for k in kernels), sum(k.bytes for k in kernels))


def seconds(kernels: list[Work], operations_per_second: float, bytes_per_second: float) -> float:
    """At the device's ceilings: each kernel takes as long as the slower of its operations and its bytes."""
    return sum(max(k.operations / operations_per_second, k.bytes / bytes_per_second) for k in kernels)


def limits(net: list[Layer], ceilings: dict[str, float]) -> dict[str, dict[str, float]]:
    """For every method that is counted: operations, bytes and seconds at the ceilings, and their ratios to plain's."""
    rates = ceilings["operations_per_second"], ceilings["bytes_per_second"]
    counted = {name: work(net, name) for name in KERNELS}
    plain, least = total(counted["plain"]), seconds(counted["plain"], *rates)
    return {
        name: {
            "operations": total(kernels).operations,
            "bytes": total(kernels).bytes,
            "seconds": seconds(kernels, *rates),
            "operations_ratio": total(kernels).operations / plain.operations,
            "bytes_ratio": total(kernels).bytes / plain.bytes,
            "seconds_ratio": seconds(kernels, *rates) / least,
        }
        for name, kernels in counted.items()
    }
