"""fit: Algorithm 1, schedules, checkpoints that go on as if nothing had happened, metrics."""

import dataclasses
import json
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from training import data, net, simple, without_times

import threepass
from threepass.train import checkpoint
from threepass.train.config import Config
from threepass.train.data import DataSet, Split
from threepass.train.loop import fit
from threepass.train.schedule import Schedule
from threepass.train.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
PARTS = ("train", "val")
RUNS = {
    "sgd": {"lr": 0.05, "augment": True},
    "adamw-exact-cosine": {"optimizer": "adamw", "lr": 0.01, "mode": "exact", "schedule": "cosine", "warmup": 1},
    "as-printed": {"update": "epoch", "reduction": "sample", "alpha": 0.9},
    "moving-alpha": {"alpha": 1.0, "alpha_end": 0.3, "every": 2, "schedule": "step", "weight_decay": 1e-3},
    "rmsprop-strength": {"optimizer": "RMSprop", "lr": 0.003, "strength": 0.1, "align_every": 2},
}


@pytest.mark.parametrize("name", RUNS)
def test_resuming_after_any_step_changes_no_bit(name, tmp_path):
    settings = {"epochs": 3, "batch_size": 16, **RUNS[name]}
    torch.manual_seed(5)
    whole = fit(net(), data(), **settings)
    for stop in [(0, 1), (0, 3), (1, 2), (2, 3)]:
        folder = tmp_path / f"{stop[0]}-{stop[1]}"

        def interrupt(epoch, done, stop=stop):
            if (epoch, done) == stop:
                raise KeyboardInterrupt

        torch.manual_seed(5)
        with pytest.raises(KeyboardInterrupt):
            fit(net(), data(), folder=folder, after_step=interrupt, **settings)
        torch.manual_seed(99)  # another process has other random states
        np.random.seed(99)
        model = net()
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        again = fit(model, data(), folder=folder, resume=True, **settings)
        for (key, z), other in zip(again.model.state_dict().items(), whole.model.state_dict().values(), strict=True):
            assert torch.equal(z, other), f"{key} after stopping at {stop}"
        assert [without_times(m) for m in again.history] == [without_times(m) for m in whole.history]


