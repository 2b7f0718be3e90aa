"""A run on disk: the folder `runs/NAME` with run.json (what to train on what), metrics and a checkpoint."""

import json
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import models
from ..init import init_
from .config import Config
from .data import DataSet, load
from .loop import Fit, fit


@dataclass(frozen=True)
class Run:
    """What a run trains: data set, model, initialisation, device and settings."""

    data: str = "digits"
    model: str = "mlp"
    model_options: dict[str, Any] = field(default_factory=dict)
    init: str | None = None
    data_dir: str | None = None
    device: str = "auto"
    config: Config = field(default_factory=Config)

    def train(self, folder: Path, resume: bool = False) -> Fit:
        """Trains in the folder, which gets run.json first; `resume` goes on from its checkpoint."""
        data = self.load()
        model = self.make_model(data)
        if not resume:
            folder.mkdir(parents=True)
            self.write(folder)
        return fit(model, data, self.config, folder=folder, resume=resume)

    def make_model(self, data: DataSet) -> nn.Module:
        """The model with the initial weights of the run's seed, on the data's device."""
        torch.manual_seed(self.config.seed)
        model = build(self.model, data, **self.model_options)
        if self.init is not None:
            init_(model, self.init)
        return model.to(data.train.x.device)

    def load(self) -> DataSet:
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return load(self.data, self.data_dir, device=device)

    def write(self, folder: Path) -> None:
        about = asdict(self) | {
            "config": self.config.to_dict(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        (folder / "run.json").write_text(json.dumps(about, indent=1))

    @classmethod
    def read(cls, folder: Path) -> "Run":
        if not (folder / "run.json").exists():
            raise FileNotFoundError(f"{folder} holds no run: there is no run.json in it")
        about = json.loads((folder / "run.json").read_text())
        config = Config.from_dict(about.pop("config"))
        return cls(**{k: v for k, v in about.items() if k not in ("torch", "python")}, config=config)


def build(name: str, data: DataSet, **options: Any) -> nn.Module:
    """A model of `threepass.models` that fits the data's images and classes, or a function of the user's, as it is."""
    shape, classes = data.train.x.shape[1:], len(data.classes)
    fitting: dict[str, Any] = {}
    if name == "mlp":
        fitting = {"sizes": (shape.numel(), 512, classes)}
    elif ":" not in name:
        if len(shape) != 3:
            raise ValueError(
                f"model {name!r} takes images, and {data.name} has examples of shape {tuple(shape)}: use mlp"
            )
        fitting = {"classes": classes, "channels": shape[0]} | ({"image": shape[-1]} if name == "vit" else {})
    return models.by_name(name, **fitting | options)


def fresh(folder: Path) -> Path:
    """The folder, or the first of NAME-2, NAME-3, ... that is not there: no run overwrites another."""
    number, wanted = 2, folder
    while folder.exists():
        folder = wanted.with_name(f"{wanted.name}-{number}")
        number += 1
    return folder
