"""Trains the planned runs that have no record yet, one after another, within a time limit.

    results/paper/STUDY.json             finished runs
    results/paper/unfinished/KEY/        the current run: an ordinary run folder with its checkpoint
    results/paper/data/NAME-EXAMPLES/    the part of a data set that --quick and --examples train on

A run that was stopped, by the time limit, by Ctrl-C or by force, goes on from its last checkpoint.
"""

import contextlib
import dataclasses
import gc
import json
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import DivergedError, NormalizationWarning
from ...train.data import DataSet, Split
from ...train.files import locked_file, write_json
from ...train.loop import fit
from ...train.runs import Run
from ..gather import read
from .net_measurements import ALONG, MEASURES
from .plan import Job
from .records import Record, Records, device_name, make_record

STARTING = 45.0  # seconds: a compiled run is not begun when less than this is left, since compiling cannot be stopped


@dataclass(frozen=True)
class Place:
    """Where runs are trained: the data folder, the device, and whether steps are compiled."""

    data_dir: Path | None = None
    device: str = "auto"
    compile: bool | None = None  # None: on a GPU

    def on(self, run: Run) -> Run:
        """The run as it is trained here."""
        gpu = self.device != "cpu" and torch.cuda.is_available()
        compiled = gpu if self.compile is None else self.compile
        images = gpu and run.model not in ("mlp", "vit")
        config = dataclasses.replace(run.config, compile=compiled, channels_last=images)
        place = None if self.data_dir is None else str(self.data_dir)
        return dataclasses.replace(run, data_dir=place, device=self.device, config=config)


class OutOfTime(KeyboardInterrupt):  # training saves a checkpoint on KeyboardInterrupt
    """The time limit was reached."""


class Clock:
    """Time since the start, and how much is left."""

    def __init__(self, minutes: float | None):
        self.began, self.minutes = time.monotonic(), minutes

    @property
    def left(self) -> float:
        """Seconds."""
        used = time.monotonic() - self.began
        return float("inf") if self.minutes is None else 60 * self.minutes - used

    def check(self) -> None:
        if self.left <= 0:
            raise OutOfTime


def train_missing(
    jobs: Sequence[Job], results: Path, place: Place, minutes: float | None = None, say: Callable[[str], None] = print
) -> bool:
    """Trains the jobs that have no record, and says one line a run; returns whether all are done.

    Runs that another process has in hand are left to it, and those whose data are not there are left out.
    """
    records, clock, elsewhere = Records(results), Clock(minutes), 0
    absent: set[str] = set()
    done = sum(job.key in records.read() for job in jobs)
    say(f"{done} of {len(jobs)} runs are done in {results}")
    for job in jobs:
        run = place.on(job.run)
        if job.key in records.read() or run.data in absent:
            continue
        if clock.left < (STARTING if run.config.compile else 0):
            break
        with locked_file(results / "unfinished" / f".{job.key}.lock") as (_, mine):
            if not mine:
                elsewhere += 1
                continue
            if job.key in records.read():  # finished by another process since
                continue
            try:
                record = train_one(job, run, results, clock)
            except FileNotFoundError as error:
                absent.add(run.data)
                say(f"runs on {run.data} are left out: {error}")
                continue
            except OutOfTime:
                say(f"stopped in {job.title}: the same command continues it")
                break
            records.add(job.study, job.key, record)
            shutil.rmtree(results / "unfinished" / job.key)
            (results / "unfinished" / f".{job.key}.lock").unlink()
        say(_line(job, record, jobs, records.read()))
        _free_memory()
    left = [job for job in jobs if job.key not in records.read()]
    if elsewhere:
        say(f"{elsewhere} run(s) are being trained by other processes")
    say(f"{len(jobs) - len(left)} of {len(jobs)} runs are done" + (f"; not run: {len(left)}" if left else ""))
    return not left


