"""Which runs are seeds of one series, what is compared with what, and when an interval is given: no false numbers."""

import json
import math
import os
import re

import pytest

from threepass.study.gather import gather
from threepass.study.report import report
from threepass.study.report_figures import dynamics, sweeps
from threepass.train.config import Config


def write_run(folder, error=0.1, age=0, task=None, **settings):
    """The files that `threepass train` leaves, after two epochs with this validation error."""
    folder.mkdir(parents=True)
    losses = {f"{part}_{name}": 0.5 for part in ("train", "val") for name in ("loss", "input_loss")}
    metrics = [{"epoch": i, "train_error": 0.1, "val_error": error} | losses for i in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    os.utime(folder / "metrics.jsonl", (1e9 - age, 1e9 - age))
    about = {"data": "digits", "model": "mlp", "model_options": {}, "init": None} | (task or {})
    config = Config(**{"epochs": 2} | settings).to_dict()
    (folder / "run.json").write_text(json.dumps(about | {"config": config, "device": "cpu", "torch": "2"}))
    return folder


def series(*folders):
    return {g.name: [r.seed for r in g.runs] for g in gather(folders).groups}


def test_runs_that_differ_in_their_seed_alone_are_one_series(tmp_path):
    runs = [write_run(tmp_path / f"a{seed}", seed=seed) for seed in (0, 1, 2)]
    assert series(*runs) == {"a0": [0, 1, 2]}


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ({"data": "mnist"}, {}),
        ({"model": "plain20"}, {}),
        ({"model_options": {"sizes": [64, 8, 10]}}, {}),
        ({"init": "xavier"}, {}),
        ({}, {"epochs": 3}),
        ({}, {"lr": 0.2}),
        ({}, {"alpha": 0.2}),
        ({}, {"batch_size": 64}),
        ({}, {"precision": "bf16"}),
    ],
)
def test_any_other_difference_makes_another_series(tmp_path, task, settings):
    first = write_run(tmp_path / "a", seed=0)
    second = write_run(tmp_path / "b", seed=1, task=task, **settings)
    assert series(first, second) == {"a": [0], "b": [1]}


def test_what_does_not_change_results_does_not_part_runs(tmp_path):
    first = write_run(tmp_path / "a", seed=0)
    second = write_run(tmp_path / "b", seed=1, task={"data_dir": "elsewhere"}, save_every=2, probe_every=0)
    about = json.loads((second / "run.json").read_text())
    (second / "run.json").write_text(json.dumps(about | {"device": "cuda", "torch": "3"}))
    assert series(first, second) == {"a": [0, 1]}


def test_runs_of_other_data_are_not_averaged_nor_compared(tmp_path):
    """As seen: runs of 9.2, 11.9 and 70 % error were one series of 30.4 +- 34."""
    runs = [
        write_run(tmp_path / "A", 0.092, seed=0, alpha=1.0),
        write_run(tmp_path / "B", 0.119, seed=1, alpha=1.0, task={"data": "fashion-mnist"}),
        write_run(tmp_path / "C", 0.70, seed=2, alpha=1.0, task={"data": "cifar10", "model": "plain20"}),
    ]
    page = report(runs, tmp_path / "page").read_text()
    assert page.count("data-toggles=") == 3
    assert "<h2>Differences</h2>" not in page
    assert "±" not in page.partition("<h2>Best and final figures</h2>")[2].partition("<tbody>")[2].partition("</t")[0]
    for figure in ("9.2", "11.9", "70.0"):  # the same digits, and none is best
        assert f"<td>{figure}</td>" in page
    assert "data &#34;cifar10&#34;, model &#34;plain20&#34;" in page  # what they differ in
    assert "trained on different data (digits, fashion-mnist, cifar10), and their figures cannot be compared" in page


def test_runs_that_have_all_diverged_are_refused(tmp_path):
    run = write_run(tmp_path / "a")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(json.loads(z) | {"val_loss": math.nan}) + "\n" for z in lines)
    )
    beside_another = gather([run, write_run(tmp_path / "b", lr=0.2)])
    assert beside_another.notes == ["a: 1 of 1 run diverged and is left out of all figures."]
    with pytest.raises(ValueError, match=r"no run in .*a has finished an epoch without diverging"):
        gather([run])


def test_a_seed_that_occurs_twice_counts_once(tmp_path):
    runs = [write_run(tmp_path / f"a{seed}", seed=seed) for seed in (0, 1)]
    runs.append(write_run(tmp_path / "older", 0.9, age=100, seed=1))
    study = gather(runs)
    assert [[run.folder.name for run in group.runs] for group in study.groups] == [["a0", "a1"]]
    a1, older = (f"{tmp_path.name}/{name}" for name in ("a1", "older"))
    text = f"a0: seed 1 occurs 2 times ({a1}, {older}); only the newest, {a1}, is used."
    assert study.notes == [text]
    assert text in report(runs, tmp_path / "page").read_text()
    assert gather([runs[0], runs[0]]).notes == []  # the same folder twice is one run


