"""Runs read from their folders, and grouped: what `report` shows."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .intervals import Difference, paired

Measure = Callable[["Run"], float | None]


@dataclass
class Run:
    """What a run's folder holds."""

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

    def against(self, of: Measure) -> Difference | None:
        """The difference to the baseline over the seeds that both have."""
        if self.baseline is None or self.baseline is self:
            return None
        mine, theirs = ({r.seed: v for r in g.complete if (v := of(r)) is not None} for g in (self, self.baseline))
        seeds = [seed for seed in mine if seed in theirs]
        return paired([mine[seed] for seed in seeds], [theirs[seed] for seed in seeds])


@dataclass
class Study:
    """All that is reported: the series, and the comparisons that they come from, each with what compare.json says."""

    groups: list[Group] = field(default_factory=list)
    compared: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [group.name for group in self.groups]

    def heading(self, folder: Path) -> str:
        """The comparison's name, where there are several."""
        return folder.resolve().name if len(self.compared) > 1 else ""


def gather(folders: Sequence[Path]) -> Study:
    """Reads the folders. With several comparisons, each one's name goes before its variants' names."""
    if not folders:
        raise ValueError("nothing to report on: give the folder of at least one run")
    study, loose = Study(), dict[str, Group]()
    several = sum((folder / "compare.json").exists() for folder in folders) > 1
    for folder in folders:
        if (folder / "compare.json").exists():
            about = json.loads((folder / "compare.json").read_text())
            study.compared.append((folder, about))
            study.groups += _compared(folder, about, f"{folder.resolve().name}: " if several else "")
        elif (folder / "metrics.jsonl").exists():
            run, place = read(folder), folder.resolve()
            alike = json.dumps(run.config | {"seed": None}, sort_keys=True) if run.config else str(place)
            if alike not in loose:
                loose[alike] = Group(place.parent.name if place.name.startswith("seed-") else place.name, [])
                study.groups.append(loose[alike])
            loose[alike].runs.append(run)
        else:
            raise FileNotFoundError(
                f"{folder} holds no run: there is neither compare.json nor metrics.jsonl in it; "
                "give a folder that `threepass compare` or `threepass train` wrote"
            )
    if not any(run.history for group in study.groups for run in group.runs):
        raise ValueError(f"nothing to report on: no run in {', '.join(map(str, folders))} has finished an epoch")
    two = [g for g in loose.values() if g.runs[0].config.get("alpha") == 1.0 and not g.runs[0].config.get("strength")]
    for group in loose.values():
        group.baseline = next(iter(two or loose.values()))
    return study


def read(folder: Path) -> Run:
    """One run; what is not there is None. It has diverged if its last epoch's losses are not finite."""

    def content(name: str) -> Any:
        return json.loads((folder / name).read_text()) if (folder / name).exists() else None

    metrics = folder / "metrics.jsonl"
    history = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    about = content("result.json") or content("run.json") or content("checkpoint/state.json") or {}
    config = about.get("config", {})
    diverged = bool(history) and not is_finite(history[-1])
    return Run(config.get("seed", 0), diverged, history, config, content("robustness.json"), content("variances.json"))


def is_finite(metrics: dict[str, Any]) -> bool:
    return all(math.isfinite(metrics[k]) for k in ("train_loss", "val_loss", "train_input_loss", "val_input_loss"))


def _compared(folder: Path, about: dict[str, Any], prefix: str) -> list[Group]:
    groups = {}
    for v in about["variants"]:
        folders = [folder / v["folder"] / f"seed-{seed}" for seed in range(about["seeds"])]
        groups[v["name"]] = Group(prefix + v["name"], [read(f) for f in folders if (f / "metrics.jsonl").exists()])
    for group in groups.values():
        group.baseline = groups[about["baseline"]]
    return list(groups.values())
