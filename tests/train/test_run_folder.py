"""A run's folder: never overwritten, held by one process, resumable from the start on; damaged files in one line."""

import json
import os
import platform
import resource
import signal
import threading

import pytest
import torch
from training import assert_same, data, simple

from threepass.cli import main
from threepass.train.config import Config
from threepass.train.folder import created, locked, new_folder
from threepass.train.loop import fit

SHORT = {"epochs": 2, "batch_size": 10, "alpha": 0.5, "lr": 0.05}


def test_a_run_is_not_overwritten(tmp_path):
    fit(simple(), data(), folder=tmp_path / "run", **SHORT)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(FileExistsError, match=r"run already contains a run: pass resume=True \(threepass train"):
        fit(simple(), data(), folder=tmp_path / "run", **SHORT)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_settings_replace_those_of_the_config():
    result = fit(simple(), data(), Config(epochs=1, batch_size=10, lr=0.05), epochs=3)
    assert len(result.history) == 3
    assert result.history[-1]["lr"] == 0.05
    with pytest.raises(ValueError, match="did you mean 'epochs'"):
        fit(simple(), data(), Config(), epoch=3)


def test_more_epochs_extend_a_run(tmp_path):
    fit(simple(), data(), folder=tmp_path, **SHORT)
    longer = fit(simple(), data(), folder=tmp_path, resume=True, epochs=4)
    assert_same(longer, fit(simple(), data(), **SHORT | {"epochs": 4}))
    with pytest.raises(ValueError, match="epochs is 3, but the run has already reached epoch 4"):
        fit(simple(), data(), folder=tmp_path, resume=True, epochs=3)


def test_a_schedule_that_is_stretched_is_said(tmp_path):
    fit(simple(), data(), folder=tmp_path, schedule="cosine", **SHORT)
    with pytest.warns(UserWarning, match="4 epochs instead of 2: schedule is recomputed .* jumps at epoch 3"):
        fit(simple(), data(), folder=tmp_path, resume=True, epochs=4)


def test_a_run_in_use_is_refused_with_its_process(tmp_path):
    fit(simple(), data(), folder=tmp_path, **SHORT)
    owner = f"in use by process {os.getpid()} on {platform.node()}"
    with locked(tmp_path), pytest.raises(BlockingIOError, match=owner):
        fit(simple(), data(), folder=tmp_path, resume=True)
    assert len(fit(simple(), data(), folder=tmp_path, resume=True).history) == 2


def test_starts_with_one_name_get_names_of_their_own(tmp_path):
    made = []
    threads = [threading.Thread(target=lambda: made.append(new_folder(tmp_path / "run"))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {path.name for path in made} == {"run", *(f"run-{i}" for i in range(2, 21))}


def test_killed_in_its_first_epoch_it_resumes_from_the_start(tmp_path):
    def kill(epoch, done):
        if done == 3:
            raise RuntimeError("killed")

    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match="killed"):
        fit(simple(), data(), folder=tmp_path / "run", after_step=kill, **SHORT)
    model = simple()
    torch.nn.init.zeros_(model[1].weight)
    resumed = fit(model, data(), folder=tmp_path / "run", resume=True)
    assert_same(resumed, fit(simple(), data(), **SHORT))


def test_a_folder_without_a_checkpoint_starts_anew_or_is_refused(tmp_path):
    assert len(fit(simple(), data(), folder=tmp_path, resume=True, **SHORT).history) == 2
    (tmp_path / "checkpoint" / "state.json").unlink()
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        fit(simple(), data(), folder=tmp_path, resume=True, **SHORT)


def test_sigterm_saves(tmp_path):
    def terminate(epoch, done):
        if (epoch, done) == (1, 2):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as stopped:
        fit(simple(), data(), folder=tmp_path, after_step=terminate, **SHORT)
    assert stopped.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert json.loads((tmp_path / "checkpoint" / "state.json").read_text())["position"] == [1, 2]
    assert_same(fit(simple(), data(), folder=tmp_path, resume=True), fit(simple(), data(), **SHORT))


def test_a_handler_of_the_users_stays(tmp_path):
    calls = []
    before = signal.signal(signal.SIGTERM, lambda *args: calls.append(args))
    try:
        fit(simple(), data(), after_step=lambda *at: signal.raise_signal(signal.SIGTERM), epochs=1, batch_size=40)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(calls) == 1


def test_a_second_ctrl_c_keeps_the_checkpoint_before(tmp_path):
    def press_twice(epoch, done):
        if epoch == 1:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(simple(), data(), folder=tmp_path, after_step=press_twice, **SHORT)
    assert json.loads((tmp_path / "checkpoint" / "state.json").read_text())["position"] == [1, 0]


def test_saves_inside_an_epoch(tmp_path):
    def kill(epoch, done):
        if (epoch, done) == (1, 3):
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fit(simple(), data(), folder=tmp_path, after_step=kill, save_minutes=1e-9, **SHORT)
    assert json.loads((tmp_path / "checkpoint" / "state.json").read_text())["position"] == [1, 2]
    expected = fit(simple(), data(), **SHORT)
    assert_same(fit(simple(), data(), folder=tmp_path, resume=True, save_minutes=10), expected)


def test_a_start_that_fails_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="no such model"), created(tmp_path / "a" / "run"):
        raise ValueError("no such model")
    assert not (tmp_path / "a" / "run").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="no such model"), created(tmp_path / "mine"):
        raise ValueError("no such model")
    assert (tmp_path / "mine").exists(), "a folder that was there before stays"


