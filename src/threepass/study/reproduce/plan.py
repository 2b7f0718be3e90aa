"""The studies as lists of runs, the most informative first. `threepass train` can repeat every run on its own."""

import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ...train import recipes
from ...train.config import Config
from ...train.runs import Run

CIFAR = ("cifar10", "cifar100")
ALPHAS = (0.2, 0.4, 0.6, 0.8)  # of the paper's curves
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
BATCHES = (16, 32, 128, 512, 2048)
GRID_ALPHAS = (1.0, 0.8, 0.4, 0.2, 0.1)
DEPTHS = (44, 56, 110)
STRENGTHS = (0.01, 0.1, 0.3, 1.0)
SAME_TIME = 1.35  # epochs of plain training in the time of a three-pass epoch, by the arithmetic of plain-20

PAPER: dict[str, Any] = {  # section 5; the learning rate falls at epochs 100 and 150 of 200
    "batch_size": 128, "momentum": 0.9, "weight_decay": 0.0, "schedule": "step", "milestones": (0.5, 0.75),
    "gamma": 0.1, "augment": True, "precision": "tf32",
}  # fmt: skip
MNIST: dict[str, Any] = {"batch_size": 128, "momentum": 0.9, "lr": 0.1, "precision": "tf32"}
HALF: dict[str, Any] = {"precision": "bf16", "save_every": 10}  # checkpoints of ResNet-18 are large
TWO: dict[str, Any] = {"alpha": 1.0, "lr": 0.01}
THREE: dict[str, Any] = {"alpha": 0.1, "lr": 0.1}
WHERE = ("device", "data_dir")  # of a run, and of its config: they change where and how fast it runs, not what it is
HOW = ("compile", "channels_last", "save_every")


@dataclass(frozen=True)
class Scale:
    """How much of the plan is run: seeds, epochs, training examples, channels of the nets' first layers; None: all."""

    seeds: int | None = None
    epochs: int | None = None
    examples: int | None = None
    width: int | None = None

    def seeds_of(self, planned: int) -> range:
        return range(planned if self.seeds is None else self.seeds)

    def epochs_of(self, planned: int) -> int:
        return planned if self.epochs is None else self.epochs

    def replaced_by(self, given: "Scale") -> "Scale":
        """This scale, with those numbers in it that are given."""
        return replace(self, **{name: value for name, value in dataclasses.asdict(given).items() if value is not None})


QUICK = Scale(seeds=1, epochs=5, examples=1000, width=4)


