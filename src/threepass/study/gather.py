"""Runs read from their folders, and grouped into series: what `report` shows.

Runs are seeds of one series only if all that their results depend on is equal but the seed: data, model and its
options, initialisation, and every setting. Only series of the same data and model are compared with each other.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..page.render import count
from ..train.config import NOT_WITH_STRENGTH, Config
from ..train.files import Kinds, read_object
from .intervals import Difference, paired

Measure = Callable[["Run"], float | None]
LOSSES = ("train_loss", "val_loss", "train_input_loss", "val_input_loss")  # that every epoch has
COMPARED: dict[str, Kinds] = {
    "data": (dict,), "model": (dict,), "config": (dict,), "variants": (list,), "baseline": (str,), "seeds": (int,),
    "versions": (dict,), "machine": (dict,),
}  # fmt: skip
CONFIGURED: dict[str, Kinds] = {"config": (dict,)}
ROBUST: dict[str, Kinds] = {"noise": (dict,), "fgsm": (dict,), "pgd": (dict,)}
VARIANCES: dict[str, Kinds] = {"start": (list,), "end": (list,)}
# Settings that do not change what a run computes, but for rounding
WITHOUT_EFFECT = (
    "compile",
    "channels_last",
    "deterministic",
    "save_every",
    "save_minutes",
    "probe_every",
    "align_every",
)


@dataclass
class Run:
    """What a run's folder holds. `task`: data, model and initialisation, as far as its files tell."""

    folder: Path
    task: dict[str, Any]
    seed: int
    diverged: bool
    history: list[dict[str, Any]]
    config: dict[str, Any]
    robustness: dict[str, Any] | None
    variances: dict[str, Any] | None

    def last(self, key: str) -> float:
        return self.history[-1][key]

    def accuracy(self, kind: str, at: float) -> float | None:
        """Under noise or an attack of this size, in percent."""
        curve = (self.robustness or {}).get(kind)
        return 100 * curve["accuracy"][curve["at"].index(at)] if curve and at in curve["at"] else None

    @property
    def place(self) -> Path:
        """The folder that its series is named after: of NAME/seed-0, NAME."""
        return self.folder.parent if self.folder.name.startswith("seed-") else self.folder

    @property
    def settings(self) -> dict[str, Any]:
        """All that its results depend on, but for the task and the seed."""
        every = Config().to_dict() | self.config
        if every["strength"] is not None:  # older runs have their defaults there
            every |= dict.fromkeys(NOT_WITH_STRENGTH)
        return {name: value for name, value in every.items() if name not in (*WITHOUT_EFFECT, "seed")}

    @property
    def is_two_passes(self) -> bool:
        return self.config.get("alpha") == 1.0 and not self.config.get("strength")


@dataclass
class Group:
    """Runs that differ in their seed only: one series of every figure, compared with its baseline."""

    name: str
    runs: list[Run]
    baseline: "Group | None" = None

    @property
    def complete(self) -> list[Run]:
        return [run for run in self.runs if run.history and not run.diverged]

    def values(self, of: Measure) -> list[float]:
        return [v for run in self.complete if (v := of(run)) is not None]

    def pairs(self, of: Measure) -> list[tuple[float, float]]:
        """The baseline's value and this group's, for every seed that both have."""
        if self.baseline is None or self.baseline is self:
            return []
        theirs, mine = ({r.seed: v for r in g.complete if (v := of(r)) is not None} for g in (self.baseline, self))
        return [(theirs[seed], mine[seed]) for seed in mine if seed in theirs]

    def against(self, of: Measure) -> Difference | None:
        """The difference to the baseline over the seeds that both have."""
        pairs = self.pairs(of)
        return paired([after for _, after in pairs], [before for before, _ in pairs])


@dataclass
class Study:
    """All that is reported: the series (of them, `loose`: those of single runs), the comparisons, and what to know."""

    groups: list[Group] = field(default_factory=list)
    loose: list[Group] = field(default_factory=list)
    compared: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)  # with what compare.json holds
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [group.name for group in self.groups]

    def heading(self, folder: Path) -> str:
        """The comparison's name, where there are several."""
        return folder.name if len(self.compared) > 1 else ""


