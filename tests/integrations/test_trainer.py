"""`ThreePassTrainer` with the options of transformers' Trainer: its updates are those of a loop by hand."""

import copy

import pytest
import torch
import transformers
from adopters import LR, Sentences, bert, parameters
from close import assert_close
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers.trainer_pt_utils import LabelSmoother

import threepass
from threepass.integrations.hugging_face import ThreePassTrainer

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::UserWarning",
    "ignore::FutureWarning",
    "ignore::threepass.NormalizationWarning",
)
SIZE, ACCUMULATED, CLIP = 2, 2, 0.5


def alpha(calls: int) -> float:
    return 0.3 + 0.05 * (calls % 8)


SCHEDULED = {"alpha": alpha, "every": 3}


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    config = transformers.GPT2Config(vocab_size=11, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
    return transformers.GPT2LMHeadModel(config).double()


class Texts(Sentences):
    """The labels are the tokens; the first ones are not counted."""

    def __getitem__(self, i: int) -> dict:
        labels = self.ids[i].clone()
        labels[: 1 + i % 3] = -100
        return {"input_ids": self.ids[i], "labels": labels}


def of_several_lengths() -> list:
    torch.manual_seed(2)
    ids = [torch.randint(2, 11, (3 + i // 2 % 4,)) for i in range(16)]
    return [{"input_ids": z, "attention_mask": torch.ones_like(z), "labels": i % 2} for i, z in enumerate(ids)]


def arguments(folder, **options) -> transformers.TrainingArguments:
    given = {
        "per_device_train_batch_size": SIZE, "gradient_accumulation_steps": ACCUMULATED, "num_train_epochs": 1,
        "learning_rate": LR, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": CLIP, "use_cpu": True,
        "report_to": [], "save_strategy": "no", "disable_tqdm": True, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    return transformers.TrainingArguments(output_dir=str(folder), **(given | options))


def by_hand(model: nn.Module, batches, loss_fn=None, without=(), **options) -> dict:
    """The weights after updates by two micro-batches each; a context for the calls may be among the options."""
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=options.pop("bf16", False))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LR)
    step = threepass.ThreePass(model.train(), loss_fn, batch_size=SIZE * ACCUMULATED, **options)
    for i, batch in enumerate(batches):
        with autocast:
            loss = step.loss({name: z for name, z in batch.items() if name not in without}, batch)
        (loss / ACCUMULATED).backward()
        if i % ACCUMULATED == ACCUMULATED - 1:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return parameters(model)


def batches_of(data: Dataset, epochs: int = 1) -> list:
    return [batch for _ in range(epochs) for batch in DataLoader(data, SIZE)]


def train(model, folder, data, three_pass, checkpoint=None, compute_loss_func=None, loss_fn=None, **options):
    trainer = ThreePassTrainer(
        model=model, args=arguments(folder, **options), train_dataset=data, eval_dataset=data, three_pass=three_pass,
        compute_loss_func=compute_loss_func, loss_fn=loss_fn,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


@pytest.mark.parametrize("options", [{"bf16": True}, {"gradient_checkpointing": True}], ids=str)
@pytest.mark.parametrize("compile", [False, "require"])
def test_options_of_the_trainer_that_change_the_forward(options, compile, tmp_path, graph_only):
    model = bert().float()
    expected = by_hand(copy.deepcopy(model), batches_of(Sentences()), bf16="bf16" in options, **SCHEDULED)
    train(model, tmp_path, Sentences(), SCHEDULED | {"compile": compile}, **options)
    assert_close(parameters(model), expected, 1e-2 if "bf16" in options else 1e-5)


def test_evaluation_in_between_changes_nothing(tmp_path):
    model = bert()
    expected = by_hand(copy.deepcopy(model), batches_of(Sentences()), **SCHEDULED)
    trainer = train(model, tmp_path, Sentences(), SCHEDULED, eval_strategy="steps", eval_steps=1)
    assert_close(parameters(model), expected, 1e-12)
    assert len([entry for entry in trainer.state.log_history if "eval_loss" in entry]) == 2


def test_a_resumed_run_is_the_whole_run(tmp_path):
    expected = by_hand(bert(), batches_of(Sentences(), 2), **SCHEDULED)
    train(bert(), tmp_path, Sentences(), SCHEDULED, save_strategy="steps", save_steps=1, max_steps=3)
    model = bert()
    trainer = train(model, tmp_path, Sentences(), SCHEDULED, tmp_path / "checkpoint-3", max_steps=4)
    assert trainer._step.calls == 8
    assert_close(parameters(model), expected, 1e-7)  # the Trainer's checkpoints
    trainer.train()  # anew: the Trainer's counters begin at 0 too
    assert trainer._step.calls == 8


def smoothed(output, batch):
    return LabelSmoother(0.2)(output, batch["labels"], shift_labels=True)


@pytest.mark.parametrize("compile", [False, pytest.param("require", marks=pytest.mark.slow)])
def test_label_smoothing(compile, tmp_path, graph_only):
    model = gpt2()
    expected = by_hand(copy.deepcopy(model), batches_of(Texts()), smoothed, ("labels",), strength=0.1)
    train(model, tmp_path, Texts(), {"strength": 0.1, "compile": compile}, label_smoothing_factor=0.2)
    assert_close(parameters(model), expected, 1e-7)  # the smoother has a sum in float32


def sum_over_items(output, labels, num_items_in_batch=None):
    logits, labels = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("compile", [False, "require"])
def test_compute_loss_func(compile, tmp_path, graph_only):
    """It gets the number of items of a micro-batch, so that it is the mean that the model itself returns."""
    model = gpt2()
    expected = by_hand(copy.deepcopy(model), batches_of(Texts()), **SCHEDULED)
    options = SCHEDULED | {"compile": compile}
    trainer = train(model, tmp_path, Texts(), options, compute_loss_func=sum_over_items)
    assert_close(parameters(model), expected, 1e-6)  # the model's own loss is in float32
    model.eval()
    with torch.no_grad():
        losses = [float(model(**batch).loss) for batch in DataLoader(Texts(), 8)]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def sum_of_logits(output, batch):
    return (output.logits.sum(1) - batch["labels"]).square().mean()


def test_evaluation_with_a_loss_fn(tmp_path):
    trainer = train(bert(), tmp_path, Sentences(), {"strength": 0.1}, loss_fn=sum_of_logits)
    batch = next(iter(DataLoader(Sentences(), 8)))
    with torch.no_grad():
        expected = sum_of_logits(trainer.model.eval()(**batch), batch)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.slow
def test_sentences_of_several_lengths(tmp_path, graph_only):
    """Grouped by length and padded; programs for some lengths, and a dynamic one."""
    weights = []
    for compile in (False, True):
        model = bert()
        trainer = ThreePassTrainer(
            model=model, args=arguments(tmp_path, train_sampling_strategy="group_by_length", num_train_epochs=3),
            train_dataset=of_several_lengths(), three_pass={"strength": 0.1, "compile": compile}, data_collator=padded,
        )  # fmt: skip
        trainer.train()
        weights.append(parameters(model))
    assert_close(weights[1], weights[0], 1e-10)
    assert len(trainer._step.compiled.programs) > 1


def padded(rows: list) -> dict:
    longest = max(len(row["input_ids"]) for row in rows)
    return {
        name: torch.stack([F.pad(row[name], (0, longest - len(row[name]))) for row in rows])
        for name in ("input_ids", "attention_mask")
    } | {"labels": torch.tensor([row["labels"] for row in rows])}


@pytest.mark.parametrize("compile", [False, "require"])
def test_lora(compile, tmp_path, graph_only):
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["query", "value"], init_lora_weights=False)
    model = peft.get_peft_model(bert(), config).double()
    expected = by_hand(copy.deepcopy(model), batches_of(Sentences()), **SCHEDULED)
    train(model, tmp_path, Sentences(), SCHEDULED | {"compile": compile})
    assert_close(parameters(model), expected, 1e-10)


def test_two_losses_are_refused(tmp_path):
    with pytest.raises(ValueError, match="pass only one of loss_fn, compute_loss_func"):
        train(bert(), tmp_path, Sentences(), {}, loss_fn=sum_of_logits, compute_loss_func=sum_over_items)


@pytest.mark.parametrize("options", [{"strength": 0.5, "mode": "exact"}, {"alpha": 0.3}], ids=str)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_hugging_face_trainer(options, accumulated, tmp_path):
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
    args = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match="the Trainer sets batch_size itself"):
        ThreePassTrainer(model=bert(), args=args, three_pass={"batch_size": 4})
