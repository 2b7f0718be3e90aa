"""The program: help, exit codes, one line for a bad value, runs that never overwrite each other."""

import dataclasses
import json
import re
import sys
import warnings
from importlib import metadata

import numpy as np
import pytest
import torch

import threepass
from threepass.__main__ import run_and_exit
from threepass.cli import COMMANDS, main, parse, train
from threepass.train.config import Config

FAST = ["--epochs", "1", "--model-options", '{"sizes": [64, 8, 10]}']


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_help_is_complete(capsys):
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(command.__name__.replace("_", "-") in listed for command in COMMANDS)
    assert "--debug" in listed
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(Config):
        assert "--" + field.name.replace("_", "-") in shown
    for word in ("--strength 0.1", "factors", "threepass.advise", "recipe"):
        assert word in shown


def test_the_program_alone_shows_its_help_and_version(capsys):
    assert main([]) == 2
    assert "Usage: threepass COMMAND" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == metadata.version("threepass") == threepass.__version__


def test_a_source_tree_that_is_not_installed_has_a_version(monkeypatch):
    def unknown(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", unknown)
    assert threepass.__version__ == "0+source"


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ([], {}),
        (["--epochs", "3", "--lr=0.5", "--strength", "1e-2"], {"epochs": 3, "lr": 0.5, "strength": 0.01}),
        (["--schedule", "step", "--milestones", "0.1", "0.2"], {"schedule": "step", "milestones": (0.1, 0.2)}),
        (
            ["--schedule", "step", "--milestones", "5", "8", "--augment"],
            {"schedule": "step", "milestones": (5.0, 8.0), "augment": True},
        ),
        (["--schedule", "step", "--milestones", "--no-augment"], {"schedule": "step", "milestones": ()}),
        (["--compile"], {"compile": True}),
        (["--compile", "--seed", "4"], {"compile": True, "seed": 4}),
        (["--compile", "require"], {"compile": "require"}),
        (["--no-compile", "--input-at", "a.b"], {"input_at": "a.b"}),
    ],
)
def test_every_setting_has_a_flag(flags, settings):
    command, values = parse(["train", "--model", "resnet20", *flags])  # for which there is no recipe
    assert command is train
    assert values.arguments["config"] == Config(**{"lr": 0.03, "strength": 0.1, "mode": "exact"} | settings)