def gather(folders: Sequence[Path]) -> Study:
    """Reads the folders. With several comparisons, each one's name goes before its variants' names."""
    if not folders:
        raise ValueError("nothing to report on: pass the folder of at least one run")
    study, single = Study(), list[Run]()
    places = {folder.resolve(): folder for folder in folders}
    several = sum((place / "compare.json").exists() for place in places) > 1
    for place, folder in places.items():
        if (place / "compare.json").exists():
            about = read_object(place / "compare.json", COMPARED)
            study.compared.append((place, about))
            study.groups += _compared(place, about, f"{place.name}: " if several else "")
        elif (place / "metrics.jsonl").exists():
            single.append(read(place))
            if single[-1].history and "val_error" not in single[-1].history[-1]:
                raise ValueError(
                    f"{folder}: reports compare validation errors, and this run has none: it has no classes"
                )
        else:
            raise FileNotFoundError(
                f"{folder} contains no run (neither compare.json nor metrics.jsonl): {_what_to_give(folder)}"
            )
    study.loose = _grouped(single, study.notes)
    study.groups += study.loose
    if study.compared and study.loose:
        names = ", ".join(group.name for group in study.loose)
        study.notes.append(
            f"Not part of the comparison: {names}. The last table has the data and the model that each was trained on."
        )
    finished = any(run.history for group in study.groups for run in group.runs)
    if not finished or not (study.compared or any(group.complete for group in study.loose)):
        raise ValueError(
            f"nothing to report on: no run in {', '.join(map(str, folders))} has finished an epoch"
            + " without diverging" * finished
        )
    for run in single:
        if run.robustness and run.robustness.get("epochs", len(run.history)) != len(run.history):
            run.robustness = None
            study.notes.append(
                f"{run.folder.name} was trained on after its robustness was measured, which is left out: "
                f"threepass robustness measures it again."
            )
    for group in study.groups:
        if n := sum(run.diverged for run in group.runs):
            runs, verb = count(len(group.runs), "run"), "is" if n == 1 else "are"
            study.notes.append(f"{group.name}: {n} of {runs} diverged and {verb} left out of all figures.")
    study.notes += _different_data(study.loose) + _unequal_lengths(study.groups)
    return study


def _what_to_give(folder: Path) -> str:
    """What to pass instead of a folder that contains no run: one of that name in runs/, or the runs inside of it."""
    near = Path("runs") / folder
    if near.is_dir() and near != folder:
        return f"did you mean {near}?"
    inside = sorted(p.parent for name in ("compare.json", "metrics.jsonl") for p in folder.glob(f"*/{name}"))
    if inside:
        return f"give the runs in it: threepass report {' '.join(map(str, inside[:8]))}{' ...' * (len(inside) > 8)}"
    return "give a folder that `threepass compare` or `threepass train` wrote"


def _different_data(groups: Sequence[Group]) -> list[str]:
    """A note where single runs were trained on several data sets: one table has them all."""
    names = [*dict.fromkeys(str(group.runs[0].task["data"]) for group in groups if "data" in group.runs[0].task)]
    if len(names) < 2:
        return []
    return [
        f"The runs were trained on different data ({', '.join(names)}), and their figures cannot be compared with each "
        "other: differences are taken between runs on the same data."
    ]


def _unequal_lengths(groups: Sequence[Group]) -> list[str]:
    """A note where runs have not gone through the same number of epochs: figures are those of each one's last."""
    epochs = {group.name: {len(run.history) for run in group.runs if not run.diverged} for group in groups}
    if len(set[int]().union(*epochs.values())) < 2:
        return []
    each = ", ".join(f"{name} {' or '.join(map(str, sorted(n)))}" for name, n in epochs.items() if n)
    return [f"The runs differ in their number of epochs ({each}), and figures are those of each run's last epoch."]