def test_algorithm_1_as_printed():
    """Sums over the set, one update an epoch, by hand: w <- w - eta (alpha sum dl_i/dw + (1 - alpha) sum dl_x,i/dw)."""
    made, eta, alpha = data(), 0.002, 0.7
    by_hand = simple()
    m = len(made.train.y)
    x = (made.train.x.float() / 255 - 0.5) / 0.3
    totals = []
    for _ in range(2):
        sums = {n: torch.zeros_like(p) for n, p in by_hand.named_parameters()}
        error = input_error = 0.0
        for i in range(m):
            r = threepass.three_pass(
                by_hand, F.cross_entropy, x[i : i + 1], made.train.y[i : i + 1], alpha=alpha, reduction="sample"
            )
            error, input_error = error + r.loss.item(), input_error + r.input_loss.item()
            for n, g in r.grads.items():
                sums[n] += g
        totals.append((error, input_error))
        with torch.no_grad():
            for n, p in by_hand.named_parameters():
                p -= eta * sums[n]
    settings = {"update": "epoch", "reduction": "sample", "alpha": alpha, "lr": eta * m, "momentum": 0.0}
    result = fit(simple(), made, epochs=2, batch_size=7, **settings)
    for p, q in zip(result.model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    assert (result.E, result.E_x) == pytest.approx(totals[-1], rel=1e-4)
    assert [m["E"] for m in result.history] == pytest.approx([t[0] for t in totals], rel=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_sam_by_hand(compiled, graph_only):
    """w <- w - lr dl/dw at w + rho g / |g|, in float64."""
    made, lr, rho = data(), 0.1, 0.3
    made = dataclasses.replace(made, **{k: Split(s.x.double() / 255, s.y) for k, s in vars(made).items() if k in PARTS})
    x, y = (made.train.x - 0.5) / 0.3, made.train.y
    by_hand = simple().double()
    parameters = list(by_hand.parameters())
    for _ in range(3):
        grads = torch.autograd.grad(F.cross_entropy(by_hand(x), y), parameters)
        length = torch.cat([g.flatten() for g in grads]).norm()
        with torch.no_grad():
            for p, g in zip(parameters, grads, strict=True):
                p += rho * g / length
        above = torch.autograd.grad(F.cross_entropy(by_hand(x), y), parameters)
        with torch.no_grad():
            for p, g, d in zip(parameters, grads, above, strict=True):
                p -= rho * g / length + lr * d
    settings = {"alpha": 1.0, "sam": rho, "lr": lr, "momentum": 0.0, "compile": compiled}
    result = fit(simple().double(), made, epochs=3, batch_size=40, **settings)
    for p, q in zip(result.model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["adam", "Rprop", "NAdam", "Adagrad"])
def test_optimizers_by_name(optimizer):
    result = fit(simple(), data(), epochs=4, batch_size=10, alpha=0.5, lr=0.01, optimizer=optimizer)
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]


@pytest.mark.parametrize("compiled", [False, True])
def test_penalties_by_name_and_by_function(compiled, graph_only):
    def l1(g):
        return g.flatten(1).abs().sum(1)

    def train(**settings):
        settings = {"epochs": 1, "batch_size": 16, "strength": 0.1, "mode": "exact", "lr": 0.05} | settings
        return fit(simple(), data(), compile="require" if compiled else False, **settings)

    default, named, own = train(), train(penalty="l1"), train(penalty=l1)
    assert without_times(named.history[0]) == pytest.approx(without_times(own.history[0]))
    assert named.history[0]["train_loss"] != pytest.approx(default.history[0]["train_loss"])
    val = data().val
    x = ((val.x.float() / 255 - 0.5) / 0.3).requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(own.model(x), val.y, reduction="sum"), x)
    assert own.history[0]["val_input_loss"] == pytest.approx(l1(g).mean().item(), rel=1e-4)


def test_stops_at_epsilon():
    result = fit(simple(), data(), epochs=50, batch_size=10, alpha=1.0, lr=0.1, epsilon=20.0)
    assert result.E <= 20
    assert all(m["E"] > 20 for m in result.history[:-1])
    assert len(result.history) < 50


def test_learns_and_writes_metrics(tmp_path):
    result = fit(simple(), data(), epochs=12, batch_size=10, alpha=0.5, folder=tmp_path / "run", align_every=4)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == result.history
    assert [m["epoch"] for m in lines] == list(range(1, 13))
    first, last = lines[0], lines[-1]
    assert last["train_loss"] < 0.7 * first["train_loss"]
    assert last["E"] == pytest.approx(40 * last["train_loss"])
    assert abs(last["grad_cosine"]) <= 1
    assert "alignment_cosine" in lines[3]
    assert "alignment_cosine" not in lines[2]
    assert last["E"] == result.E
    events = tmp_path / "run" / "tensorboard"
    assert scalars(events, "epoch/train_loss") == pytest.approx([m["train_loss"] for m in lines])
    assert scalars(events, "val/error") == pytest.approx([m["val_error"] for m in lines])
    assert len(scalars(events, "alignment/cosine")) == 3
    losses = torch.tensor(scalars(events, "train/loss")).view(12, 4)
    assert losses.mean(1).tolist() == pytest.approx([m["train_loss"] for m in lines], rel=1e-5)
    assert scalars(events, "train/lr") == pytest.approx([0.1] * 48)


