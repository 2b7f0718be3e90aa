"""Low precision: how the third pass survives bf16 and fp16.

With reduction="batch" t is 1e-5 to 1e-2 of a, so alpha a + (1 - alpha) t rounded to bf16 is mostly alpha a again, and
in fp16 t underflows. So wherever an operation ran in a half-precision dtype

* pass 3 starts from t_0 divided by a power of two near its largest entry (it is linear in t_0), and fp16's pass 2 from
  the loss times a power of two near the batch size; both are taken out again in float32;
* the gradients of pass 2 and pass 3 are computed apart and added in float32, or, in a compiled step whose products are
  not cheap, in one product with the mix a + k t rounded up or down at random: a is on the grid already, so that only
  what t adds is rounded;
* a half parameter's gradient is given in float32, and when `ThreePass` adds it to `p.grad` (in a compiled step, before
  it is given) it is rounded up or down at random, with the right mean. The random bits are a hash of the value, its
  position and a seed that is another one at every step: rounding errors do not add up over steps, no generator moves,
  and the same step gives the same result.
"""

import functools
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from .rounding import round_stochastically

HALF = (torch.bfloat16, torch.float16)


def power_of_two(largest: Tensor) -> Tensor:
    """The power of two at or under `largest`; 1 where that is zero or not finite."""
    exponent = torch.floor(torch.log2(largest.float()))
    return torch.where(torch.isfinite(exponent), torch.exp2(exponent.clamp(-100, 100)), torch.ones_like(exponent))


def weights_dtype(parameters: Iterable[Tensor]) -> torch.dtype:
    """The dtype of the two terms' weights where they are tensors: float64 if any parameter has it, else float32."""
    wide = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
    return torch.float64 if wide else torch.float32


def tf32_convolutions() -> bool:
    """Whether PyTorch's convolutions of float32 may be computed in TF32."""
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:  # it was set by the newer name
        return getattr(torch.backends.cudnn, "conv").fp32_precision == "tf32"  # noqa: B009


@functools.cache
def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def as_dtype(z: Tensor, dtype: torch.dtype) -> Tensor:
    """z.to(dtype), several times as fast where there is nothing to convert."""
    return z if z.dtype == dtype else z.to(dtype)


def materialized(z: Tensor) -> Tensor:
    """z in memory: a compiler that saw how z is computed would recompute it for every element that reads it."""
    return z.clone()


materialized_op = torch.library.custom_op("threepass::materialized", materialized, mutates_args=())
materialized_op.register_fake(torch.empty_like)


def mix_of(a: Tensor, t: Tensor, ratio: Tensor, seed: Tensor) -> Tensor:
    """a + ratio * t; in half precision what t adds is rounded up or down at random."""
    mix = a.to(accumulate_dtype(a.dtype)) + ratio * t
    return round_stochastically(mix, a.dtype, seed) if a.dtype in HALF else mix


mix_op = torch.library.custom_op("threepass::mix", mix_of, mutates_args=())  # one node of a captured step
mix_op.register_fake(lambda a, t, ratio, seed: torch.empty_like(a))


@torch.library.custom_op("threepass::seed", mutates_args=())
def seed_op(seed: Tensor) -> Tensor:
    """The step's seed, an int32 scalar: a node that a captured graph keeps until `randomness.seed_draws` finds it."""
    return seed.clone()


seed_op.register_fake(torch.empty_like)
has_side_effect(torch.ops.threepass.seed.default)


def round_of(z: Tensor, dtype: torch.dtype, seed: Tensor) -> Tensor:
    return round_stochastically(z, dtype, seed)


round_op = torch.library.custom_op("threepass::round", round_of, mutates_args=())  # likewise
round_op.register_fake(lambda z, dtype, seed: torch.empty_like(z, dtype=dtype))


def error_gain(half: set[torch.dtype], batch_size: float) -> float:
    """The factor on pass 2's errors: in fp16 about the batch size, so that they are those of a single sample's loss."""
    return 2.0 ** round(math.log2(batch_size)) if torch.float16 in half else 1.0


def initial_tangents(
    dx: list[Tensor],
    c: float | Tensor,
    gain: float | Tensor,
    half: set[torch.dtype],
    max_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> tuple[list[Tensor], float | Tensor]:
    """t_0, and what pass 3's gradients are then to be multiplied by.

    gain: of the errors, and so of dx; max_over_ranks: the maximum over ranks, where their scales have to be equal.
    """
    if not half:
        factor = c / gain
        return [g * factor if isinstance(factor, Tensor) or factor != 1 else g for g in dx], 1 / gain
    largest = torch.stack([g.abs().max().float() for g in dx]).max()
    if max_over_ranks is not None:
        largest, whole = max_over_ranks(torch.stack([largest, largest.new_tensor(c)]))
        dx, c = [(g.float() * (c / whole)).to(g.dtype) for g in dx], whole
    size = power_of_two(largest)
    return [(g.float() / size).to(g.dtype) for g in dx], c * size / gain**2