def read(folder: Path) -> Run:
    """One run; what is not there is None. It has diverged if its last epoch's losses are not finite."""

    def content(name: str, keys: Mapping[str, Kinds]) -> dict[str, Any] | None:
        return read_object(folder / name, keys) if (folder / name).exists() else None

    history = _read_metrics(folder / "metrics.jsonl")
    files = ("result.json", "run.json", "checkpoint/state.json")
    about = next((settings for name in files if (settings := content(name, CONFIGURED))), {})
    config = about.get("config", {})
    diverged = bool(history) and not is_finite(history[-1])
    measured = content("robustness.json", ROBUST), content("variances.json", VARIANCES)
    return Run(folder, _task(folder, about), config.get("seed", 0), diverged, history, config, *measured)


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """One epoch a line; none where there is no such file."""
    history = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), 1):
        try:
            epoch = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is damaged: it is not JSON ({error})") from error
        if lacking := [key for key in LOSSES if key not in epoch]:
            raise ValueError(f"{path}, line {number} lacks the key {lacking[0]!r}")
        history.append(epoch)
    return history


def is_finite(metrics: dict[str, Any]) -> bool:
    return all(math.isfinite(metrics[k]) for k in LOSSES)


def _task(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """What run.json says of data, model and initialisation; else the comparison that the run is part of.

    `fit` records none of this: such runs are alike only if they are seed-0, seed-1, ... of one folder.
    """
    if "model" in about:
        return {name: about.get(name) for name in ("data", "model", "model_options", "init")}
    if (folder.parent.parent / "compare.json").exists():
        return {"comparison": str(folder.parent.parent)}
    return {"unknown": str(folder.parent if folder.name.startswith("seed-") else folder)}


def _compared(folder: Path, about: dict[str, Any], prefix: str) -> list[Group]:
    groups = {}
    for v in about["variants"]:
        folders = [folder / v["folder"] / f"seed-{seed}" for seed in range(about["seeds"])]
        groups[v["name"]] = Group(prefix + v["name"], [read(f) for f in folders if (f / "metrics.jsonl").exists()])
    for group in groups.values():
        group.baseline = groups[about["baseline"]]
    return list(groups.values())


def _grouped(runs: Sequence[Run], notes: list[str]) -> list[Group]:
    """Single runs as series, compared within their task."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(json.dumps([run.task, run.settings], sort_keys=True), []).append(run)
    groups = [Group(name, members) for name, members in zip(_names(alike.values()), alike.values(), strict=True)]
    for group in groups:
        group.runs = _one_a_seed(group, notes)
        rivals = [g for g in groups if g.runs[0].task == group.runs[0].task]
        plain = [g for g in rivals if g.runs[0].is_two_passes]
        group.baseline = min(plain or rivals[:1], key=lambda g: len(differing([g, group])))
        if "unknown" in group.runs[0].task and len(groups) > 1:
            notes.append(f"{group.name}: its files do not name data and model, so it is compared with no other series.")
    return sorted(groups, key=lambda group: group.baseline is not group)  # the first series is drawn in grey


def _one_a_seed(group: Group, notes: list[str]) -> list[Run]:
    """The newest run of every seed: the same seed again is no further evidence."""
    newest: dict[int, Run] = {}
    for run in sorted(group.runs, key=lambda run: (run.folder / "metrics.jsonl").stat().st_mtime_ns):
        newest[run.seed] = run
    for seed, times in Counter(run.seed for run in group.runs).items():
        if times > 1:
            names = ", ".join(_tail(run.folder, 2) for run in group.runs if run.seed == seed)
            choice = f"only the newest, {_tail(newest[seed].folder, 2)}, is used"
            notes.append(f"{group.name}: seed {seed} occurs {times} times ({names}); {choice}.")
    return [newest[seed] for seed in sorted(newest)]


def _names(series: Iterable[Sequence[Run]]) -> list[str]:
    """Of every series, as much of its first run's place as tells them all apart."""
    places = [runs[0].place for runs in series]
    if len(set(places)) < len(places):
        places = [runs[0].folder for runs in series]
    every = ([_tail(place, k) for place in places] for k in range(1, 99))
    return next(names for names in every if len(set(names)) == len(places))


def _tail(path: Path, parts: int) -> str:
    return "/".join(path.parts[-parts:])


def differing(groups: Sequence[Group]) -> list[str]:
    """The settings in which series differ."""
    every = [g.runs[0].settings for g in groups]
    return [name for name in every[0] if any(settings.get(name) != every[0][name] for settings in every)]
