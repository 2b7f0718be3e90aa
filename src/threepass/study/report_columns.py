"""The numbers by which a report compares runs."""

import math
from functools import partial
from typing import Any, Literal, NamedTuple

from .gather import Group, Measure, Run, Study

ATTACKS = {"noise": "Gaussian noise", "fgsm": "FGSM", "pgd": "PGD"}


class Column(NamedTuple):
    """A measure as a column of tables; `better`: which values are, where that can be said."""

    of: Measure
    better: Literal["low", "high"] | None


def columns(study: Study) -> dict[str, Column]:
    measures = {
        "best error, %": Column(best_error, "low"),
        "final error, %": Column(final_error, "low"),
        "final loss": Column(partial(Run.last, key="val_loss"), "low"),
        "final input loss": Column(partial(Run.last, key="val_input_loss"), "low"),
        "final training loss": Column(partial(Run.last, key="train_loss"), None),
    }
    for kind, name in ATTACKS.items():
        at = next((at for group in study.groups if (at := middle(group, kind)) is not None), None)
        if at is not None:
            of = partial(Run.accuracy, kind=kind, at=at)
            measures[f"accuracy at {name.removeprefix('Gaussian ')} {at:g}, %"] = Column(of, "high")
    return measures


def middle(group: Group, kind: str) -> float | None:
    """The middle of the sizes: a choice that does not look at the results."""
    sizes = [run.robustness[kind]["at"] for run in group.complete if run.robustness]
    return sorted(sizes[0])[len(sizes[0]) // 2] if sizes else None


def parts_in_words(study: Study) -> str:
    """What noise and attacks moved in the examples."""
    return " or ".join(dict.fromkeys(record.get("of", "pixel") for record in _robustness_records(study)))


def unit_in_words(study: Study) -> str:
    """In which the sizes of noise and attacks are."""
    kinds = {(record.get("of", "pixel"), *record.get("range", (0, 1))) for record in _robustness_records(study)}
    if kinds == {("pixel", 0, 1)}:
        return "pixels 0 to 1"
    return "in units of the features" if {of for of, *_ in kinds} == {"feature"} else "in units of each data set"


def examples_in_words(study: Study) -> str:
    """How many validation examples were disturbed; of each series, where they differ."""
    counts = {g.name: {r.robustness["examples"] for r in g.complete if r.robustness} for g in study.groups}
    every = sorted(set[int]().union(*counts.values()))
    if len(every) == 1:
        return f"{every[0]} validation examples"
    each = "; ".join(f"{name}: {' or '.join(map(str, sorted(n)))}" for name, n in counts.items() if n)
    return f"validation examples ({each})"


def steps_in_words(study: Study) -> str:
    """Of PGD."""
    return " or ".join(dict.fromkeys(str(record.get("steps", "several")) for record in _robustness_records(study)))


def _robustness_records(study: Study) -> list[dict[str, Any]]:
    return [run.robustness for group in study.groups for run in group.complete if run.robustness]


def best_error(run: Run) -> float:
    return 100 * min(m["val_error"] for m in run.history)


def final_error(run: Run) -> float:
    return 100 * run.last("val_error")


def log_input_loss(run: Run) -> float | None:
    return math.log(run.last("val_input_loss")) if run.last("val_input_loss") > 0 else None