def write(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


DAMAGES = {
    "checkpoint/tensors.safetensors": [
        (lambda file: os.truncate(file, file.stat().st_size // 2), "is damaged or missing"),
        (lambda file: file.write_bytes(b""), "is damaged or missing"),
        (lambda file: file.unlink(), "is damaged or missing"),
    ],
    "checkpoint/state.json": [
        (lambda file: os.truncate(file, 100), "is damaged: it is not JSON"),
        (lambda file: file.write_bytes(b"\xff\xfe"), "is damaged: it is not JSON"),
        (lambda file: file.write_text("[]"), r"expected a JSON object, got \[\]"),
        (lambda file: file.write_text('{"format": 2}'), "lacks the key 'config'"),
        (lambda file: write(file, format="1"), "format: expected an integer, got '1'"),
        (lambda file: write(file, format=7), "written by another version"),
        (lambda file: write(file, position=[0.5, 1]), "position: expected an integer, got 0.5"),
        (lambda file: write(file, history={}), r"history: expected a list, got \{\}"),
        (lambda file: write(file, config={"lr": "fast"}), r"config: lr must be a number, got 'fast' \(str\)"),
    ],
    "run.json": [
        (lambda file: os.truncate(file, 20), "is damaged: it is not JSON"),
        (lambda file: write(file, model=3), "model: expected text, got 3"),
        (lambda file: write(file, init=["a"]), r"init: expected text or null, got \['a'\]"),
        (lambda file: write(file, config={"epochs": 2.5}), "config: epochs must be an integer, got 2.5"),
    ],
}


@pytest.mark.parametrize(
    ("name", "damage", "message"), [(name, *case) for name, cases in DAMAGES.items() for case in cases]
)
def test_damaged_files_in_one_line(name, damage, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = ["--model-options", '{"sizes": [64, 4, 10]}', "--batch-size", "1437", "--probe-every", "0"]
    assert main(["train", *sizes, "--epochs", "1", "--name", "one"]) == 0
    capsys.readouterr()
    damage(tmp_path / "runs" / "one" / name)
    assert main(["train", "--resume", "runs/one", "--epochs", "2"]) == 1
    with pytest.raises(ValueError, match=message) as raised:
        main(["train", "--resume", "runs/one", "--epochs", "2", "--debug"])
    assert name in str(raised.value) or "checkpoint: written by" in str(raised.value)
    assert capsys.readouterr().err == f"threepass: {raised.value}\n"


def test_a_full_disk_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        code = main(["train", "--epochs", "1", "--probe-every", "0"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "could not write the checkpoint runs/mlp-digits/checkpoint" in last
    assert "there is no previous checkpoint" in last
