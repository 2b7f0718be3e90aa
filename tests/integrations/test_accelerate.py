"""`ThreePass` in a loop of Accelerate: its updates are those of the same loop written out by hand."""

import pytest
import torch
from adopters import LR, parameters
from close import assert_close
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import threepass

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))


def schedule(calls: int) -> float:
    return 0.2 + 0.05 * calls


def micro_batches(dtype: torch.dtype) -> DataLoader:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(16, 5).to(dtype), torch.randint(4, (16,))), 4)


SCHEDULED = {"alpha": schedule, "every": 3, "batch_size": 8}


def with_accelerate(precision: str, epochs: int, folder, compile=False) -> nn.Module:
    """Goes on with what is in the folder, and leaves a checkpoint there; updates by two micro-batches, clipped."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # of other tests
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    dtype = torch.float64 if precision == "no" else torch.float32
    model = small_net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, micro_batches(dtype))
    step = threepass.ThreePass(wrapped, F.cross_entropy, **SCHEDULED, compile=compile)
    accelerator.register_for_checkpointing(step)
    if (folder / "0").exists():
        accelerator.load_state(folder / "0")
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward(step.loss(*batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.save_state(folder / "0")
    return model


def by_hand(precision: str, epochs: int) -> nn.Module:
    dtype = torch.float64 if precision == "no" else torch.float32
    model = small_net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    step = threepass.ThreePass(model, F.cross_entropy, **SCHEDULED)
    for _ in range(epochs):
        for i, batch in enumerate(micro_batches(dtype)):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                step(*batch)
            if i % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    return model


@pytest.mark.parametrize("compile", [False, "require"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision, compile, tmp_path, graph_only):
    """Two runs, the second from the checkpoint of the first, are one loop by hand."""
    with_accelerate(precision, 1, tmp_path, compile)
    model = with_accelerate(precision, 1, tmp_path, compile)
    expected = by_hand(precision, 2)
    assert_close(parameters(model), parameters(expected), 1e-12 if precision == "no" else 2e-3)
