"""`threepass train` under torchrun: two ranks train as one process does, to 1e-10 in float64.

Two processes, with the environment that torchrun gives them, run their commands; the tests compare the folders.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from close import assert_close
from processes import free_port
from safetensors.torch import load_file

import threepass
from threepass.cli import main

RANKS = 2
MODEL = '''
import atexit
import os
from pathlib import Path
from torch import nn

def note_threads():
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    Path("threads-" + os.environ["RANK"]).write_text("".join(names))

if "RANK" in os.environ:
    atexit.register(note_threads)

class Double(nn.Module):
    """A small net in float64; a rank can be made to end in the middle of the run."""
    def __init__(self, dropout=0.0, norm=False, last_call=None):
        super().__init__()
        middle = [nn.BatchNorm1d(16)] if norm else []
        self.net = nn.Sequential(nn.Linear(64, 16), *middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 10)).double()
        self.calls, self.last_call = 0, last_call

    def forward(self, x):
        if self.last_call is not None:
            self.calls += self.training
            if self.calls == self.last_call and os.environ.get("RANK") == "1":
                os._exit(13)
        return self.net(x.flatten(1).double())
'''
COMMON = {"model": "double:Double", "device": "cpu", "batch-size": 256, "lr": 0.1, "alpha": 0.5, "probe-every": 0}
EPOCH = {"mode": "exact", "update": "epoch", "reduction": "sample", "lr": 0.01, "clip": 0.5, "optimizer": "adamw"}
STRENGTH = {"alpha": None, "strength": 0.1, "penalty": "l1", "ema": 0.9}
RANDOM = {"model-options": '{"dropout": 0.5, "norm": true}'}


def new(name: str, **settings) -> list[str]:
    """The command for a new run; a setting that is None has no flag."""
    flags = {"name": name, **COMMON, **settings}
    given = {flag: value for flag, value in flags.items() if value is not None}
    return ["train", *(word for flag, value in given.items() for word in (f"--{flag}", str(value)))]


def resumed(name: str) -> list[str]:
    """The command that makes two epochs of a run of one."""
    return ["train", "--resume", f"runs/{name}", "--epochs", "2"]


# in this process, then by two ranks, then in this process again
BEFORE = [
    new("whole", epochs=2),
    new("one", epochs=1),
    new("epoch-1", epochs=2, **EPOCH),
    new("strength-1", epochs=1, **STRENGTH),
]
BY_TWO = [
    new("divided", epochs=2),
    resumed("one"),
    new("two", epochs=1),
    new("epoch-2", epochs=2, **EPOCH),
    new("strength-2", epochs=1, **STRENGTH),
    new("random", epochs=2, **RANDOM),
    new("random-parts", epochs=1, **RANDOM),
    resumed("random-parts"),
]
AFTER = [resumed("two")]


def work(rank: int, folder: str, ports: list[str]) -> None:
    os.chdir(folder)
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": str(RANKS)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    for command, port in zip(BY_TWO, ports, strict=True):
        os.environ["MASTER_PORT"] = port
        assert main([*command, "--debug"]) == 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "double.py").write_text(MODEL)
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        for command in BEFORE:
            assert main(command) == 0
        mp.spawn(work, (str(folder), [free_port() for _ in BY_TWO]), nprocs=RANKS)
        for command in AFTER:
            assert main(command) == 0
    return folder / "runs"


def weights(run: Path) -> dict[str, torch.Tensor]:
    found = load_file(run / "checkpoint" / "tensors.safetensors")
    return {name: z for name, z in found.items() if name.startswith(("model/", "optimizer/", "sum/average"))}


def metrics(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.endswith("seconds")} for row in rows]


@pytest.mark.parametrize(
    ("run", "whole"),
    [("divided", "whole"), ("one", "whole"), ("two", "whole"), ("epoch-2", "epoch-1"), ("strength-2", "strength-1")],
)
def test_two_ranks_train_as_one_process(runs, run, whole):
    assert_close(weights(runs / run), weights(runs / whole), 1e-10)
    for found, expected in zip(metrics(runs / run), metrics(runs / whole), strict=True):
        for name, value in expected.items():  # dl/dx has the format of the images, float32
            rel = 1e-6 if name in ("E_x", "train_input_loss", "val_input_loss") else 1e-10
            assert found[name] == pytest.approx(value, rel=rel), name


def test_one_rank_writes(runs):
    """A second run of the same name would have a number."""
    assert {folder.name for folder in runs.iterdir()} == {
        command[2].removeprefix("runs/") for command in [*BEFORE, *BY_TWO]
    }


def test_each_rank_draws_its_own_numbers_and_a_resumed_run_the_same(runs):
    assert_close(weights(runs / "random-parts"), weights(runs / "random"), 0.0)
    assert metrics(runs / "random-parts") == metrics(runs / "random")


def torchrun(folder: Path, *given: str, every: float = 0.1) -> subprocess.CompletedProcess:
    """every: seconds between torchrun's looks at the ranks; when one has ended, it stops the others."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["--monitor-interval", str(every), "--master-port"]
    source = str(Path(threepass.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command += [free_port(), "-m", "threepass", *given]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_a_rank_that_dies_ends_the_job_and_the_run_goes_on(runs, monkeypatch):
    """Rank 1 ends in the second epoch; one process goes on from the end of the first."""
    folder = runs.parent
    ended = torchrun(folder, *new("ended", epochs=2, **{"model-options": '{"last_call": 9}'}), every=10)
    assert ended.returncode != 0
    assert "threepass: another rank of this job has ended" in ended.stderr
    assert "threepass train --resume" in ended.stderr
    assert len(metrics(runs / "ended")) == 1
    monkeypatch.chdir(folder)
    assert main(["train", "--resume", "runs/ended"]) == 0
    assert_close(weights(runs / "ended"), weights(runs / "whole"), 1e-10)


def test_no_thread_of_gloo_is_left_when_python_exits(runs):
    """One that still releases a tensor would abort the process, and torchrun would take the run for a failure."""
    done = torchrun(runs.parent, *new("left", epochs=1))
    assert done.returncode == 0, done.stderr
    for rank in range(RANKS):
        threads = (runs.parent / f"threads-{rank}").read_text().split()
        assert threads
        assert not [name for name in threads if "gloo" in name]


def test_a_batch_smaller_than_the_ranks_says_so():
    from threepass.train.config import Config
    from threepass.train.data import load
    from threepass.train.ranks import Ranks
    from threepass.train.trainer import Trainer

    data = load("digits")
    model = threepass.models.mlp(64, 8, 10)
    size = len(data.train) - 1
    with pytest.raises(ValueError, match="a batch of 1 samples cannot be divided among 2 ranks"):
        Trainer(model, data, Config(batch_size=size), ranks=Ranks(0, 2))
    with pytest.raises(ValueError, match="sam is for one process"):
        Trainer(model, data, Config(sam=0.1, alpha=1.0), ranks=Ranks(0, 2))


@pytest.mark.slow
def test_torchrun_with_compiled_steps(runs):
    done = torchrun(runs.parent, *new("compiled", epochs=2, compile="require"))
    assert done.returncode == 0, done.stderr
    assert_close(weights(runs / "compiled"), weights(runs / "whole"), 1e-10)
