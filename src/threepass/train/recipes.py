"""Settings that work, by model and data set: the defaults of `threepass train` and `threepass compare`.

Each was found by training, and `results` names the files of those runs. Where there is no recipe, the defaults
are those of `Config`.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

Settings = dict[str, Any]  # of Config


@dataclass(frozen=True)
class Recipe:
    """`common`: the settings of every method, two passes too; `third`: of three passes; `methods`: what compare shows.

    The learning rate in `common` is that of two passes; `third` may have its own.
    """

    common: Settings
    third: Settings
    methods: dict[str, tuple[float, ...]]  # alphas or strengths
    results: str | None  # None: these are the settings of the paper, and not measured by us yet


PAPER: Settings = {"epochs": 200, "lr": 0.01, "schedule": "step", "augment": True}
PAPER_THIRD: Settings = {"alpha": 0.1, "eta_over_alpha": True}

# A model's name stands without its depth.
RECIPES: dict[tuple[str, str], Recipe] = {
    ("mlp", "digits"): Recipe(
        {"epochs": 30, "batch_size": 64, "lr": 0.05, "schedule": "cosine"},
        {"strength": 1.0, "mode": "exact"},
        {"strengths": (0.3, 1.0, 3.0)},
        "results/recipes/digits",
    ),
    ("mlp", "mnist"): Recipe(
        {"epochs": 5, "batch_size": 128, "lr": 0.1, "schedule": "cosine"},
        {"strength": 3.0, "mode": "paper"},
        {"strengths": (0.3, 1.0, 3.0)},
        "results/recipes/mnist",
    ),
    ("plain", "cifar10"): Recipe(PAPER, PAPER_THIRD, {"alphas": (0.1,)}, "results/paper/table2.json"),
    ("plain", "cifar100"): Recipe(PAPER, PAPER_THIRD, {"alphas": (0.1,)}, None),
}


def find(model: str, data: str) -> Recipe | None:
    return RECIPES.get((re.sub(r"\d+$", "", model), data))


def train_defaults(model: str, data: str, given: Collection[str]) -> Settings:
    """The settings of a run for which those named in `given` are the user's own.

    What cannot go together with one of them is left out: of alpha and strength, the user's choice replaces the
    recipe's, and a learning rate of the user's is not divided by alpha.

    >>> train_defaults("plain20", "cifar10", ["epochs"])["eta_over_alpha"]
    True
    >>> train_defaults("plain20", "cifar10", ["strength"])
    {'epochs': 200, 'lr': 0.01, 'schedule': 'step', 'augment': True}
    """
    recipe = find(model, data)
    if recipe is None:
        return {}
    settings = recipe.common | recipe.third
    replaced = {
        "strength": ("alpha", "alpha_end", "reduction", "sam", "eta_over_alpha"),
        "alpha": ("strength", "sam"),
        "eta_over_alpha": ("strength", "sam", "lr"),
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
    recipe = find(model, data)
    if recipe is None:
        return {}
    methods = {} if {"alphas", "strengths"} & {*given} else {"alphas": (), "strengths": ()} | recipe.methods
    shared = recipe.common | {name: value for name, value in recipe.third.items() if name == "mode"}
    return {name: value for name, value in (shared | methods).items() if name not in given}
