"""`load_run`: the model of a run from its folder alone, and how raw inputs become the model's."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from .._torch_compat import tree_map
from ..tape.inputs import call_model
from . import checkpoint
from .data.inputs import Inputs
from .runs import Run, build


@dataclass(frozen=True)
class TrainedRun:
    """A trained model, in eval mode, and what it was trained on; calling it gives the model's output for raw inputs.

    Attributes:
        model: takes `standardised(x)`.
        inputs: name, shape, mean, std and classes of the data.
        weights: the file or folder that the weights are from.
    """

    model: nn.Module = field(repr=False)
    inputs: Inputs
    weights: Path

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names, in the order of the model's outputs; none for a regression."""
        return self.inputs.classes

    def standardised(self, x: Any) -> Any:
        """Raw inputs, a tensor or array as in the data set, as the model takes them."""
        return self.inputs.standardised(x)

    @torch.no_grad()
    def __call__(self, x: Any) -> Any:
        """The model's output for a batch of raw inputs."""
        weight = next(self.model.parameters())
        if self.inputs.mean is None:
            x = tree_map(lambda z: z.to(weight.device) if isinstance(z, Tensor) else z, x)
        else:
            x = self.standardised(x).to(weight)  # its device and dtype
        return call_model(self.model, x)


def load_run(
    folder: Path | str,
    model: nn.Module | None = None,
    weights: Literal["last", "best"] = "last",
    device: torch.device | str = "cpu",
) -> TrainedRun:
    """The trained model of a run's folder, for raw inputs.

        run = threepass.load_run("runs/mlp-digits")
        output = run(x)     # model((x - mean) / std), in eval mode, without gradients

    Args:
        folder: of a run of `threepass train` or `fit`, or of one seed of a method of `threepass compare`.
        model: the architecture, which gets the weights; runs of `threepass train` make their own, if none is given.
        weights: of the last epoch, or of the epoch with the best `monitor`.
        device: to put the model on.
    """
    if weights not in ("last", "best"):
        raise ValueError(f'weights must be "last" or "best", got {weights!r}')
    folder = Path(folder)
    inputs = Inputs.read(folder)
    if model is None:
        if not (folder / "run.json").exists():
            raise ValueError(
                f"{folder} has no run.json, so the model cannot be rebuilt: pass one of the same architecture, "
                "load_run(folder, model)"
            )
        run = Run.read(folder)
        model = build(run.model, inputs, **run.model_options)
    file, tensors = _last(folder) if weights == "last" else _read(folder / "best.safetensors")
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"the checkpoint does not match the model: {file}: {' '.join(str(error).split())}") from error
    return TrainedRun(model.to(device).eval(), inputs, file)


def _last(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The weights in the checkpoint, averaged if the run averages them; a comparison keeps the weights alone."""
    if not checkpoint.exists(folder / "checkpoint"):
        return _read(folder / "weights.safetensors")
    place = checkpoint.find(folder / "checkpoint")
    file, tensors = _read(place / "tensors.safetensors")
    model = {name.removeprefix("model/"): z for name, z in tensors.items() if name.startswith("model/")}
    average = {name.removeprefix("sum/average "): z for name, z in tensors.items() if name.startswith("sum/average ")}
    return file, model | average


def _read(file: Path) -> tuple[Path, dict[str, Tensor]]:
    if not file.exists():
        raise FileNotFoundError(f"there are no weights at {file}: has the run finished an epoch?")
    try:
        return file, load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged ({error})") from error
