"""Batches from a torch DataLoader: every epoch a function of the seed and its number, so that runs can be resumed."""

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..._torch_compat import tree_leaves, tree_map
from .dataset import Device
from .formats import DataError


class LoaderBatches:
    """Epochs of batches (x, y) from a DataLoader, moved to a device.

    Shuffling and random transforms draw from torch's, NumPy's and Python's generators. Each epoch seeds them from
    (seed, number of the epoch) while the loader runs, and training's own random numbers are left alone. A generator of
    the loader's own is seeded too.
    """

    samples = None  # not known before they were read

    def __init__(self, loader: DataLoader, what: str, device: Device, seed: int):
        try:
            self._length = len(loader)
        except TypeError as error:
            raise DataError(
                f"the {what} loader has no length, which schedules need: give its dataset a __len__"
            ) from error
        if not self._length:
            raise DataError(f"the {what} loader is empty")
        self.loader, self.what, self.device, self.seed = loader, what, device, seed

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self._length

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Any, Any]]:
        """The batches of an epoch from batch `start` on; those before it are read and passed over."""
        own = _RandomStates(int(np.random.SeedSequence(self.seed, spawn_key=(number,)).generate_state(1)[0]))
        for generator in {id(g): g for g in _generators(self.loader)}.values():
            generator.manual_seed(own.seed)
        if hasattr(self.loader.sampler, "set_epoch"):
            self.loader.sampler.set_epoch(number)
        with own.swapped():
            batches = iter(self.loader)
        for i in range(self._length):
            with own.swapped():
                batch = next(batches, None)
            if batch is None:
                raise DataError(f"the {self.what} loader yielded {i} batches, but its length is {self._length}")
            if i >= start:
                yield self._pair(batch)

    def _pair(self, batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            got = f"a batch of {len(batch)} elements" if isinstance(batch, (tuple, list)) else type(batch).__name__
            raise DataError(f"the {self.what} loader must yield pairs (x, y), got {got}: use a collate_fn that does")
        plain = tuple(dict(part) if isinstance(part, Mapping) else part for part in batch)
        x, y = tree_map(lambda z: z.to(self.device) if isinstance(z, Tensor) else z, plain)
        x = tuple(x) if isinstance(x, list) else x
        if not any(isinstance(z, Tensor) for z in tree_leaves(x)):
            raise DataError(f"the {self.what} loader yields an x without tensors, a {type(x).__name__}")
        return x, y


class _RandomStates:
    """States of the global generators, which the loader uses in place of training's own."""

    def __init__(self, seed: int):
        self.seed = seed
        before = self._read()
        torch.random.default_generator.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.states = self._read()
        self._write(before)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        before = self._read()
        self._write(self.states)
        try:
            yield
        finally:
            self.states = self._read()
            self._write(before)

    @staticmethod
    def _read() -> tuple[Any, Any, Any]:
        return torch.get_rng_state(), np.random.get_state(), random.getstate()

    @staticmethod
    def _write(states: tuple[Any, Any, Any]) -> None:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _generators(loader: DataLoader) -> list[torch.Generator]:
    places = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    generators = [getattr(place, "generator", None) for place in places]
    return [g for g in generators if isinstance(g, torch.Generator)]