def scalars(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload().Scalars(tag)
    assert [e.step for e in events] == sorted({e.step for e in events})
    return [e.value for e in events]


def test_validation_input_loss_is_the_per_sample_mean():
    made, model = data(), simple()
    trainer = Trainer(model, made, Config(batch_size=7))
    x = ((made.val.x.float() / 255 - 0.5) / 0.3).requires_grad_()
    (dx,) = torch.autograd.grad(F.cross_entropy(model(x), made.val.y, reduction="sum"), x)
    assert trainer.evaluate()["input_loss"] == pytest.approx(0.5 * dx.square().sum().item() / len(x), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "step", "milestones": (0.5, 0.75)}, [1, 1, 0.1, 0.01]),
        ({"schedule": "step", "milestones": (1, 3)}, [1, 0.1, 0.1, 0.01]),
        ({"schedule": "cosine"}, [1, 0.8535534, 0.5, 0.1464466]),
        ({"warmup": 2}, [0.5, 1, 1, 1]),
        ({"eta_over_alpha": True, "alpha": 0.25}, [4, 4, 4, 4]),
    ],
)
def test_learning_rates(settings, expected):
    schedule = Schedule(Config(epochs=4, lr=1.0, **settings), batches=1, samples=40)
    assert [schedule.lr(i) for i in range(4)] == pytest.approx(expected)


def test_ctrl_c_stops_after_the_step_and_saves(tmp_path, capsys):
    before = signal.getsignal(signal.SIGINT)

    def press(epoch, done):
        if (epoch, done) == (1, 2):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(simple(), data(), folder=tmp_path, epochs=5, batch_size=10, after_step=press)
    assert "resume=True" in capsys.readouterr().out
    assert json.loads((tmp_path / "checkpoint" / "state.json").read_text())["position"] == [1, 2]
    assert signal.getsignal(signal.SIGINT) is before
    assert len(fit(simple(), data(), folder=tmp_path, resume=True, epochs=5, batch_size=10).history) == 5


def test_a_crash_while_saving_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    settings = {"epochs": 2, "batch_size": 10}
    fit(simple(), data(), folder=tmp_path, **settings)
    good = (tmp_path / "checkpoint" / "tensors.safetensors").read_bytes()
    model = simple()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    original = Path.rename

    def crash(self, target):
        if self.name == "checkpoint.new":
            raise OSError("power cut")
        return original(self, target)

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(OSError, match="power cut"):
        checkpoint.save(tmp_path / "checkpoint", model, optimizer, {}, {})
    monkeypatch.undo()
    assert (checkpoint.find(tmp_path / "checkpoint") / "tensors.safetensors").read_bytes() == good
    assert len(fit(simple(), data(), folder=tmp_path, resume=True, **settings).history) == 2


def test_a_disk_that_fails_stops_the_run(tmp_path, monkeypatch):
    def full(path, packed):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "write", full)
    with pytest.raises(OSError, match="no space left"):
        fit(simple(), data(), folder=tmp_path, epochs=1, batch_size=10)


