"""Loggers: what they get is what TensorBoard gets; W&B and MLflow with the real packages, offline."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import trained

import threepass
from threepass.integrations.loggers import MlflowLogger


class Kept:
    def __init__(self):
        self.rows = []

    def log(self, step, values):
        self.rows.append((step, dict(values)))


def test_a_logger_gets_every_step_and_epoch():
    kept = Kept()
    history = trained(kept, epochs=2).history
    assert [step for step, _ in kept.rows] == [1, 2, 3, 4, 5, 6]
    assert all({"train/loss", "train/input_loss", "train/lr"} <= values.keys() for _, values in kept.rows)
    for row, metrics in zip(kept.rows[2::3], history, strict=True):
        assert row[1]["val/loss"] == metrics["val_loss"]
        assert row[1]["epoch/E"] == metrics["E"]
    assert not any("val/loss" in kept.rows[i][1] for i in (0, 1, 3, 4))


def test_a_logger_and_tensorboard_get_the_same(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    kept = Kept()
    trained(kept, epochs=1, folder=tmp_path / "run")
    events = event_accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    written = {(name, e.step): e.value for name in events.Tags()["scalars"] for e in events.Scalars(name)}
    logged = {(name, step): value for step, values in kept.rows for name, value in values.items()}
    assert written == pytest.approx(logged, rel=1e-6)


def test_wandb_offline(tmp_path):
    """In a process of its own: W&B finishes writing when that ends."""
    pytest.importorskip("wandb")
    code = """
import wandb
from small_run import trained
from threepass.integrations.loggers import WandbLogger
with wandb.init(project="test") as run:
    print(trained(WandbLogger(run), epochs=1).history[-1]["val_loss"])
"""
    folders = [str(Path(threepass.__file__).parents[1]), str(Path(__file__).parent)]
    environment = os.environ | {"WANDB_MODE": "offline", "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    written = file.read_bytes()  # records hold names and values as text
    assert written.count(b"train/input_loss") >= 3
    assert b"val/loss" in written
    assert done.stdout.strip().encode() in written


@pytest.mark.filterwarnings("ignore")
def test_mlflow_with_a_store_of_files(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient((tmp_path / "store").as_uri())
    run = client.create_run(client.create_experiment("test"))
    history = trained(MlflowLogger(run, client), epochs=2).history
    written = client.get_metric_history(run.info.run_id, "val/loss")
    assert [(m.step, m.value) for m in written] == [(3, history[0]["val_loss"]), (6, history[1]["val_loss"])]


def test_mlflow_leaves_out_what_is_not_finite():
    class Client:
        def __init__(self):
            self.rows = []

        def log_metric(self, run_id, key, value, step):
            self.rows.append((run_id, key, value, step))

    class Run:
        class info:  # noqa: N801
            run_id = "7"

    client = Client()
    MlflowLogger(Run(), client).log(3, {"a": 1.0, "b": float("nan")})
    assert json.dumps(client.rows) == '[["7", "a", 1.0, 3]]'
