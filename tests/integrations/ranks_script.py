"""Two updates by Lightning, Accelerate and Hugging Face's Trainer, for two ranks: `torchrun ranks_script.py FOLDER`.

Each rank writes the weights that it ends with to a file for each library.
"""

import os
import sys
import warnings
from pathlib import Path

import torch
from adopters import LR, Sentences, bert, lightning_module, parameters
from processes import leave_group
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import threepass

OPTIONS = {"alpha": 0.3, "mode": "exact"}
SIZE = 4  # of a rank's batch


def samples() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(16, 5).double(), torch.randint(4, (16,)))


def by_lightning(folder: Path) -> nn.Module:
    import lightning

    from threepass.integrations.lightning import ThreePassCallback

    module = lightning_module(dictionary=False)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", strategy="ddp", devices=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[ThreePassCallback(**OPTIONS)], use_distributed_sampler=False,
    )  # fmt: skip
    sampler = DistributedSampler(samples(), 2, int(os.environ["RANK"]), shuffle=False)
    trainer.fit(module, DataLoader(samples(), SIZE, sampler=sampler))
    return module.net


def by_accelerate(folder: Path) -> nn.Module:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), lightning_module(dictionary=False).net
    optimizer = torch.optim.SGD(model.parameters(), LR)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(), SIZE))
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    step = threepass.ThreePass(wrapped, F.cross_entropy, **OPTIONS)
    for x, y in loader:
        accelerator.backward(step.loss(x, y))
        optimizer.step()
        optimizer.zero_grad()
    return model


def by_hugging_face(folder: Path) -> nn.Module:
    import transformers

    from threepass.integrations.hugging_face import ThreePassTrainer

    model = bert()
    args = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=SIZE // 2, gradient_accumulation_steps=2,
        num_train_epochs=1, learning_rate=LR, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0,
        use_cpu=True, ddp_backend="gloo", report_to=[], save_strategy="no", disable_tqdm=True,
        train_sampling_strategy="sequential", ddp_find_unused_parameters=False,
    )  # fmt: skip
    assert args.world_size == 2
    ThreePassTrainer(model=model, args=args, train_dataset=Sentences(16), three_pass=OPTIONS).train()
    return model


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


LIBRARIES = {"lightning": by_lightning, "accelerate": by_accelerate, "hugging_face": by_hugging_face}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for name, train in LIBRARIES.items():
        weights = {n: p.detach() for n, p in train(folder).named_parameters()}
        torch.save(weights, folder / f"{name}-{os.environ['RANK']}.pt")
    leave_group()