OPTIMIZER = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 1}, "unknown setting 'learning_rate'; did you mean 'lr'?"),
        ({"epoch": 3}, "did you mean 'epochs'"),
        ({"alpha": 2}, "alpha must be a number"),
        ({"schedule": "sine"}, "schedule must be one of constant, step, cosine"),
        ({"optimizer": "sgdx"}, "optimizer must be one of sgd, adam, adamw or a class of torch.optim"),
        ({"optimizer": "Rprop", "weight_decay": 0.1}, "'Rprop' has no weight decay"),
        ({"optimizer": "LBFGS"}, "fit does not support LBFGS"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"lr": 0}, "lr must be positive"),
        ({"eta_over_alpha": True, "strength": 1.0}, "no strength"),
        ({"alpha": 0.1, "strength": 1.0}, "not both"),
        ({"label_smoothing": 1}, "label_smoothing must be"),
        ({"label_smoothing": 0.1, "loss_fn": F.cross_entropy}, "label_smoothing applies only to the default"),
        ({"epochs": "3"}, r"epochs must be an integer, got '3' \(str\)"),
        ({"lr": True}, r"lr must be a number, got True \(bool\)"),
        ({"optimizer": OPTIMIZER}, r"optimizer must be text, got SGD \( Parameter Group 0 .* \.\.\. \(SGD\)$"),
        ({"milestones": 0.5}, "milestones must be a list of numbers, got 0.5"),
        ({"strength": "big"}, "strength must be a number or None, got 'big'"),
        ({"seed": -1}, "seed must not be negative"),
        ({"milestones": (5,)}, 'milestones needs schedule="step"'),
        ({"gamma": 0.2, "schedule": "cosine"}, 'gamma needs schedule="step"'),
        ({"schedule": "step", "milestones": (0.5, 5)}, "must all be fractions of the run"),
        ({"schedule": "step", "milestones": (100, 150)}, "first milestone is epoch 100 and the run has 10 epochs"),
        ({"optimizer": "adam", "momentum": 0.5}, "momentum is used by sgd alone"),
        ({"input_at": "nosuch"}, "input_at='nosuch' names no module of the model; it has: 0, 1, 2, 3"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        fit(simple(), data(), **settings)


def test_settings_may_be_replaced_in_another_process():
    for config in (Config(strength=0.3), Config(alpha=0.1)):
        assert pickle.loads(pickle.dumps(config)).with_settings({"epochs": 3}) == dataclasses.replace(config, epochs=3)


def test_resume_refuses_other_settings_and_missing_checkpoints(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run at"):
        fit(simple(), data(), folder=tmp_path / "none", resume=True)
    with pytest.raises(ValueError, match="resume=True needs folder="):
        fit(simple(), data(), resume=True)
    fit(simple(), data(), folder=tmp_path, epochs=1, batch_size=10)
    with pytest.raises(ValueError, match="cannot resume the run with other values of lr: use those it was"):
        fit(simple(), data(), folder=tmp_path, resume=True, epochs=2, batch_size=10, lr=0.2)


@pytest.mark.parametrize(
    "settings",
    [{"precision": "bf16"}, {"precision": "tf32"}, {"deterministic": True}, {"channels_last": True}],
    ids=str,
)
def test_numerics_are_the_runs_own(settings):
    before = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    result = fit(net(), data(), epochs=2, batch_size=10, alpha=0.5, lr=0.02, **settings)
    assert result.history[-1]["train_loss"] < 1.5
    assert all(p.dtype == torch.float32 for p in result.model.parameters())
    assert (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()) == before


SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.skipif(not (SHARED / "mnist").exists(), reason="the real MNIST files are not beside the checkout")
def test_mnist_in_one_epoch():
    from threepass.train.data import load

    mnist = load("mnist", SHARED / "mnist")
    mnist = dataclasses.replace(mnist, train=Split(mnist.train.x[:20_000], mnist.train.y[:20_000]))
    for alpha in (1.0, 0.8):
        torch.manual_seed(0)
        model = threepass.models.mlp(784, 512, 10)
        result = fit(model, mnist, epochs=1, alpha=alpha, lr=0.1, eta_over_alpha=True)
        assert result.history[0]["val_error"] < 0.08


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "cifar10-a").exists(), reason="the real CIFAR-10 is not beside the checkout")
def test_plain_20_learns_cifar_10(tmp_path):
    from threepass.train.data import load

    subprocess.run(
        [sys.executable, str(SHARED / "unpack.py"), str(tmp_path), "cifar10"], check=True, capture_output=True
    )
    cifar = load("cifar10", tmp_path)
    few = DataSet(
        Split(cifar.train.x[:9600], cifar.train.y[:9600]), Split(cifar.val.x[:1000], cifar.val.y[:1000]),
        cifar.mean, cifar.std, cifar.classes, "cifar10, the first 9,600",
    )  # fmt: skip
    for alpha in (1.0, 0.1):
        torch.manual_seed(0)
        model = threepass.models.plain(20)
        settings = {"batch_size": 64, "lr": 0.01, "eta_over_alpha": True, "augment": True, "channels_last": True}
        first, last = fit(model, few, epochs=2, alpha=alpha, **settings).history
        assert last["train_loss"] < first["train_loss"]
        assert last["val_error"] < 0.8  # chance is 0.9
