"""The figures of a report: curves over epochs, accuracy against strength or alpha, attacks, and variances by layer."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from ..page.figure import Figure, Line, Panel, number, over_runs
from .gather import Group, Measure, Run, Study
from .report_columns import ATTACKS, final_error, middle, unit_in_words

CURVES = {
    "loss": ("Loss", "Cross-entropy, or the loss that was given."),
    "error": ("Error, %", "Examples classified wrongly; on a logarithmic axis zero lies on the lower edge."),
    "input_loss": ("Input loss", "Mean over examples of the penalty, ½ |dl/dx|² by default, in the units of the net."),
}
VARIANCES = {"pass2": "Variance of the error, pass 2", "pass3": "Variance of the tangent, pass 3"}
FEWEST = 3  # strengths or alphas that a figure over them is drawn for
Metrics = dict[str, Any]  # of one epoch


def has_curves(study: Study) -> bool:
    """Whether some series has two epochs: the figures of one are numbers in a table."""
    return any(len(run.history) > 1 for group in study.groups for run in group.complete)


def curves(study: Study) -> Iterator[Figure]:
    if not has_curves(study):
        return
    for key, (title, caption) in CURVES.items():
        lines, scale = [], 100 if key == "error" else 1
        for k, group in enumerate(study.groups):
            for part in ("train", "val"):
                values = partial(_scaled, key=f"{part}_{key}", factor=scale)
                lines += _over_epochs(k, group, values, dashed=part == "train")
        note = "solid: validation; dashed: training; band: range over seeds"
        panel = Panel(f"curve-{key.replace('_', '-')}", title, "epoch", lines, note, logarithmic=True)
        yield Figure(panel, study.names, caption)


def dynamics(study: Study) -> Iterator[Figure]:
    """What the optimizer saw: those of its figures that some run has recorded."""
    of: dict[str, tuple[str, Callable[[Run, Metrics], float | None], bool, str]] = {
        "lr": ("Learning rate", partial(_scaled, key="lr"), False, "Of the epoch's last step."),
        "back-norm": ("Gradient norm, backpropagation", _back_norm, True, "With its weight in the update."),
        "third-norm": ("Gradient norm, third pass", _third_norm, True, "With its weight in the update."),
        "cosine": ("Cosine between the two", _cosine, False, "Above 0: the third pass also lowers the loss."),
        "alignment": ("Cosine of paper mode's third pass with the exact one", partial(_scaled, key="alignment_cosine"),
                      False, "1: paper mode points along the gradient of the input loss."),
        "time": ("Time of a step, ms", partial(_scaled, key="step_seconds", factor=1000), False,
                 "Mean over the epoch, as measured while training."),
    }  # fmt: skip
    for slug, (title, values, logarithmic, caption) in of.items():
        lines = [line for k, group in enumerate(study.groups) for line in _over_epochs(k, group, values)]
        if lines:
            panel = Panel(f"training-{slug}", title, "epoch", lines, "band: range over seeds", logarithmic)
            yield Figure(panel, study.names, caption)


def _over_epochs(k: int, group: Group, values: Callable[[Run, Metrics], float | None], dashed=False) -> list[Line]:
    """One line: the mean over runs in the epochs in which all of them have a value."""
    epochs = min((len(run.history) for run in group.complete), default=0)
    rows = [[values(run, m) for m in run.history[:epochs]] for run in group.complete]
    known = [i for i in range(epochs) if all(row[i] is not None for row in rows)]
    return [over_runs(k, [i + 1 for i in known], [[row[i] for i in known] for row in rows], dashed)] if known else []  # type: ignore[misc]


def _scaled(run: Run, m: Metrics, key: str, factor: float = 1.0) -> float | None:
    return factor * m[key] if key in m else None


def _back_norm(run: Run, m: Metrics) -> float | None:
    return _scaled(run, m, "grad_norm", 1.0 if run.config.get("strength") is not None else m.get("alpha", 1.0))


def _third_norm(run: Run, m: Metrics) -> float | None:
    strength = run.config.get("strength")
    weight = 1 - m.get("alpha", 1.0) if strength is None else strength
    return _scaled(run, m, "third_norm", weight) if weight else None


def _cosine(run: Run, m: Metrics) -> float | None:
    return None if run.is_two_passes else _scaled(run, m, "grad_cosine")


def sweeps(study: Study) -> Iterator[Figure]:
    """What became of strength or alpha, where series of one kind have at least three values of it."""
    alike: dict[str, dict[float, int]] = {}  # the value, and the series that has it
    for k, group in enumerate(study.groups):
        if group.complete and not group.complete[0].is_two_passes:
            config = group.complete[0].config
            name = "alpha" if config.get("strength") is None else "strength"
            others = {n: v for n, v in group.complete[0].settings.items() if n not in (name, "lr", "eta_over_alpha")}
            base = "" if group.baseline is None else group.baseline.name
            alike.setdefault(json.dumps([name, base, others], sort_keys=True), {})[config[name]] = k
    for i, (key, series) in enumerate((key, s) for key, s in alike.items() if len(s) >= FEWEST):
        yield from _sweep(study, json.loads(key)[0], series, i)


def _sweep(study: Study, name: str, series: dict[float, int], which: int) -> Iterator[Figure]:
    """Final error, and accuracy under the middle attack and noise; weaker third passes to the left."""
    values = sorted(series, reverse=name == "alpha")
    order = [series[v] for v in values]
    first = study.groups[order[0]]
    ticks = [number(v) for v in values]
    if first.baseline in study.groups and first.baseline is not first and first.baseline.complete:
        order, ticks = [study.groups.index(first.baseline), *order], [first.baseline.name, *ticks]
    measures: dict[str, tuple[str, Measure]] = {"error": ("Validation error, %", final_error)}
    for kind in ("pgd", "noise"):
        if (at := middle(first, kind)) is not None:
            measures[kind] = f"Accuracy under {ATTACKS[kind]} {at:g}, %", partial(Run.accuracy, kind=kind, at=at)
    for slug, (title, of) in measures.items():
        points = [(i, k, seeds) for i, k in enumerate(order) if (seeds := study.groups[k].values(of))]
        lines = [Line(-1, [i for i, _, _ in points], [fmean(s) for _, _, s in points], style="bare", label="mean")]
        lines += [Line(k, [i] * len(seeds), seeds, style="points") for i, k, seeds in points]
        panel = Panel(f"by-{name}-{slug}-{which}", title, name, lines, "points: seeds; line: means", ticks=ticks)
        yield Figure(panel, study.names, f"Points: seeds, last epoch. Line: their means, by {name}.")


def robustness(study: Study) -> Iterator[Figure]:
    curves = {k: [r.robustness for r in g.complete if r.robustness] for k, g in enumerate(study.groups)}
    curves = {k: measured for k, measured in curves.items() if measured}
    for kind, title in ATTACKS.items() if curves else ():
        lines = []
        for k, measured in curves.items():
            at = measured[0][kind]["at"]
            rows = [[100 * a for a in c[kind]["accuracy"]] for c in measured if c[kind]["at"] == at]
            lines.append(over_runs(k, at, rows))
        across = f"{'standard deviation of the noise' if kind == 'noise' else 'radius'}, {unit_in_words(study)}"
        title, note = f"Accuracy under {title}, %", "band: range over seeds"
        panel = Panel(f"robust-{kind}", title, across, lines, note, top=100.0)
        yield Figure(panel, study.names, "Validation accuracy with the last epoch's weights.")


def variances(study: Study) -> Iterator[Figure]:
    by_group = {k: [r.variances for r in g.complete if r.variances] for k, g in enumerate(study.groups)}
    by_group = {k: tables for k, tables in by_group.items() if tables}
    shapes = {tuple(row["layer"] for row in t["end"]) for tables in by_group.values() for t in tables}
    if len(shapes) != 1 or shapes == {()}:  # none, or several models: their layers have no common axis
        return
    (layers,) = shapes
    places: Sequence[int] = range(len(layers))
    for key, title in VARIANCES.items():
        lines = [
            over_runs(k, places, [[row[key] for row in t["end"]] for t in tables]) for k, tables in by_group.items()
        ]
        start = [[row[key] for row in t["start"]] for t in next(iter(by_group.values()))]
        before = over_runs(-1, places, start, dashed=True)._replace(low=None, high=None, label="before training")
        note = "grey, dashed: before training"
        panel = Panel(f"variance-{key}", title, "layer", [*lines, before], note, True, layers)
        yield Figure(panel, study.names, "At the input of every layer; grey and dashed: before training.")
