"""The callback for Lightning: compiled steps, mixed precision, clipping, accumulation, checkpoints."""

import copy
from functools import partial

import lightning
import pytest
import torch
from adopters import LR, lightning_module, parameters
from close import assert_close
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import threepass
from threepass.integrations.lightning import ThreePassCallback

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
SIZE, ACCUMULATED, CLIP = 4, 2, 0.1


def alpha(calls: int) -> float:
    return 0.3 + 0.05 * (calls % 8)


OPTIONS = {"alpha": alpha, "mode": "exact", "every": 3, "batch_size": SIZE * ACCUMULATED}


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self.net(x)
        loss = F.cross_entropy(output, y)
        self.log("loss", loss, on_epoch=True, reduce_fx=torch.max)
        self.log_dict({"size": output.abs().mean(), "number": 3.0})
        return {"loss": loss, "output": output}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), LR, momentum=0.9)


class Seen(lightning.Callback):
    """What other callbacks see after every step."""

    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        logged = trainer.callback_metrics
        self.values.append([*map(float, (outputs["loss"], outputs["output"].sum(), logged["size"], logged["number"]))])


def samples() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(16, 5).double(), torch.randint(4, (16,)))


def trainer_of(folder, *callbacks, epochs=2, precision="64-true", **options) -> lightning.Trainer:
    return lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=[*callbacks], precision=precision,
        accumulate_grad_batches=ACCUMULATED, gradient_clip_val=CLIP, **options,
    )  # fmt: skip


def fit(module, folder, compile=False, data=None, **options):
    seen, callback = Seen(), ThreePassCallback(**OPTIONS, compile=compile)
    trainer = trainer_of(folder, callback, seen, **options)
    trainer.fit(module, DataLoader(data or samples(), SIZE))
    return trainer, callback, seen.values


def by_hand(epochs: int) -> dict:
    net = Module().net.double()
    optimizer = torch.optim.SGD(net.parameters(), LR, momentum=0.9)
    step = threepass.ThreePass(net, F.cross_entropy, **OPTIONS)
    for _ in range(epochs):
        for i, batch in enumerate(DataLoader(samples(), SIZE)):
            step(*batch)
            if i % ACCUMULATED == ACCUMULATED - 1:
                nn.utils.clip_grad_norm_(net.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
    return parameters(net)


@pytest.mark.parametrize("compile", [False, "require"])
def test_weights_and_logs_are_those_of_the_loop_by_hand(compile, tmp_path, graph_only):
    module = Module()
    trainer, callback, seen = fit(module, tmp_path, compile)
    assert_close(parameters(module.net), by_hand(2), 1e-12)
    _, _, expected = fit(Module(), tmp_path)
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected), rtol=1e-12, atol=0)
    assert trainer.callback_metrics["loss_epoch"] == pytest.approx(max(loss * ACCUMULATED for loss, *_ in seen[4:]))
    if compile:
        assert [entry.uses for entry in callback.step.compiled.programs.entries] == [3, 5]


def test_compiled_steps_in_mixed_precision(tmp_path, graph_only):
    data = TensorDataset(samples().tensors[0].float(), samples().tensors[1])
    eager, compiled = Module(), Module()
    fit(eager, tmp_path, data=data, precision="bf16-mixed")
    fit(compiled, tmp_path, "require", data=data, precision="bf16-mixed")
    assert_close(parameters(compiled), parameters(eager), 1e-3)


@pytest.mark.parametrize("compile", [False, "require"])
def test_a_resumed_fit_is_the_whole_fit(compile, tmp_path, graph_only):
    trainer, callback, _ = fit(Module().double(), tmp_path, compile)
    assert callback.state_dict() == {"calls": 8}
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    module, resumed = Module().double(), ThreePassCallback(**OPTIONS, compile=compile)
    trainer = trainer_of(tmp_path, resumed, epochs=4)
    trainer.fit(module, DataLoader(samples(), SIZE), ckpt_path=tmp_path / "half.ckpt")
    assert resumed.state_dict() == {"calls": 16}
    assert_close(parameters(module.net), by_hand(4), 1e-12)


def test_a_second_fit_of_a_trainer_goes_on(tmp_path):
    module = Module()
    trainer, callback, _ = fit(module, tmp_path)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, DataLoader(samples(), SIZE))
    assert callback.state_dict() == {"calls": 16}


class Reader(Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def training_step(self, batch, batch_idx):
        if (batch_idx if self.what == "batch_idx" else self.current_epoch) % 2:
            batch = [2 * batch[0], batch[1]]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("what", ["batch_idx", "self.trainer.current_epoch"])
def test_a_training_step_that_reads_what_changes_runs_eagerly(what, tmp_path, graph_only):
    eager, compiled = Reader(what), Reader(what)
    fit(eager, tmp_path)
    with pytest.warns(threepass.UncompiledWarning, match=f"training_step reads {what}, which may be different"):
        fit(compiled, tmp_path, True)
    assert_close(parameters(compiled), parameters(eager), 0.0)
    with pytest.raises(threepass.CaptureError, match=f"training_step reads {what}"):
        fit(Reader(what), tmp_path, "require")


def test_batches_of_several_sizes(tmp_path, graph_only):
    """Each has a program, because what is logged contains the size; the epoch's value is a mean over samples."""

    class Sized(Module):
        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(x))
            return loss

    def fitted(compile):
        module, callback = Sized(), ThreePassCallback(strength=0.1, compile=compile)
        trainer = trainer_of(tmp_path, callback, epochs=4)
        trainer.fit(module, DataLoader(samples(), 6))
        return module, callback, trainer.callback_metrics["loss"]

    (eager, _, expected), (module, callback, logged) = fitted(False), fitted("require")
    assert logged == pytest.approx(float(expected), rel=1e-12)
    assert_close(parameters(module), parameters(eager), 1e-12)
    assert len(callback.step.compiled.programs) == 2


def test_the_module_keeps_its_own_training_step(tmp_path):
    module = Module()
    own = module.training_step = partial(Module.training_step, module)
    fit(module, tmp_path)
    assert vars(module)["training_step"] is own


def test_a_module_wrapped_by_torch_compile_runs_eagerly(tmp_path):
    module = Module()
    with pytest.warns(threepass.UncompiledWarning, match="compile=True"):
        fit(torch.compile(module, backend="eager"), tmp_path)
    assert_close(parameters(module.net), by_hand(2), 1e-12)


def test_a_failed_fit_leaves_the_module_as_it_was(tmp_path):
    class Fails(Module):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("of the user's")

    module = Fails()
    with pytest.raises(RuntimeError, match="of the user's"):
        fit(module, tmp_path)
    assert "training_step" not in vars(module)
    assert "log" not in vars(module)


def test_a_scaler_is_refused():
    with pytest.raises(ValueError, match="leave scaler out"):
        ThreePassCallback(strength=0.1, scaler=torch.amp.GradScaler("cpu"))


def test_copies_of_a_callback(tmp_path):
    """Lightning's tuner copies callbacks."""
    _, callback, _ = fit(Module(), tmp_path)
    assert copy.deepcopy(callback).state_dict() == callback.state_dict()


def fit_with_lightning(module, tmp_path, callback=None, **options) -> None:
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
    module = lightning_module(False)
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="needs automatic optimization"):
        fit_with_lightning(module, tmp_path, ThreePassCallback(alpha=0.3))
