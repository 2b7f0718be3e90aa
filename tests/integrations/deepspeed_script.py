"""Updates by DeepSpeed, alone and through Accelerate and the Trainer: `torchrun deepspeed_script.py FOLDER`.

Each rank writes the weights that it ends with to a file for each case.
"""

import os
import sys
import warnings
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"  # before the import

import deepspeed
import torch
from adopters import LR, Sentences, bert, lightning_module
from processes import leave_group
from ranks_script import OPTIONS, samples
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

import threepass

ACCUMULATED = 2
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
STAGES = (0, 1, 2)


def config(stage: int, **more) -> dict:
    return {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 8 // RANKS // ACCUMULATED,
        "gradient_accumulation_steps": ACCUMULATED, "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0, **more,
    }  # fmt: skip


def net() -> nn.Module:
    return lightning_module(dictionary=False).net.float()


def micro_batches() -> DataLoader:
    """For this rank: two batches of eight samples, in parts for the ranks and the calls."""
    sampler = DistributedSampler(samples(), RANKS, int(os.environ["RANK"]), shuffle=False)
    return DataLoader(samples(), 8 // RANKS // ACCUMULATED, sampler=sampler)


def engine_of(model: nn.Module, stage: int, **more):
    optimizer = torch.optim.SGD(model.parameters(), LR)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage, **more))[0]


def by_engine(stage: int, compile: bool = False, **more) -> nn.Module:
    engine = engine_of(net(), stage, **more)
    step = threepass.ThreePass(engine, F.cross_entropy, **OPTIONS, batch_size=8, compile=compile and "require")
    for x, y in micro_batches():
        loss = step.loss(x.float(), y)
        engine.backward(loss)
        engine.step()
    assert step.result.grads.keys() == dict(engine.named_parameters()).keys()
    return engine.module


def by_accelerate() -> nn.Module:
    from accelerate import Accelerator, DeepSpeedPlugin

    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=ACCUMULATED)
    plugin.deepspeed_config |= config(2)
    accelerator, model = Accelerator(deepspeed_plugin=plugin), net()
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), LR))
    assert isinstance(wrapped, deepspeed.DeepSpeedEngine)
    step = threepass.ThreePass(wrapped, F.cross_entropy, **OPTIONS, batch_size=8)
    for x, y in micro_batches():
        with accelerator.accumulate(wrapped):
            accelerator.backward(step.loss(x.float(), y))
            optimizer.step()
            optimizer.zero_grad()
    return model


def by_hugging_face(folder: Path) -> nn.Module:
    import transformers
    from accelerate import PartialState
    from accelerate.state import AcceleratorState

    from threepass.integrations.hugging_face import ThreePassTrainer

    # Where there is no accelerator, Accelerate finds no backend by itself, and every rank would be alone: see the docs.
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    model = bert().float()
    args = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8 // RANKS // ACCUMULATED,
        gradient_accumulation_steps=ACCUMULATED, num_train_epochs=1, learning_rate=LR, lr_scheduler_type="constant",
        optim="sgd", max_grad_norm=0.0, accelerator_config={"use_configured_state": True}, report_to=[],
        save_strategy="no", disable_tqdm=True, train_sampling_strategy="sequential", deepspeed=config(2),
    )  # fmt: skip
    trainer = ThreePassTrainer(model=model, args=args, train_dataset=Sentences(16), three_pass=OPTIONS)
    assert args.world_size == RANKS
    trainer.train()
    assert isinstance(trainer.model_wrapped, deepspeed.DeepSpeedEngine)
    return model


def refused(folder: Path) -> None:
    """What a call of the step, and ZeRO stage 3, answer."""
    x, y = next(iter(micro_batches()))
    answers = []
    for stage in (2, 3):
        step = threepass.ThreePass(engine_of(net(), stage), F.cross_entropy, **OPTIONS)
        try:
            (step if stage == 2 else step.loss)(x.float(), y)
        except (TypeError, NotImplementedError) as error:
            answers.append(str(error))
    torch.save(answers, folder / f"refused-{os.environ['RANK']}.pt")


CASES = {f"stage {stage}": lambda folder, stage=stage: by_engine(stage) for stage in STAGES}
CASES["captured"] = lambda folder: by_engine(2, compile=True)
CASES["accelerate"] = lambda folder: by_accelerate()
CASES["hugging_face"] = by_hugging_face

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled first: a minute
    deepspeed.init_distributed("gloo")
    folder = Path(sys.argv[1])
    for name, train in CASES.items():
        weights = {n: p.detach() for n, p in train(folder).named_parameters()}
        torch.save(weights, folder / f"{name}-{os.environ['RANK']}.pt")
    refused(folder)
    leave_group()
