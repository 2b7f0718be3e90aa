"""Adapters for other libraries' training loops: their updates are those of the same loop written out by hand."""

import copy

import pytest
import torch
from adopters import LR, Sentences, bert, lightning_module, parameters
from close import assert_close
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import threepass

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


def test_the_models_own_loss():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2).double()

        def forward(self, x, labels=None):
            logits = self.layer(x).tanh()
            return {"logits": logits} | ({} if labels is None else {"loss": F.cross_entropy(logits, labels)})

    torch.manual_seed(0)
    model, x, labels = Model(), torch.randn(4, 3).double(), torch.randint(2, (4,))
    ours = threepass.three_pass(model, None, {"x": x, "labels": labels}, mode="exact").grads
    theirs = threepass.three_pass(
        model, lambda out, y: F.cross_entropy(out["logits"], y), {"x": x}, labels, mode="exact"
    )
    assert_close(ours, theirs.grads, 1e-14)
    with pytest.raises(ValueError, match=r"contains none: pass a loss_fn, or .*labels"):
        threepass.three_pass(model, None, {"x": x})


def test_the_first_scalar_of_a_tuple_is_the_models_own_loss():
    model = bert()
    batch = next(iter(DataLoader(Sentences(), 8)))
    expected = threepass.three_pass(model, None, batch, alpha=0.3).grads
    assert_close(threepass.three_pass(model, None, batch | {"return_dict": False}, alpha=0.3).grads, expected, 1e-14)


# Hugging Face


def test_embeddings_that_require_grad_are_not_warned_of(recwarn):
    """As `enable_input_require_grads` makes them: the Trainer calls it for checkpointed models of peft."""
    model = bert()
    for p in model.bert.embeddings.parameters():
        p.requires_grad_(False)
    model.enable_input_require_grads()
    threepass.three_pass(model, None, next(iter(DataLoader(Sentences(), 8))), mode="exact")
    assert not [w for w in recwarn if "not parameters of the model" in str(w.message)]


@pytest.mark.parametrize("options", [{"strength": 0.5, "mode": "exact"}, {"alpha": 0.3}], ids=str)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_hugging_face_trainer(options, accumulated, tmp_path):
    import transformers

    from threepass.integrations.hugging_face import ThreePassTrainer

    model = bert()
    twin, data = copy.deepcopy(model), Sentences()
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4 // accumulated, gradient_accumulation_steps=accumulated,
        num_train_epochs=1, learning_rate=LR, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = ThreePassTrainer(model=model, args=args, train_dataset=data, eval_dataset=data, three_pass=options)
    trainer.train()
    optimizer = torch.optim.SGD(twin.parameters(), LR)
    step = threepass.ThreePass(twin, None, **options)
    for batch in DataLoader(data, 4):
        optimizer.zero_grad()
        step(batch)
        optimizer.step()
    assert_close(parameters(model), parameters(twin), 1e-10)
    model.eval()
    with torch.no_grad():
        whole = model(**next(iter(DataLoader(data, 8)))).loss
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(whole), rel=1e-6)


def test_what_the_hugging_face_trainer_refuses(tmp_path):
    import transformers

    from threepass.integrations.hugging_face import ThreePassTrainer

    args = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match="the Trainer sets batch_size itself"):
        ThreePassTrainer(model=bert(), args=args, three_pass={"batch_size": 4})


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


# Lightning


def fit_with_lightning(module, tmp_path, callback=None, **options) -> None:
    import lightning

    torch.manual_seed(1)
    data = TensorDataset(torch.randn(8, 5).double(), torch.randint(4, (8,)))
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=callback, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, 8 // options.get("accumulate_grad_batches", 1)))


@pytest.mark.parametrize("dictionary", [False, True])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_lightning_callback(dictionary, accumulated, tmp_path):
    from threepass.integrations.lightning import ThreePassCallback

    module = lightning_module(dictionary)
    twin = copy.deepcopy(module.net)
    callback = ThreePassCallback(alpha=0.3, mode="exact", batch_size=8 if accumulated > 1 else None)
    fit_with_lightning(module, tmp_path, callback, accumulate_grad_batches=accumulated)
    assert len(module.logged) == 2 * accumulated
    assert "training_step" not in vars(module)  # the module is as it was
    torch.manual_seed(1)
    x, y = torch.randn(8, 5).double(), torch.randint(4, (8,))
    optimizer = torch.optim.SGD(twin.parameters(), LR)
    for _ in range(2):
        optimizer.zero_grad()
        threepass.ThreePass(twin, F.cross_entropy, alpha=0.3, mode="exact")(x, y)
        optimizer.step()
    assert_close(parameters(module.net), parameters(twin), 1e-12)
    assert callback.state_dict() == {"calls": 2 * accumulated}


def test_lightning_with_manual_optimization_calls_the_step_itself(tmp_path):
    """`ThreePass` in `training_step`, called as in any loop or as a loss for `manual_backward`."""

    def manual(by_loss: bool):
        module = lightning_module(False)
        module.automatic_optimization = False
        step = threepass.ThreePass(module.net, F.cross_entropy, alpha=0.3, mode="exact")

        def training_step(batch, batch_idx):
            optimizer = module.optimizers()
            optimizer.zero_grad()
            if by_loss:
                module.manual_backward(step.loss(*batch))
            else:
                step(*batch)
            optimizer.step()

        module.training_step = training_step
        fit_with_lightning(module, tmp_path)
        return module

    called, by_loss = manual(False), manual(True)
    twin = lightning_module(False).net
    optimizer = torch.optim.SGD(twin.parameters(), LR)
    torch.manual_seed(1)
    x, y = torch.randn(8, 5).double(), torch.randint(4, (8,))
    for _ in range(2):
        optimizer.zero_grad()
        threepass.ThreePass(twin, F.cross_entropy, alpha=0.3, mode="exact")(x, y)
        optimizer.step()
    assert_close(parameters(called.net), parameters(twin), 1e-12)
    assert_close(parameters(by_loss.net), parameters(twin), 1e-12)


def test_lightning_with_manual_optimization_is_refused(tmp_path):
    from threepass.integrations.lightning import ThreePassCallback

    module = lightning_module(False)
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="needs automatic optimization"):
        fit_with_lightning(module, tmp_path, ThreePassCallback(alpha=0.3))
