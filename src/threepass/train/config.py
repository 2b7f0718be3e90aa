"""One frozen dataclass holds every setting of a training run; it is saved with the run."""

import dataclasses
import difflib
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

from ..compile.programs import check_compile
from ..core.options import ALPHA, Options, check_weights
from ..core.penalty import NAMES

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "step", "cosine")
PRECISIONS = ("float32", "tf32", "bf16")
LR = float("0.1")  # a learning rate that a user gives is another object, even if it is equal (see core/options.py)
CHOICES = {
    "update": ("batch", "epoch"), "schedule": SCHEDULES, "precision": PRECISIONS, "monitor_mode": ("min", "max"),
}  # fmt: skip
SYNONYMS = {"learning_rate": "lr", "wd": "weight_decay", "num_epochs": "epochs"}  # what others call a setting
NOT_WITH_STRENGTH = ("alpha", "reduction")  # strength takes their place
RESUME_MAY_CHANGE = ("epochs", "patience", "probe_every", "align_every", "save_every", "save_minutes")


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
        alpha: the weight of backpropagation's gradient, in [0, 1]; 1 is plain training. Below 1 with sgd, also set
            eta_over_alpha, or use strength instead
        alpha_end: alpha at the end of the run, if it changes
        reduction: of the input loss: batch, sample
        mode: of the third pass: paper, exact; threepass.advise says which
        strength: of the penalty, instead of alpha and reduction; start with 0.1, then by factors of 3
        penalty: the input loss of a sample, of its gradient g = dl/dx: l2 (1/2 |g|^2), l1 (sum |g|), norm (|g|)
        sam: radius of sharpness-aware minimisation, with alpha 1; 0: none
        every: run the third pass in every k-th step only
        input_at: the module whose output counts as the input
        clip: the largest norm of the gradient of all parameters together; 0: no clipping
        optimizer: sgd, adam, adamw, or a class of torch.optim
        lr: the learning rate; default: 0.1, for regression by the mean squared error with SGD 0.01
        eta_over_alpha: divide the learning rate by alpha, as the paper does
        momentum: of sgd
        weight_decay: the optimizer's
        schedule: of the learning rate: constant, step, cosine
        milestones: of the step schedule, in epochs (100 150) or as fractions of the run (0.5 0.75)
        gamma: the factor on the learning rate at a milestone
        warmup: epochs in which the learning rate rises to its value
        ema: decay of a moving average of the weights, which validation and the result use, such as 0.999; 0: none
        patience: stop after so many epochs without a better `monitor`; 0: never
        monitor: the metric of the best epoch and of patience
        monitor_mode: whether the lowest or the highest `monitor` is the best: min, max
        label_smoothing: of the cross-entropy
        augment: random crops after padding by 4, and horizontal flips
        precision: float32, tf32, bf16
        compile: capture the training step and compile it; trace: capture it and run it with the kernels of an eager
            step, which needs no compiler and is ready within seconds; require: compile it, or stop with an error
        channels_last: the memory format of images
        deterministic: use deterministic kernels only
        seed: of initialisation, data order and augmentation
        probe_every: epochs between measurements of both passes' gradients; 0: never
        align_every: epochs between measurements of the paper's gradient against the exact one; 0: never
        save_every: epochs between checkpoints
        save_minutes: minutes between checkpoints inside an epoch; 0: only after epochs
    """

    epochs: int = 10
    batch_size: int = 128
    update: str = "batch"
    epsilon: float | None = None
    alpha: float = ALPHA
    alpha_end: float | None = None
    reduction: str = "batch"
    mode: str = "paper"
    strength: float | None = None
    penalty: str = "l2"
    sam: float = 0.0
    every: int = 1
    input_at: str | None = None
    clip: float = 0.0
    optimizer: str = "sgd"
    lr: float = LR
    eta_over_alpha: bool = False
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: str = "constant"
    milestones: tuple[float, ...] = (0.5, 0.75)
    gamma: float = 0.1
    warmup: int = 0
    ema: float = 0.0
    patience: int = 0
    monitor: str = "val_loss"
    monitor_mode: str = "min"
    label_smoothing: float = 0.0
    augment: bool = False
    precision: str = "float32"
    compile: bool | Literal["trace", "require"] = False
    channels_last: bool = False
    deterministic: bool = False
    seed: int = 0
    probe_every: int = 1
    align_every: int = 0
    save_every: int = 1
    save_minutes: float = 10.0

    def __post_init__(self) -> None:
        self._check_types()
        object.__setattr__(self, "milestones", tuple(self.milestones))
        check_weights(self.alpha, self.strength)
        Options(self.alpha, self.reduction, self.mode, self.strength, self.input_at)
        if self.penalty not in NAMES:
            raise ValueError(f"penalty must be one of {', '.join(NAMES)}, got {self.penalty!r}")
        if self.alpha_end is not None:
            Options(self.alpha_end)
        for name, accepted in CHOICES.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {getattr(self, name)!r}")
        for name in ("epochs", "batch_size", "every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        for name in (
            "warmup",
            "probe_every",
            "align_every",
            "weight_decay",
            "momentum",
            "sam",
            "seed",
            "save_minutes",
            "clip",
            "patience",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)!r}")
        check_compile(self.compile)
        if not self.lr > 0:
            raise ValueError(f"lr must be positive, got {self.lr!r}")
        for name in ("label_smoothing", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)!r}")
        if self.sam and (self.alpha != 1 or self.strength is not None):
            raise ValueError("sam replaces the third pass: set alpha to 1, and leave strength out")
        if self.eta_over_alpha and (self.alpha == 0 or self.strength is not None):
            raise ValueError("eta_over_alpha=True needs alpha > 0 and no strength: it divides lr by alpha")
        self._check_schedule()
        if self.optimizer != "sgd" and self.momentum != Config.momentum:
            raise ValueError(f"momentum is used by sgd alone, but optimizer is {self.optimizer!r}: leave momentum out")

    def _check_types(self) -> None:
        """Settings read from files or given in Python may be of any type."""
        for name, expected in typing.get_type_hints(type(self)).items():
            value = getattr(self, name)
            if not _is_a(value, expected):
                words = " or ".join(_words(expected))
                got = textwrap.shorten(repr(value), 60, placeholder=" ...")
                raise ValueError(f"{name} must be {words}, got {got} ({type(value).__name__})")

    def _check_schedule(self) -> None:
        if self.schedule != "step":
            for name in ("milestones", "gamma"):
                if getattr(self, name) != getattr(Config, name):
                    text = f'{name} needs schedule="step" (--schedule step), but schedule is {self.schedule!r}'
                    raise ValueError(text)
            return
        if not all(m > 0 for m in self.milestones) or len({m < 1 for m in self.milestones}) > 1:
            raise ValueError(
                f"milestones must all be fractions of the run, between 0 and 1, or all be epochs, from 1 on; "
                f"got {', '.join(f'{m:g}' for m in self.milestones)}"
            )
        if self.milestones and min(self.milestones) >= max(1, self.epochs):
            raise ValueError(
                f"the first milestone is epoch {min(self.milestones):g} and the run has {self.epochs} epochs, so the "
                "learning rate would never decay: give earlier milestones, fractions of the run, or another schedule"
            )

    def with_settings(self, settings: Mapping[str, Any]) -> "Config":
        """This config with some settings replaced."""
        return Config.from_dict(self.to_dict() | dict(settings))

    def differing(self, other: "Config") -> list[str]:
        """The settings in which two configs differ."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [name for name in mine if mine[name] != theirs[name]]

    @property
    def depends_on_epochs(self) -> list[str]:
        """The settings whose effect on a step depends on the number of epochs."""
        fractions = self.schedule == "step" and any(m < 1 for m in self.milestones)
        used = {"schedule": self.schedule == "cosine", "milestones": fractions, "alpha_end": self.alpha_end is not None}
        return [name for name, is_used in used.items() if is_used]

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any], file: Path | None = None) -> "Config":
        """Unknown keys are an error that names the nearest known one. file: where the settings come from."""
        if file is not None:
            try:
                return cls.from_dict(settings)
            except ValueError as error:
                raise ValueError(f"{file}: config: {error}") from error
        known = [f.name for f in dataclasses.fields(cls)]
        for key in settings:
            if key not in known:
                near = difflib.get_close_matches(SYNONYMS.get(key, key), known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
                if key == "device":
                    hint = ": training runs on the device of the model, so move model and data there"
                raise ValueError(f"unknown setting {key!r}{hint}")
        unused = {name for name in NOT_WITH_STRENGTH if settings.get(name, 0) is None}
        return cls(**{name: value for name, value in settings.items() if name not in unused})

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON takes them; those that strength takes the place of are None."""
        unused = {} if self.strength is None else dict.fromkeys(NOT_WITH_STRENGTH)
        return dataclasses.asdict(self) | {"milestones": list(self.milestones)} | unused


def _is_a(value: Any, expected: Any) -> bool:
    """Whether a value is of an annotation's type; integers count as floats, booleans not as numbers."""
    origin = typing.get_origin(expected)
    if origin in (types.UnionType, typing.Union):
        return any(_is_a(value, one) for one in typing.get_args(expected))
    if origin is Literal:
        return value in typing.get_args(expected)
    if origin is tuple:
        return isinstance(value, (tuple, list)) and all(_is_a(v, typing.get_args(expected)[0]) for v in value)
    if expected in (int, float):
        return isinstance(value, Integral if expected is int else Real) and not isinstance(value, bool)
    return isinstance(value, expected)


def _words(expected: Any) -> list[str]:
    """An annotation in words."""
    if typing.get_origin(expected) in (types.UnionType, typing.Union):
        return [word for one in typing.get_args(expected) for word in _words(one)]
    if typing.get_origin(expected) is Literal:
        return [repr(value) for value in typing.get_args(expected)]
    if typing.get_origin(expected) is tuple:
        return ["a list of numbers"]
    names = {int: "an integer", float: "a number", str: "text", bool: "True or False", types.NoneType: "None"}
    return [names[expected]]
