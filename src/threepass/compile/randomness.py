"""Random numbers of a captured step: every one a hash of its place and of one seed, which is an input of the step.

A compiled step that drew from PyTorch's generators would draw other numbers than the eager one, and could not be
compared with it. So each operation of a captured graph that draws (dropout, noise) is replaced by arithmetic on the
positions in its result, a seed of its own, and nothing else. The same goes for the seeds of random rounding
(`numerics/rounding.py`). Plain integer arithmetic is the same in every precision and in every compiler, it is fused
with what reads it, and a mask need not be kept in memory.

`precision.seed_op` marks the step's seed in a trace; `seed_draws` numbers the draws and gives each a seed hashed from
the step's and its number. Passes that run a function again (a checkpointed block) set the random state back to where
it began (`tape/state.py`), so that its draws have the same numbers again, and the same masks.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.library import custom_op

from .._torch_compat import tree_leaves
from ..errors import CaptureError
from ..tape.replay import is_random_node
from .rewrite.graph import insert_call, replace_call, value_of

_aten, _ours = torch.ops.aten, torch.ops.threepass


@custom_op("threepass::seeds", mutates_args=())
def seeds_op(seed: Tensor, count: int) -> Tensor:
    """`count` seeds, one for each draw."""
    return _hash(torch.arange(count, device=seed.device, dtype=torch.int32) * -1640531535 + seed)


seeds_op.register_fake(lambda seed, count: seed.new_empty(count))


def _hash(h: Tensor) -> Tensor:
    """32 bits that look random, of int32 numbers (whose products wrap); the shifts are of unsigned ones."""
    h = (h ^ ((h >> 16) & 0xFFFF)) * 0x21F0AAAD
    h = (h ^ ((h >> 15) & 0x1FFFF)) * -749066857
    return h ^ ((h >> 15) & 0x1FFFF)


def uniform(shape: Sequence[int], seed: Tensor) -> Tensor:
    """In (0, 1), in float32.

    A place meets the seed before it is multiplied: Inductor takes a multiple of a place for an index, multiplies its
    constants, and Triton refuses the product, which is beyond 32 bits.
    """
    places = torch.arange(math.prod(shape), device=seed.device).to(torch.int32) ^ seed
    bits = (_hash(places * -1640531535 + seed) >> 9) & 0x7FFFFF
    return ((bits.to(torch.float32) + 0.5) * 2**-23).view(list(shape))


def normal(shape: Sequence[int], seed: Tensor) -> Tensor:
    """Of mean 0 and variance 1, in float32, by Box and Muller's formula."""
    radius, angle = uniform(shape, seed), uniform(shape, _hash(seed + 1))
    return (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()


def _bernoulli(z: Tensor, p: float | Tensor | None = None, *, seed: Tensor, generator: None = None) -> Tensor:
    return (uniform(z.shape, seed) < (z if p is None else p)).to(z.dtype)


def _native_dropout(z: Tensor, p: float, train: bool | None, *, seed: Tensor) -> tuple[Tensor, Tensor]:
    if train is False:
        return z.clone(), torch.ones_like(z, dtype=torch.bool)
    mask = uniform(z.shape, seed) < 1 - p  # as `_bernoulli`
    return z * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def _rand(size: Sequence[int], *, seed: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return uniform(size, seed).to(dtype or torch.get_default_dtype())


def _randn(size: Sequence[int], *, seed: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return normal(size, seed).to(dtype or torch.get_default_dtype())


def _rand_like(z: Tensor, *, seed: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return uniform(z.shape, seed).to(dtype or z.dtype)


def _randn_like(z: Tensor, *, seed: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return normal(z.shape, seed).to(dtype or z.dtype)


def _uniform(z: Tensor, low: float = 0.0, high: float = 1.0, *, seed: Tensor, generator: None = None) -> Tensor:
    return (low + (high - low) * uniform(z.shape, seed)).to(z.dtype)


def _normal(z: Tensor, mean: float = 0.0, std: float = 1.0, *, seed: Tensor, generator: None = None) -> Tensor:
    return (mean + std * normal(z.shape, seed)).to(z.dtype)


def _exponential(z: Tensor, rate: float = 1.0, *, seed: Tensor, generator: None = None) -> Tensor:
    return (uniform(z.shape, seed).log() / -rate).to(z.dtype)


def _randint(low: int, high: int, size: Sequence[int], *, seed: Tensor, dtype=None, **_: Any) -> Tensor:
    return (low + (uniform(size, seed).double() * (high - low)).floor()).to(dtype or torch.int64)


def _randint_below(high: int, size: Sequence[int], *, seed: Tensor, **kwargs: Any) -> Tensor:
    return _randint(0, high, size, seed=seed, **kwargs)


def _randperm(n: int, *, seed: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return uniform([n], seed).argsort().to(dtype or torch.int64)


_DRAWN: dict[Any, Callable[..., Any]] = {
    _aten.bernoulli.default: _bernoulli,
    _aten.bernoulli.p: _bernoulli,
    _aten.bernoulli.Tensor: _bernoulli,
    _aten.native_dropout.default: _native_dropout,
    _aten.rand.default: _rand,
    _aten.randn.default: _randn,
    _aten.rand_like.default: _rand_like,
    _aten.randn_like.default: _randn_like,
    _aten.uniform.default: _uniform,
    _aten.normal_functional.default: _normal,
    _aten.exponential.default: _exponential,
    _aten.randint.default: _randint_below,
    _aten.randint.low: _randint,
    _aten.randperm.default: _randperm,
}
_SEED_OF: dict[Any, int] = {_ours.mix.default: 3, _ours.round.default: 2}  # the place of the seed among their arguments
_MARKS = {_ours.seed.default, _ours.random_state.default, _ours.set_random_state.default}


def seed_draws(graph: Graph) -> bool:
    """Gives every draw its seed, hashed from the step's; says whether the model or the loss draws any.

    After the random state was set, draws take it from a copy of the seeds: a compiler that saw equal arithmetic on one
    seed could keep the mask from pass 1 on. A graph without a step's seed keeps its draws, which must not repeat.
    """
    marks = graph.find_nodes(op="call_function", target=_ours.seed.default)
    numbers, drawn = _numbers(graph), [node for node in graph.nodes if is_random_node(node)]
    if marks and numbers:
        _refuse_unknown(drawn)
        with graph.inserting_before(marks[0]):
            count = 1 + max(numbers.values())
            seeds = current = insert_call(graph, _ours.seeds.default, (marks[0].args[0], count))
        for node in list(graph.nodes):
            with graph.inserting_before(node):
                if node.target is _ours.set_random_state.default:
                    current = insert_call(graph, _ours.recompute_from.default, (seeds,))
                elif node in numbers:
                    _give_seed(node, insert_call(graph, _aten.select.int, (current, 0, numbers[node])))
    elif len(set(numbers.values())) < len(numbers):
        raise CaptureError("a function that has no seed draws random numbers, and draws the same ones once more")
    for node in reversed(graph.nodes):
        if node.target in _MARKS or (node.target is _ours.recompute_from.default and not node.users):
            graph.erase_node(node)
    return bool(drawn)


def _numbers(graph: Graph) -> dict[Node, int]:
    """Which of the seeds each node takes; a draw its number, which setting the random state sets back.

    Raises if what runs once more draws other random numbers than it drew at first.
    """
    numbers: dict[Node, int] = {}
    states: dict[Any, tuple[int, bool]] = {}
    first: list[Node] = []  # of each number, the first draw
    count, repeats = 0, False
    for node in graph.nodes:
        if node.target is _ours.random_state.default:
            states[node] = count, repeats
        elif node.target is _ours.set_random_state.default:
            count, repeats = states[node.args[0]]
            repeats = repeats or count < len(first)
        elif is_random_node(node):
            if repeats and (count == len(first) or _call_of(node) != _call_of(first[count])):
                raise CaptureError(
                    f"a function that runs once more, as an activation checkpoint does, draws {_in_words(node)}, which "
                    "it did not draw at first. It must draw the same random numbers each time"
                )
            first += [] if repeats else [node]
            numbers[node] = count
            count += 1
    rounded = [node for node in graph.nodes if node.target in _SEED_OF]
    return numbers | {node: len(first) + i for i, node in enumerate(rounded)}


def _call_of(node: Node) -> Any:
    """What two draws have in common that draw the same numbers from the same seed."""
    value = value_of(node)
    shapes = tuple(z.shape for z in tree_leaves(value))
    return node.target, map_arg((node.args, node.kwargs), lambda n: None), shapes


def _in_words(node: Node) -> str:
    return f"random numbers by {node.target}, of shape {tuple(tree_leaves(value_of(node))[0].shape)}"


def _refuse_unknown(drawn: list[Node]) -> None:
    unknown = sorted({str(node.target) for node in drawn if node.target not in _DRAWN})
    if unknown:
        raise CaptureError(
            f"the step draws random numbers by {', '.join(unknown)}, which a captured program cannot compute from a "
            "seed; draw them outside of the model and the loss, and pass them in x or y"
        )


def _give_seed(node: Node, seed: Node) -> None:
    if node.target in _DRAWN:
        replace_call(node, _DRAWN[node.target], node.args, {**node.kwargs, "seed": seed})
    else:
        node.update_arg(_SEED_OF[node.target], seed)
