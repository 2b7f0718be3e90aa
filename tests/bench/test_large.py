"""The large nets: small versions of them against double backward, and the suite that measures them."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from threepass import ThreePass, three_pass
from threepass.bench import execution, large, nets, tables
from threepass.bench.case import Case
from threepass.bench.execution import eager
from threepass.bench.limits import layers
from threepass.bench.methods import ALPHA, METHODS, weights
from threepass.compile.trace import trace
from threepass.core.engine import Task, run
from threepass.core.options import Options

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
SMALL = {name: replace(case, precision="float32", device="cpu") for name, case in large.CASES["cpu"].items()}
RATES = {"operations_per_second": 1e12, "bytes_per_second": 1e11}


def problem(name, checkpointing=False):
    model, (x, y, v) = replace(SMALL[name], checkpointing=checkpointing, threads=1).make()
    return model.double(), [x.double() if x.is_floating_point() else x, y, v]


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SMALL)
def test_small_versions_are_exact(name, checkpointing):
    """In float64: eager and captured exact steps against double backward, captured paper steps against eager ones."""
    model, (x, y, v) = problem(name, checkpointing)
    double = list(METHODS["double"](problem(name)[0], x, y, v))
    for method in ("exact", "paper"):
        expected = list(METHODS[method](model, x, y, v))
        if method == "exact":
            torch.testing.assert_close(expected, double, rtol=1e-10, atol=1e-13)
        options = Options(alpha=ALPHA, mode=method)

        def step(x, y, terms, options=options):
            grads = run(Task(model, F.cross_entropy, x, y), options, weights=(terms[0], terms[1])).grads
            return [grads[name] for name in weights(model)]

        inputs = [x, y, torch.tensor([options.back, options.third], dtype=torch.float64)]
        torch.testing.assert_close(trace(step, inputs)(*inputs), expected, rtol=1e-10, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("name", SMALL)
def test_small_versions_compiled(name, mode):
    model, (x, y, _) = problem(name, checkpointing=True)
    expected = three_pass(model, F.cross_entropy, x, y, mode=mode).grads
    found = ThreePass(model, F.cross_entropy, mode=mode, compile="require")(x, y).grads
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


def test_sizes_are_those_of_the_published_models():
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in nets.by_name(c.model).parameters()) for name, c in SMALL.items()}
    assert sizes == {"resnet50": 25557032, "vit": 86566120, "gpt2": 124439808, "convnext": 28589128}


def test_limits_under_autocast_count_weights_as_weights():
    model, (x, *_) = replace(SMALL["vit"], precision="amp", threads=1).make()
    kinds = [z.kind for z in layers(model, x)]
    assert kinds.count("weight") == 10  # patches, four a block, and the scores
    assert kinds.count("pair") == 2


@pytest.mark.parametrize("most", [1, 3, 7, 16, 100, 1000])
def test_the_largest_batch_is_found_to_a_sixteenth(most):
    tried = []
    found = large.largest(lambda size: tried.append(size) or size <= most, 16)
    assert most - max(1, most // 16) < found <= most
    assert len(tried) < 16


@pytest.fixture
def without_compiling(monkeypatch):
    """Eager steps in place of compiled ones; counts those that are made."""
    made = []

    def form(how, method, model, batch):
        made.append(f"{method}, {how}")
        if method == "exact":
            raise RuntimeError("no kernel for this")
        return eager(method, model, batch)._replace(how=how, compile_seconds=2.0, parts={"check": 1.0})

    def makers(method, cuda):
        for how, _ in execution.makers(method, cuda):
            yield how, lambda *args, how=how: form(how, *args)

    monkeypatch.setattr(large, "makers", makers)
    monkeypatch.setattr(large, "ceilings", lambda device, dtype: RATES)
    return made


@pytest.mark.slow
def test_stages_write_at_once_and_repeat_nothing(without_compiling, tmp_path, monkeypatch):
    case = replace(SMALL["gpt2"], rounds=2, threads=1).settled()
    saved = []

    def stage(name, report):
        large.run(case, report, name, lambda report: saved.append(json.loads(json.dumps(report))))
        return saved[-1] if saved else report

    prepared = stage("prepare", {})
    assert without_compiling == ["plain, capture", "plain, torch.compile", "paper, ThreePass", "exact, ThreePass"]
    assert [len(report.get("rows", {})) for report in saved] == [0, 1, 2, 3, 4]
    assert prepared["exact_against_double_backward"] < 1e-5
    assert prepared["rows"]["exact, ThreePass"] == {"fails": "RuntimeError: no kernel for this"}
    assert prepared["rows"]["paper, ThreePass"]["difference"] == 0
    assert tables.large_nets(tmp_path) == "Not measured yet."

    stage("prepare", prepared)
    assert len(without_compiling) == 4
    timed = stage("time", prepared)
    assert len(without_compiling) == 7  # not the one that failed
    row = timed["rows"]["paper, ThreePass"]
    assert (row["compile_seconds"], row["again"]["compile_seconds"], len(row["seconds"])) == (2.0, 2.0, 2)
    assert row["kernels"][0]["ms"] >= row["kernels"][-1]["ms"]
    report = stage("largest", timed)
    assert report["largest_batch"] == {"form": "eager", "plain": 16, "paper": 16, "exact": 16}
    assert report["eager_peak_bytes"]["plain"] < report["eager_peak_bytes"]["exact"]

    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "cpu-gpt2.json").write_text(json.dumps(report))
    paper = row["median"] / min(timed["rows"][f"plain, {how}"]["median"] for how in ("capture", "torch.compile"))
    shown = tables.large_nets(tmp_path).splitlines()[2]
    assert f" | {paper:.2f}x | fails | " in shown
    assert shown.endswith(" | 3, 3, - | 16, 16, 16 |")


def test_a_net_that_is_not_in_the_suite(tmp_path):
    with pytest.raises(ValueError, match="unknown net 'lenet': choose from resnet50, vit, gpt2, convnext"):
        large.large(["lenet"], tmp_path, False, True, None, "cpu")


def test_no_time_left_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(large, "run_command", lambda *args: pytest.fail("started"))
    assert large.large([], tmp_path, False, False, 0.0, "cpu") == []


def test_what_cannot_be_made_says_what_to_do(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'threepass\[hugging-face\]'"):
        nets.by_name("gpt2")
    with pytest.raises(ValueError, match="checkpointing needs a model with its blocks"):
        Case("plain8", checkpointing=True, device="cpu").make()
