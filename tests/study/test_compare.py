"""compare and report: the files, the same start for all, resuming, diverged runs, intervals, attacks, the page."""

import base64
import io
import json
import math
import re
import shutil
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from threepass.models import mlp
from threepass.page.images import data_uri, heat, picture
from threepass.study import attacks
from threepass.study import compare as study
from threepass.study.compare import Comparison, Variant, by_alpha, by_strength, compare, cost, two_passes
from threepass.study.intervals import paired, t_quantile
from threepass.study.report import report
from threepass.train.config import Config
from threepass.train.data import Split, load
from threepass.train.data.dataset import DataSet

pytest.importorskip("sklearn")

CONFIG = Config(epochs=2, batch_size=64, lr=0.05)
VARIANTS = [two_passes(), by_alpha(0.1)]
FEW = {"sigmas": (0.0, 0.2), "radii": (0.0, 0.05, 0.1)}


def net() -> nn.Module:
    return mlp(64, 16, 10)


@pytest.fixture(scope="module")
def data() -> DataSet:
    return load("digits")


@pytest.fixture(scope="module")
def made(data, tmp_path_factory):
    """A comparison of two variants from two seeds, and what was said on the way."""
    said = []
    torch.set_num_threads(1)  # as in every test: sums over threads round otherwise
    out = tmp_path_factory.mktemp("runs") / "small"
    options = {"command": "threepass compare <digits>", "about": "A test.", "say": said.append, **FEW}
    assert compare(data, net, CONFIG, VARIANTS, 2, out, **options) == out
    return out, said


def test_files(made, data):
    out, said = made
    folders = [out / v.folder / f"seed-{seed}" for v in VARIANTS for seed in (0, 1)]
    for folder in folders:
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
        result = json.loads((folder / "result.json").read_text())
        assert result["status"] == "complete"
        assert result["config"]["seed"] == result["seed"]
        model = net()
        model.load_state_dict(load_file(folder / "weights.safetensors"))
        curves = json.loads((folder / "robustness.json").read_text())
        assert curves["pgd"]["accuracy"][0] == pytest.approx(1 - result["last"]["val_error"])
        assert [row["layer"] for row in json.loads((folder / "variances.json").read_text())["end"]] == ["1", "3"]
    about = json.loads((out / "compare.json").read_text())
    assert about["baseline"] == "two passes"
    assert about["config"] == CONFIG.to_dict()
    assert set(about["cost"]["seconds"]) == {"plain", "two passes", "alpha 0.1"}
    *runs, last = json.loads((out / "summary.json").read_text())["runs"]
    assert [(run["variant"], run["seed"]) for run in (*runs, last)] == [
        (v.name, seed) for v in VARIANTS for seed in (0, 1)
    ]
    assert (last["last"], last["robustness"]) == (result["last"], curves)
    assert said[-1] == f"report: {out / 'report.html'}"
    assert len(said) == 4 + 3 + 1  # runs, the summary and the page
    head, two, three = (line.split("  ") for line in said[4:7])
    assert [word for word in head if word] == ["final error, %", "final input loss", "accuracy at PGD 0.05, %", "seeds"]
    assert (two[0], three[0].strip()) == ("two passes", "alpha 0.1")


def test_a_seed_gives_every_variant_the_same_weights_and_batches(data, tmp_path, monkeypatch):
    real, seen = study.fit, {}

    def watched(model, data, config, *, folder, **rest):
        start = torch.cat([p.detach().flatten() for p in model.parameters()])
        seen.setdefault(config.seed, []).append(start)  # the config's seed is that of the batches
        return real(model, data, config, folder=folder, **rest)

    monkeypatch.setattr(study, "fit", watched)
    compare(data, net, Config(epochs=1, batch_size=256), VARIANTS, 2, tmp_path / "x", say=lambda text: None, **FEW)
    assert torch.equal(*seen[0])
    assert torch.equal(*seen[1])
    assert not torch.equal(seen[0][0], seen[1][0])


def test_nothing_is_overwritten(made, data):
    out, _ = made
    before = (out / "compare.json").read_bytes()
    again = compare(data, net, Config(epochs=1), VARIANTS[:1], 1, out, say=lambda text: None, **FEW)
    assert again == out.with_name("small-2")
    assert (out / "compare.json").read_bytes() == before


