"""What a run must know of its data to use its model later, on raw inputs: shape, standardisation, classes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import Kinds, read_object, write_json

FILE = "data.json"
BRIGHT = 10.0  # no pixel from 0 to 1 is that bright, with noise on it neither
KEYS: dict[str, Kinds] = {
    "name": (str,), "shape": (list, type(None)), "dtype": (str, type(None)), "mean": (list, type(None)),
    "std": (list, type(None)), "classes": (list,), "outputs": (int, type(None)),
}  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """The examples that a run was trained on. Of a DataLoader only the name is known, and nothing is standardised.

    shape: of one example; dtype: of the examples, "uint8" (pixels, 255 stands for 1) or of floating-point numbers;
    mean and std: of every channel or feature of the training split; outputs: the numbers that a model gives for an
    example, one a class or target.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    mean: tuple[float, ...] | None = field(default=None, repr=False)
    std: tuple[float, ...] | None = field(default=None, repr=False)
    classes: tuple[str, ...] = field(default=(), repr=False)
    outputs: int | None = None

    def standardised(self, x: Any) -> Any:
        """Raw examples as the model takes them: (x - mean) / std; uint8 is divided by 255 before."""
        if self.mean is None or self.std is None or self.shape is None:
            return x
        x = torch.as_tensor(x)
        if x.shape[1:] == self.shape[1:] and self.shape[0] == 1:
            x = x[:, None]  # grey images without their channel
        if x.shape[1:] != self.shape:
            raise ValueError(
                f"x must be a batch of examples of shape {self.shape}, as in {self.name}; got {tuple(x.shape)}"
            )
        if x.dtype == torch.uint8 and self.dtype != "uint8":
            raise ValueError(
                f"x is uint8, and {self.name} has {self.dtype}: convert x to its units, x.float() or x.float() / 255"
            )
        if not x.is_floating_point() and self.dtype == "uint8" and x.dtype != torch.uint8:
            raise ValueError(f"x is {x.dtype}: pass pixels as uint8, or as floating-point numbers from 0 to 1")
        if x.is_floating_point() and self.dtype == "uint8" and x.numel() and float(x.max()) > BRIGHT:
            raise ValueError(
                f"x has floating-point pixels up to {float(x.max()):g}, but the expected range is 0 to 1: pass uint8, "
                "or divide x by 255"
            )
        scale, shift = standardisation(x, (self.mean, self.std))
        return x.to(scale.dtype).mul(scale).add(shift)

    @staticmethod
    def is_in(folder: Path) -> bool:
        return (folder / FILE).exists()

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> "Inputs":
        if not cls.is_in(folder):
            raise FileNotFoundError(
                f"there is no {FILE} in {folder}: it contains no run, or a run of an older version of threepass; "
                "resuming such a run writes the file"
            )
        content = read_object(folder / FILE, KEYS)
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in content.items() if k in KEYS}
        return cls(**fields)


def standardisation(x: Tensor, normalise: tuple[Sequence[float], Sequence[float]] | None) -> tuple[Tensor, Tensor]:
    """scale and shift, C x 1 x 1, with scale * x + shift = (pixels - mean) / std."""
    channels = x.shape[1]
    mean, std = ([0.0] * channels, [1.0] * channels) if normalise is None else normalise
    if len(mean) != channels or len(std) != channels:
        raise ValueError(f"normalise needs {channels} means and stds, one per channel; got {len(mean)} and {len(std)}")
    one = 255 if x.dtype == torch.uint8 else 1
    dtype = torch.promote_types(x.dtype, torch.float32)
    shape = (channels, *[1] * (x.dim() - 2))
    scale = torch.tensor([1 / (one * s) for s in std], dtype=dtype).view(shape)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], dtype=dtype).view(shape)
    return scale.to(x.device), shift.to(x.device)