@dataclass(frozen=True)
class Job:
    """A run of a study. `cell` says what it stands for there; runs of a cell differ in their seed only."""

    study: str
    cell: dict[str, str]
    run: Run
    examples: int | None = None  # train on so many examples only
    measures: tuple[str, ...] = ()

    @property
    def seed(self) -> int:
        return self.run.config.seed

    @property
    def title(self) -> str:
        return f"{', '.join(self.cell.values())}, seed {self.seed}"

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that the result depends on, without those at their defaults: a new setting changes no key."""
        run = {f.name: getattr(self.run, f.name) for f in dataclasses.fields(Run) if f.name not in WHERE}
        settings = {f.name: (getattr(self.run.config, f.name), f.default) for f in dataclasses.fields(Config)}
        changed = {name: value for name, (value, default) in settings.items() if value != default and name not in HOW}
        return run | {"config": changed, "examples": self.examples}

    @property
    def key(self) -> str:
        """A name in words with a digest of the settings, the same for every study that has this run."""
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:8]
        words = (self.run.model, self.run.data, self.cell.get("method", ""), f"seed {self.seed}")
        return re.sub(r"[^\w.]+", "-", " ".join(words)).strip("-") + f"-{digest}"

    @property
    def cost(self) -> float:
        """Of one run relative to others, for the time that is left."""
        config, model = self.run.config, self.run.model
        depth = float(re.sub(r"\D", "", model) or 2)
        width = 6.0 if model == "resnet18" else 3.0 if model == "vit" else 1.0
        two = config.alpha == 1 and config.strength is None
        passes = 2.0 if config.sam or (config.mode == "exact" and not two) else 1.0 if two else SAME_TIME
        steps = max(1.0, 128 / config.batch_size) ** 0.8
        return config.epochs * depth * width * passes * steps * ((self.examples or 50_000) / 50_000)


def command_line(run: Run, name: str) -> str:
    """The command that repeats a run alone: `threepass train` with every setting that is not its default."""
    words = ["threepass", "train", "--data", run.data, "--model", run.model]
    if run.model_options:
        words += ["--model-options", json.dumps(run.model_options)]
    if run.init is not None:
        words += ["--init", run.init]
    recipe = recipes.train_defaults(run.model, run.data, ())
    fixed = {*recipe, "alpha"} if recipe and run.config.strength is None else {*recipe}
    for f in dataclasses.fields(Config):
        value, flag = getattr(run.config, f.name), "--" + f.name.replace("_", "-")
        if value is None or (value == f.default and f.name not in fixed):
            continue
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            words += [flag, *map(str, value)]
        else:
            words += [flag, str(value)]
    return shlex.join([*words, "--name", name])


@dataclass(frozen=True)
class Net:
    """What a run trains, and on what; `cell` is what its row of a table says of it besides."""

    data: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    init: str | None = None
    cell: dict[str, str] = field(default_factory=dict)


MLP, PLAIN20 = Net("mnist", "mlp"), Net("cifar10", "plain20")


@dataclass(frozen=True)
class Study:
    """A list of runs under way: what its jobs have in common."""

    name: str
    scale: Scale
    measures: tuple[str, ...] = field(default=())

    def job(self, net: Net, method: str, epochs: int, seed: int, longer: float = 1.0, **settings: Any) -> Job:
        """A run with the paper's settings for the data set, and those that are given."""
        epochs = round(longer * self.scale.epochs_of(epochs))
        common = {"epochs": epochs, "probe_every": max(1, epochs // 20), "seed": seed}
        config = Config(**(MNIST if net.data == "mnist" else PAPER) | common | settings)
        cell = {"net": net.model, "data": net.data, "method": method} | net.cell
        narrow = {"width": self.scale.width} if self.scale.width and net.model.startswith(("plain", "resnet")) else {}
        run = Run(net.data, net.model, net.options | narrow, net.init, config=config)
        return Job(self.name, cell, run, self.scale.examples, self.measures)


def table2(scale: Scale) -> Iterator[Job]:
    """Table 2: first the three-pass and Kaiming rows of all seeds, then Xavier in both readings, then eta .1."""
    s = Study("table2", scale, ("robustness",))
    nets = [Net(data, f"plain{depth}") for data in CIFAR for depth in (20, 32)]
    for seed in scale.seeds_of(3):
        for net in nets:
            yield s.job(net, "alpha 0.1", 200, seed, **THREE)
            yield s.job(net, "kaiming", 200, seed, **TWO)
    for seed in scale.seeds_of(1):
        for init in ("xavier-relu", "xavier"):
            for net in nets:
                yield s.job(replace(net, init=init), init, 200, seed, **TWO)
    for seed in scale.seeds_of(1):
        for row, scheme in {"kaiming": None, "xavier-relu": "xavier-relu", "xavier": "xavier"}.items():
            for net in nets:
                yield s.job(replace(net, init=scheme), f"{row}, eta 0.1", 200, seed, alpha=1.0, lr=0.1)


def mnist(scale: Scale) -> Iterator[Job]:
    """MLP 784-512-10, eta .1, 50 epochs, two passes and alpha .2 to .8."""
    s = Study("mnist", scale)
    for seed in scale.seeds_of(3):
        yield s.job(MLP, "plain", 50, seed, alpha=1.0)
        for alpha in ALPHAS:
            yield s.job(MLP, f"alpha {alpha:g}", 50, seed, alpha=alpha)


def curves(scale: Scale) -> Iterator[Job]:
    """plain-20 by two passes (the runs of Table 2) and alpha .2 to .8 at .01 / alpha, on both sets."""
    s = Study("curves", scale)
    for seed in scale.seeds_of(3):
        for net in (Net(data, "plain20") for data in CIFAR):
            yield replace(s.job(net, "kaiming", 200, seed, **TWO), measures=("robustness",))
            for alpha in ALPHAS:
                yield s.job(net, f"alpha {alpha:g}", 200, seed, alpha=alpha, lr=0.01, eta_over_alpha=True)


def alpha0(scale: Scale) -> Iterator[Job]:
    """The third pass alone. The paper does not say its learning rate: .1, and .01 for CIFAR."""
    s = Study("alpha0", scale)
    for seed in scale.seeds_of(3):
        yield s.job(MLP, "alpha 0", 50, seed, alpha=0.0)
        for data in CIFAR:
            for lr in (0.1, 0.01):
                yield s.job(Net(data, "plain20"), f"alpha 0, eta {lr:g}", 200, seed, alpha=0.0, lr=lr)


def rates(scale: Scale) -> Iterator[Job]:
    """eta x alpha, plain-20 on CIFAR-10, 40 epochs; the extremes of alpha first."""
    s = Study("rates", scale)
    for seed in scale.seeds_of(1):
        for alpha in sorted(GRID_ALPHAS, key=lambda a: a not in (0.1, 1.0)):
            for lr in RATES:
                yield s.job(PLAIN20, f"alpha {alpha:g}, eta {lr:g}", 40, seed, alpha=alpha, lr=lr)


def batches(scale: Scale) -> Iterator[Job]:
    """Batch x alpha, plain-20 on CIFAR-10, 40 epochs, eta = .01 / alpha whatever the batch."""
    s = Study("batches", scale)
    for seed in scale.seeds_of(1):
        for alpha in sorted(GRID_ALPHAS, key=lambda a: a not in (0.1, 1.0)):
            for size in reversed(BATCHES):
                settings: dict[str, Any] = {"alpha": alpha, "lr": 0.01, "eta_over_alpha": True, "batch_size": size}
                yield s.job(PLAIN20, f"alpha {alpha:g}, batch {size}", 40, seed, **settings)


def deeper(scale: Scale) -> Iterator[Job]:
    """plain-44, -56 and -110, and plain-20 with sigmoids; 60 epochs, with the signals' variances."""
    s = Study("deeper", scale, ("variances",))
    for seed in scale.seeds_of(1):
        for options in ({"activation": "sigmoid"}, {}):
            for depth in DEPTHS if not options else (20,):
                net, kind = Net("cifar10", f"plain{depth}", options), "sigmoid, " if options else ""
                yield s.job(net, f"{kind}kaiming", 60, seed, **TWO)
                yield s.job(net, f"{kind}alpha 0.1", 60, seed, **THREE)


def init(scale: Scale) -> Iterator[Job]:
    """Three passes from the four initialisers, plain-20 on CIFAR-10, 60 epochs."""
    s = Study("init", scale)
    for seed in scale.seeds_of(3):
        for scheme in ("kaiming", "geometric", "balanced", "xavier"):
            yield s.job(replace(PLAIN20, init=scheme), scheme, 60, seed, **THREE)


def alignment(scale: Scale) -> Iterator[Job]:
    """How far pass 3 points along the gradient of the input loss, over 20 epochs of four nets on CIFAR-10."""
    s = Study("alignment", scale, ("alignment",))
    sgd = {"lr": 0.05, "schedule": "cosine", "weight_decay": 5e-4}
    adam = {"lr": 1e-3, "schedule": "cosine", "weight_decay": 0.05, "optimizer": "adamw"}
    nets: dict[str, dict[str, Any]] = {"plain20": {"lr": 0.01}, "resnet20": sgd, "vit": adam, "plain32": {"lr": 0.01}}
    for seed in scale.seeds_of(1):
        for net, own in nets.items():
            yield s.job(Net("cifar10", net), "two passes", 20, seed, align_every=1, alpha=1.0, **own)
            # Adam divides the gradient by its size, so that alpha's factor does not reach the weights.
            three = own | {"alpha": 0.1, "eta_over_alpha": "optimizer" not in own}
            yield s.job(Net("cifar10", net), "alpha 0.1", 20, seed, align_every=1, **three)


def norms(scale: Scale) -> Iterator[Job]:
    """ResNet-20 and ResNet-18 with BatchNorm, ReLU and GELU: two passes, then both modes over strength; 30 epochs."""
    s = Study("norms", scale, ("robustness",))
    common: dict[str, Any] = {"lr": 0.1, "schedule": "cosine", "weight_decay": 5e-4}
    for seed in scale.seeds_of(1):
        for model in ("resnet20", "resnet18"):
            own = common | (HALF if model == "resnet18" else {})
            for activation in ({"activation": "relu"}, {"activation": "gelu"}):
                net = Net("cifar10", model, activation, cell=activation)
                yield s.job(net, "two passes", 30, seed, alpha=1.0, **own)
                for strength in STRENGTHS:
                    for mode in ("exact", "paper"):
                        method = f"{mode}, strength {strength:g}"
                        third = {"strength": strength, "mode": mode}
                        yield s.job(net, method, 30, seed, **own | third)


def methods(scale: Scale) -> Iterator[Job]:
    """What else one could do with plain-20 on CIFAR-10: exact mode, SAM, weight decay, more plain epochs."""
    s = Study("methods", scale, ("robustness",))
    for seed in scale.seeds_of(3):
        yield s.job(PLAIN20, "alpha 0.1", 200, seed, **THREE)
        yield s.job(PLAIN20, "kaiming", 200, seed, **TWO)
        yield s.job(PLAIN20, "exact, alpha 0.1", 200, seed, mode="exact", **THREE)
        yield s.job(PLAIN20, "plain, same time", 200, seed, longer=SAME_TIME, **TWO)
        yield s.job(PLAIN20, "SAM, rho 0.05", 200, seed, sam=0.05, **TWO)
        yield s.job(PLAIN20, "weight decay 0.0005", 200, seed, **TWO | {"weight_decay": 5e-4})
        yield s.job(PLAIN20, "weight decay 0.005", 200, seed, **TWO | {"weight_decay": 5e-3})


def readings(scale: Scale) -> Iterator[Job]:
    """What the paper leaves open: biases, the fan of Kaiming's rule, the scale of the input loss."""
    s = Study("readings", scale)
    for seed in scale.seeds_of(1):
        for data in CIFAR:
            for net in (Net(data, "plain20"), Net(data, "plain32")):
                no_bias, fan_out = replace(net, options={"bias": False}), replace(net, init="kaiming-out")
                yield s.job(no_bias, "alpha 0.1, no bias", 200, seed, **THREE)
                yield s.job(no_bias, "kaiming, no bias", 200, seed, **TWO)
                yield s.job(fan_out, "alpha 0.1, fan out", 200, seed, **THREE)
                yield s.job(fan_out, "kaiming, fan out", 200, seed, **TWO)
                yield s.job(net, "alpha 0.1, per sample", 200, seed, reduction="sample", **THREE)


STUDIES: dict[str, Callable[[Scale], Iterator[Job]]] = {
    f.__name__: f
    for f in (table2, mnist, curves, alpha0, rates, batches, deeper, init, alignment, norms, methods, readings)
}


def plan(studies: Iterable[str], scale: Scale) -> list[Job]:
    """The runs of the studies in order, each once: a run that two studies have stands where it comes first."""
    names = [name for word in studies for name in (STUDIES if word == "all" else (word,))]
    unknown = [name for name in names if name not in STUDIES]
    if unknown:
        raise ValueError(f"unknown study {unknown[0]!r}: choose from {', '.join(STUDIES)}, all and report")
    jobs: dict[str, Job] = {}
    for name in dict.fromkeys(names):
        for job in STUDIES[name](scale):
            jobs.setdefault(job.key, job)
    return list(jobs.values())
