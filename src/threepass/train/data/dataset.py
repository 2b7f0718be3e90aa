"""A data set: two splits on one device, with what is needed to normalise them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...errors import warn_caller
from .formats import DataError
from .inputs import Inputs

Device = torch.device | str


@dataclass(frozen=True)
class Split:
    """Examples and their labels or targets.

    x is N x C x H x W or N x F, uint8 (pixels, 255 stands for 1), float32 or float64; y is N, int64, or for regression
    N or N x D, floating point; both are on one device.
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        x, y = (f"{str(z.dtype).removeprefix('torch.')}{list(z.shape)}" for z in (self.x, self.y))
        return f"Split(x={x}, y={y})"

    def to(self, device: Device) -> "Split":
        return Split(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class DataSet:
    """Training and validation split; mean and std of every channel of the training split, in units of pixels 0 to 1.

    `classes` names the classes in the order of their labels; without names, they are called "0", "1" and so on. For
    regression it is empty.
    """

    train: Split
    val: Split
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]
    name: str

    def standardised(self, x: Tensor) -> Tensor:
        """x as `fit` gives it to the model: (x - mean) / std, channel by channel; uint8 is divided by 255 before."""
        return self.inputs.standardised(x)

    @property
    def inputs(self) -> Inputs:
        """What a run saves of the data."""
        x, y = self.train.x, self.train.y
        outputs = len(self.classes) or y.shape[1:].numel()
        kind = str(x.dtype).removeprefix("torch.")
        return Inputs(self.name, tuple(x.shape[1:]), kind, self.mean, self.std, self.classes, outputs)


def from_dataset(
    train: Dataset,
    val: Dataset,
    name: str = "dataset",
    device: Device = "cpu",
    channels: Literal["first", "last"] | None = None,
) -> DataSet:
    """A DataSet from two torch Datasets of pairs (x, label), or (x, target) with floating-point targets for regression.

    Every example is read once, so transforms should not be random: `fit(..., augment=True)` augments. `fit` trains on
    standardised inputs, `standardised(x)` of the result.

    Args:
        train: training examples. x is a tensor or array, C x H x W, H x W or F, or a PIL image.
        val: validation examples, of the same shape and dtype.
        name: of the data set, for messages and reports.
        device: to put the tensors on.
        channels: "first" for C x H x W, "last" for H x W x C. By default channels are first, and an x that looks like
            H x W x C, with 1, 3 or 4 numbers along the last dimension and more along both others, is an error.
    """
    if channels not in (None, "first", "last"):
        raise ValueError(f'channels must be "first", "last" or None, got {channels!r}')
    return assemble(_read("train", train, channels), _read("val", val, channels), name, device=device)


def assemble(
    train: Split, val: Split, name: str, classes: tuple[str, ...] | None = None, device: Device = "cpu"
) -> DataSet:
    """Checks that the splits belong together, measures the training split and moves both to the device.

    mean_c and std_c are over N, H and W, std with divisor N; a constant channel gets std 1.
    """
    if train.x.shape[1:] != val.x.shape[1:] or train.x.dtype != val.x.dtype:
        shapes = " and ".join(f"{split.x.dtype} {tuple(split.x.shape)}" for split in (train, val))
        raise DataError(f"{name}: training and validation examples differ in dtype or shape: {shapes}")
    for what, split in (("training", train), ("validation", val)):
        if not bool(split.x.isfinite().all()):
            bad = int((~split.x.flatten(1).isfinite().all(1)).sum())
            raise DataError(f"{name}: {bad} of {len(split)} {what} examples contain NaN or infinity")
    if train.y.dtype != val.y.dtype or train.y.shape[1:] != val.y.shape[1:]:
        raise DataError(f"{name}: training targets are {_kind(train.y)} and validation targets {_kind(val.y)}")
    if train.y.is_floating_point():
        if not bool(torch.cat([train.y, val.y]).isfinite().all()):
            raise DataError(f"{name}: targets contain NaN or infinity")
        classes = ()
    else:
        classes = _classes(train.y, val.y, name, classes)
    mean, std = zip(*(_measure(train.x[:, c]) for c in range(train.x.shape[1])), strict=True)
    return DataSet(train.to(device), val.to(device), mean, std, classes, name)


