"""`report`: one page from any set of runs, built from their files alone; it needs no server, no network and no model.

A run is a folder of `threepass compare` (compare.json) or of `threepass train` (metrics.jsonl). Runs that differ only
in their seed are one series. Beside the page, figures/ holds every figure as an SVG file.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from ..page.figure import number
from ..page.images import HEAT
from ..page.writer import write_page
from ..train.folder import new_folder
from . import report_figures as figures
from . import report_tables as tables
from .gallery import galleries
from .gather import Group, Measure, Run, Study, gather
from .intervals import Difference
from .report_columns import (
    ATTACKS,
    examples_in_words,
    final_error,
    log_input_loss,
    middle,
    parts_in_words,
    steps_in_words,
)


def report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Writes OUT/report.html, or OUT itself if it ends in .html, and figures/ beside it; returns the page's path.

    Without `out` a new folder is made: runs/report, or the first free one of runs/report-2, runs/report-3, ...
    """
    study = gather([Path(run) for run in runs])
    out = new_folder(Path("runs/report")) if out is None else out
    page = Path(out) if Path(out).suffix == ".html" else Path(out) / "report.html"
    dynamics, single = list(figures.dynamics(study)), None
    if dynamics and not figures.has_curves(study):
        dynamics, single = [], tables.of_one_epoch(study, dynamics)
    made = {
        "curves": list(figures.curves(study)),
        "dynamics": dynamics,
        "sweeps": list(figures.sweeps(study)),
        "attacked": list(figures.robustness(study)),
        "layers": list(figures.variances(study)),
    }
    return write_page(
        page,
        "report.html.j2",
        [figure for drawn in made.values() for figure in drawn],
        **made,
        study=study,
        single=single,
        cards=list(_cards(study)),
        totals=tables.totals(study),
        differences=tables.differences(study),
        costs=list(tables.costs(study)),
        disturbed=Disturbed(examples_in_words(study), parts_in_words(study), steps_in_words(study)),
        galleries=list(galleries(study)),
        heat=HEAT,
        settings=list(tables.settings(study)),
        loose=tables.loose(study),
    )


class Disturbed(NamedTuple):
    """In words: how many examples noise and attacks were tried on, what of them they move, and the steps of PGD."""

    examples: str
    parts: str
    steps: str


class Finding(NamedTuple):
    """What changed, and how sure that is."""

    what: str
    before: str
    after: str
    words: str
    shown: bool


class Card(NamedTuple):
    series: int
    name: str
    against: str
    findings: list[Finding]


def _cards(study: Study) -> Iterator[Card]:
    """One for every series but the baselines."""
    for k, group in enumerate(study.groups):
        ratio = group.against(log_input_loss)
        if group.baseline is None or ratio is None:
            continue
        findings = [_finding("Validation error, last epoch", group, final_error)]
        words = _in_words(ratio, lambda v: f"× {number(math.exp(v))}", "")
        findings.append(Finding("Validation input loss", "", f"× {number(math.exp(ratio.mean))}", words, ratio.shown))
        for kind, size in {"pgd": "radius", "noise": "σ"}.items():
            at = middle(group.baseline, kind)
            if at is not None:
                of = partial(Run.accuracy, kind=kind, at=at)
                findings.append(_finding(f"Accuracy under {ATTACKS[kind]}, {size} {at:g}", group, of))
        yield Card(k, group.name, group.baseline.name, [finding for finding in findings if finding is not None])


def _finding(what: str, group: Group, of: Measure) -> Finding | None:
    """Both means are over the seeds that the difference is taken over."""
    d = group.against(of)
    if d is None:
        return None
    before, after = (f"{fmean(values):.2f} %" for values in zip(*group.pairs(of), strict=True))
    return Finding(what, before, after, _in_words(d, lambda v: f"{v:+.2f}", " points"), d.shown)


def _in_words(d: Difference, write: Callable[[float], str], unit: str) -> str:
    bounds = tables.bounds(d, write)
    if not d.has_interval:
        return tables.minus(f"{write(d.mean)}{unit}; {bounds}")
    rest = "" if d.shown else ": no difference shown"
    return tables.minus(f"{write(d.mean)}{unit}, 95 % interval {bounds}{rest}")