def test_interrupted_comparison_goes_on_to_the_same_numbers(made, data, tmp_path, monkeypatch):
    whole, _ = made
    real, calls = study.fit, []

    def interrupted(model, data, config, *, folder, **rest):
        calls.append(folder.name)

        def step(epoch, done):
            if len(calls) == 3 and (epoch, done) == (1, 5):
                raise KeyboardInterrupt

        return real(model, data, config, folder=folder, after_step=step, **rest)

    monkeypatch.setattr(study, "fit", interrupted)
    said = []
    arguments = (data, net, CONFIG, VARIANTS, 2, tmp_path / "part")
    with pytest.raises(KeyboardInterrupt):
        compare(*arguments, say=said.append, **FEW)
    with pytest.raises(ValueError, match="with other values of config, seeds: use those it was started with"):
        compare(data, net, Config(epochs=3), VARIANTS, 1, tmp_path / "part", resume=True, **FEW)
    assert compare(*arguments, resume=True, say=said.append, **FEW) == tmp_path / "part"
    assert calls == ["seed-0", "seed-0", "seed-1", "seed-1", "seed-1"]  # two complete runs are not repeated
    for weights in whole.glob("*/*/weights.safetensors"):
        again = load_file(tmp_path / "part" / weights.relative_to(whole))
        assert all(torch.equal(z, again[k]) for k, z in load_file(weights).items())


def test_a_diverged_run_is_recorded_and_left_out(data, tmp_path):
    said = []
    wild = by_strength(1.0, mode="paper", lr=1e20)
    settings = Config(epochs=3, batch_size=64, lr=0.05)
    out = compare(data, net, settings, [two_passes(), wild], 1, tmp_path / "wild", say=said.append, **FEW)
    result = json.loads((out / wild.folder / "seed-0" / "result.json").read_text())
    assert result["status"] == "diverged"
    assert result["epochs"] < 3  # it does not continue with NaN
    assert "diverged in epoch 1" in said[1]
    page = (out / "report.html").read_text()
    assert "strength 1, paper: 1 of 1 run diverged" in page
    assert "nan" not in re.sub(r"base64,[^\"]*", "", page)
    alone = compare(data, net, settings, [wild], 1, tmp_path / "alone", say=said.append, **FEW)
    assert (alone / "report.html").exists()


def test_bad_requests_say_what_is_wrong(data, tmp_path):
    with pytest.raises(ValueError, match="also as folder names: 'a b', 'a-b'"):
        compare(data, net, CONFIG, [Variant("a b"), Variant("a-b")], 1, tmp_path / "x")
    with pytest.raises(ValueError, match="seeds must be at least 1"):
        compare(data, net, CONFIG, VARIANTS, 0, tmp_path / "x")
    with pytest.raises(FileNotFoundError, match=r"neither compare.json nor metrics.jsonl"):
        report([tmp_path], tmp_path)
    assert not list(tmp_path.iterdir())


def test_settings_that_methods_have_values_of_their_own_for_are_not_common_ones(data, tmp_path, monkeypatch, capsys):
    """Of alpha and mode, a comparison of strengths used to print the defaults, which no method has."""

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "_train", interrupted)
    for variants in ([two_passes(), by_strength(0.3)], [two_passes(), by_alpha(0.3)]):
        with pytest.raises(KeyboardInterrupt):
            compare(data, net, CONFIG, variants, 1, tmp_path / "x", **FEW)
    by_strengths, by_alphas = capsys.readouterr().err.split("# common settings")[1:]
    assert not re.search(r"^(# )?(alpha|reduction|mode|strength|seed)\b( =|:)", by_strengths, re.MULTILINE)
    assert "# strength 0.3, exact: strength 0.3, mode exact" in by_strengths
    assert "# run 1 of 2: two passes, seed 0" in by_strengths
    assert '\nreduction = "batch"' in by_alphas


