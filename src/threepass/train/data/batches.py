"""Batches cut from a split on its own device, the same on every device for the same seed."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .dataset import Split
from .inputs import standardisation

PAD = 4


class Batches:
    """Epochs of batches (x, y) from a split: x float32 (float64 from a split of that), B x C x H x W, y int64, B.

    Order, crops and flips are a pure function of (seed, epoch number, place in the epoch), drawn on the CPU, so that
    devices agree and `epoch(number, start=k)` goes on at batch k as if it had never stopped.

    Args:
        split: the examples, on the device that the batches are made on.
        batch_size: examples in a batch; without drop_last, the last batch of an epoch may be smaller.
        normalise: (mean, std) of every channel: x = (pixels - mean) / std, with pixels 0 to 1. None: x = pixels.
        augment: pad with zeros by 4, crop the old size at random, and mirror left to right half of the time.
        shuffle: draw a new order for every epoch; else the split's own.
        seed: of order, crops and flips.
        drop_last: leave out the last batch of an epoch if it is smaller.
        channels_last: the memory format of x; else contiguous.
        part_of: which columns of a batch's draw, 4 x B, this process takes; default: all.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        normalise: tuple[Sequence[float], Sequence[float]] | None,
        augment: bool = False,
        shuffle: bool = True,
        seed: int,
        drop_last: bool = False,
        channels_last: bool = False,
        part_of: Callable[[Tensor], Tensor] = lambda drawn: drawn,
    ):
        if batch_size < 1 or (drop_last and batch_size > len(split)):
            raise ValueError(f"batch_size must be at least 1, with drop_last at most {len(split)}; got {batch_size}")
        if split.x.dim() != 4 and (augment or channels_last):
            raise ValueError(f"augment and channels_last need images, N x C x H x W; got {tuple(split.x.shape)}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        self.split, self.batch_size, self.drop_last = split, batch_size, drop_last
        self.augment, self.shuffle, self.seed, self.part_of = augment, shuffle, seed, part_of
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.scale, self.shift = standardisation(split.x, normalise)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.split) // self.batch_size if self.drop_last else -(-len(self.split) // self.batch_size)

    @property
    def samples(self) -> int:
        return len(self.split)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch from batch `start` on."""
        if not 0 <= start <= len(self):
            raise ValueError(f"start must be within 0 to {len(self)} (the batches of an epoch), got {start}")
        # One draw and one copy to the device for the whole epoch: no batch waits for the host.
        places = self.draw(number).to(self.split.x.device).split(self.batch_size, dim=1)[start : len(self)]
        return (self.cut(self.part_of(place)) for place in places)

    def draw(self, number: int) -> Tensor:
        """For every place in an epoch the example, the crop's top and left, whether to flip: 4 x N, on the CPU."""
        return torch.from_numpy(self._draw(number))

    def cut(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """The batch of B places of a draw, 4 x B, on the split's device."""
        example, top, left, flip = drawn.unbind()
        # Product and sum, each rounded by itself, are the same bits on every device; a division need not be.
        x = self.split.x[example].to(self.scale.dtype).mul_(self.scale).add_(self.shift)
        if self.augment:
            x = crop_and_flip(x, top, left, flip.bool())
        return x.contiguous(memory_format=self.memory_format), self.split.y[example]

    def _draw(self, number: int) -> np.ndarray:
        rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(number,)))
        n = len(self.split)
        order = rng.permutation(n) if self.shuffle else np.arange(n)
        return np.stack([order, *rng.integers(0, 2 * PAD + 1, (2, n)), rng.integers(0, 2, n)])


def crop_and_flip(x: Tensor, top: Tensor, left: Tensor, flip: Tensor) -> Tensor:
    """Zero-pads B x C x H x W by 4, cuts H x W out again at (top, left), each B of 0 to 8, mirrored where flip, B bool.

    out[b, c, i, j] = padded[b, c, top[b] + i, left[b] + (W - 1 - j if flip[b] else j)]
    """
    height, width = x.shape[-2:]
    image = torch.arange(len(x), device=x.device)[:, None, None]
    row = top[:, None] + torch.arange(height, device=x.device)
    column = torch.arange(width, device=x.device)
    column = left[:, None] + torch.where(flip[:, None], column.flip(0), column)
    padded = F.pad(x, (PAD, PAD, PAD, PAD)).permute(0, 2, 3, 1)
    return padded[image, row[:, :, None], column[:, None, :]].permute(0, 3, 1, 2)
