"""One frozen dataclass holds every setting of a training run; it is saved with the run."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..compile.programs import check_compile
from ..core.options import Options

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "step", "cosine")
PRECISIONS = ("float32", "tf32", "bf16")


@dataclass(frozen=True)
class Config:
    """The settings of `fit` and `threepass train`.

    update="epoch" with reduction="sample" is Algorithm 1 as printed: one update an epoch, of gradients summed over the
    set. `eta_over_alpha` is the paper's rule: the learning rate is lr / alpha, so that backpropagation's part moves the
    weights as lr would.
    """

    epochs: int = 10  # stop after so many
    batch_size: int = 128
    update: str = "batch"  # after every batch, or once an epoch: batch, epoch
    epsilon: float | None = None  # stop when an epoch's total error is at most this
    alpha: float = 0.1  # the weight of backpropagation; 1 is plain training
    alpha_end: float | None = None  # alpha at the end of the run, if it moves
    reduction: str = "batch"  # of the input loss: batch, sample
    mode: str = "paper"  # of the third pass: paper, exact
    strength: float | None = None  # of the penalty, instead of alpha and reduction
    sam: float = 0.0  # radius of sharpness-aware minimisation, with alpha 1; 0: none
    every: int = 1  # the third pass in every so many steps
    input_at: str | None = None  # the module whose output counts as the input
    optimizer: str = "sgd"  # sgd, adam, adamw, or a class of torch.optim
    lr: float = 0.1  # learning rate
    eta_over_alpha: bool = False  # divide the learning rate by alpha, as the paper does
    momentum: float = 0.9  # of sgd
    weight_decay: float = 0.0
    schedule: str = "constant"  # of the learning rate: constant, step, cosine
    milestones: tuple[float, ...] = (0.5, 0.75)  # of the schedule step, as parts of the run
    gamma: float = 0.1  # the learning rate's factor at a milestone
    warmup: int = 0  # epochs in which the learning rate rises to its value
    label_smoothing: float = 0.0
    augment: bool = False  # random crops after padding by 4, and mirror images
    precision: str = "float32"  # float32, tf32, bf16
    compile: bool | Literal["require"] = False  # steps as compiled programs; require: an error where that cannot be
    channels_last: bool = False
    deterministic: bool = False  # only deterministic kernels
    seed: int = 0  # of initialisation, data order and augmentation
    probe_every: int = 1  # epochs between measurements of both passes' gradients; 0: never
    align_every: int = 0  # epochs between measurements of paper against exact; 0: never
    save_every: int = 1  # epochs between checkpoints

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", tuple(self.milestones))
        Options(self.alpha, self.reduction, self.mode, self.strength, self.input_at)
        if self.alpha_end is not None:
            Options(self.alpha_end)
        for name, accepted in {"update": ("batch", "epoch"), "schedule": SCHEDULES, "precision": PRECISIONS}.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {getattr(self, name)!r}")
        for name in ("epochs", "batch_size", "every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        for name in ("warmup", "probe_every", "align_every", "weight_decay", "momentum", "sam"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)!r}")
        check_compile(self.compile)
        if not self.lr > 0:
            raise ValueError(f"lr must be positive, got {self.lr!r}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing!r}")
        if self.sam and (self.alpha != 1 or self.strength is not None):
            raise ValueError("sam takes the place of the third pass: give alpha 1 and no strength with it")
        if self.eta_over_alpha and (self.alpha == 0 or self.strength is not None):
            raise ValueError("eta_over_alpha divides by alpha: give an alpha above 0, and no strength")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "Config":
        """Unknown keys are an error that names the nearest known one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for key in settings:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
                raise ValueError(f"unknown setting {key!r}{hint}")
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"milestones": list(self.milestones)}
