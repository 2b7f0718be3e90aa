"""A run on disk: the folder `runs/NAME` with run.json (what to train on what), metrics and a checkpoint."""

import dataclasses
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import models
from .._torch_compat import tree_leaves
from ..init import init_
from ..inspect.advise import curved_operations
from .checks import WRONG
from .config import Config
from .config_file import as_toml
from .data import DataSet, Inputs, load
from .device import find_device
from .files import Kinds, read_object, write_json
from .ranks import ALONE, Ranks
from .trainer import Trainer

KEYS: dict[str, Kinds] = {
    "data": (str,), "model": (str,), "model_options": (dict,), "init": (str, type(None)),
    "data_dir": (str, type(None)), "device": (str,), "config": (dict,),
}  # fmt: skip
EMPTY: Mapping[str, Any] = {}
WHERE = ("data_dir", "device")  # a run may go on elsewhere


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

    def trainer(self, ranks: Ranks = ALONE, if_norms: Mapping[str, Any] = EMPTY) -> Trainer:
        """The run, ready to begin: data loaded, model made, and both checked against each other and the settings.

        if_norms: settings for a model that has norms; regressions have a learning rate of their own.
        """
        data = self.load()
        model, config = self.make_model(data), self.config
        if if_norms and norms_of(model, data):
            config = config.with_settings({k: v for k, v in if_norms.items() if data.classes or k != "lr"})
        return Trainer(model, data, config, ranks=ranks)

    def make_model(self, data: DataSet) -> nn.Module:
        """The model with the initial weights of the run's seed, on the data's device."""
        torch.manual_seed(self.config.seed)
        return self.fresh_model(data).to(data.train.x.device)

    def fresh_model(self, data: DataSet) -> nn.Module:
        """The model with initial weights of PyTorch's random state."""
        model = build(self.model, data, **self.model_options)
        if self.init is not None:
            init_(model, self.init)
        return model

    def load(self) -> DataSet:
        return load(self.data, self.data_dir, device=find_device(self.device))

    def write(self, folder: Path) -> None:
        about = asdict(self) | {
            "config": self.config.to_dict(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        write_json(folder / "run.json", about)

    def in_words(self) -> str:
        """All settings, as a file for `--config`."""
        own = {name: getattr(self, name) for name in KEYS if name != "config"}
        return as_toml(own | self.config.to_dict())

    @classmethod
    def read(cls, folder: Path) -> "Run":
        if not (folder / "run.json").exists():
            near = Path("runs") / folder
            hint = f": did you mean {near}?" if (near / "run.json").exists() else ""
            raise FileNotFoundError(f"{folder} contains no run: run.json is missing{hint}")
        file = folder / "run.json"
        about = read_object(file, KEYS)
        config = Config.from_dict(about["config"], file)
        return cls(**{name: about[name] for name in KEYS if name != "config"}, config=config)

    def resumed(self, given: dict[str, Any]) -> "Run":
        """This run with what was given anew when it is resumed: where it runs, and what its checkpoint lets change."""
        own = {name: value for name, value in given.items() if name in KEYS}
        refused = [name for name, value in own.items() if name not in WHERE and value != getattr(self, name)]
        if refused:
            flags = ", ".join("--" + name.replace("_", "-") for name in refused)
            raise ValueError(f"a resumed run keeps its {', '.join(refused)}: leave out {flags}, or start a new run")
        settings = {name: value for name, value in given.items() if name not in KEYS}
        where = {name: value for name, value in own.items() if name in WHERE}
        return dataclasses.replace(self, **where, config=self.config.with_settings(settings))


def norms_of(model: nn.Module, data: DataSet) -> tuple[str, ...]:
    """The normalisations whose curvature paper mode leaves out; none of a model that does not take the data."""
    few = slice(min(8, len(data.train)))
    x, y = data.standardised(data.train.x[few]), data.train.y[few]
    try:
        return curved_operations(model, lambda output, y: tree_leaves(output)[0].sum(), x, y, None)[0]
    except WRONG:
        return ()


def build(name: str, data: DataSet | Inputs, **options: Any) -> nn.Module:
    """A model of `threepass.models` that fits the data's images and classes, or a function of the user's, as it is."""
    inputs = data.inputs if isinstance(data, DataSet) else data
    shape, classes = inputs.shape or (), inputs.outputs
    fitting: dict[str, Any] = {}
    if name == "mlp":
        fitting = {"sizes": (math.prod(shape), 512, classes)}
    elif ":" not in name:
        if len(shape) != 3:
            raise ValueError(f"model {name!r} takes images, and {data.name} has examples of shape {shape}: use mlp")
        fitting = {"classes": classes, "channels": shape[0]} | ({"image": shape[-1]} if name == "vit" else {})
    return models.by_name(name, **fitting | options)
