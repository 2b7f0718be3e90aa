"""The rules by which records confirm or refute what the paper says. No verdict is written by hand.

A claim is a list of comparisons. Where one is a difference, it is taken between runs of the same seed, and its 95 %
interval (Student's t over seeds) decides: wholly on the claimed side of zero confirms it, wholly on the other side
refutes it, and anything else, fewer than three seeds included, is unclear. A claim is refuted if one of its comparisons
is, confirmed if all of them are, and not run if none of them is. Where a comparison asks whether something happens (a
run stalls), it must happen with every seed to be confirmed, and with none to be refuted.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from ..intervals import Difference, paired, t_quantile
from .plan import STUDIES, Scale
from .records import Record

CONFIRMED, REFUTED, UNCLEAR, NOT_RUN = "confirmed", "refuted", "unclear", "not run"
CLASSES = {"mnist": 10, "cifar10": 10, "cifar100": 100}
TOLERANCE = 1.0  # points: our accuracy and the paper's agree if they are as close as this, whatever the spread
Of = Callable[[Record], float]
Holds = Callable[[Record], bool]


class Row(NamedTuple):
    """One comparison: what is compared, the paper's figure, ours, and what follows."""

    what: str
    paper: str
    ours: str
    word: str


class Finding(NamedTuple):
    """A claim with its comparisons and the verdict on it."""

    name: str
    claim: str
    rule: str
    rows: list[Row]

    @property
    def word(self) -> str:
        return together(row.word for row in self.rows)


@dataclass(frozen=True)
class Cell:
    """Finished runs that differ in their seed only."""

    records: dict[int, Record]  # by seed

    def values(self, of: Of) -> list[float]:
        return [of(r) for _, r in sorted(self.records.items())]

    def __bool__(self) -> bool:
        return bool(self.records)


class Evidence:
    """The records of a plan, by study and cell."""

    def __init__(self, records: dict[str, Record], scale: Scale, root: Path):
        self.scale, self.root = scale, root
        self.cells: dict[tuple[str, frozenset[tuple[str, str]]], Cell] = {}
        seeds = 1 + max((r["seed"] for r in records.values()), default=0)  # more may have been run than are planned
        for study, plan in STUDIES.items():
            for job in (*plan(scale), *plan(dataclasses.replace(scale, seeds=seeds))):
                record = {job.seed: records[job.key]} if job.key in records else {}
                where = (study, frozenset(job.cell.items()))
                self.cells[where] = Cell(self.cells.get(where, Cell({})).records | record)

    def cell(self, study: str, net: str, data: str, method: str, **more: str) -> Cell:
        labels = {"net": net, "data": data, "method": method} | more
        return self.cells[study, frozenset(labels.items())]


def best_val(r: Record) -> float:
    return r["best"]["val"]


def best_train(r: Record) -> float:
    return r["best"]["train"]


def final_val(r: Record) -> float:
    return r["final"]["val"]


def final_train(r: Record) -> float:
    return r["final"]["train"]


def end_of(column: str) -> Of:
    """The mean over the last twentieth of the epochs."""

    def of(r: Record) -> float:
        values = [v for v in r["history"][column] if v is not None]
        return fmean(values[-max(1, len(values) // 20) :])

    return of


def growth_of(column: str) -> Of:
    """log10 of the end over the first epoch."""

    def of(r: Record) -> float:
        start = next(v for v in r["history"][column] if v is not None)
        return math.log10(max(end_of(column)(r), 1e-30) / max(start, 1e-30))

    return of


def stalled(r: Record) -> bool:
    """It never got to twice the training accuracy of guessing, or its loss was not finite at the end."""
    return r["status"] == "diverged" or best_train(r) < 200 / CLASSES[r["cell"]["data"]]


def above(of: Of, bound: float) -> Holds:
    return lambda r: of(r) > bound


def below(of: Of, bound: float) -> Holds:
    return lambda r: of(r) < bound


def together(words: Iterable[str]) -> str:
    verdicts = list(words)
    if REFUTED in verdicts:
        return REFUTED
    if all(w == NOT_RUN for w in verdicts):
        return NOT_RUN
    return CONFIRMED if all(w == CONFIRMED for w in verdicts) else UNCLEAR


def spread(values: Sequence[float], unit: str = "") -> str:
    """Mean, sample standard deviation and number of seeds."""
    if not values:
        return ""
    deviation = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{fmean(values):.2f}{deviation}{unit} ({len(values)} seed{'s' * (len(values) > 1)})"


def sign_of(d: Difference | None, sign: int) -> str:
    """The verdict on "the difference has this sign"."""
    if d is None:
        return NOT_RUN
    if d.low is None or d.high is None or not d.shown:
        return UNCLEAR
    return CONFIRMED if sign * d.mean > 0 else REFUTED


def difference_text(d: Difference | None) -> str:
    if d is None:
        return ""
    largest = max(abs(z) for z in (d.mean, d.low, d.high) if z is not None)
    seeds, form = f"{d.n} seed{'s' * (d.n > 1)}", "+.2f" if largest >= 0.005 else "+.1e"
    return f"{d.mean:{form}} ({seeds if d.low is None else f'{d.low:{form}} to {d.high:{form}}, {seeds}'})"


def compare(what: str, after: Cell, before: Cell, of: Of, sign: int, theirs: str = "") -> Row:
    """Whether `of` is larger (sign 1) or smaller (-1) in `after` than in `before`, over the seeds that both have."""
    d = difference(after, before, of)
    return Row(what, theirs, difference_text(d), sign_of(d, sign))


def difference(after: Cell, before: Cell, of: Of) -> Difference | None:
    seeds = sorted(after.records.keys() & before.records.keys())
    return paired([of(after.records[s]) for s in seeds], [of(before.records[s]) for s in seeds])


def same(what: str, after: Cell, before: Cell, of: Of, margin: float, theirs: str = "") -> Row:
    """Whether the interval of the difference lies within a margin of zero; refuted if it lies wholly outside."""
    d = difference(after, before, of)
    return Row(what, theirs, difference_text(d), _within(d, margin))


def _within(d: Difference | None, margin: float) -> str:
    if d is None or d.low is None or d.high is None:
        return NOT_RUN if d is None else UNCLEAR
    if -margin <= d.low and d.high <= margin:
        return CONFIRMED
    return REFUTED if d.low > margin or d.high < -margin else UNCLEAR


def every(what: str, cell: Cell, holds: Holds, shown: Of, theirs: str = "", unit: str = "") -> Row:
    """Whether something holds for every seed; refuted if it holds for none, unclear if for some."""
    if not cell:
        return Row(what, theirs, "", NOT_RUN)
    held = [holds(r) for r in cell.records.values()]
    word = CONFIRMED if all(held) else UNCLEAR if any(held) else REFUTED
    return Row(what, theirs, spread(cell.values(shown), unit), word)


def agreement(cell: Cell, of: Of, theirs: float) -> str:
    """Whether the paper's one number could be another seed of ours, or is within TOLERANCE of our mean.

    With n seeds the next one lies within mean +- t s sqrt(1 + 1/n) in 95 % of cases.
    """
    values = cell.values(of)
    if not values:
        return NOT_RUN
    off = abs(fmean(values) - theirs)
    if off <= TOLERANCE:
        return CONFIRMED
    if len(values) < 2:
        return UNCLEAR
    return UNCLEAR if off <= t_quantile(len(values) - 1) * stdev(values) * math.sqrt(1 + 1 / len(values)) else REFUTED