def test_runs_of_unequal_length_are_noted(tmp_path):
    short, long = write_run(tmp_path / "short", lr=0.1), write_run(tmp_path / "long", lr=0.2)
    assert gather([short, long]).notes == []
    lines = (long / "metrics.jsonl").read_text().splitlines()
    (long / "metrics.jsonl").write_text("\n".join([*lines, lines[-1]]) + "\n")
    (note,) = gather([short, long]).notes
    assert "differ in their number of epochs (short 2, long 3)" in note


def test_a_run_that_does_not_name_its_data_is_compared_with_nothing(tmp_path):
    runs = [write_run(tmp_path / name / f"seed-{i}", seed=i) for name in ("a", "b") for i in (0, 1)]
    for run in runs:
        config = json.loads((run / "run.json").read_text())["config"]
        (run / "run.json").unlink()
        (run / "checkpoint").mkdir()
        (run / "checkpoint" / "state.json").write_text(json.dumps({"config": config}))  # as `fit` leaves it
    study = gather(runs)
    assert {g.name: [r.seed for r in g.runs] for g in study.groups} == {"a": [0, 1], "b": [0, 1]}
    assert all(group.baseline is group for group in study.groups)
    assert "a: its files do not name data and model, so it is compared with no other series." in study.notes


def test_series_of_one_name_are_told_apart(tmp_path):
    runs = [write_run(tmp_path / place / "mlp", lr=lr) for place, lr in (("x", 0.1), ("y", 0.2))]
    assert list(series(*runs)) == ["x/mlp", "y/mlp"]
    more = [write_run(tmp_path / "z" / f"seed-{i}", seed=i, lr=lr) for i, lr in ((0, 0.3), (1, 0.4))]
    assert list(series(*more)) == ["seed-0", "seed-1"]
    assert list(series(*more, runs[0])) == ["seed-0", "seed-1", "mlp"]


def test_a_series_is_compared_with_the_two_passes_that_are_most_like_it(tmp_path):
    runs = [
        write_run(tmp_path / "plain-2", alpha=1.0),
        write_run(tmp_path / "plain-4", alpha=1.0, epochs=4),
        write_run(tmp_path / "three-2", alpha=0.5),
        write_run(tmp_path / "three-4", alpha=0.5, epochs=4),
    ]
    found = {g.name: g.baseline.name for g in gather(runs).groups}
    assert found == {"plain-2": "plain-2", "plain-4": "plain-4", "three-2": "plain-2", "three-4": "plain-4"}
    assert "three-4, against plain-4" in report(runs, tmp_path / "page").read_text()


def page_of(tmp_path, before, after):
    """The report on two series with these validation errors, by seed."""
    runs = [write_run(tmp_path / f"two-{i}", e, seed=i, alpha=1.0) for i, e in enumerate(before)]
    runs += [write_run(tmp_path / f"three-{i}", e, seed=i, alpha=0.5) for i, e in enumerate(after)]
    return report(runs, tmp_path / "page").read_text()


def bold(page):
    """What is set in bold in the cards and in the differences."""
    return re.findall(r'class="(?:value )?clear">([^<]*)<', page)


def test_two_seeds_give_no_interval_and_nothing_bold(tmp_path):
    page = page_of(tmp_path, [0.10, 0.20], [0.05, 0.15])  # equal differences: once an interval of no width, in bold
    assert "−5.00 points; 2 seeds: no interval" in page
    assert "<small>2 seeds: no interval</small>" in page
    assert bold(page) == []
    assert "95 % interval −" not in page


def test_one_seed_gives_no_interval(tmp_path):
    page = page_of(tmp_path, [0.10], [0.05])
    assert "−5.00 points; 1 seed: no interval" in page
    assert bold(page) == []


def test_three_seeds_with_a_clear_difference_are_bold(tmp_path):
    page = page_of(tmp_path, [0.100, 0.200, 0.150], [0.050, 0.151, 0.099])
    # differences -5, -4.9, -5.1: mean -5, half width 4.3027 * 0.1 / sqrt(3) = 0.2484
    assert "−5.00 points, 95 % interval −5.25 to −4.75" in page
    assert bold(page) == ["10.00 %", "−5.00", "−5.00"]  # the card, best error, final error


def test_three_seeds_whose_interval_holds_zero_are_not_bold(tmp_path):
    page = page_of(tmp_path, [0.10, 0.20, 0.15], [0.05, 0.25, 0.14])
    assert ": no difference shown" in page
    assert bold(page) == []


def test_three_equal_differences_are_not_bold(tmp_path):
    page = page_of(tmp_path, [0.10, 0.20, 0.15], [0.05, 0.15, 0.10])
    assert "−5.00 points; equal with 3 seeds: no interval" in page
    assert "<small>equal with 3 seeds: no interval</small>" in page
    assert bold(page) == []