@pytest.mark.parametrize("package", ["numpy", "safetensors"])
def test_without_the_extra_training_says_what_to_install(package, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("threepass.train", "threepass.cli"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"training needs {package}: pip install 'threepass\[train\]'"):
        _ = threepass.fit
    with pytest.raises(SystemExit, match=rf"^threepass: training needs {package}: pip install"):
        run_and_exit()


def test_without_the_extra_the_program_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cyclopts", None)
    monkeypatch.delitem(sys.modules, "threepass.cli")
    with pytest.raises(SystemExit, match=r"needs cyclopts: pip install 'threepass\[train\]'"):
        run_and_exit()


def test_a_file_of_arrays_and_warnings_without_source_lines(own_folder, capsys):
    x, y = np.random.default_rng(0).random((30, 4)), np.arange(30) % 3
    np.savez(own_folder / "mine.npz", x_train=x, y_train=y % 2, x_val=x, y_val=y)
    few = ["--epochs", "1", "--batch-size", "30"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["train", "--data", "mine.npz", *few]) == 0
    said = capsys.readouterr()
    assert "runs/mlp-mine: epoch 1" in said.out
    first, *_ = said.err.splitlines()
    assert first == "threepass: warning: mine: no training example is of class 2, which validation has"


def test_regression_on_the_command_line(own_folder, capsys):
    x = np.random.default_rng(0).random((30, 4))
    np.savez(own_folder / "mine.npz", x_train=x, y_train=x[:, 0], x_val=x, y_val=x[:, 1])
    few = ["--data", "mine.npz", "--epochs", "1", "--batch-size", "30"]
    assert main(["train", *few]) == 0
    assert "validation absolute error" in capsys.readouterr().out
    assert main(["data", "mine.npz"]) == 0
    assert "30 training and 30 validation examples of shape (4,), targets of shape ()" in capsys.readouterr().out
    assert main(["compare", *few]) == 1
    assert "mine has no classes" in capsys.readouterr().err
    assert main(["report", "runs/mlp-mine"]) == 1
    assert "this run has none" in capsys.readouterr().err


def test_a_regression_has_a_learning_rate_of_its_own(own_folder, capsys):
    x = np.random.default_rng(0).standard_normal((60, 4))
    np.savez("mine.npz", x_train=x, y_train=x[:, 0], x_val=x, y_val=x[:, 1])
    few = ["train", "--data", "mine.npz", "--epochs", "1"]

    def saved_lr(run):
        return json.loads((own_folder / "runs" / run / "run.json").read_text())["config"]["lr"]

    assert main(few) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "lr 0.01, the default for regression by the mean squared error with SGD"
    assert saved_lr("mlp-mine") == 0.01
    assert main(["train", "--resume", "runs/mlp-mine", "--epochs", "2"]) == 0
    assert main([*few, "--lr", "0.1"]) == 0
    assert "default for regression" not in capsys.readouterr().out
    assert saved_lr("mlp-mine-2") == 0.1


def test_a_net_of_ones_own_with_norms_starts_in_exact_mode(own_folder, capsys, monkeypatch):
    (own_folder / "of_mine.py").write_text(
        "from torch import nn\n\n\n"
        "def normed():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 10))\n\n"
        "def plain():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    monkeypatch.syspath_prepend(own_folder)
    few = ["train", "--epochs", "1", "--model"]

    def saved(run):
        return json.loads((own_folder / "runs" / run / "run.json").read_text())["config"]

    assert main([*few, "of_mine:normed"]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("no recipe for of_mine:normed on digits: strength 0.1, mode exact for its norms, lr 0.03, ")
    assert (saved("of_mine-normed-digits")["mode"], saved("of_mine-normed-digits")["lr"]) == ("exact", 0.03)
    assert main(["train", "--resume", "runs/of_mine-normed-digits", "--epochs", "2"]) == 0
    assert main([*few, "of_mine:plain"]) == 0
    assert (saved("of_mine-plain-digits")["mode"], saved("of_mine-plain-digits")["lr"]) == ("paper", 0.1)
    assert main([*few, "of_mine:normed", "--alpha", "1"]) == 0
    assert saved("of_mine-normed-digits-2")["mode"] == "paper"
    compared = ["compare", *few[1:], "of_mine:normed", "--strengths", "0.1", "--seeds", "1"]
    assert main(compared) == 0
    assert "strength 0.1, exact" in capsys.readouterr().out
    about = json.loads((own_folder / "runs" / "compare-of_mine-normed-digits" / "compare.json").read_text())
    assert [v["name"] for v in about["variants"]] == ["two passes", "strength 0.1, exact"]
    assert about["config"]["lr"] == 0.03
    assert main([*few, "of_mine:normed", "--mode", "exact", "--name", "by-hand"]) == 0
    assert (saved("by-hand")["mode"], saved("by-hand")["lr"]) == ("exact", 0.03)
    assert "strength 0.1, lr 0.03, to start with" in capsys.readouterr().out
    assert main([*few, "of_mine:normed", "--lr", "0.1"]) == 0
    assert (saved("of_mine-normed-digits-3")["mode"], saved("of_mine-normed-digits-3")["lr"]) == ("exact", 0.1)
    x = np.random.default_rng(0).standard_normal((60, 64))
    np.savez("mine.npz", x_train=x, y_train=x[:, :10], x_val=x, y_val=x[:, :10])
    assert main([*few, "of_mine:normed", "--data", "mine.npz"]) == 0
    assert (saved("of_mine-normed-mine")["mode"], saved("of_mine-normed-mine")["lr"]) == ("exact", 0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main([*few, "of_mine:normed", "--mode", "paper"]) == 0
    assert "leaves out the curvature of layer_norm" in capsys.readouterr().err


def test_train_writes_a_run_and_resumes_it(own_folder, capsys):
    assert main(["train", *FAST, "--alpha", "0.8", "--schedule", "constant", "--name", "one"]) == 0
    assert "validation error" in capsys.readouterr().out
    run = json.loads((own_folder / "runs" / "one" / "run.json").read_text())
    assert run["config"]["alpha"] == 0.8
    assert main(["train", *FAST, "--name", "one"]) == 0
    assert {p.name for p in (own_folder / "runs").iterdir()} == {"one", "one-2"}
    assert main(["train", "--resume", "runs/one"]) == 0
    assert "runs/one: epoch 1" in capsys.readouterr().out
    assert main(["train", "--resume", "runs/one", "--epochs", "2", "--alpha=0.8", "--device", "cpu"]) == 0
    assert "runs/one: epoch 2" in capsys.readouterr().out
    extended = json.loads((own_folder / "runs" / "one" / "run.json").read_text())
    assert (extended["config"]["epochs"], extended["device"]) == (2, "cpu")
    refused = {"--lr": "0.2", "--alpha": "0.1", "--model": "vit", "--name": "two", "--epochs": "1"}
    for flag, value in refused.items():
        assert main(["train", "--resume", "runs/one", flag, value]) == 1
        assert flag.strip("-") in capsys.readouterr().err
    assert json.loads((own_folder / "runs" / "one" / "run.json").read_text()) == extended


def test_compare_and_report(own_folder, capsys):
    sizes = ["--model-options", '{"sizes": [64, 8, 10]}']
    methods = ["--alphas", "0.5", "--strengths", "0.1", "--mode", "exact", "--penalty", "l1", "--seeds", "1"]
    assert main(["compare", "--epochs", "1", *methods, *sizes, "--name", "c"]) == 0
    said = capsys.readouterr()
    assert "runs/c/report.html" in said.out
    assert "multiplies backpropagation's gradient" not in said.out + said.err
    assert (own_folder / "runs" / "c" / "report.html").stat().st_size > 10_000
    assert main(["report", "runs/c", "--out", "page.html"]) == 0
    assert (own_folder / "page.html").exists()
    assert main(["report", "runs/nowhere"]) == 1
    assert not (own_folder / "runs" / "report").exists()
    for name in ("report", "report-2"):
        assert main(["report", "runs/c"]) == 0
        assert f"report: runs/{name}/report.html" in capsys.readouterr().out


def test_robustness_of_runs_is_measured_and_reported(own_folder, capsys):
    short = ["train", "--epochs", "1", "--probe-every", "0", "--ema", "0.9", "--schedule", "constant"]
    assert main([*short, "--name", "a"]) == 0
    error = json.loads((own_folder / "runs" / "a" / "metrics.jsonl").read_text())["val_error"]
    capsys.readouterr()
    assert main(["robustness", "runs/a"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "runs/a: accuracy on 360 validation examples, by the size of the disturbance"
    assert said[3].startswith(f"  PGD             0: {1 - error:.1%}  0.005: ")  # of the averaged weights
    assert main(["report", "runs/a", "--out", "page.html"]) == 0
    assert "Accuracy under PGD" in (own_folder / "page.html").read_text()
    assert main(["robustness", "runs/b"]) == 1
    assert "runs/b contains no run" in capsys.readouterr().err
    assert main(["train", "--resume", "runs/a", "--epochs", "2"]) == 0
    assert main(["report", "runs/a", "--out", "page.html"]) == 0
    page = (own_folder / "page.html").read_text()
    assert "a was trained on after its robustness was measured" in page
    assert "Accuracy under PGD" not in page


def test_sizes_of_attacks_on_features_are_said_to_be_in_their_units(own_folder, capsys):
    x = 100 * np.random.default_rng(0).standard_normal((40, 4))
    y = (x[:, 0] > 0).astype(int)
    np.savez(own_folder / "mine.npz", x_train=x, y_train=y, x_val=x, y_val=y)
    assert main(["train", "--data", "mine.npz", "--epochs", "1", "--name", "a"]) == 0
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["robustness", "runs/a", "--examples", "10"]) == 0
    words = r"the inputs of mine are features, not pixels: .* in their units; their standard deviations are \d+ to \d+"
    assert re.search(words, capsys.readouterr().err)

    def page_of(*runs):
        assert main(["report", *runs, "--out", "page.html"]) == 0
        return " ".join((own_folder / "page.html").read_text().split())

    page = page_of("runs/a")
    assert "Accuracy on 10 validation examples with noise, and under attacks that move every feature by at" in page
    assert "radius, in units of the features" in page
    assert "pixels 0 to 1" not in page
    assert main(["train", "--epochs", "1", "--name", "b", "--model-options", '{"sizes": [64, 8, 10]}']) == 0
    assert main(["robustness", "runs/b", "--examples", "20"]) == 0
    page = page_of("runs/b")
    assert "Accuracy on 20 validation examples with noise, and under attacks that move every pixel by at" in page
    assert "radius, pixels 0 to 1" in page
    page = page_of("runs/a", "runs/b")
    assert "Accuracy on validation examples (a: 10; b: 20) with noise, and" in page
    assert "move every feature or pixel by" in page
    assert "radius, in units of each data set" in page


def test_bench_writes_what_it_prints(own_folder, capsys, monkeypatch):
    rates = {"operations_per_second": 1e12, "bytes_per_second": 1e11}
    monkeypatch.setattr("threepass.bench.case.ceilings", lambda device, dtype: rates)
    net = ["--model", "mlp", "--model-options", '{"sizes": [12, 8, 10]}', "--image", "2", "--batch", "4"]
    few = ["--methods", "paper,sam", "--no-best", "--rounds", "1", "--threads", "1", "--device", "cpu"]
    assert main(["bench", *net, *few, "--out", "new/one.json"]) == 0
    printed = capsys.readouterr().out
    assert list(json.loads((own_folder / "new" / "one.json").read_text())["methods"]) == ["plain", "paper", "sam"]
    assert "three passes, paper" in printed
    (own_folder / "page.md").write_text("no marks")
    assert main(["bench", "--table", "new", "--into", "page.md"]) == 1
    assert "has no markers for the tables" in capsys.readouterr().err


def test_data_says_what_is_there(capsys):
    assert main(["data", "digits"]) == 0
    assert "1437 training and 360 validation examples of shape (1, 8, 8), 10 classes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "--data", "nowhere"], 1, "neither a folder, nor a .npz file, nor one of the sets"),
        (["train", "--model", "foo"], 1, "unknown model 'foo'"),
        (["train", "--model", "no_such_module:net"], 1, "importing 'no_such_module' failed"),
        (["train", "--init", "magic"], 1, "magic"),
        (["train", "--alpha", "3"], 2, "alpha must be a number in [0, 1]"),
        (["train", "--alpha", "0.1", "--strength", "0.1"], 2, "pass either strength or alpha, not both"),
        (["train", "--penalty", "l3"], 2, "penalty must be one of l2, l1, norm, got 'l3'"),
        (["train", "--schedule", "sine"], 2, "schedule must be one of constant, step"),
        (["train", "--epoch", "3"], 2, "Did you mean --epochs? (see threepass train --help)"),
        (["train", "mnist"], 2, "threepass train: unexpected argument 'mnist' (see threepass train --help)"),
        (["train", "--optimizer", "foo"], 1, "optimizer must be one of sgd"),
        (["train", "--input-at", "nosuch"], 1, "input_at='nosuch' names no module"),
        (["train", "--seed", "-1"], 2, "seed must not be negative"),
        (["compare", "--alphas", "2"], 1, "alpha must be a number in [0, 1]"),
        (["compare", "--strength", "1"], 2, "pass --strengths instead of --strength (see threepass compare --help)"),
        (["compare", "--alpha", "0.3"], 2, "pass --alphas instead of --alpha"),
        (["compare", "--eta-over-alpha"], 2, "leave out --eta-over-alpha"),
        (["compare", "--seed", "3"], 2, "pass their number as --seeds instead of --seed"),
        (["compare", "--reduction", "sample"], 2, "--reduction and --alpha-end apply only to methods of --alphas"),
        (["compare", "--demo", "--epochs", "1"], 2, "--demo has settings of its own: leave out --epochs"),
        (["compare", "--optimizer", "foo"], 1, "optimizer must be one of sgd"),
        (["train", "--model-options", "[1]"], 1, "--model-options must be a JSON object such as"),
        (["train", "--model-options", "{"], 1, "--model-options is not JSON"),
        (
            ["train", "--model-options", '{"sizes": [64, 8, 5]}'],
            1,
            "the model has only 5 outputs, but digits has",
        ),
        (["train", "--model-options", '{"sizes": [63, 8, 10]}'], 1, "the model fails on a batch of digits (shape "),
        (["train", "--model", "plain20", "--model-options", '{"channels": 3}'], 1, "digits (shape (128, 1, 8, 8))"),
        (["train", "--device", "cuda"], 1, "PyTorch finds no CUDA device; --device cpu"),
        (["train", "--device", "mps"], 1, "device mps: PyTorch finds no MPS device; --device cpu"),
        (["train", "--device", "xpu"], 1, "device must be cpu, cuda, cuda:N or auto, got 'xpu'"),
        (["train", "--device", "gpu"], 1, "device must be cpu, cuda, cuda:N or auto, got 'gpu'"),
        (["train", "--milestones", "100", "150"], 2, 'milestones needs schedule="step" (--schedule step)'),
        (["train", "--epochs", "many"], 2, 'unable to convert "many" into int'),
        (["train", "--compile", "maybe"], 2, 'Choose from: "trace", "require"'),
        (["train", "--lr", "-1"], 2, "lr must be positive, got -1.0"),
        (["report"], 2, "RUNS requires an argument"),
        (["train", "--resume", "runs/none"], 1, "contains no run"),
        (["fly"], 2, 'Unknown command "fly". Available commands: compare, train'),
        (["train", "--data", "minst"], 1, "did you mean mnist?"),
        (["train", "--data", "mine.npz"], 1, "there is no file mine.npz"),
        (["bench", "--methods", "magic"], 1, "unknown method 'magic'"),
        (
            ["bench", "--model", "mlp", "--model-options", '{"sizes": [5, 2]}'],
            1,
            "does not take batches of images, 128 x 3",
        ),
        (["bench", "--table", "nowhere"], 1, "no results of threepass bench in nowhere"),
        (["bench", "--suite", "tpu"], 1, "suite must be one of gpu, gpu-more, cpu"),
        (["bench", "--scaling", "age", "--device", "cpu"], 1, "unknown sweep 'age'"),
        (["data", "mnist", "--data-dir", "empty"], 1, "threepass data mnist --download"),
    ],
)
def test_bad_values_get_words_and_no_traceback(arguments, code, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(arguments) == code
    said = capsys.readouterr()
    assert message in said.err
    assert "--data" not in arguments or not said.out  # no word on recipes for data that is not there
    assert "data" in arguments or len(said.err.splitlines()) == 1
    assert "Traceback" not in said.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", [["train", "--resume"], ["report"]])
def test_a_run_named_without_its_folder(command, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--epochs", "1", "--name", "mine", "--probe-every", "0"]) == 0
    assert main([*command, "mine"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("did you mean runs/mine?")


def test_a_model_that_has_learned_nothing_is_said(own_folder, capsys):
    """At a learning rate next to zero the biases of the last layer, here large, decide on one class for all."""
    (own_folder / "dull.py").write_text(
        "from threepass.models import mlp\n"
        "def net():\n"
        "    model = mlp(64, 8, 10)\n"
        "    model[-1].bias.data[0] = 100.0\n"
        "    return model\n"
    )
    short = ["train", "--epochs", "1", "--probe-every", "0"]
    assert main([*short, "--model", "dull:net", "--lr", "1e-9"]) == 0
    said = capsys.readouterr().err
    assert "is no better than always predicting the most frequent class: the model has learned nothing" in said
    assert main(short) == 0
    assert "learned nothing" not in capsys.readouterr().err


def test_debug_shows_the_error_itself():
    with pytest.raises(FileNotFoundError):
        main(["train", "--data", "nowhere", "--debug"])


def test_torchrun_is_for_training_alone(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["report", "runs/a"]) == 2
    assert "torchrun is for `threepass train`" in capsys.readouterr().err
