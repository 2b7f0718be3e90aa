"""Recipes: every one is a valid config with measured results, and what a user gives is never overruled."""

import importlib
import json
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch

from threepass.cli import main, parse
from threepass.train.config import Config
from threepass.train.recipes import RECIPES, REGRESSION_LR, STARTS, compare_defaults, find, train_defaults

ROOT = Path(__file__).parents[2]


def config_of(*words: str) -> Config:
    return parse(["train", *words])[1].arguments["config"]


@pytest.mark.parametrize("key", RECIPES, ids="-".join)
def test_every_recipe_has_valid_settings_and_results(key):
    recipe = RECIPES[key]
    assert Config(**train_defaults(*key, ())) == Config(**recipe.common | recipe.third)
    assert (ROOT / recipe.results).exists()
    assert set(recipe.methods) <= {"alphas", "strengths"}


def test_train_uses_the_recipe_of_its_model_and_data():
    assert config_of("--data", "mnist") == Config(**train_defaults("mlp", "mnist", ()))
    assert config_of() == Config(**train_defaults("mlp", "digits", ()))
    assert config_of("--model", "plain32", "--data", "cifar100").lr == find("plain20", "cifar10").common["lr"]


def test_without_a_recipe_training_starts_with_a_strength_and_the_learning_rate_of_plain_training():
    assert config_of("--data", "mine.npz") == Config(strength=0.1)
    assert config_of("--model", "resnet20", "--data", "mnist") == Config(strength=0.1, mode="exact", lr=0.03)
    assert config_of("--model", "resnet20", "--strength", "1", "--mode", "paper") == Config(strength=1.0, lr=0.03)
    assert config_of("--data", "mine.npz", "--alpha", "0.5") == Config(alpha=0.5)
    values = parse(["compare", "--data", "mine.npz"])[1].arguments
    assert (values["alphas"], values["strengths"], values["config"]) == ((), (0.1, 0.3, 1.0), Config())


@pytest.mark.parametrize(("model", "lr"), [("plain20", 0.01), ("vit", 0.01), ("resnet20", 0.03)])
def test_without_a_recipe_nets_that_need_a_lower_learning_rate_start_with_it(model, lr):
    assert config_of("--model", model, "--data", "mnist").lr == lr
    assert parse(["compare", "--model", model, "--data", "mnist"])[1].arguments["config"].lr == lr
    assert config_of("--model", model, "--data", "mnist", "--lr", "0.1").lr == 0.1


DEFAULT, ADAMW = "lr 0.1, the default with SGD", "lr 0.001, the default of torch.optim for adamw"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], ["recipe of mlp on digits: batch_size 64, lr 0.05, schedule cosine, strength 1.0, mode exact"]),
        (["--data", "mine.npz"], ["no recipe for mlp on mine.npz: strength 0.1, to start with at the lear", DEFAULT]),
        (
            ["--data", "mine.npz", "--alpha", "0.5"],
            [DEFAULT, "alpha 0.5 multiplies backpropagation's gradient too: lr 0.1 "],
        ),
        (["--data", "mine.npz", "--alpha", "0.5", "--eta-over-alpha", "--lr", "0.1"], []),
        (["--data", "mine.npz", "--alpha", "0.5", "--optimizer", "adam", "--lr", "0.01"], []),
        (["--data", "mine.npz", "--alpha", "1"], [DEFAULT]),
        (["--data", "mine.npz", "--alpha", "1", "--optimizer", "adamw"], [ADAMW]),
        (["--optimizer", "adamw"], ["recipe of mlp on digits: batch_size 64, schedule cosine, strength 1.0", ADAMW]),
        (["--optimizer", "sgd"], ["recipe of mlp on digits: batch_size 64, lr 0.05, schedule cosine, strength 1.0"]),
        (["--data", "mine.npz", "--alpha", "1", "--optimizer", "adamw", "--lr", "0.001"], []),
    ],
)  # fmt: skip
def test_training_says_first_what_was_chosen(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    x, y = np.random.default_rng(0).random((30, 4)), np.arange(30) % 3
    np.savez("mine.npz", x_train=x, y_train=y, x_val=x, y_val=y)
    assert main(["train", "--epochs", "1", *words]) == 0
    *lines, _ = capsys.readouterr().out.splitlines()
    assert len(lines) == len(said)
    assert all(line.startswith(start) for line, start in zip(lines, said, strict=True))


def test_the_settings_that_strength_replaces_are_saved_as_none():
    assert {"alpha": None, "reduction": None}.items() <= Config(strength=0.1).to_dict().items()
    for config in (Config(strength=0.1), Config(alpha=0.5, reduction="sample")):
        assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--lr", "0.5"], {"lr": 0.5, "eta_over_alpha": False}),  # a learning rate of one's own is not divided
        (["--strength", "0.3"], {"strength": 0.3, "eta_over_alpha": False, "lr": 0.01}),
        (["--alpha", "0.4"], {"alpha": 0.4, "eta_over_alpha": True}),
        (["--no-augment"], {"augment": False, "alpha": 0.1}),
        (["--alpha", "1", "--sam", "0.05"], {"sam": 0.05, "eta_over_alpha": False}),
        (["--optimizer", "adamw"], {"lr": Config.lr, "eta_over_alpha": False}),  # the trainer takes that of torch.optim
        (["--optimizer", "sgd"], {"lr": 0.01, "eta_over_alpha": True}),
    ],
)
def test_what_the_user_gives_goes_first(words, expected):
    config = config_of("--model", "plain20", "--data", "cifar10", *words)
    assert {name: getattr(config, name) for name in expected} == expected


