"""The program: help, exit codes, one line for a bad value, runs that never overwrite each other."""

import dataclasses
import json
import sys
from importlib import metadata

import pytest

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
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(Config):
        assert "--" + field.name.replace("_", "-") in shown


def test_the_program_alone_shows_its_help_and_version(capsys):
    assert main([]) == 2
    assert "Usage: threepass COMMAND" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == metadata.version("threepass")


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ([], {}),
        (["--epochs", "3", "--lr=0.5", "--strength", "1e-2"], {"epochs": 3, "lr": 0.5, "strength": 0.01}),
        (["--milestones", "0.1", "0.2", "--augment"], {"milestones": (0.1, 0.2), "augment": True}),
        (["--milestones", "--no-augment"], {"milestones": ()}),
        (["--compile"], {"compile": True}),
        (["--compile", "--seed", "4"], {"compile": True, "seed": 4}),
        (["--compile", "require"], {"compile": "require"}),
        (["--no-compile", "--input-at", "a.b"], {"input_at": "a.b"}),
    ],
)
def test_every_setting_has_a_flag(flags, settings):
    command, values = parse(["train", *flags])
    assert command is train
    assert values.arguments["config"] == Config(**settings)


def test_without_the_extra_the_program_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cyclopts", None)
    monkeypatch.delitem(sys.modules, "threepass.cli")
    with pytest.raises(SystemExit, match=r"needs cyclopts: pip install 'threepass\[train\]'"):
        run_and_exit()


def test_train_writes_a_run_and_resumes_it(own_folder, capsys):
    assert main(["train", *FAST, "--alpha", "0.8", "--name", "one"]) == 0
    assert "validation error" in capsys.readouterr().out
    run = json.loads((own_folder / "runs" / "one" / "run.json").read_text())
    assert run["config"]["alpha"] == 0.8
    assert main(["train", *FAST, "--name", "one"]) == 0
    assert {p.name for p in (own_folder / "runs").iterdir()} == {"one", "one-2"}
    assert main(["train", "--resume", "runs/one"]) == 0
    assert "runs/one: epoch 1" in capsys.readouterr().out


def test_compare_and_report(own_folder, capsys):
    sizes = ["--model-options", '{"sizes": [64, 8, 10]}']
    methods = ["--alphas", "0.5", "--strengths", "0.1", "--mode", "exact", "--penalty", "l1", "--seeds", "1"]
    assert main(["compare", "--epochs", "1", *methods, *sizes, "--name", "c"]) == 0
    assert "runs/c/report.html" in capsys.readouterr().out
    assert (own_folder / "runs" / "c" / "report.html").stat().st_size > 10_000
    assert main(["report", "runs/c", "--out", "page.html"]) == 0
    assert (own_folder / "page.html").exists()


def test_bench_writes_what_it_prints(own_folder, capsys):
    net = ["--model", "mlp", "--model-options", '{"sizes": [12, 8, 10]}', "--image", "2", "--batch", "4"]
    few = ["--methods", "paper,sam", "--no-best", "--rounds", "1", "--threads", "1", "--device", "cpu"]
    assert main(["bench", *net, *few, "--out", "new/one.json"]) == 0
    printed = capsys.readouterr().out
    assert list(json.loads((own_folder / "new" / "one.json").read_text())["methods"]) == ["plain", "paper", "sam"]
    assert "three passes, paper" in printed
    (own_folder / "page.md").write_text("no marks")
    assert main(["bench", "--table", "new", "--into", "page.md"]) == 1
    assert "has no place for the tables" in capsys.readouterr().err


def test_data_says_what_is_there(capsys):
    assert main(["data", "digits"]) == 0
    assert "1437 training and 360 validation examples of shape (1, 8, 8), 10 classes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "--data", "nowhere"], 1, "neither a folder nor one of the sets"),
        (["train", "--model", "foo"], 1, "unknown model 'foo'"),
        (["train", "--model", "no_such_module:net"], 1, "importing 'no_such_module' failed"),
        (["train", "--init", "magic"], 1, "magic"),
        (["train", "--alpha", "3"], 2, "alpha must be a number in [0, 1]"),
        (["train", "--penalty", "l3"], 2, "penalty must be one of l2, l1, norm, got 'l3'"),
        (["train", "--schedule", "sine"], 2, "schedule must be one of constant, step"),
        (["train", "--epoch", "3"], 2, "Did you mean --epochs? (see threepass train --help)"),
        (["train", "mnist"], 2, "threepass train: unexpected argument 'mnist' (see threepass train --help)"),
        (["train", "--epochs", "many"], 2, 'unable to convert "many" into int'),
        (["train", "--compile", "maybe"], 2, 'Choose from: "require"'),
        (["train", "--lr", "-1"], 2, "lr must be positive, got -1.0"),
        (["report"], 2, "RUNS requires an argument"),
        (["train", "--resume", "runs/none"], 1, "holds no run"),
        (["fly"], 2, 'Unknown command "fly". Available commands: compare, train'),
        (["bench", "--methods", "magic"], 1, "unknown method 'magic'"),
        (["bench", "--suite", "tpu"], 1, "suite must be one of gpu, cpu"),
        (["bench", "--scaling", "age", "--device", "cpu"], 1, "unknown sweep 'age'"),
        (["data", "mnist", "--data-dir", "empty"], 1, "threepass data mnist --download"),
    ],
)
def test_bad_values_get_words_and_no_traceback(arguments, code, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(arguments) == code
    said = capsys.readouterr()
    assert message in said.err
    assert "data" in arguments or len(said.err.splitlines()) == 1
    assert "Traceback" not in said.err
    assert not (tmp_path / "runs").exists()


def test_debug_shows_the_error_itself():
    with pytest.raises(FileNotFoundError):
        main(["train", "--data", "nowhere", "--debug"])
