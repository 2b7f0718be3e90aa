"""`threepass bench`: the methods compute what they say; counts, memory, limits, tables and processes."""

import copy
import json
import math
import os
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import threepass
from threepass import models
from threepass.bench import case as cases
from threepass.bench import execution, methods, page, suite, tables, timing
from threepass.bench.case import Case, run
from threepass.bench.limits import KERNELS, Layer, Work, layers, limits, operations, seconds, total, work
from threepass.bench.methods import METHODS, NAMES
from threepass.bench.scaling import SIZES, exponent, scaling
from threepass.bench.worker import from_json, to_json

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
RATES = {"operations_per_second": 1e12, "bytes_per_second": 1e11}
TINY = {
    "model": "mlp",
    "options": {"sizes": (12, 8, 10)},
    "batch": 4,
    "image": 2,
    "rounds": 2,
    "device": "cpu",
    "threads": 1,
}


@pytest.fixture
def fast_ceilings(monkeypatch):
    monkeypatch.setattr(cases, "ceilings", lambda device, dtype: RATES)


@pytest.fixture(scope="module")
def eager_report():
    """Every method, eagerly, as it is read back from a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "ceilings", lambda device, dtype: RATES)
        return json.loads(json.dumps(run(Case(**TINY, best=False))))


@pytest.mark.parametrize("net", ["plain8", "resnet18", "vit"])
def test_methods_compute_what_they_say(net, monkeypatch):
    monkeypatch.setattr(methods, "H", 1e-6)
    torch.manual_seed(0)
    options = {"plain8": {"width": 4}, "resnet18": {"width": 4}, "vit": {"width": 16, "depth": 2, "heads": 2}}[net]
    model = models.by_name(net, **options).double()
    x, y = torch.randn(4, 3, 32, 32).double(), torch.randint(10, (4,))
    v = F.normalize(torch.randn(4, 10).double(), dim=1)
    before = [p.detach().clone() for p in model.parameters()]
    grads = {name: list(f(model, x, y, v)) for name, f in METHODS.items()}
    torch.testing.assert_close([p.detach() for p in model.parameters()], before)
    torch.testing.assert_close(grads["exact"], grads["double"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(grads["alpha1"], grads["plain"], rtol=1e-9, atol=1e-12)
    if net != "resnet18":  # where batch norm couples samples, a penalty on each one's loss is another thing
        options = {"alpha": methods.ALPHA, "reduction": "sample", "mode": "exact"}
        limit = threepass.three_pass(model, F.cross_entropy, x, y, **options).grads
        torch.testing.assert_close(grads["finite"], [limit[n] for n in limit], rtol=1e-3, atol=1e-6)


def test_sam_and_the_jacobian_penalty_written_out():
    torch.manual_seed(0)
    model = models.mlp(6, 5, 3, activation="tanh").double()
    x, y, v = torch.randn(4, 6).double(), torch.randint(3, (4,)), F.normalize(torch.randn(4, 3).double(), dim=1)
    g = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    length = math.sqrt(sum(z.square().sum().item() for z in g))
    moved = models.mlp(6, 5, 3, activation="tanh").double()
    with torch.no_grad():
        for there, p, z in zip(moved.parameters(), model.parameters(), g, strict=True):
            there.copy_(p + methods.RHO / length * z)
    expected = torch.autograd.grad(F.cross_entropy(moved(x), y), list(moved.parameters()))
    torch.testing.assert_close(list(methods.sam(model, x, y, v)), list(expected))

    jacobian = torch.func.vmap(torch.func.jacrev(lambda z: model(z[None])[0]))(x)  # sample x output x input
    penalty = 3 * torch.einsum("so,soi->si", v, jacobian).square().sum() / 4
    loss = F.cross_entropy(model(x), y) + methods.JACOBIAN / 2 * penalty
    torch.testing.assert_close(
        list(methods.jacobian(model, x, y, v)), list(torch.autograd.grad(loss, list(model.parameters())))
    )


def test_limits_are_those_of_the_design_page():
    x = torch.randn(2, 3, 32, 32)
    of = {
        name: limits(layers(models.by_name(name, **options), x), RATES)
        for name, options in {"plain20": {}, "mlp": {"sizes": (3072, 2048, 2048, 10)}, "vit": {}}.items()
    }
    assert of["plain20"]["paper"]["operations_ratio"] == pytest.approx(1.34, abs=0.005)
    assert of["plain20"]["exact"]["operations_ratio"] == pytest.approx(2.00, abs=0.005)
    assert of["mlp"]["paper"]["operations_ratio"] == pytest.approx(1.67, abs=0.005)
    assert of["plain20"]["plain"]["operations_ratio"] == of["plain20"]["plain"]["bytes_ratio"] == 1
    assert of["vit"]["paper"]["bytes_ratio"] > 1.4  # curved: t is pushed, and a is read beside it


def test_a_layer_s_bytes_by_hand():
    """conv: a = 2x3x4x4, u = 2x5x4x4, w = 5x3x3x3 + 5 numbers of 4 bytes; then a norm of u."""
    a, u, w = 4 * 96, 4 * 160, 4 * 140
    model = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5))
    conv, norm = layers(model, torch.randn(2, 3, 4, 4))
    forward = 2 * 2 * 16 * 5 * 3 * 9
    assert conv == Layer("weight", forward, a, u, w, True, False)
    assert norm == Layer("norm", 0, u, u, 40, False, False)
    assert total(work([conv], "plain")) == Work(2 * forward, 2 * (a + u + w))
    assert total(work([conv], "paper")) == Work(4 * forward, 4 * (a + u + w) + a)
    assert total(work([conv._replace(straight=True)], "paper")) == Work(4 * forward, 4 * (a + u + w))
    assert total(work([norm], "plain")).bytes == 5 * u + 2 * 40
    assert total(work([norm], "paper")).bytes == 9 * u + 3 * 40
    assert seconds([Work(100, 5), Work(10, 50)], 10, 5) == 20


def test_operations_of_a_step_agree_with_the_limits():
    torch.manual_seed(0)
    model, x, y = models.plain(8, width=4), torch.randn(2, 3, 16, 16), torch.randint(10, (2,))
    found = layers(model, x)
    last = found[-1].operations
    for method in ("plain", "sam", "paper", "exact"):
        counted = operations(lambda method=method: METHODS[method](model, x, y, x))
        expected = total(work(found, method)).operations
        assert counted == pytest.approx(expected, abs=last), method
    assert set(KERNELS) <= set(METHODS)


def test_methods_take_turns_and_samples_are_long_enough(monkeypatch):
    monkeypatch.setattr(timing, "enough", lambda step, cuda: 2)
    seen = []
    times = timing.take_turns({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, rounds=3, cuda=False)
    assert "".join(seen) == "aaabbb" * 3  # one that does not count, and two that do
    assert {name: len(z) for name, z in times.items()} == {"a": 3, "b": 3}


def test_a_sample_lasts_five_milliseconds(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def step():
        clock[0] += 1e-4

    assert 50 <= timing.enough(step, cuda=False) < 200


def test_peak_memory_is_counted_to_the_byte():
    def two_at_once():
        for _ in range(3):
            a = torch.empty(1000)
            b = torch.empty(500)
            del a, b

    assert timing.peak_bytes(two_at_once, cuda=False) == 6000


def test_ceilings_are_of_this_machine():
    found = timing.ceilings("cpu", torch.float32)
    assert 1e9 < found["operations_per_second"] < 1e15
    assert 1e8 < found["bytes_per_second"] < 1e13


def test_all_methods_are_measured_eagerly(eager_report):
    report = eager_report
    printed = tables.text(report)
    assert list(report["methods"]) == list(METHODS)
    assert report["exact_against_double_backward"] < 1e-5
    for name, entry in report["methods"].items():
        row = entry["eager"]
        assert f"\n  {NAMES[name]} " in printed
        assert min(row["ratio"], row["best_ratio"], row["peak_ratio"], row["samples_per_second"]) > 0
        assert row["difference"] == 0  # of a CPU's float32 from itself
        assert ("bytes_share" in row) == (name != "jacobian")
    assert report["methods"]["plain"]["eager"]["ratio"] == 1


def test_three_passes_are_measured_traced_too_relative_to_eager_plain_training(eager_report):
    traced = {name: entry["traced"] for name, entry in eager_report["methods"].items() if "traced" in entry}
    assert list(traced) == ["paper", "exact"]
    plain = eager_report["methods"]["plain"]["eager"]
    for row in traced.values():
        assert row["ratio"] == row["median"] / plain["median"]
        assert row["difference"] < 1e-5
        assert row["compile_seconds"] > 0
    assert "\ncaptured, not compiled " in tables.text(eager_report)
    assert "traced" not in run(Case(**TINY, best=False, traced=False, methods=("paper",)))["methods"]["paper"]


@pytest.mark.usefixtures("fast_ceilings")
def test_methods_at_their_best_give_the_same_gradients():
    report = run(Case(**TINY, eager=False, methods=("plain", "paper")))
    rows = {name: entry["best"] for name, entry in report["methods"].items()}
    assert {"capture", "torch.compile"} == {report["methods"]["plain"][z]["how"] for z in ("best", "second")}
    assert rows["paper"]["how"] == "ThreePass"
    assert report["methods"]["plain"]["second"]["ratio"] >= 1
    assert rows["paper"]["call"]["ratio"] > 0
    assert all(row["compile_seconds"] > 0 and row["difference"] < 1e-5 for row in rows.values())


@pytest.mark.usefixtures("fast_ceilings")
def test_a_method_that_fails_says_why_and_the_others_go_on(monkeypatch):
    def broken(model, x, y, v):
        raise RuntimeError("no kernel for this\nand more")

    monkeypatch.setitem(METHODS, "sam", broken)
    report = run(Case(**TINY, best=False, methods=("sam", "finite")))
    assert report["methods"]["sam"] == {"eager": {"fails": "RuntimeError: no kernel for this"}}
    assert report["methods"]["finite"]["eager"]["ratio"] > 0
    assert "fails: RuntimeError: no kernel for this\n" in tables.text(report)


def test_the_reasons_of_every_form_are_kept(monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError("not this one")

    monkeypatch.setattr(execution, "capture", refuse)
    monkeypatch.setattr(execution.torch, "compile", refuse)
    with pytest.raises(execution.FormError, match="capture: ValueError: not this one; torch"):
        execution.best("sam", models.mlp(4, 3), [torch.randn(2, 4), torch.zeros(2).long(), torch.randn(2, 3)])


@pytest.mark.usefixtures("fast_ceilings")
def test_a_form_that_steps_in_says_for_which_and_why(monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError("not this one")

    monkeypatch.setattr(execution, "capture", refuse)
    monkeypatch.setattr(execution.torch, "compile", lambda model: model)
    report = run(Case(**TINY, eager=False, methods=("sam",)))
    row = report["methods"]["sam"]["best"]
    assert row["how"] == "torch.compile"
    assert row["failed"] == ["capture: ValueError: not this one"]
    assert "; capture: ValueError: not this one" in tables.text(report)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"methods": ("magic",)}, "unknown method 'magic': choose from plain, paper"),
        ({"precision": "fp8"}, "precision must be one of tf32, float32, bf16, amp, got 'fp8'"),
        ({"rounds": 0}, "at least 1"),
        ({"eager": False, "best": False}, "nothing to measure"),
    ],
)
def test_bad_cases_say_so(wrong, message):
    with pytest.raises(ValueError, match=message):
        Case(**wrong)


def test_what_a_case_settles():
    case = Case(device="cpu", methods=("exact",), threads=1).settled()
    assert (case.precision, case.methods) == ("float32", ("plain", "exact"))
    assert from_json(to_json(case)) == case
    assert suite.slug(Case("vit", {"depth": 12}, device="cpu")) == "cpu-vit-depth12-128-float32"
    with pytest.raises(ValueError, match="tf32 needs a GPU"):
        Case(device="cpu", precision="tf32").settled()
    model, (x, y, v) = Case(batch=3, image=8, precision="bf16", device="cpu").make()
    assert x.dtype == next(model.parameters()).dtype == torch.bfloat16
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert (x.shape, y.shape, v.shape) == ((3, 3, 8, 8), (3,), (3, 10))


NETS = """
import os
from threepass import models
from threepass.bench import case

