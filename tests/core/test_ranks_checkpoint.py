"""torch.distributed.checkpoint: what two ranks save one process resumes, and back, with the weights of one run."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from close import assert_close
from processes import RANKS, spawned
from small_batches import batch, net
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import threepass

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to (save|load):UserWarning")
KINDS = ("ddp", "sharded")
FIRST, LAST = 3, 6  # steps before and after the checkpoint


class Run:
    """A model with its optimizer and step: every second step is a plain one, and alpha follows a schedule."""

    def __init__(self, kind: str = "one process"):
        self.model: nn.Module = net()
        if kind == "ddp":
            self.model = DistributedDataParallel(self.model)
        elif kind == "sharded":
            fully_shard(self.model, mesh=dist.init_device_mesh("cpu", (RANKS,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        alpha = lambda calls: 1 / (2 + calls)  # noqa: E731
        self.step = threepass.ThreePass(self.model, F.cross_entropy, alpha=alpha, mode="exact", every=2)

    def train(self, steps: int, x, y) -> "Run":
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.step(x, y)
            self.optimizer.step()
        return self

    def _state(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step.state_dict()}

    def save(self, folder: Path) -> None:
        dcp.save(self._state(), checkpoint_id=folder, no_dist=not dist.is_initialized())

    def load(self, folder: Path) -> "Run":
        state = self._state()
        dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step.load_state_dict(state["step"])
        return self

    def weights(self) -> dict:
        found = {n.removeprefix("module."): p.detach() for n, p in self.model.named_parameters()}
        return {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in found.items()}


class Work:
    """Saves after the first steps, and goes on from what one process saved after as many."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self, rank: int) -> dict:
        part = [z.chunk(RANKS)[rank] for z in batch()]
        for kind in KINDS:
            Run(kind).train(FIRST, *part).save(self.folder / kind)
        return {
            kind: Run(kind).load(self.folder / "one process").train(LAST - FIRST, *part).weights() for kind in KINDS
        }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    Run().train(FIRST, *batch()).save(folder / "one process")
    return folder, spawned(Work(folder), tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_resumes_what_two_ranks_saved(checkpoints, kind):
    folder, _ = checkpoints
    resumed = Run().load(folder / kind)
    assert resumed.step.calls == FIRST
    assert_close(resumed.train(LAST - FIRST, *batch()).weights(), Run().train(LAST, *batch()).weights(), 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_resume_what_one_process_saved(checkpoints, kind):
    _, ranks = checkpoints
    for rank in ranks:
        assert_close(rank[kind], Run().train(LAST, *batch()).weights(), 1e-10)
