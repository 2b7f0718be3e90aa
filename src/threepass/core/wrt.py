"""Which tensors of x count as the input of the net, and gradients in the structure in which the caller sees them.

wrt=None            every floating-point tensor of x; gradients are structured like x, with None for the rest
wrt="pos"           one entry of a dict x (of a tuple x: its index); the gradient is a tensor
wrt=("pos", "cell") several entries; the gradients are a dict of them
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .._torch_compat import tree_leaves, tree_map
from ..tape.inputs import is_float

Key = str | int
Wrt = Key | tuple[Key, ...] | None


def as_wrt(wrt: Any) -> Wrt:
    """The option in a form that can be compared and hashed."""
    if wrt is None or _is_key(wrt):
        return wrt
    if not isinstance(wrt, (tuple, list)) or not wrt or not all(map(_is_key, wrt)) or len(set(wrt)) < len(wrt):
        raise ValueError(
            "wrt must be a key of the dict x, an index of the tuple x, or a tuple of these without duplicates; "
            f"got {wrt!r}"
        )
    return tuple(wrt)


def check_wrt(x: Any, wrt: Wrt) -> None:
    """Refuses a `wrt` that does not name floating-point tensors of x."""
    if wrt is None:
        return
    if isinstance(x, Tensor):
        raise ValueError(f"wrt={wrt!r} names entries of a dict or tuple x, but x is a tensor: leave wrt out")
    entries = _entries(x)
    for key in _keys(wrt):
        if key not in entries:
            raise ValueError(f"wrt={key!r} is not an entry of x; x has: {', '.join(map(repr, entries))}")
        z = entries[key]
        if not is_float(z):
            kind = f"a tensor of {z.dtype}" if isinstance(z, Tensor) else f"a {type(z).__name__}"
            raise TypeError(f"wrt names x[{key!r}], which is {kind}: only floating-point tensors have gradients")


def map_inputs(x: Any, wrt: Wrt, fn: Callable[[Tensor], Any]) -> Any:
    """x with fn applied to the tensors that count as the input, in the order of x."""
    if wrt is None:
        return map_leaves(lambda z: fn(z) if is_float(z) else z, x)
    chosen = _keys(wrt)
    replaced = {key: fn(z) if key in chosen else z for key, z in _entries(x).items()}
    return replaced if isinstance(x, Mapping) else tuple(replaced.values())


def without_other_leaves(x: Any, wrt: Wrt, parameters: Mapping[str, Tensor]) -> Any:
    """x with its inputs detached if they are leaves that require grad, as users often set, but not parameters."""
    own = set(map(id, parameters.values()))
    return map_inputs(x, wrt, lambda z: z.detach() if z.requires_grad and z.is_leaf and id(z) not in own else z)


def inputs_of(x: Any, wrt: Wrt) -> list[Tensor]:
    inputs: list[Tensor] = []
    map_inputs(x, wrt, inputs.append)
    return inputs


def like_inputs(x: Any, wrt: Wrt, tensors: list[Tensor]) -> Any:
    """One tensor for each of `inputs_of(x, wrt)`, in the structure of the gradients."""
    rest = iter(tensors)
    if wrt is None:
        return map_leaves(lambda z: next(rest) if is_float(z) else None, x)
    chosen = _keys(wrt)
    named = {key: next(rest) for key in _entries(x) if key in chosen}
    return {key: named[key] for key in wrt} if isinstance(wrt, tuple) else named[wrt]


def map_leaves(fn: Callable[[Any], Any], x: Any) -> Any:
    """`tree_map`, with a fast path for a single tensor."""
    return fn(x) if isinstance(x, Tensor) else tree_map(fn, x)


def leaves_of(x: Any) -> list[Any]:
    """`tree_leaves`, with a fast path for a single tensor."""
    return [x] if isinstance(x, Tensor) else tree_leaves(x)


def _entries(x: Any) -> dict[Any, Any]:
    return dict(x) if isinstance(x, Mapping) else dict(enumerate(x))


def _keys(wrt: Key | tuple[Key, ...]) -> tuple[Key, ...]:
    return wrt if isinstance(wrt, tuple) else (wrt,)


def _is_key(key: Any) -> bool:
    return isinstance(key, (str, int)) and not isinstance(key, bool)
