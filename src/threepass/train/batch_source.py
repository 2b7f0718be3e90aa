"""Where a run's batches come from: a data set in memory, or two torch DataLoaders."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .config import Config
from .data import Batches, DataSet, Inputs, LoaderBatches
from .ranks import ALONE, Ranks
from .validation import size_of_batches

Data = DataSet | tuple[DataLoader, DataLoader]


@dataclass(frozen=True)
class BatchSource:
    """Batches for training and validation; `first` is a validation batch, for measurements along the run.

    classes: how many there are; 0 for regression, None where it is not known. inputs: what is saved of the data.
    """

    train: Batches | LoaderBatches
    val: Batches | LoaderBatches
    first: tuple[Any, Any]
    name: str
    classes: int | None
    inputs: Inputs

    @property
    def is_regression(self) -> bool:
        """Whether the targets are numbers, not labels."""
        y = self.first[1]
        return isinstance(y, Tensor) and y.is_floating_point()

    @property
    def targets(self) -> Tensor:
        """Of training; of a loader, those of the first validation batch."""
        return self.train.split.y if isinstance(self.train, Batches) else self.first[1]


def batch_source(data: Data, config: Config, device: torch.device, ranks: Ranks = ALONE) -> BatchSource:
    """The batches of a data set, or of a pair of loaders, which do their own shuffling and augmentation."""
    if isinstance(data, DataSet):
        return _from_memory(data, config, ranks)
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(one, DataLoader) for one in data):
        return _from_loaders(data[0], data[1], config, device)
    if isinstance(data, str):
        raise TypeError(f"data must be a data set, not a name: pass threepass.train.data.load({data!r})")
    raise TypeError(
        "data must be a threepass.train.data.DataSet, as load and from_dataset return it, or a pair of torch "
        f"DataLoaders, (train_loader, val_loader); got {type(data).__name__}"
    )


def _from_memory(data: DataSet, config: Config, ranks: Ranks) -> BatchSource:
    smallest = len(data.train) % config.batch_size or config.batch_size
    if smallest < ranks.size:
        raise ValueError(
            f"a batch of {smallest} samples cannot be divided among {ranks.size} ranks: change batch_size "
            f"({config.batch_size}; {data.name} has {len(data.train)} training examples) or use fewer ranks"
        )
    common: dict[str, Any] = {
        "normalise": (data.mean, data.std), "channels_last": config.channels_last, "seed": config.seed,
    }  # fmt: skip
    own: dict[str, Any] = {"augment": config.augment, "shuffle": True, "part_of": ranks.part_of}
    train = Batches(data.train, config.batch_size, **own, **common)
    size = size_of_batches(len(data.val), data.val.x[0].numel(), config.batch_size)
    val = Batches(data.val, size, shuffle=False, **common)
    first = val.cut(val.draw(0)[:, : config.batch_size].to(data.val.x.device))
    return BatchSource(train, val, first, data.name, len(data.classes), data.inputs)


def _from_loaders(train: DataLoader, val: DataLoader, config: Config, device: torch.device) -> BatchSource:
    if config.augment:
        raise ValueError(
            "augment=True works only with data in memory; with a DataLoader, use transforms in its dataset"
        )
    if config.update == "epoch":
        raise ValueError(
            'update="epoch" works only with data in memory: load the datasets with from_dataset(train, val)'
        )
    if config.batch_size not in (Config.batch_size, train.batch_size):
        raise ValueError(f"batch_size={config.batch_size} differs from the training loader's ({train.batch_size})")
    training = LoaderBatches(train, "training", device, config.seed)
    validation = LoaderBatches(val, "validation", device, config.seed)
    return BatchSource(training, validation, next(validation.epoch(0)), "the loader", None, Inputs("the loader"))