def test_the_best_of_those_that_are_compared_is_marked(tmp_path):
    runs = [
        write_run(tmp_path / "plain", 0.12, alpha=1.0),
        write_run(tmp_path / "three", 0.08, strength=0.1),
        write_run(tmp_path / "other", 0.01, task={"data": "mnist"}),
    ]
    page = report(runs, tmp_path / "page").read_text()
    table = page.partition("<h2>Best and final figures</h2>")[2].partition("</table>")[0]
    assert re.findall(r'<td class="best">([\d.]+)', table)[:2] == ["8.0", "8.0"]
    assert "<td>1.0</td>" in table


def test_curves_of_what_the_metrics_have(tmp_path):
    folder = write_run(tmp_path / "a", strength=0.5)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    more = {"lr": 0.1, "alpha": 0.1, "step_seconds": 0.002}
    rows = [metrics[0] | more, metrics[1] | more | {"grad_norm": 2.0, "third_norm": 4.0, "grad_cosine": 0.3}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in rows))
    found = {f.panel.slug: f.panel.lines for f in dynamics(gather([folder]))}
    ends = {slug: (list(line.x), list(line.y)) for slug, (line,) in found.items()}
    assert ends == {
        "training-lr": ([1, 2], [0.1, 0.1]),
        "training-back-norm": ([2], [2.0]),
        "training-third-norm": ([2], [2.0]),  # times the strength
        "training-cosine": ([2], [0.3]),
        "training-time": ([1, 2], [2.0, 2.0]),
    }


def test_a_figure_by_strength_needs_three_of_them(tmp_path):
    runs = [write_run(tmp_path / f"s{s}", 0.1 * s, strength=s, lr=0.1 * s) for s in (1.0, 0.3)]
    runs.append(write_run(tmp_path / "plain", 0.5, alpha=1.0))
    assert list(sweeps(gather(runs))) == []
    runs.append(write_run(tmp_path / "s3", 0.3, strength=3.0))
    (figure,) = sweeps(gather(runs))
    assert figure.panel.ticks == ["plain", "0.3", "1", "3"]
    assert figure.panel.lines[0].y == pytest.approx([50.0, 3.0, 10.0, 30.0])


def test_the_baseline_comes_first_and_is_drawn_in_grey(tmp_path):
    """The colour of a series is that of its place, and the first place has grey."""
    strong, plain = write_run(tmp_path / "strong", strength=1.0), write_run(tmp_path / "plain", alpha=1.0)
    assert gather([strong, plain]).names == ["plain", "strong"]
    page = report([strong, plain], tmp_path / "page").read_text()
    assert "compared with plain" in page
    assert gather([strong]).names == ["strong"]


def test_runs_of_one_epoch_have_tables_and_no_curves(tmp_path):
    run = write_run(tmp_path / "a")
    (first, _) = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text(json.dumps(json.loads(first) | {"lr": 0.03, "step_seconds": 0.002}) + "\n")
    page = report([run], tmp_path / "page")
    text = page.read_text()
    assert "Every run has one epoch, so there are no curves" in text
    assert "<figure" not in text
    assert re.search(r"Learning rate</th><th[^>]*>Time of a step, ms</th>", text)
    assert "0.0300" in text
    other = write_run(tmp_path / "b", lr=0.2)
    assert report([run, other], tmp_path / "both").read_text().count("<figure") > 2


def test_single_runs_beside_a_comparison_are_named(tmp_path):
    about = {"data": {"name": "digits", "train": 1, "val": 1, "shape": [1, 8, 8], "classes": []}, "config": {},
             "model": {"parameters": 1, "layers": ""}, "variants": [{"name": "a", "folder": "a", "settings": {}}],
             "baseline": "a", "seeds": 1, "versions": {}, "machine": {}}  # fmt: skip
    write_run(tmp_path / "compared" / "a" / "seed-0")
    (tmp_path / "compared" / "compare.json").write_text(json.dumps(about))
    study = gather([tmp_path / "compared", write_run(tmp_path / "mine", task={"data": "mnist"})])
    assert study.notes[0].startswith("Not part of the comparison: mine.")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("metrics.jsonl", '{"epo', "metrics.jsonl, line 1 is damaged: it is not JSON"),
        ("metrics.jsonl", "{}", "metrics.jsonl, line 1 lacks the key 'train_loss'"),
        ("run.json", "{", "run.json is damaged: it is not JSON"),
        ("run.json", '{"config": 3}', "run.json: config: expected a JSON object, got 3"),
        ("robustness.json", "[]", r"robustness.json: expected a JSON object, got \[\]"),
        ("variances.json", "{}", "variances.json lacks the key 'start'"),
        ("compare.json", "{}", "compare.json lacks the key 'data'"),
        ("compare.json", '{"data": {', "compare.json is damaged: it is not JSON"),
    ],
)
def test_damaged_files_are_named(tmp_path, file, content, words):
    run = write_run(tmp_path / "a")
    (run / file).write_text(content)
    with pytest.raises(ValueError, match=words):
        report([run], tmp_path / "page")


def test_a_folder_of_runs_names_them(tmp_path):
    runs = [write_run(tmp_path / "runs" / name) for name in ("a", "b")]
    with pytest.raises(FileNotFoundError, match=f"give the runs in it: threepass report {runs[0]} {runs[1]}"):
        gather([tmp_path / "runs"])
