"""Recipes: every one is a valid config with results behind it, and what a user gives is never overruled."""

from pathlib import Path

import pytest

from threepass.cli import parse
from threepass.train.config import Config
from threepass.train.recipes import RECIPES, compare_defaults, find, train_defaults

ROOT = Path(__file__).parents[1]


def config_of(*words: str) -> Config:
    return parse(["train", *words])[1].arguments["config"]


@pytest.mark.parametrize("key", RECIPES, ids="-".join)
def test_every_recipe_has_valid_settings_and_results(key):
    recipe = RECIPES[key]
    assert Config(**train_defaults(*key, ())) == Config(**recipe.common | recipe.third)
    assert recipe.results is None or (ROOT / recipe.results).exists()
    assert set(recipe.methods) <= {"alphas", "strengths"}


def test_train_uses_the_recipe_of_its_model_and_data():
    assert config_of("--data", "mnist") == Config(**train_defaults("mlp", "mnist", ()))
    assert config_of() == Config(**train_defaults("mlp", "digits", ()))
    assert config_of("--model", "plain32", "--data", "cifar100").lr == find("plain20", "cifar10").common["lr"]
    assert config_of("--model", "vit", "--data", "mnist") == Config()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--lr", "0.5"], {"lr": 0.5, "eta_over_alpha": False}),  # a learning rate of one's own is not divided
        (["--strength", "0.3"], {"strength": 0.3, "eta_over_alpha": False, "lr": 0.01}),
        (["--alpha", "0.4"], {"alpha": 0.4, "eta_over_alpha": True}),
        (["--no-augment"], {"augment": False, "alpha": 0.1}),
        (["--alpha", "1", "--sam", "0.05"], {"sam": 0.05, "eta_over_alpha": False}),
    ],
)
def test_what_the_user_gives_goes_first(words, expected):
    config = config_of("--model", "plain20", "--data", "cifar10", *words)
    assert {name: getattr(config, name) for name in expected} == expected


def test_alpha_replaces_a_recipes_strength():
    config = config_of("--data", "mnist", "--alpha", "0.5")
    assert (config.alpha, config.strength, config.lr) == (0.5, None, find("mlp", "mnist").common["lr"])


def test_compare_takes_methods_from_the_recipe_unless_some_are_given():
    recipe = find("mlp", "mnist")
    values = parse(["compare", "--data", "mnist"])[1].arguments
    assert (values["alphas"], values["strengths"]) == ((), recipe.methods["strengths"])
    assert values["config"].mode == recipe.third["mode"]
    values = parse(["compare", "--data", "mnist", "--alphas", "0.5"])[1].arguments
    assert (values["alphas"], values["strengths"]) == ((0.5,), ())
    assert "alphas" not in compare_defaults("mlp", "mnist", ["strengths"])