def test_damaged_images_are_named(made, tmp_path):
    shutil.copytree(made[0], tmp_path / "copy")
    (tmp_path / "copy" / "examples.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"examples.safetensors is damaged .*delete it"):
        report([tmp_path / "copy"], tmp_path / "page")


def test_cost_times_every_variant(data):
    variants = [*VARIANTS, Variant("seldom", {"every": 2})]
    found = cost(Comparison(data, net, CONFIG, variants, 1, None, (), ()), rounds=3)
    assert list(found["seconds"]) == ["plain", "two passes", "alpha 0.1", "seldom"]
    assert all(s > 0 for s in found["seconds"].values())


def test_the_page_comes_from_the_files_alone(made, tmp_path):
    out, _ = made
    page = report([out], tmp_path / "elsewhere.html")
    assert page.read_bytes() == (out / "report.html").read_bytes()
    text = page.read_text()
    assert "threepass compare &lt;digits&gt;" in text
    assert not re.search(r"(src|href)=\"(?!data:|#)", text)  # nothing is fetched
    assert not re.search(r"@import|url\(", text)
    for name in ("curve-loss", "curve-error", "curve-input-loss", "robust-pgd", "variance-pass3"):
        drawing = (tmp_path / "figures" / f"{name}.svg").read_text()
        assert len(ET.fromstring(drawing).findall(".//{*}path[@class='line']")) >= 2
    assert str(out.parent) not in text


def test_report_of_single_runs_and_of_several_comparisons(made, tmp_path):
    out, _ = made
    page = report(sorted(out.glob("*/seed-*")), tmp_path / "runs").read_text()
    assert "two-passes" in page
    assert page.count("data-toggles=") == 2  # seeds of one config are one series
    shutil.copytree(out, tmp_path / "again")
    both = report([out, tmp_path / "again", out], tmp_path / "both").read_text()
    assert "small: alpha 0.1" in both
    assert "again: alpha 0.1" in both
    assert both.count("data-toggles=") == 4


def test_paired_interval():
    # differences 1, 2, 3, 6: mean 3, s = sqrt(14/3), t(3) = 3.1824
    d = paired([2, 4, 6, 10], [1, 2, 3, 4])
    half = 3.1824463 * math.sqrt(14 / 3) / 2
    assert d == pytest.approx((3.0, 3 - half, 3 + half, 4), abs=1e-4)
    assert not d.shown
    assert paired([1.0], [3.0]) == (-2.0, None, None, 1)
    assert paired([1.0, 2.0], [3.0, 4.5]) == (-2.25, None, None, 2)
    assert paired([4.0, 5.0, 6.1], [1.0, 2.0, 3.0]).shown
    same = paired([4.0, 5.0, 6.0], [1.0, 2.0, 3.0])
    assert (same.low, same.high) == (3.0, 3.0)
    assert not same.shown  # of no width
    assert paired([], []) is None
    assert [t_quantile(df) for df in (30, 31, 100)] == pytest.approx([2.0423, 2.0395, 1.9840], abs=1e-4)


def test_images_are_written_and_read_back():
    image = torch.randint(0, 256, (5, 7, 3), dtype=torch.uint8)
    head, _, body = data_uri(image).partition(",")
    assert head == "data:image/png;base64"
    read = Image.open(io.BytesIO(base64.b64decode(body)))
    assert (read.format, read.mode) == ("PNG", "RGB")
    assert torch.equal(torch.from_numpy(np.array(read)), image)
    assert picture(torch.tensor([[[0.0, 1.0]]])).tolist() == [[[0, 0, 0], [255, 255, 255]]]
    assert heat(torch.tensor([[0.0, 2.0]]), 2.0).tolist() == [[[0, 0, 4], [252, 255, 164]]]


def test_attacks_stay_in_the_ball_and_in_range_and_do_harm(made, data):
    out, _ = made
    model = net()
    model.load_state_dict(load_file(out / "two-passes" / "seed-0" / "weights.safetensors"))
    model, p = attacks.in_float64(model, "cpu"), attacks.pixels(data, 200)
    assert p.x.dtype == torch.float64
    for eps in (0.03, 0.2):
        moved, _ = attacks.pgd(model, p, eps)
        assert (moved - p.x).abs().max() <= eps + 1e-12
        assert moved.min() >= 0
        assert moved.max() <= 1
        assert (moved - p.x).abs().max() > 0.9 * eps
    found = attacks.robustness(model, data, radii=(0.1, 0.0, 0.05), examples=200)
    fgsm, pgd = (found[kind]["accuracy"] for kind in ("fgsm", "pgd"))
    assert pgd[1] == fgsm[1] == found["noise"]["accuracy"][0]
    assert all(a <= b + 0.005 for a, b in zip(pgd, fgsm, strict=True))
    assert pgd[0] < pgd[2] < pgd[1]


def test_attacks_are_in_pixels_whatever_the_normalisation(data):
    class Normalised(nn.Module):
        def __init__(self, inner, mean, std):
            super().__init__()
            self.inner, self.mean, self.std = inner, mean, std

        def forward(self, x):  # undoes the normalisation
            return self.inner(x * self.std + self.mean)

    torch.manual_seed(0)
    plain = DataSet(data.train, data.val, (0.0,), (1.0,), data.classes, "plain")
    whole = DataSet(
        *(Split((s.x * 255).round().byte(), s.y) for s in (data.train, data.val)), (0.3,), (0.4,), data.classes, "bytes"
    )
    inner = net()
    a = attacks.robustness(inner, plain, (0.0, 0.1), (0.0, 0.1), examples=50)
    b = attacks.robustness(Normalised(inner, data.mean[0], data.std[0]), data, (0.0, 0.1), (0.0, 0.1), examples=50)
    assert a == b
    assert attacks.pixels(whole).x.max() == 1.0


def test_data_beyond_pixels_keeps_its_own_range(data):
    wide = DataSet(*(Split(6 * s.x - 3, s.y) for s in (data.train, data.val)), (0.0,), (1.0,), data.classes, "wide")
    assert (attacks.pixels(wide).low, attacks.pixels(wide).high) == (-3.0, 3.0)
