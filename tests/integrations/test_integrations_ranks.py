"""Lightning, Accelerate and Hugging Face's Trainer under torchrun: two ranks train as one process by hand does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from close import assert_close
from processes import free_port
from ranks_script import LIBRARIES, by_hand

import threepass

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("libraries")
    paths = [Path(threepass.__file__).parents[1], HERE.parent, HERE]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    command += [str(HERE / "ranks_script.py"), str(folder)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("library", LIBRARIES)
def test_two_ranks_train_as_one_process(folder, library):
    expected = by_hand(library)
    for rank in range(2):
        assert_close(torch.load(folder / f"{library}-{rank}.pt"), expected, 1e-10)