def test_alpha_replaces_a_recipes_strength():
    config = config_of("--data", "mnist", "--alpha", "0.5")
    assert (config.alpha, config.strength, config.lr) == (0.5, None, find("mlp", "mnist").common["lr"])


def test_a_comparison_that_goes_on_has_the_same_recipe():
    again = parse(["compare", "--data", "mnist", "--resume"])[1].arguments
    assert again["strengths"] == find("mlp", "mnist").methods["strengths"]
    assert again["config"].epochs == find("mlp", "mnist").common["epochs"]


def test_compare_takes_methods_from_the_recipe_unless_some_are_given():
    recipe = find("mlp", "mnist")
    values = parse(["compare", "--data", "mnist"])[1].arguments
    assert (values["alphas"], values["strengths"]) == ((), recipe.methods["strengths"])
    assert values["config"].mode == recipe.third["mode"]
    values = parse(["compare", "--data", "mnist", "--alphas", "0.5"])[1].arguments
    assert (values["alphas"], values["strengths"]) == ((0.5,), ())
    assert "alphas" not in compare_defaults("mlp", "mnist", ["strengths"])


def rows_of(file: Path) -> list[dict]:
    return json.loads(file.read_text())


@pytest.fixture
def search(monkeypatch):
    """The script of the search."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("recipes")


@pytest.mark.parametrize("task", ["vit", "resnet"])
def test_nets_with_norms_start_at_the_learning_rate_of_the_lowest_error(task):
    """Of the mean over seeds and over two and three passes."""
    rows = rows_of(ROOT / "results" / "recipes" / f"{task}-search.json")
    assert not any(row["diverged"] for row in rows)
    rates = {row["settings"]["lr"] for row in rows}
    errors = {lr: fmean(row["val_error"] for row in rows if row["settings"]["lr"] == lr) for lr in rates}
    assert min(errors, key=errors.get) == STARTS[task]["lr"]
    assert max(errors, key=errors.get) == 0.1


@pytest.mark.parametrize("task", ["mnist", "digits", "vit", "resnet"])
def test_the_files_of_the_search_have_the_rows_of_its_script(task, search):
    found = [row["settings"] for row in rows_of(ROOT / "results" / "recipes" / f"{task}-search.json")]
    assert all(settings in found for settings in search.settings_of(task))
    assert all(settings in search.settings_of(task, seeds=3) for settings in found)


def test_a_quick_search_runs_to_its_end_and_goes_on_where_it_stopped(search, tmp_path, monkeypatch, capsys):
    file, common = tmp_path / "new" / "search.json", search.GRIDS["digits"][0]
    monkeypatch.setitem(search.GRIDS, "digits", (common, [search.PLAIN | {"lr": 0.1}]))
    search.main(["digits", "--quick", "--out", str(file)])
    first = rows_of(file)
    diverging = search.by("exact", 1.0, 1e30)
    monkeypatch.setitem(search.GRIDS, "digits", (common, [search.PLAIN | {"lr": 0.1}, diverging]))
    capsys.readouterr()
    search.main(["digits", "--quick", "--out", str(file)])
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert rows_of(file)[:1] == first
    plain, diverged = rows_of(file)
    assert (plain["settings"]["epochs"], plain["diverged"], diverged["diverged"]) == (1, False, True)
    assert set(plain) == set(rows_of(ROOT / "results" / "recipes" / "digits-search.json")[0])


def test_no_measured_regression_diverged_at_the_learning_rate_of_regressions_or_three_times_it():
    rows = rows_of(ROOT / "results" / "recipes" / "regression.json")
    stable = [
        lr
        for lr in {row["lr"] for row in rows}
        if not any(r["diverged"] for r in rows if r["lr"] == lr and r["standardised"])
    ]
    assert sorted(stable)[-2] == REGRESSION_LR


@pytest.mark.filterwarnings("ignore:the targets of this regression", "ignore::threepass.errors.LossGrowthWarning")
def test_a_quick_search_for_regressions_runs_to_its_end(search, tmp_path, monkeypatch):
    script = importlib.import_module("regression")
    monkeypatch.setattr(script, "NETS", {"512": (512,)})
    monkeypatch.setattr(script, "RATES", (0.01,))
    threads = torch.get_num_threads()
    script.main(["--quick", "--out", str(tmp_path / "found.json")])
    torch.set_num_threads(threads)
    rows = rows_of(tmp_path / "found.json")
    assert len(rows) == 12
    assert set(rows[0]) == set(rows_of(ROOT / "results" / "recipes" / "regression.json")[0])
