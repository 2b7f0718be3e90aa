import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import threepass

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def step(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("benchmark_step", FOLDER / "step.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_methods_are_measured_and_written(step, tmp_path, capsys):
    out = tmp_path / "new" / "step.json"
    step.main(["--model", "plain20", "--batch", "2", "--rounds", "1", "--device", "cpu", "--out", str(out)])
    printed = capsys.readouterr().out
    report = json.loads(out.read_text())
    assert set(report) == {"config", "machine", "limit", "methods"}
    assert list(report["methods"]) == list(step.METHODS)
    for name, r in report["methods"].items():
        assert f"\n{name} " in printed
        assert min(r["ratio"], r["best_ratio"], r["peak_ratio"], r["median"]) > 0
    assert report["methods"]["plain"]["ratio"] == report["methods"]["plain"]["peak_ratio"] == 1


def test_limits_are_those_of_the_design_page(step):
    x = torch.randn(1, 3, 32, 32)
    assert step.limits(step.NETS["plain20"](), x)["paper"] == pytest.approx(1.34, abs=0.005)
    assert step.limits(step.NETS["mlp"](), x)["paper"] == pytest.approx(1.67, abs=0.005)


def test_a_method_that_fails_says_why_and_the_others_go_on(step, monkeypatch, capsys):
    def broken(model, x, y):
        raise RuntimeError("no kernel for this\nand more")

    monkeypatch.setattr(step, "METHODS", {"plain": step.plain, "broken": broken, "SAM": step.sam})
    report = step.main(["--model", "plain20", "--batch", "2", "--rounds", "1", "--device", "cpu"])
    assert report["methods"]["broken"] == {"fails": "no kernel for this"}
    assert report["methods"]["SAM"]["ratio"] > 0
    assert "fails: no kernel for this\n" in capsys.readouterr().out


def test_peak_memory_is_counted_to_the_byte(step):
    def two_at_once():
        for _ in range(3):
            a = torch.empty(1000)
            b = torch.empty(500)
            del a, b

    assert step.cpu_peak_bytes(two_at_once) == 6000


@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
@pytest.mark.parametrize("net", ["plain", "resnet18", "vit"])
def test_methods_compute_what_they_say(step, net, monkeypatch):
    import nets

    monkeypatch.setattr(step, "H", 1e-6)
    torch.manual_seed(0)
    sizes = {"plain": (8, 10, 4), "resnet18": (4,), "vit": (16, 2, 2)}
    model = {"plain": nets.plain, "resnet18": nets.resnet18, "vit": nets.ViT}[net](*sizes[net]).double()
    x, y = torch.randn(4, 3, 32, 32, dtype=torch.double), torch.randint(10, (4,))
    before = [p.detach().clone() for p in model.parameters()]
    grads = {name: list(f(model, x, y)) for name, f in step.METHODS.items()}
    torch.testing.assert_close([p.detach() for p in model.parameters()], before)
    torch.testing.assert_close(grads["exact"], grads["double backward"], rtol=1e-9, atol=1e-12)
    if net != "resnet18":  # where batch norm couples samples, a penalty on each one's loss is another thing
        options = {"alpha": step.ALPHA, "reduction": "sample", "mode": "exact"}
        limit = threepass.three_pass(model, F.cross_entropy, x, y, **options).grads
        limit = [limit[name] for name, _ in model.named_parameters()]
        torch.testing.assert_close(grads["finite differences"], limit, rtol=1e-3, atol=1e-6)