def train_one(job: Job, run: Run, results: Path, clock: Clock) -> Record:
    """One run from its checkpoint, if it has one, to its record."""
    folder = results / "unfinished" / job.key
    if job.examples is not None:
        run = dataclasses.replace(run, data=str(part_of(run, job.examples, results / "data")), data_dir=None)
    data = load(run)
    resume = any((folder / name / "state.json").exists() for name in ("checkpoint", "checkpoint.old"))
    model = run.make_model(data)
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        run.write(folder)
    elif (folder / "run.json").exists():
        # A run may go on elsewhere; its config says how its steps are computed, and stays.
        run = dataclasses.replace(run, config=Run.read(folder).config)

    batches, quarter = -(-len(data.train) // run.config.batch_size), max(1, run.config.epochs // 4)

    def after_step(epoch: int, done: int) -> None:
        clock.check()
        if done == batches and (epoch + 1) % quarter == 0:
            for name in ALONG.keys() & set(job.measures):
                write_json(folder / f"{name}-{epoch + 1}.json", ALONG[name](run, data, model))

    if not (resume and read(folder).diverged):
        with contextlib.suppress(DivergedError), warnings.catch_warnings():
            warnings.simplefilter("ignore", NormalizationWarning)  # what paper mode does there is what is studied
            fit(model, data, run.config, folder=folder, resume=resume, after_step=after_step)
    outcome = read(folder)
    measured: dict[str, Any] = {}
    for name in () if outcome.diverged else job.measures:
        clock.check()
        measured[name] = MEASURES[name](run, data, model)
        for file in folder.glob(f"{name}-*.json"):
            measured[name][file.stem.removeprefix(f"{name}-")] = json.loads(file.read_text())
    return make_record(job, run, outcome.history, measured)


@cache
def _load(data: str, data_dir: str | None, device: str) -> DataSet:
    return Run(data=data, data_dir=data_dir, device=device).load()


def load(run: Run) -> DataSet:
    """The run's data; sets that are loaded stay on the device for the next run."""
    return _load(run.data, run.data_dir, run.device)


def part_of(run: Run, examples: int, below: Path) -> Path:
    """A folder with the first examples of every class of a set, so that `threepass train --data FOLDER` takes it.

    Of the validation split half as many, but at least one of each class.
    """
    folder = below / f"{run.data}-{examples}"
    if not (folder / "data.npz").exists():
        whole = dataclasses.replace(run, device="cpu").load()
        arrays: dict[str, Any] = {}
        for name, split, count in (("train", whole.train, examples), ("val", whole.val, examples // 2)):
            chosen = first_of_every_class(split, len(whole.classes), count)
            arrays |= {f"x_{name}": split.x[chosen].numpy(), f"y_{name}": split.y[chosen].numpy()}
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / "new.npz", **arrays)
        (folder / "new.npz").replace(folder / "data.npz")
    return folder


def first_of_every_class(split: Split, classes: int, count: int) -> torch.Tensor:
    """The places of the first examples of every class, about `count` in all, in their order."""
    each = max(1, count // classes)
    places = [(split.y == label).nonzero()[:each, 0] for label in range(classes)]
    return torch.cat(places).sort().values


def minutes_left(jobs: Sequence[Job], records: dict[str, Record], device: str) -> float | None:
    """By what finished runs of this plan took on this device; None before the first of them."""
    done = [(job.cost, records[job.key]) for job in jobs if job.key in records]
    known = [(cost, r["seconds"]) for cost, r in done if r["device"] == device and r["status"] == "complete"]
    if not known:
        return None
    rate = sum(seconds for _, seconds in known) / sum(cost for cost, _ in known)
    return rate * sum(job.cost for job in jobs if job.key not in records) / 60


def _line(job: Job, record: Record, jobs: Sequence[Job], records: dict[str, Record]) -> str:
    done = sum(j.key in records for j in jobs)
    best, final = record["best"]["val"], record["final"]["val"]
    figures = f"validation accuracy {final:.2f} %, best {best:.2f} %"
    if record["status"] == "diverged":
        figures = f"diverged in epoch {record['epochs']}"
    left = minutes_left(jobs, records, record["device"])
    time_left = "" if left is None else f"; about {left:.0f} min left"
    return f"[{done}/{len(jobs)}] {job.title}: {figures}, {record['seconds'] / 60:.1f} min{time_left}"


def _free_memory() -> None:
    """Recorded graphs hold memory until they are collected."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def status(jobs: Sequence[Job], results: Path, place: Place) -> list[str]:
    """One line a run: done, unfinished, or not run; at the end the time that is left."""
    records = Records(results).read()
    lines = []
    for job in jobs:
        begun = (results / "unfinished" / job.key).exists()
        word = "done" if job.key in records else "unfinished" if begun else "not run"
        lines.append(f"{word:<10}  {job.study:<9}  {job.title}")
    left = minutes_left(jobs, records, device_name(place.on(jobs[0].run))) if jobs else None
    count = sum(job.key in records for job in jobs)
    return [*lines, f"{count} of {len(jobs)} runs are done" + ("" if left is None else f"; about {left:.0f} min left")]
