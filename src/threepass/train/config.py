"""One frozen dataclass holds every setting of a training run; it is saved with the run."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..compile.programs import check_compile
from ..core.options import Options
from ..core.penalty import NAMES

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "step", "cosine")
PRECISIONS = ("float32", "tf32", "bf16")


@dataclass(frozen=True)
class Config:
    """The settings of `fit` and `threepass train`.

    update="epoch" with reduction="sample" is Algorithm 1 as printed: one update an epoch, of gradients summed over the
    set. `eta_over_alpha` is the paper's rule: the learning rate is lr / alpha, so that backpropagation's part moves the
    weights as lr would.

    Args:
        epochs: the number of epochs
        batch_size: samples in a batch
        update: update the weights after every batch, or once an epoch: batch, epoch
        epsilon: stop when an epoch's total error is at most this
        alpha: the weight of backpropagation; 1 is plain training
        alpha_end: alpha at the end of the run, if it changes
        reduction: of the input loss: batch, sample
        mode: of the third pass: paper, exact
        strength: of the penalty, instead of alpha and reduction
        penalty: the input loss of a sample, of its gradient g = dl/dx: l2 (1/2 |g|^2), l1 (sum |g|), norm (|g|)
        sam: radius of sharpness-aware minimisation, with alpha 1; 0: none
        every: run the third pass in every k-th step only
        input_at: the module whose output counts as the input
        optimizer: sgd, adam, adamw, or a class of torch.optim
        lr: the learning rate
        eta_over_alpha: divide the learning rate by alpha, as the paper does
        momentum: of sgd
        weight_decay: the optimizer's
        schedule: of the learning rate: constant, step, cosine
        milestones: of the step schedule, as fractions of the run
        gamma: the factor on the learning rate at a milestone
        warmup: epochs in which the learning rate rises to its value
        label_smoothing: of the cross-entropy
        augment: random crops after padding by 4, and horizontal flips
        precision: float32, tf32, bf16
        compile: run the steps as compiled programs; require: raise an error where that is not possible
        channels_last: the memory format of images
        deterministic: use deterministic kernels only
        seed: of initialisation, data order and augmentation
        probe_every: epochs between measurements of both passes' gradients; 0: never
        align_every: epochs between measurements of the paper's gradient against the exact one; 0: never
        save_every: epochs between checkpoints
    """

    epochs: int = 10
    batch_size: int = 128
    update: str = "batch"
    epsilon: float | None = None
    alpha: float = 0.1
    alpha_end: float | None = None
    reduction: str = "batch"
    mode: str = "paper"
    strength: float | None = None
    penalty: str = "l2"
    sam: float = 0.0
    every: int = 1
    input_at: str | None = None
    optimizer: str = "sgd"
    lr: float = 0.1
    eta_over_alpha: bool = False
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: str = "constant"
    milestones: tuple[float, ...] = (0.5, 0.75)
    gamma: float = 0.1
    warmup: int = 0
    label_smoothing: float = 0.0
    augment: bool = False
    precision: str = "float32"
    compile: bool | Literal["require"] = False
    channels_last: bool = False
    deterministic: bool = False
    seed: int = 0
    probe_every: int = 1
    align_every: int = 0
    save_every: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", tuple(self.milestones))
        Options(self.alpha, self.reduction, self.mode, self.strength, self.input_at)
        if self.penalty not in NAMES:
            raise ValueError(f"penalty must be one of {', '.join(NAMES)}, got {self.penalty!r}")
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
