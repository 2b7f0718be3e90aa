"""Lightning, Accelerate and Hugging Face's Trainer under torchrun: two ranks train as one process by hand does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from adopters import LR, Sentences, bert, lightning_module, parameters
from close import assert_close
from processes import free_port
from ranks_script import LIBRARIES, OPTIONS, samples
from torch.nn import functional as F
from torch.utils.data import DataLoader

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


def by_hand(library: str) -> dict:
    """The weights after an epoch of two batches of eight samples, in this process."""
    if library == "hugging_face":
        model, loss_fn = bert(), None
        batches = [(batch, None) for batch in DataLoader(Sentences(16), 8)]
    else:
        model, loss_fn = lightning_module(dictionary=False).net, F.cross_entropy
        batches = list(DataLoader(samples(), 8))
    optimizer = torch.optim.SGD(model.parameters(), LR)
    step = threepass.ThreePass(model, loss_fn, **OPTIONS)
    for x, y in batches:
        optimizer.zero_grad()
        step(x, y)
        optimizer.step()
    return parameters(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("library", LIBRARIES)
def test_two_ranks_train_as_one_process(folder, library):
    expected = by_hand(library)
    for rank in range(2):
        assert_close(torch.load(folder / f"{library}-{rank}.pt"), expected, 1e-10)
