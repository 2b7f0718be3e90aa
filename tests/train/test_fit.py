"""fit beyond images in memory: loaders, regression, tokens, losses and metrics of one's own; what it reports."""

import json
import random
from collections import UserDict

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate
from training import assert_same, data, simple

import threepass
from threepass.cli import main
from threepass.errors import LossGrowthWarning, LossReductionWarning
from threepass.models import mlp
from threepass.train.config import Config
from threepass.train.data import DataError, from_dataset, load
from threepass.train.loop import fit
from threepass.train.loss_watch import LossWatch, bad_values


class Noisy(Dataset):
    """Random transforms of three kinds."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        noise = torch.randn(5) + np.random.randn() + random.random()
        return torch.linspace(i / 40, 1, 5) + 0.1 * noise, i % 3


def loaders(workers=0, **options):
    train = DataLoader(Noisy(), 8, shuffle=True, num_workers=workers, **options)
    return train, DataLoader(Noisy(), 20)


def small(outputs=3):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, outputs))


@pytest.mark.parametrize("own_generator", [False, True])
def test_loaders_resume_bit_by_bit(own_generator, tmp_path):
    settings = {"epochs": 2, "strength": 0.1, "lr": 0.05}

    def made():
        return loaders(generator=torch.Generator()) if own_generator else loaders()

    def kill(epoch, done):
        if (epoch, done) == (1, 3):
            raise KeyboardInterrupt

    torch.manual_seed(5)
    whole = fit(small(), made(), **settings)
    torch.manual_seed(5)
    with pytest.raises(KeyboardInterrupt):
        fit(small(), made(), folder=tmp_path, after_step=kill, **settings)
    torch.manual_seed(99)
    random.seed(99)
    assert_same(fit(small(), made(), folder=tmp_path, resume=True), whole)
    assert whole.history[0]["train_loss"] != whole.history[1]["train_loss"]


def test_a_loader_gives_what_the_data_in_memory_gives():
    x, y = torch.randn(40, 5), torch.arange(40) % 3
    part = TensorDataset(x, y)
    model = small().eval()
    r = threepass.three_pass(model, F.cross_entropy, x, y, alpha=0.5)
    result = fit(model, (DataLoader(part, 40), DataLoader(part, 7)), epochs=1, alpha=0.5, lr=1e-9, probe_every=0)
    metrics = result.history[0]
    assert metrics["val_loss"] == pytest.approx(r.loss.item(), rel=1e-5)
    assert metrics["val_input_loss"] == pytest.approx(r.input_loss.item(), rel=1e-5)
    assert metrics["val_error"] == pytest.approx((r.output.argmax(1) != y).float().mean().item())


def test_loaders_with_compiled_steps(graph_only, capsys):
    x, y = torch.randn(40, 5).double(), torch.arange(40) % 3
    pair = DataLoader(TensorDataset(x, y), 10), DataLoader(TensorDataset(x, y), 10)

    def model():
        return nn.Sequential(*[m for m in small().double() if not isinstance(m, nn.Dropout)])

    trained = fit(model(), pair, epochs=2, alpha=0.5, alpha_end=0.2, compile="require")
    got, (first, second) = trained.model, trained.history
    assert 0 < first["check_seconds"] < first["compile_seconds"] < first["seconds"]
    assert first["step_seconds"] < first["compile_seconds"]
    assert "compile_seconds" not in second
    assert "compiling paper mode, " in capsys.readouterr().err
    expected = fit(model(), pair, epochs=2, alpha=0.5, alpha_end=0.2).model
    for p, q in zip(got.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def stream():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([(torch.zeros(5), 0)])

    return DataLoader(Stream())


@pytest.mark.parametrize(
    ("made", "settings", "error", "message"),
    [
        (lambda: loaders()[0], {}, TypeError, r"a pair of torch DataLoaders, \(train_loader, val_loader\); got DataLo"),
        (lambda: (stream(), stream()), {}, DataError, "the training loader has no length"),
        (lambda: (DataLoader([torch.zeros(5)]),) * 2, {}, DataError, "must yield pairs .x, y., got Tensor: use a col"),
        (loaders, {"augment": True}, ValueError, "augment=True works only with data in memory"),
        (loaders, {"update": "epoch"}, ValueError, 'update="epoch" works only with data in memory'),
        (loaders, {"batch_size": 64}, ValueError, r"batch_size=64 differs from the training loader's \(8\)"),
        (
            lambda: (DataLoader(TensorDataset(torch.rand(4, 5), torch.arange(4)), 4),) * 2,
            {},
            ValueError,
            "outputs, but",
        ),
        (
            lambda: (DataLoader(TensorDataset(torch.rand(4, 6), torch.arange(4))),) * 2,
            {},
            ValueError,
            "the model fails on a",
        ),
    ],
)
def test_loaders_that_do_not_fit(made, settings, error, message):
    with pytest.raises(error, match=message):
        fit(small(), made(), **settings)


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_regression(shape):
    torch.manual_seed(0)
    x = torch.randn(120, 5)
    y = x[:, 0].mul(2).add(0.5) if shape == () else x[:, : shape[0]] * 2 + 0.5
    made = from_dataset(TensorDataset(x[:80], y[:80]), TensorDataset(x[80:], y[80:]))
    result = fit(small(shape[0] if shape else 1), made, epochs=30, batch_size=20, strength=1e-4, lr=0.02)
    model, first, last = result.model.eval(), result.history[0], result.history[-1]
    assert last["train_loss"] < 0.2 * first["train_loss"]
    assert "val_error" not in last
    mean, std = torch.tensor(made.mean), torch.tensor(made.std)
    out = model((x[80:] - mean) / std).reshape(y[80:].shape)
    assert last["val_loss"] == pytest.approx(F.mse_loss(out, y[80:]).item(), rel=1e-4)
    assert last["val_absolute_error"] == pytest.approx((out - y[80:]).abs().mean().item(), rel=1e-4)
    with pytest.raises(ValueError, match=r"output has shape \(20, 10\) and the targets \(20.*integer labels"):
        fit(small(10), made, batch_size=20)


def test_regression_by_the_default_loss_has_a_learning_rate_of_its_own(capsys, tmp_path):
    x = torch.randn(200, 5)
    pair = TensorDataset(x, x[:, :1] * 2)
    settings = {"epochs": 2, "batch_size": 20, "alpha": 1.0}
    for given in (from_dataset(pair, pair), (DataLoader(pair, 20), DataLoader(pair, 20))):
        result = fit(mlp(5, 512, 1), given, **settings)
        assert result.config.lr == 0.01
        assert "lr 0.01, the default for regression by the mean squared error with SGD" in capsys.readouterr().err
        assert result.history[-1]["lr"] == 0.01
        assert fit(mlp(5, 512, 1), given, lr=0.001, **settings).config.lr == 0.001
    assert fit(mlp(5, 8, 1), given, lr=0.1, **settings).config.lr == 0.1, "as given, although it is the usual default"
    assert fit(mlp(5, 8, 1), given, loss_fn=F.l1_loss, **settings).config.lr == 0.1
    for squared_error in (F.mse_loss, nn.MSELoss()):
        assert fit(mlp(5, 8, 1), given, loss_fn=squared_error, **settings).config.lr == 0.01
    assert fit(mlp(5, 8, 1), given, optimizer="adam", **settings).config.lr == 0.001
    fit(mlp(5, 8, 1), given, folder=tmp_path, **settings)
    assert fit(mlp(5, 8, 1), given, Config(**settings), folder=tmp_path, resume=True, epochs=3).config.lr == 0.01


@pytest.mark.parametrize("size", [100.0, 0.01])
def test_targets_of_another_scale_are_said(size):
    x = torch.randn(40, 5)
    pair = TensorDataset(x, size * x[:, :1])
    for given in (from_dataset(pair, pair), (DataLoader(pair, 20), DataLoader(pair, 20))):
        with pytest.warns(UserWarning, match=r"root mean square of .*: standardise them, \(y - mean\) / std") as caught:
            fit(mlp(5, 8, 1), given, epochs=1, lr=1e-6)
        assert [w.filename for w in caught] == [__file__]
    fit(mlp(5, 8, 1), given, epochs=1, lr=1e-6, loss_fn=F.l1_loss)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(12, 8), nn.Linear(8, 4)

    def forward(self, tokens, mask):
        return self.head(self.embedding(tokens) * mask[..., None])


def test_token_models():
    torch.manual_seed(0)
    tokens = torch.randint(0, 12, (60, 6))
    tags, mask = tokens % 4, torch.ones(60, 6, dtype=torch.bool)
    tags[:, -1], mask[:, -1] = -100, False
    examples = [({"tokens": t, "mask": m}, y) for t, m, y in zip(tokens, mask, tags, strict=True)]

    def collate(batch):  # to a mapping that is no dict, as tokenizers give it
        x, y = default_collate(batch)
        return UserDict(x), y

    pair = DataLoader(examples, 10, shuffle=True, collate_fn=collate), DataLoader(examples, 60)
    result = fit(Tagger(), pair, epochs=8, strength=0.01, lr=1.0)
    last = result.history[-1]
    assert last["val_error"] < 0.1
    x = {"tokens": tokens, "mask": mask}
    expected = threepass.three_pass(
        result.model, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), x, tags, strength=0.01
    )
    assert last["val_loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
    assert last["val_input_loss"] == pytest.approx(expected.input_loss.item(), rel=1e-5)


def test_a_loss_of_ones_own_with_its_metric():
    def hinge(output, y):
        return F.multi_margin_loss(output, y)

    def accuracy(output, y):
        return (output.argmax(1) == y).float().mean()

    result = fit(simple(), data(), epochs=2, batch_size=10, alpha=0.5, loss_fn=hinge, metric=accuracy)
    last = result.history[-1]
    assert 0 <= last["val_accuracy"] <= 1
    assert "val_error" not in last
    plain = fit(simple(), data(), epochs=2, batch_size=10, alpha=0.5, loss_fn=hinge).history[-1]
    assert last["val_accuracy"] == pytest.approx(1 - plain["val_error"])
    assert last["train_accuracy"] == pytest.approx(1 - plain["train_error"])
    with pytest.raises(ValueError, match="metric 'metric' must return one number"):
        fit(simple(), data(), metric=lambda output, y: output.argmax(1) == y)
    with pytest.raises(ValueError, match="loss_fn must return a scalar"):
        fit(simple(), data(), loss_fn=nn.CrossEntropyLoss(reduction="none"))
    unnamed = fit(simple(), data(), epochs=1, batch_size=10, metric=lambda output, y: 0.25).history[-1]
    assert unnamed["val_metric"] == unnamed["train_metric"] == 0.25


def test_training_that_diverges_stops_at_the_step(tmp_path):
    with pytest.raises(threepass.DivergedError, match=r"training loss at step (\d+) \(epoch 1, batch") as raised:
        fit(simple(), data(), folder=tmp_path, epochs=3, batch_size=4, lr=1e20)
    assert raised.value.epoch == 1
    assert 2 <= raised.value.step <= 10
    (line,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert not np.isfinite(line["train_loss"])
    assert json.loads((tmp_path / "checkpoint" / "state.json").read_text())["position"] == [0, 0]
    result = fit(simple(), data(), epochs=2, batch_size=4, lr=1e20, keep_going=True)
    assert len(result.history) == 2


def test_a_first_loss_that_is_not_finite_is_no_divergence():
    model = simple()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(threepass.DivergedError, match=r"step 1 .*before the first update. Look for NaN .* in the data"):
        fit(model, data(), epochs=1, batch_size=4)


def test_the_name_of_a_data_set_is_not_its_data():
    with pytest.raises(TypeError, match=r"not a name: pass threepass.train.data.load\('mnist'\)"):
        fit(simple(), "mnist")


def test_the_last_update_may_diverge_too():
    with pytest.raises(threepass.DivergedError, match="validation loss after epoch 1 is not finite") as raised:
        fit(simple(), data(), epochs=1, batch_size=40, lr=1e38)
    assert raised.value.step is None


def test_divergence_in_the_program(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wild = ["train", "--lr", "1e20", "--epochs", "2", "--name", "wild"]
    assert main(wild) == 3
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("threepass: the training loss at step")
    assert "--keep-going" in said
    assert main([*wild, "--keep-going", "--probe-every", "0"]) == 0


def test_one_line_an_epoch_without_a_terminal(capsys):
    fit(simple(), data(), epochs=3, batch_size=10, strength=0.1)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert "validation error" in lines[0]
    assert lines[0].endswith(" left")
    assert lines[2].endswith(" an epoch")


def test_the_bar_says_what_it_does(monkeypatch):
    pytest.importorskip("rich")
    import sys

    from threepass.train.progress import Progress

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(2, 5) as progress:
        described = progress._bar.tasks[0]
        progress.announce("compiling training steps, batches of 8")
        assert described.description == "compiling training steps, batches of 8 ..."
        progress.step(0, 5, torch.tensor(0.123))
        progress.epoch({"epoch": 1, "train_loss": 0.5, "val_error": 0.25, "val_input_loss": 1.0, "val_loss": 1.0})
        assert described.description == "epoch 1/2  loss 0.5000  validation error 25.00%, input loss 1"
        assert described.completed == 5


def test_compilation_is_announced(graph_only, capsys):
    fit(simple(), data(), epochs=1, batch_size=40, compile=True)
    said = capsys.readouterr().err
    assert "compiling training steps, batches of 40 ..." in said
    assert "compiling validation, batches of 20 ..." in said


def test_a_config_of_another_type():
    assert Config(lr=np.float64(0.1), epochs=np.int64(3)).epochs == 3


def test_a_summed_loss_is_said(capsys):
    with pytest.warns(LossReductionWarning, match="a sum over the batch, not a mean") as caught:
        fit(simple(), data(), epochs=1, batch_size=10, loss_fn=nn.CrossEntropyLoss(reduction="sum"), lr=1e-3)
    assert [w.filename for w in caught if w.category is LossReductionWarning] == [__file__]


@pytest.mark.parametrize("compile", [False, True])
def test_clipping(compile, graph_only):
    made, by_hand = data(), simple()
    result = fit(simple(), made, epochs=1, batch_size=40, alpha=0.5, lr=1.0, momentum=0.0, clip=0.01, compile=compile)
    moved = torch.cat([(p - q).flatten() for p, q in zip(result.model.parameters(), by_hand.parameters(), strict=True)])
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)
    free = fit(simple(), made, epochs=1, batch_size=40, alpha=0.5, lr=1.0, momentum=0.0, clip=1e6, compile=compile)
    plain = fit(simple(), made, epochs=1, batch_size=40, alpha=0.5, lr=1.0, momentum=0.0, compile=compile)
    for p, q in zip(free.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_the_best_epoch_is_kept(tmp_path):
    settings = {"epochs": 12, "batch_size": 10, "alpha": 1.0, "lr": 0.2}
    result = fit(simple(), data(), folder=tmp_path, **settings)
    best = result.best()
    assert best["val_loss"] == min(m["val_loss"] for m in result.history)
    assert best["epoch"] < 12, "validation gets worse on so little data"
    shorter = fit(simple(), data(), **settings | {"epochs": best["epoch"]})
    with safe_open(tmp_path / "best.safetensors", "pt") as file:
        assert file.metadata()["epoch"] == str(best["epoch"])
        for name, z in shorter.model.state_dict().items():
            assert torch.equal(file.get_tensor(name), z)


def test_stops_when_validation_gets_no_better(tmp_path):
    settings = {"batch_size": 10, "alpha": 1.0, "lr": 0.2, "patience": 3, "monitor": "val_error"}
    result = fit(simple(), data(), folder=tmp_path, epochs=60, **settings)
    stopped = len(result.history)
    assert stopped == result.best("val_error")["epoch"] + 3 < 60
    assert len(fit(simple(), data(), folder=tmp_path, resume=True).history) == stopped
    more = fit(simple(), data(), folder=tmp_path, resume=True, patience=0, epochs=stopped + 1)
    assert len(more.history) == stopped + 1
    with pytest.raises(ValueError, match="monitor must be one of val_loss, val_input_loss, val_error, train_loss"):
        fit(simple(), data(), monitor="val_accuracy")


def test_an_early_stop_leaves_its_last_epoch(tmp_path):
    """Where checkpoints are written more rarely than every epoch."""
    settings = {"batch_size": 10, "alpha": 1.0, "lr": 0.2, "patience": 3, "monitor": "val_error", "save_every": 50}
    result = fit(simple(), data(), folder=tmp_path, epochs=60, **settings)
    assert len(result.history) < 50
    for name, z in threepass.load_run(tmp_path, simple()).model.state_dict().items():
        assert torch.equal(z, result.model.state_dict()[name])


def test_the_highest_of_a_metric_of_which_more_is_better(tmp_path):
    def accuracy(output, y):
        return (output.argmax(1) == y).double().mean()

    settings = {"batch_size": 10, "alpha": 1.0, "lr": 0.2, "patience": 3, "monitor_mode": "max"}
    result = fit(
        simple(), data(), folder=tmp_path, metric=accuracy, epochs=40, monitor="val_accuracy", **settings
    )  # fmt: skip
    values = [m["val_accuracy"] for m in result.history]
    assert result.best()["epoch"] == 1 + values.index(max(values)) == len(values) - 3 < 37
    assert result.best("val_loss")["val_loss"] == min(m["val_loss"] for m in result.history)
    with safe_open(tmp_path / "best.safetensors", "pt") as file:
        assert file.metadata()["epoch"] == str(result.best()["epoch"])
    with pytest.raises(ValueError, match="monitor_mode must be one of min, max, got 'most'"):
        fit(simple(), data(), monitor_mode="most")


@pytest.mark.parametrize("kind", ["pixels", "features"])
def test_the_trained_model_takes_standardised_inputs(kind):
    made = data()
    if kind == "features":
        g = torch.Generator().manual_seed(0)
        x = 200 + 50 * torch.randn(60, 36, generator=g)
        y = (x[:, 0] + x[:, 1] > 400).long()
        pairs = TensorDataset(x, y)
        made = from_dataset(Subset(pairs, range(40)), Subset(pairs, range(40, 60)))
    result = fit(simple(), made, epochs=3, alpha=1.0, batch_size=10)
    with torch.no_grad():
        wrong = result.model(made.standardised(made.val.x)).argmax(1) != made.val.y
    assert wrong.double().mean().item() == pytest.approx(result.history[-1]["val_error"], abs=1e-12)


@pytest.mark.parametrize("update", ["batch", "epoch"])
def test_moving_average_by_hand(update, tmp_path):
    settings = {"epochs": 3, "batch_size": 10, "alpha": 0.5, "lr": 0.1, "update": update}
    model = simple()
    average = [p.detach().clone() for p in model.parameters()]
    updates = 0

    def follow(epoch, done):
        nonlocal updates
        if update == "batch":
            updates += 1
            decay = min(0.6, (1 + updates) / (10 + updates))
            for z, p in zip(average, model.parameters(), strict=True):
                z.lerp_(p.detach(), 1 - decay)

    fit(model, data(), after_step=follow, **settings)

    def kill(epoch, done):
        if (epoch, done) == (1, 2):
            raise KeyboardInterrupt

    whole = fit(simple(), data(), ema=0.6, **settings)
    with pytest.raises(KeyboardInterrupt):
        fit(simple(), data(), ema=0.6, folder=tmp_path, after_step=kill, **settings)
    assert_same(fit(simple(), data(), folder=tmp_path, resume=True), whole)
    if update == "batch":
        for p, z in zip(whole.model.parameters(), average, strict=True):
            torch.testing.assert_close(p.detach(), z)
    out = whole.model.eval()(((data().val.x.float() / 255) - 0.5) / 0.3)
    assert whole.history[-1]["val_loss"] == pytest.approx(F.cross_entropy(out, data().val.y).item(), rel=1e-5)


def test_an_alpha_that_shortens_steps_is_said_first(capsys):
    digits, settings = load("digits"), {"epochs": 1, "batch_size": 512, "probe_every": 0}
    fit(mlp(64, 8, 10), digits, **settings)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("alpha 0.1 multiplies backpropagation's gradient too: lr 0.1 acts like 0.01 in plain")
    for own in ({"strength": 0.1}, {"alpha": 1.0}, {"eta_over_alpha": True, "lr": 0.01}):
        fit(mlp(64, 8, 10), digits, **settings, **own)
        assert "multiplies" not in capsys.readouterr().err


def test_a_device_is_no_setting():
    with pytest.raises(ValueError, match="unknown setting 'device': training runs on the device of the model"):
        fit(mlp(64, 8, 10), load("digits"), device="cuda")


def batch_pairs(x, y):
    return DataLoader(TensorDataset(x, y), 8), DataLoader(TensorDataset(torch.randn(16, 5), y[:16]), 8)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_in_what_a_loader_gives_is_named_and_no_divergence(value):
    x, y = torch.randn(40, 5), torch.arange(40) % 3
    x[19, 2] = value
    message = r"step 3 \(epoch 1, batch 3\) is not finite: x contains NaN or infinity in 1 of the 8 samples of the"
    with pytest.raises(threepass.DivergedError, match=message) as raised:
        fit(small(), batch_pairs(x, y), epochs=2, strength=0.1, lr=0.01)
    assert raised.value.step == 3
    assert "diverged" not in str(raised.value)
    train, val = batch_pairs(torch.randn(40, 5), y)
    val.dataset.tensors[0][9:11] = value
    with pytest.raises(
        threepass.DivergedError, match=r"validation loss after epoch 1 is not finite: x contains .* 2 of the 8"
    ):
        fit(small(), (train, val), epochs=2, strength=0.1, lr=0.01)
    targets = torch.randn(40, 1)
    targets[3] = value
    with pytest.raises(
        threepass.DivergedError, match=r"step 1 .* is not finite: y contains NaN or infinity in 1 of the 8"
    ):
        fit(small(1), (DataLoader(TensorDataset(torch.randn(40, 5), targets), 8), batch_pairs(x, targets + 1)[1]))


def test_an_entry_with_nan_is_named_and_a_mask_is_not():
    mask = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    x = {"tokens": torch.ones(2, 2, dtype=torch.int64), "mask": mask, "features": (torch.ones(2), torch.ones(2, 3))}
    assert bad_values([(x, torch.arange(2))]) is None
    x["features"][1][0, 1] = torch.nan
    found = bad_values([(x, torch.arange(2))])
    assert found.startswith("x['features'][1] contains NaN or infinity in 1 of the 2 samples")


def test_a_loss_that_grows_is_said_before_it_is_not_finite():
    torch.manual_seed(0)
    x = torch.randn(400, 5)
    made = from_dataset(*2 * [TensorDataset(x, x[:, :1] * 2)])
    settings = {"epochs": 1, "batch_size": 4, "alpha": 1.0, "probe_every": 0}
    grown = r"grown from .* in the first step to .*lower the learning rate \(lr 0.05\)"
    with pytest.warns(LossGrowthWarning, match=grown) as caught, pytest.raises(threepass.DivergedError):
        fit(mlp(5, 512, 1), made, lr=0.05, **settings)
    assert [w.filename for w in caught] == [__file__]
    fit(mlp(5, 512, 1), made, lr=0.002, **settings)


def test_single_batches_with_a_large_loss_are_no_growth():
    watch = LossWatch()
    for loss in [1.0, 100.0, 0.5, 80.0, 0.4, 0.3] * 3:
        assert watch.is_finite(loss, 0.1)
    negative = LossWatch()
    for loss in [-1.0, 5.0, 20.0, 30.0, 40.0, 50.0]:
        assert negative.is_finite(loss, 0.1)
    assert not negative.is_finite(float("nan"), 0.1)
