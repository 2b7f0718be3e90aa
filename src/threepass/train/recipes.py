"""Settings that work, by model and data set: the defaults of `threepass train` and `threepass compare`.

Each was found by training, and `results` names the files of those runs. Where there is no recipe, a run starts with
strength 0.1, at the learning rate of plain training, and all else has the defaults of `Config`, but for
the learning rates in STARTS, and that of regressions.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from .config import LR, Config
from .optimizer import default_lr

Settings = dict[str, Any]  # of Config


@dataclass(frozen=True)
class Recipe:
    """`common`: the settings of every method, two passes too; `third`: of three passes; `methods`: what compare shows.

    The learning rate in `common` is that of two passes; `third` may have its own.
    """

    common: Settings
    third: Settings
    methods: dict[str, tuple[float, ...]]  # alphas or strengths
    results: str | None  # the file of its runs; None: what to start with where there is no recipe


PAPER: Settings = {"epochs": 200, "lr": 0.01, "schedule": "step", "augment": True}
PAPER_THIRD: Settings = {"alpha": 0.1, "eta_over_alpha": True}

# A model's name stands without its depth.
RECIPES: dict[tuple[str, str], Recipe] = {
    ("mlp", "digits"): Recipe(
        {"epochs": 30, "batch_size": 64, "lr": 0.05, "schedule": "cosine"},
        {"strength": 1.0, "mode": "exact"},
        {"strengths": (0.3, 1.0, 3.0)},
        "results/recipes/digits.json",
    ),
    ("mlp", "mnist"): Recipe(
        {"epochs": 5, "batch_size": 128, "lr": 0.1, "schedule": "cosine"},
        {"strength": 3.0, "mode": "paper"},
        {"strengths": (0.3, 1.0, 3.0)},
        "results/recipes/mnist.json",
    ),
    ("plain", "cifar10"): Recipe(PAPER, PAPER_THIRD, {"alphas": (0.1,)}, "results/paper/table2.json"),
    ("plain", "cifar100"): Recipe(PAPER, PAPER_THIRD, {"alphas": (0.1,)}, "results/paper/table2.json"),
}


STRENGTHS = (0.1, 0.3, 1.0)  # to begin with, where there is no recipe
# The learning rate of SGD where there is no recipe, for nets to which Config's 0.1 does not suit: of plain, the paper's
# (results/paper/table2.json); of vit and resnet, by their errors on digits (results/recipes/vit-search.json and
# resnet-search.json).
STARTS: dict[str, Settings] = {"plain": {"lr": 0.01}, "vit": {"lr": 0.01}, "resnet": {"lr": 0.03}}
# The learning rate of SGD for regression by the mean squared error: of 0.1, 0.03, ..., the second largest at which no
# run on standardised targets diverged (results/recipes/regression.json).
REGRESSION_LR = 0.01
WITH_NORMS = ("resnet", "vit")  # of `threepass.models`; paper mode leaves out the curvature of norms


def find(model: str, data: str) -> Recipe | None:
    return RECIPES.get((_without_depth(model), data))


def _find_or_start(model: str, data: str) -> Recipe:
    """The recipe, or what to start with where there is none."""
    mode = {"mode": "exact"} if _without_depth(model) in WITH_NORMS else {}
    start = Recipe(
        STARTS.get(_without_depth(model), {}), {"strength": STRENGTHS[0]} | mode, {"strengths": STRENGTHS}, None
    )
    return find(model, data) or start


def _without_depth(model: str) -> str:
    return re.sub(r"\d+$", "", model)


def train_defaults(model: str, data: str, given: Collection[str]) -> Settings:
    """The settings of a run for which those named in `given` are the user's own.

    What cannot go together with one of them is left out: of alpha and strength, the user's choice replaces the
    recipe's, a learning rate of the user's is not divided by alpha, and learning rates are for SGD.

    >>> train_defaults("plain20", "cifar10", ["epochs"])["eta_over_alpha"]
    True
    >>> train_defaults("plain20", "cifar10", ["strength"])
    {'epochs': 200, 'lr': 0.01, 'schedule': 'step', 'augment': True}
    >>> train_defaults("resnet20", "cifar10", ["epochs"])
    {'lr': 0.03, 'strength': 0.1, 'mode': 'exact'}
    """
    recipe = _find_or_start(model, data)
    settings = recipe.common | recipe.third
    replaced = {
        "strength": ("alpha", "alpha_end", "reduction", "sam", "eta_over_alpha"),
        "alpha": ("strength", "sam"),
        "eta_over_alpha": ("strength", "sam", "lr", "optimizer"),
        "lr": ("optimizer",),
    }
    return {
        name: value
        for name, value in settings.items()
        if name not in given and not {*replaced.get(name, ())} & {*given}
    }


def compare_defaults(model: str, data: str, given: Collection[str]) -> Settings:
    """The settings of a comparison, and its alphas or strengths where the user gives neither.

    >>> compare_defaults("plain20", "cifar10", ["epochs"])["alphas"]
    (0.1,)
    """
    recipe = _find_or_start(model, data)
    methods = {} if {"alphas", "strengths"} & {*given} else {"alphas": (), "strengths": ()} | recipe.methods
    shared = recipe.common | {name: value for name, value in recipe.third.items() if name == "mode"}
    own = {*given, "lr"} if "optimizer" in given else given
    return {name: value for name, value in (shared | methods).items() if name not in own}


def choice_in_words(model: str, data: str, chosen: Settings) -> str:
    """What was chosen for the flags that a user left out, and why.

    >>> choice_in_words("vit", "mnist", train_defaults("vit", "mnist", ["lr", "strength"]))
    'no recipe for vit on mnist: mode exact for its norms'
    >>> choice_in_words("mlp", "mine", train_defaults("mlp", "mine", []))
    'no recipe for mlp on mine: strength 0.1, to start with at the learning rate of plain training'
    """
    words = ", ".join(f"{name} {_shown(value)}" for name, value in chosen.items() if value != ())
    if find(model, data) is not None:
        return f"recipe of {model} on {data}: {words}"
    words = words.replace("mode exact", "mode exact for its norms")
    third = {"strength", "strengths"} & {*chosen}
    why = ", to start with at the learning rate of plain training" if third else ""
    return f"no recipe for {model} on {data}: {words}{why}"


def if_norms(model: str, chosen: Settings, given: Collection[str], config: Config) -> Settings:
    """What a net of the user's own starts with if it turns out to have norms: exact mode, at the rate of resnet.

    >>> if_norms("my:net", {"strength": 0.1}, [], Config(strength=0.1))
    {'mode': 'exact', 'lr': 0.03}
    >>> if_norms("my:net", {"strength": 0.1}, ["lr"], Config(strength=0.1, lr=0.2)), if_norms("mlp", {}, [], Config())
    ({'mode': 'exact'}, {})
    >>> if_norms("my:net", {"strength": 0.1}, ["mode"], Config(strength=0.1, mode="exact"))
    {'lr': 0.03}
    """
    third = config.strength is not None or config.alpha < 1
    if ":" not in model or not third:
        return {}
    mode = {} if "mode" in {*chosen, *given} else {"mode": "exact"}
    return mode | (STARTS["resnet"] if config.lr is LR and config.optimizer == "sgd" else {})


def alpha_in_words(config: Config) -> str | None:
    """What alpha does to the learning rate of plain training, where it acts like another one."""
    acts = config.strength is None and 0 < config.alpha < 1 and config.optimizer == "sgd" and not config.eta_over_alpha
    if not acts:
        return None
    return (
        f"alpha {config.alpha:g} multiplies backpropagation's gradient too: lr {config.lr:g} acts like "
        f"{config.lr * config.alpha:g} in plain training (eta_over_alpha, --eta-over-alpha, divides lr by alpha, as "
        "the paper does; strength in place of alpha leaves lr as it is)"
    )


def with_default_lr(config: Config, squared_error: bool = False) -> Config:
    """The config with a learning rate for its optimizer or loss, if the user chose none.

    >>> with_default_lr(Config(optimizer="adamw")).lr, with_default_lr(Config(optimizer="adamw", lr=0.1)).lr
    (0.001, 0.1)
    """
    if config.lr is not LR:
        return config
    lr = default_lr(config.optimizer) if config.optimizer != "sgd" else REGRESSION_LR if squared_error else None
    return config if lr is None else config.with_settings({"lr": lr})


def lr_in_words(config: Config) -> str:
    """Where the learning rate is from, that the user did not choose.

    >>> lr_in_words(Config(optimizer="adamw", lr=0.001))
    'lr 0.001, the default of torch.optim for adamw'
    """
    if config.optimizer != "sgd":
        return f"lr {config.lr:g}, the default of torch.optim for {config.optimizer}"
    of = " for regression by the mean squared error" if config.lr == REGRESSION_LR else ""
    return f"lr {config.lr:g}, the default{of} with SGD"


def _shown(value: Any) -> str:
    return " ".join(f"{v:g}" for v in value) if isinstance(value, tuple) else str(value)
