"""fit(compile=True): the numbers of eager training, step by step, from captured steps.

Most tests leave out Inductor, which takes seconds a program, and run the traced programs as they are. As on a GPU,
every captured step is warmed up before it is used, so that a change by the warm-up would show in the numbers.
"""

import json
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import data, net, simple, without_times

from threepass import CaptureError, UncompiledWarning
from threepass.cli import UsageError, main, parse
from threepass.compile import inductor
from threepass.compile.cuda_graph import WARM_UP
from threepass.train.config import Config
from threepass.train.data import DataSet, Split
from threepass.train.graph_capture import GraphCapture
from threepass.train.loop import fit
from threepass.train.steps import LOSSES
from threepass.train.validation import size_of_batches

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
RUNS = {
    "sgd": {"lr": 0.05, "schedule": "cosine", "warmup": 1, "weight_decay": 1e-3, "label_smoothing": 0.1},
    "moving-alpha": {"alpha": 1.0, "alpha_end": 0.0, "every": 2, "schedule": "step"},
    "adamw-exact": {"optimizer": "adamw", "lr": 0.01, "mode": "exact", "schedule": "cosine"},
    "as-printed": {"update": "epoch", "reduction": "sample", "alpha": 0.9},
    "rmsprop-strength": {"optimizer": "RMSprop", "lr": 0.003, "strength": 0.1},
}


def in_double() -> DataSet:
    made = data()
    train, val = (Split(split.x.double() / 255, split.y) for split in (made.train, made.val))
    return DataSet(train, val, made.mean, made.std, made.classes, made.name)


def normed() -> nn.Module:
    """No bias before the norm: its gradient is zero but for rounding, which Adam blows up to steps of full length."""
    torch.manual_seed(1)
    layers = [nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(144, 3))


@pytest.fixture
def traced(monkeypatch, graph_only):
    capture = GraphCapture.capture

    def warmed_up(self, function, counter, compiled=True):
        step = capture(self, function, counter, compiled)
        for _ in range(WARM_UP if step is not None else 0):
            with function.restore():
                step()
        return step

    monkeypatch.setattr(GraphCapture, "capture", warmed_up)


def assert_same_run(got, expected, tolerance: float) -> None:
    assert len(got.history) == len(expected.history)
    for mine, theirs in zip(got.history, expected.history, strict=True):
        assert without_times(mine) == pytest.approx(without_times(theirs), rel=tolerance, abs=tolerance)
    for (name, z), other in zip(got.model.state_dict().items(), expected.model.state_dict().values(), strict=True):
        torch.testing.assert_close(z, other, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("name", RUNS)
def test_the_same_numbers_as_eager(name, traced):
    settings = {"epochs": 3, "batch_size": 16, "augment": True, **RUNS[name]}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncompiledWarning)
        got = fit(normed().double(), in_double(), compile=True, **settings)
    assert_same_run(got, fit(normed().double(), in_double(), **settings), 1e-10)


@pytest.mark.parametrize("settings", [{"sam": 0.1, "alpha": 1.0}, {"mode": "exact", "penalty": "l1"}, *RUNS.values()])
def test_the_same_numbers_without_a_compiler(settings, monkeypatch):
    def compiled(program, inputs):
        raise AssertionError('compile="trace" called the compiler')

    monkeypatch.setattr(inductor, "compiled", compiled)
    settings = {"epochs": 2, "batch_size": 16, "augment": True, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncompiledWarning)
        got = fit(normed().double(), in_double(), compile="trace", **settings)
    assert_same_run(got, fit(normed().double(), in_double(), **settings), 1e-10)


class Checkpointed(nn.Sequential):
    """The second layer runs under activation checkpointing, or without."""

    def __init__(self, checkpointed: bool):
        torch.manual_seed(1)
        block = nn.Sequential(nn.Linear(36, 9), nn.Tanh(), nn.Dropout(0.4))
        super().__init__(nn.Flatten(), block, nn.Dropout(0.2), nn.Linear(9, 3))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self[0](x)
        a = checkpoint(self[1], a, use_reentrant=False) if self.checkpointed else self[1](a)
        return self[3](self[2](a))


