"""--config FILE: TOML and YAML, flags override it, unknown keys name the file and the key."""

import json
import tomllib
from pathlib import Path

import pytest

from threepass.cli import COMMANDS, main, parse
from threepass.train.config_file import as_toml


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def settings(*arguments):
    _, values = parse(list(arguments))
    return values.arguments


TOML = """
epochs = 3
model-options = {sizes = [64, 8, 10]}
augment = false
eta_over_alpha = true
schedule = "step"
milestones = [0.5, 0.75]
"""
YAML = """
epochs: 3
model-options: {sizes: [64, 8, 10]}
augment: false
eta_over_alpha: true
schedule: step
milestones: [0.5, 0.75]
strength: null
"""


@pytest.mark.parametrize(("name", "text"), [("a.toml", TOML), ("a.yaml", YAML)])
def test_a_file_is_flags(name, text):
    Path(name).write_text(text)
    found, flags = (
        settings("train", "--config", name),
        settings(
            *[
                "train",
                "--epochs",
                "3",
                "--no-augment",
                "--eta-over-alpha",
                "--schedule",
                "step",
                "--milestones",
                "0.5",
                "0.75",
            ],
            "--model-options",
            '{"sizes": [64, 8, 10]}',
        ),
    )
    assert found["config"] == flags["config"]
    assert found["task"] == flags["task"]
    assert found["given"] == flags["given"]


def test_flags_override_the_file():
    Path("a.toml").write_text('epochs = 3\nlr = 0.5\naugment = true\nmodel = "plain20"')
    found = settings("train", "--config=a.toml", "--epochs", "5", "--no-augment", "--model=mlp")
    assert (found["config"].epochs, found["config"].lr, found["config"].augment) == (5, 0.5, False)
    assert found["task"].model == "mlp"


@pytest.mark.parametrize("command", [c.__name__.replace("_", "-") for c in COMMANDS])
def test_every_command_reads_one_and_refuses_unknown_keys(command, capsys):
    Path("a.toml").write_text("colour = 3")
    assert main([command, "--config", "a.toml"]) == 2
    shown = capsys.readouterr().err
    assert f"threepass {command}: a.toml: unknown key 'colour'" in shown


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epohs = 3", "a.toml: unknown key 'epohs'; did you mean 'epochs'?"),
        ("given = 3", "a.toml: unknown key 'given'"),
        ("epochs = ", "a.toml is not TOML"),
        ('epochs = "many"', '"many"'),
        ("alpha = 3", "alpha must be a number in [0, 1]"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text, words, capsys):
    Path("a.toml").write_text(text)
    assert main(["train", "--config", "a.toml"]) == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "missing.toml"], "--config: cannot read missing.toml"),
        (["--config"], "--config needs the name of a file"),
        (["--config", "a.toml", "--config", "b.toml"], "--config was given more than once"),
    ],
)
def test_a_file_that_is_not_there(arguments, words, capsys):
    assert main(["train", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_run_prints_and_saves_its_settings_and_they_make_the_same_run(capsys):
    Path("a.toml").write_text("epochs = 1\nbatch_size = 512\nprobe_every = 0\nmodel_options = {sizes = [64, 8, 10]}")
    assert main(["train", "--config", "a.toml", "--name", "first"]) == 0
    shown = capsys.readouterr().err.partition("epoch 1/1")[0]
    printed, saved = tomllib.loads(shown), json.loads(Path("runs/first/run.json").read_text())
    everything = {name: saved[name] for name in ("data", "model", "model_options", "device")} | saved["config"]
    assert printed == {name: value for name, value in everything.items() if value is not None}
    Path("b.toml").write_text(shown)
    assert main(["train", "--config", "b.toml", "--name", "second"]) == 0
    first, second = (Path(f"runs/{name}/best.safetensors").read_bytes() for name in ("first", "second"))
    weights = len(first) // 2
    assert first[-weights:] == second[-weights:]


def test_a_comparison_prints_and_saves_its_settings_at_its_start(capsys, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("threepass.study.compare._train", interrupted)
    Path("a.yaml").write_text(
        "epochs: 1\nbatch_size: 512\nprobe_every: 0\nmodel_options: {sizes: [64, 8, 10]}\nseeds: 1\nstrengths: [0.1]"
    )
    assert main(["compare", "--config", "a.yaml", "--name", "both"]) == 130
    shown = capsys.readouterr().err
    saved = json.loads(Path("runs/both/compare.json").read_text())
    assert "# common settings, saved in runs/both/compare.json" in shown
    by_method = {name for variant in saved["variants"] for name in variant["settings"]} | {"reduction", "seed"}
    common = {name: v for name, v in saved["config"].items() if v is not None and name not in by_method}
    assert tomllib.loads(shown) == common
    assert saved["config"]["batch_size"] == 512
    assert [variant["name"] for variant in saved["variants"]] == ["two passes", "strength 0.1, exact"]


def test_toml_of_nested_values():
    values = {"a": {"b": [1, 2.5], "c d": 'x"y'}, "e": True, "f": 1e-05}
    assert tomllib.loads(as_toml(values)) == values
