"""A run's folder alone is enough to use its model on raw inputs."""

import json

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from training import data, net, simple

import threepass
from threepass.cli import main
from threepass.train.data import Split, from_dataset, load
from threepass.train.loop import fit

SHORT = {"epochs": 3, "batch_size": 10, "strength": 0.1, "lr": 0.05, "probe_every": 0}


def accuracy(run, split: Split) -> float:
    return (run(split.x).argmax(1) == split.y).double().mean().item()


@pytest.mark.parametrize("model", ["mlp", "resnet8"])
def test_a_run_of_the_program_is_loaded_by_its_folder_alone(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = {"resnet8": ["--model-options", '{"width": 4}']}.get(model, [])
    assert main(["train", "--model", model, *options, "--epochs", "2", "--lr", "0.05", "--batch-size", "256"]) == 0
    digits = load("digits")
    for weights in ("last", "best"):
        run = threepass.load_run(f"runs/{model}-digits", weights=weights)
        assert not run.model.training
        assert run.classes == digits.classes
        metrics = tmp_path / "runs" / f"{model}-digits" / "metrics.jsonl"
        epochs = [json.loads(line) for line in metrics.read_text().splitlines()]
        epoch = epochs[-1] if weights == "last" else min(epochs, key=lambda m: m["val_loss"])
        assert 1 - accuracy(run, digits.val) == pytest.approx(epoch["val_error"])
        grey = digits.val.x[:, 0].numpy()
        assert torch.equal(run(grey), run(digits.val.x))


@pytest.mark.parametrize("settings", [{}, {"ema": 0.5}], ids=str)
def test_a_run_of_fit_gets_its_weights_into_a_model(settings, tmp_path):
    made = data()
    result = fit(net(), made, folder=tmp_path, mode="exact", **SHORT, **settings)
    run = threepass.load_run(tmp_path, net())
    expected = result.model.eval()((made.val.x.float() / 255 - 0.5) / 0.3)
    torch.testing.assert_close(run(made.val.x), expected)
    torch.testing.assert_close(run(made.val.x.float() / 255), expected)
    for wrong, message in [
        (made.val.x.long(), "x is torch.int64: pass pixels as uint8"),
        (made.val.x.float(), "floating-point pixels up to .*: pass uint8, or divide x by 255"),
        (made.val.x[:, :, :5], r"examples of shape \(1, 6, 6\), as in made; got \(20, 1, 5, 6\)"),
        (made.val.x[0, 0], r"got \(6, 6\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(wrong)


def test_features_and_targets(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(60, 4) * torch.tensor([1.0, 10.0, 0.1, 3.0]) + 5
    pair = TensorDataset(x, x[:, 1:3] / 10)
    fit(threepass.models.mlp(4, 8, 2), from_dataset(pair, pair), folder=tmp_path, **SHORT | {"lr": 0.001})
    run = threepass.load_run(tmp_path, threepass.models.mlp(4, 8, 2))
    assert (run.classes, run.inputs.outputs) == ((), 2)
    torch.testing.assert_close(run.standardised(x.numpy()).std(0, correction=0), torch.ones(4))
    torch.testing.assert_close(run(x.double().numpy()), run(x))
    assert run(x.round().long()).shape == (60, 2)
    assert len(repr(run)) < 300
    with pytest.raises(
        ValueError, match=r"x is uint8, and dataset has float32: convert x to its units, x.float\(\) or"
    ):
        run(x.to(torch.uint8))


def test_what_a_loader_gives_is_not_standardised(tmp_path):
    examples = [({"input": torch.randn(4) + 3}, i % 3) for i in range(20)]
    loader = DataLoader(examples, 10)
    result = fit(threepass.models.mlp(4, 8, 3), (loader, loader), folder=tmp_path, **SHORT | {"batch_size": 10})
    run = threepass.load_run(tmp_path, threepass.models.mlp(4, 8, 3))
    x = {"input": torch.randn(5, 4)}
    torch.testing.assert_close(run(x), result.model.eval()(**x))
    assert run.standardised(x) is x


def test_a_run_of_a_comparison(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    few = ["--epochs", "1", "--seeds", "1", "--strengths", "0.1", "--probe-every", "0"]
    assert main(["compare", "--model-options", '{"sizes": [64, 8, 10]}', *few]) == 0
    (folder,) = (tmp_path / "runs").glob("*/strength*/seed-0")
    run = threepass.load_run(folder, threepass.models.mlp(64, 8, 10))
    last = json.loads((folder / "result.json").read_text())["last"]
    assert 1 - accuracy(run, load("digits").val) == pytest.approx(last["val_error"])


def test_what_cannot_be_loaded(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no data\.json in"):
        threepass.load_run(tmp_path)
    fit(simple(), data(), folder=tmp_path, **SHORT)
    with pytest.raises(ValueError, match=r"has no run.json.*load_run\(folder, model\)"):
        threepass.load_run(tmp_path)
    with pytest.raises(ValueError, match=r"the checkpoint does not match the model: .*safetensors"):
        threepass.load_run(tmp_path, net())
    with pytest.raises(ValueError, match='weights must be "last" or "best"'):
        threepass.load_run(tmp_path, simple(), weights="newest")
    (tmp_path / "best.safetensors").write_bytes(b"garbage")
    with pytest.raises(ValueError, match=r"best\.safetensors is damaged"):
        threepass.load_run(tmp_path, simple(), weights="best")
    (tmp_path / "best.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"there are no weights at .*best.safetensors"):
        threepass.load_run(tmp_path, simple(), weights="best")
    (tmp_path / "data.json").write_text(json.dumps({"name": 3}))
    with pytest.raises(ValueError, match=r"data\.json: name: expected text, got 3"):
        threepass.load_run(tmp_path, simple())


def test_a_run_of_an_older_version_gets_the_file_when_it_is_resumed(tmp_path):
    fit(simple(), data(), folder=tmp_path, **SHORT)
    (tmp_path / "data.json").unlink()
    fit(simple(), data(), folder=tmp_path, resume=True, epochs=4)
    run = threepass.load_run(tmp_path, simple())
    assert np.isfinite(run(data().val.x).numpy()).all()