@pytest.mark.parametrize("settings", [{"sam": 0.1, "alpha": 1.0}, {"mode": "exact", "strength": 0.1}])
def test_checkpointed_blocks_draw_the_masks_of_those_without_checkpoints(settings):
    settings = {"epochs": 1, "batch_size": 16, "compile": "trace", **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncompiledWarning)
        got, expected = (fit(Checkpointed(each).double(), in_double(), **settings) for each in (True, False))
    assert_same_run(got, expected, 1e-10)


def test_the_same_numbers_from_inductor():
    settings = {"epochs": 2, "batch_size": 20, "augment": True, "alpha": 0.8, "alpha_end": 0.3, **RUNS["sgd"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncompiledWarning)
        got = fit(simple().double(), in_double(), compile=True, **settings)
    assert_same_run(got, fit(simple().double(), in_double(), **settings), 1e-10)
    first, second = got.history
    assert 0 < first["compile_seconds"] < first["seconds"]
    assert first["step_seconds"] < first["compile_seconds"]
    assert "compile_seconds" not in second


@pytest.mark.parametrize("place", ["training", "validation"])
def test_a_wrong_input_loss_is_refused_however_small_it_is(place, monkeypatch):
    """A validation whose input loss was always 0 once passed, as a small entry in a vector of sums."""

    def sabotaged(program, inputs):
        def run(values):
            outputs = list(program.graph(*values))
            if (len(outputs) == len(LOSSES.names)) == (place == "validation"):
                outputs[1] = torch.zeros_like(outputs[1])
            return outputs

        return run

    monkeypatch.setattr(inductor, "compiled", sabotaged)
    model = simple()
    with torch.no_grad():
        model[3].weight.mul_(1e-3)
    with pytest.raises(CaptureError, match=r"the input loss, of shape \(\)"):
        fit(model, data(), compile="require", epochs=1, batch_size=20, alpha=0.5)


@pytest.mark.parametrize("name", RUNS)
def test_resuming_after_any_step_changes_no_bit(name, traced, tmp_path):
    settings = {"epochs": 2, "batch_size": 16, "channels_last": True, "compile": True, **RUNS[name]}
    torch.manual_seed(5)
    whole = fit(net(), data(), **settings)
    torch.manual_seed(5)
    for stop in [(0, 3), (1, 2)]:

        def interrupt(epoch, done, stop=stop):
            if (epoch, done) == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fit(net(), data(), folder=tmp_path / "run", resume=stop != (0, 3), after_step=interrupt, **settings)
        torch.manual_seed(99)
    assert_same_run(fit(net(), data(), folder=tmp_path / "run", resume=True, **settings), whole, 0.0)


class Branching(nn.Module):
    """Looks at its values, which a trace cannot."""

    def __init__(self):
        super().__init__()
        self.net = simple()

    def forward(self, x):
        return self.net(x) * (2 if x.mean().item() > 0 else 1)


def hooked() -> nn.Module:
    model = simple()
    model[1].weight.register_hook(lambda g: g * 0.5)
    return model


class Replacing(Branching):
    """Puts another tensor in a buffer's place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean().detach()
        return self.net(x - self.mean)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Branching, "a value is read out of a tensor"),
        (hooked, "has a hook on its gradient"),
        (Replacing, "replaces a buffer by another tensor"),
    ],
)
@pytest.mark.parametrize("update", ["batch", "epoch"])
def test_what_cannot_be_captured_runs_eagerly_and_says_so_once(make, reason, update, traced):
    settings = {"epochs": 2, "batch_size": 16, "update": update}
    with pytest.warns(UncompiledWarning, match=reason) as seen:
        got = fit(make().double(), in_double(), compile=True, **settings)
    assert len([w for w in seen if w.category is UncompiledWarning]) == 1
    assert_same_run(got, fit(make().double(), in_double(), **settings), 1e-10)


class Turned(nn.Module):
    """Has something of everything that people turn while they train."""

    def __init__(self):
        super().__init__()
        self.net, self.temperature = normed(), 1.0
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, x):
        return self.net(x) / self.temperature + self.offset


TURNS = {
    "freezing a layer": lambda m: m.net[0].requires_grad_(False),
    "freezing and thawing": lambda m: m.net[0].requires_grad_(not m.net[0].weight.requires_grad),
    "a hook on a module": lambda m: m.net[2].register_forward_hook(lambda module, args, out: out * 0.5),
    "another buffer": lambda m: setattr(m, "offset", m.offset + 0.3),
    "a number": lambda m: setattr(m, "temperature", m.temperature * 2),
    "a layer in eval mode": lambda m: m.net[1].eval(),
    "a parameter's data": lambda m: setattr(m.net[4].weight, "data", m.net[4].weight.data * 0.5),
    "another module": lambda m: setattr(m.net, "2", nn.Tanh()),
}


@pytest.mark.parametrize("update", ["batch", pytest.param("epoch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TURNS)
def test_what_changes_between_steps_is_noticed(name, update, traced):
    def run(compile):
        model = Turned().double()

        def turn(epoch, done):
            if done == 2:
                TURNS[name](model)

        common = {"epochs": 2, "batch_size": 16, "lr": 0.05, "weight_decay": 1e-3, "update": update}
        return fit(model, in_double(), compile=compile, after_step=turn, **common)

    assert_same_run(run("require"), run(False), 1e-10)


def test_a_hook_on_a_parameter_makes_later_steps_eager(traced):
    def run(compile):
        model = normed().double()

        def turn(epoch, done):
            if (epoch, done) == (0, 2):
                model[0].weight.register_hook(lambda g: g * 0.5)

        return fit(model, in_double(), compile=compile, after_step=turn, epochs=2, batch_size=16)

    with pytest.warns(UncompiledWarning, match="a parameter has a hook on its gradient") as seen:
        got = run(True)
    assert [w.filename for w in seen if w.category is UncompiledWarning] == [__file__]
    assert_same_run(got, run(False), 1e-10)
    with pytest.raises(CaptureError, match="a parameter has a hook on its gradient"):
        run("require")


def test_compile_on_the_command_line():
    def compile_of(*words):
        return parse(["train", *words])[1].arguments["config"].compile

    assert [compile_of(), compile_of("--compile")] == [False, True]
    for word in ("trace", "require"):
        assert compile_of("--compile", word) == Config.from_dict(Config(compile=word).to_dict()).compile == word
    with pytest.raises(UsageError, match="always"):
        parse(["train", "--compile", "always"])
    with pytest.raises(ValueError, match="compile must be True or False or 'trace' or 'require', got 2"):
        Config(compile=2)


def test_the_command_line_compiles(traced, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ["--model-options", '{"sizes": [64, 8, 10]}']
    assert main(["train", "--compile", "--epochs", "1", *sizes, "--name", "one"]) == 0
    (line,) = (tmp_path / "runs" / "one" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["compile_seconds"] > 0


def test_bf16(traced):
    settings = {"epochs": 3, "batch_size": 10, "alpha": 0.5, "lr": 0.02, "precision": "bf16"}
    got, expected = (fit(simple(), data(), compile=compile, **settings).history[-1] for compile in (True, False))
    assert all(got[key] == pytest.approx(expected[key], rel=0.05) for key in ("train_loss", "val_loss", "E_x"))


@pytest.mark.parametrize(
    ("samples", "numbers", "batch_size", "expected"),
    [(10_000, 3072, 128, 1000), (10, 3072, 128, 10), (50_000, 150_528, 64, 64), (2000, 64, 1500, 1000)],
)
def test_validation_batches_are_large_and_equal(samples, numbers, batch_size, expected):
    assert size_of_batches(samples, numbers, batch_size) == expected