def small():
    case.ceilings = lambda device, dtype: {"operations_per_second": 1e12, "bytes_per_second": 1e11}
    return models.mlp(12, 8, 10)

def crashing():
    os._exit(7)
"""


@pytest.mark.parametrize("together", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_crash_costs_one_result(together, tmp_path, monkeypatch, capsys):
    (tmp_path / "nets.py").write_text(NETS)
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH"), "src"])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    tiny = Case(**TINY | {"model": "nets:small", "options": {}}, best=False, methods=("plain",))
    named = {"first": tiny, "bad": Case("nets:crashing", device="cpu"), "good": tiny}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "bad.json").write_text("from another time")
    first, bad, good = (json.loads(f.read_text()) for f in suite.run_all(named, tmp_path / "out", together))
    assert bad["fails"] == "exit code 7"
    assert first["methods"]["plain"]["eager"]["ratio"] == good["methods"]["plain"]["eager"]["ratio"] == 1
    assert capsys.readouterr().out.count("fails: exit code 7") == 1
    assert len(tables.reports(tmp_path / "out")) == 2


@pytest.mark.slow
def test_prepared_cases_are_in_the_cache_and_crashes_are_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH"), "src"])])
    )
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    one = Case("mlp", {"sizes": (48, 8, 10)}, image=4, batch=4, device="cpu", methods=("sam",))
    suite.prepare_all({"one": one, "bad": Case("nets:crashing", device="cpu", methods=("plain",))}, processes=1)
    done, bad = capsys.readouterr().out.splitlines()
    assert done.startswith("one, sam: done, ")
    assert bad.startswith("bad, plain: exit code 7, ")
    assert any((tmp_path / "cache").rglob("*.py"))


def test_exponents_and_the_page(tmp_path, monkeypatch):
    """Sweeps whose cases cost size^2 for plain and twice that for paper; one case has failed."""

    def measured(named, out, together):
        assert together
        out.mkdir(parents=True, exist_ok=True)
        for name, case in named.items():
            size = int(name.split("-")[1])
            row = {"median": size**2 / 1e6, "peak_bytes": size}
            three = {"best": {"median": 2 * size**2 / 1e6, "peak_bytes": 3 * size}}
            report = {"case": json.loads(to_json(case)), "machine": {"gpu": None, "cpu": "abacus"}}
            report |= {"fails": "x"} if name == "width-32" else {"methods": {"plain": {"best": row}, "paper": three}}
            (out / f"{name}.json").write_text(json.dumps(report))

    monkeypatch.setattr("threepass.bench.scaling.run_all", measured)
    scaling(("width", "depth"), Case(device="cpu"), tmp_path)
    same = [(tmp_path / "cpu-scaling" / f"{name}.json").read_text() for name in ("width-16", "depth-20")]
    assert same[0] == same[1]  # one net, measured once
    file = scaling(("depth",), Case(device="cpu"), tmp_path)
    found = json.loads(file.read_text())["sweeps"]
    assert found["width"]["best"]["plain"]["sizes"] == [s for s in SIZES["cpu"]["width"] if s != 32]
    assert found["depth"]["best"]["paper"]["seconds_exponent"] == pytest.approx(2)
    assert found["depth"]["best"]["paper"]["bytes_exponent"] == pytest.approx(1)
    written = page.write(tmp_path).read_text()
    assert "abacus" in written
    assert written.count("<svg") == 4 + 2  # time and ratio of two sweeps, and the keys of two methods
    assert (tmp_path / "figures" / "cpu-scaling-depth-best-ratio.svg").exists()
    with pytest.raises(ValueError, match="unknown sweep 'age': choose from depth, width, batch, image"):
        scaling(("age",), Case(device="cpu"), tmp_path)
    assert exponent([2], [3]) is None


def test_tables_go_between_the_marks(tmp_path, eager_report):
    report = copy.deepcopy(eager_report)
    for entry in report["methods"].values():
        entry["best"] = entry["eager"] | {"ratio": 1.25}
    (tmp_path / "cpu-one.json").write_text(json.dumps(report))
    made = tables.markdown(tmp_path)
    z = report["limits"]["paper"]
    assert f", 1.25x | {z['operations_ratio']:.2f}x, {z['bytes_ratio']:.2f}x |" in made
    assert all(f"| {name} | 1.25x |" in made for name in NAMES.values())
    target, (whole, time, *_) = tmp_path / "page.md", tables.MARKS
    target.write_text(f"before\n{whole}\nold\n{tables.END}\nafter\n{time}\n{tables.END}\nlast\n")
    (tmp_path / "cpu-encoder-16-float32.json").write_text(json.dumps(report))
    (tmp_path / "cpu-resnet20-64-float32.json").write_text(json.dumps({"case": report["case"], "fails": "exit code 7"}))
    made, short = tables.markdown(tmp_path), tables.costs(tmp_path, "time")
    tables.fill(target, tmp_path)
    assert target.read_text() == (
        f"before\n{whole}\n{made}\n{tables.END}\nafter\n{time}\n{short}\n{tables.END}\nlast\n"
    )
    assert "| nn.TransformerEncoder, CPU, compiled | 1.25x | 1.25x | 1.25x | 1.25x | 1.25x |" in short
    assert re.search(r"\| nn.TransformerEncoder, CPU, traced \| [\d.]+x \| [\d.]+x \| - \| - \| - \| - \|", short)
    assert short.count("\n") == 4  # the head, and what was measured
    (tmp_path / "bare.md").write_text("nothing")
    with pytest.raises(ValueError, match="no markers for the tables"):
        tables.fill(tmp_path / "bare.md", tmp_path)