def _classes(train: Tensor, val: Tensor, name: str, classes: tuple[str, ...] | None) -> tuple[str, ...]:
    """The names of the classes, by default "0" to the largest label; labels that cannot be meant so are refused."""
    known = train.unique()
    labels = torch.cat([known, val]).unique()
    low, high = int(labels[0]), int(labels[-1])
    count = high + 1 if classes is None else len(classes)
    if low < 0 or high >= count:
        raise DataError(f"{name}: labels must be in 0 to {count - 1}; found {low} to {high}")
    if count > max(1000, 2 * len(labels)):
        raise DataError(
            f"{name}: labels run to {high}, but only {len(labels)} different ones occur: number the classes from 0 on, "
            "as numpy.unique(y, return_inverse=True) does"
        )
    if low > 0 and classes is None:
        text = (
            f"{name}: labels run from {low} to {high} and none is 0, so that a model needs {count} outputs, one for "
            f"class 0 too: subtract {low} from the labels if they are meant to count from {low}"
        )
        warn_caller(text, UserWarning)
    unseen = labels[~torch.isin(labels, known)].tolist()
    if unseen:
        text = f"{name}: no training example is of class {', '.join(map(str, unseen[:10]))}, which validation has"
        warn_caller(text, UserWarning)
    return classes or tuple(map(str, range(count)))


def make_split(x: Any, y: Any, what: str, channels: str | None = None) -> Split:
    """A Split from arrays or tensors: N x H x W gets a channel axis; x other than uint8 becomes float32.

    channels: "first" or "last" in an x of four dimensions; None: first, and an x that looks otherwise is refused.
    """
    try:
        x, y = torch.as_tensor(x), torch.as_tensor(y)
    except TypeError as error:
        raise DataError(f"{what}: x and y must be numbers, got arrays of {x.dtype} and {y.dtype}") from error
    if x.dim() and y.dim() and len(x) != len(y):
        raise DataError(f"{what}: x has {len(x)} examples and y has {len(y)}")
    dims = (1, 2) if y.is_floating_point() else (1,)
    if x.dim() == 0 or len(x) == 0 or y.shape[:1] != x.shape[:1] or y.dim() not in dims or x.dim() not in (2, 3, 4):
        raise DataError(
            f"{what}: x must be N x C x H x W, N x H x W or N x F and y N, for regression N or N x D, with N > 0; "
            f"got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    if x.is_complex() or y.is_complex():
        raise DataError(f"{what}: x and y must be real numbers")
    if y.is_floating_point() and y.dim() == 1 and bool((y == y.round()).all()):
        raise DataError(
            f"{what}: y is {_kind(y)} with integer values only: convert it to an integer dtype if these are classes, "
            "or for regression give it the shape N x 1"
        )
    if x.dim() == 4:
        x = _channels_first(x, what, channels)
    if x.dtype != torch.uint8:
        x = x.float()
    return Split(x[:, None] if x.dim() == 3 else x, y.float() if y.is_floating_point() else y.long())


def _channels_first(x: Tensor, what: str, channels: str | None) -> Tensor:
    """Images as N x C x H x W."""
    if channels == "last":
        return x.movedim(-1, 1).contiguous()
    few = (1, 3, 4)  # grey, colours, colours and transparency
    if channels is None and x.shape[-1] in few and min(x.shape[1:3]) > max(few):
        raise DataError(
            f"{what}: x is {tuple(x.shape)}, which looks like N x H x W x C, and channels come first, N x C x H x W: "
            'give numpy.moveaxis(x, -1, 1), or from_dataset(..., channels="last"). If this is N x C x H x W, say so: '
            'from_dataset(..., channels="first")'
        )
    return x


def _kind(y: Tensor) -> str:
    return f"{str(y.dtype).removeprefix('torch.')} {tuple(y.shape)}"


def _read(what: str, dataset: Dataset, channels: str | None) -> Split:
    examples: list[Tensor] = []
    labels = []
    for x, label in _items(dataset):
        x = _image(x, channels)
        if examples and x.shape != examples[0].shape:
            raise DataError(
                f"{what}: example {len(examples)} is {tuple(x.shape)}, the first is {tuple(examples[0].shape)}"
            )
        examples.append(x)
        labels.append(torch.as_tensor(label))
    if not examples:
        raise DataError(f"{what}: the dataset is empty")
    return make_split(torch.stack(examples), torch.stack(labels), what, channels)


def _items(dataset: Any) -> Iterator[tuple[Any, Any]]:
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return (dataset[i] for i in range(len(dataset)))
    return iter(dataset)


def _image(x: Any, channels: str | None) -> Tensor:
    if hasattr(x, "getbands"):  # a PIL image: H x W, or H x W x C
        pixels = torch.tensor(np.asarray(x))
        return pixels.movedim(-1, 0) if pixels.dim() == 3 and channels != "last" else pixels
    return torch.as_tensor(x)


def _measure(channel: Tensor) -> tuple[float, float]:
    if channel.dtype == torch.uint8:  # from the histogram: exact, and without a wide copy of the pixels
        count = channel.flatten().bincount(minlength=256).double()
        value = torch.arange(256, dtype=torch.float64) / 255
        mean = (count @ value) / count.sum()
        std = ((count @ (value - mean) ** 2) / count.sum()).sqrt()
    else:
        mean, std = channel.double().mean(), channel.double().std(correction=0)
    return mean.item(), std.item() or 1.0
