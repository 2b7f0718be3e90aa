"""The folder of a run: one process at a time writes its metrics, TensorBoard events and checkpoints.

A folder that contains a run is never overwritten. The operating system releases the lock when the process ends.
"""

import contextlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from . import checkpoint
from .files import locked_file, replacing

LOCK = ".lock"
GROUPS = {
    "E": "epoch/E", "E_x": "epoch/E_x", "lr": "epoch/lr", "alpha": "epoch/alpha",
    "grad_norm": "gradients/backprop_norm", "third_norm": "gradients/third_norm", "grad_cosine": "gradients/cosine",
}  # fmt: skip


class RunFolder:
    """Writes a run's files; what takes long goes on in the background. `created` and `resumed` are the ways in."""

    def __init__(self, path: Path):
        self.path = path
        self.has_begun = False  # a step is done, so that there is something to keep
        self._background = ThreadPoolExecutor(1, "run-folder")
        self._pending: list[Future[None]] = []
        self._events: Any = None

    @property
    def has_checkpoint(self) -> bool:
        return checkpoint.exists(self.path / "checkpoint")

    def save(self, packed: checkpoint.Packed) -> None:
        """Replaces the checkpoint, whole or not at all."""
        self.wait()
        self._submit(checkpoint.write, self.path / "checkpoint", packed)

    def save_best(self, weights: dict[str, Tensor], metrics: dict[str, Any]) -> None:
        """Replaces the weights of the best epoch; its metrics are in the file's header."""
        copied = {name: z.detach().cpu().contiguous().clone() for name, z in weights.items()}
        self._submit(_write_weights, self.path / "best.safetensors", copied, {k: str(v) for k, v in metrics.items()})

    def write_metrics(self, history: Sequence[dict[str, Any]]) -> None:
        file = self.path / "metrics.jsonl"
        try:
            with replacing(file) as beside:
                beside.write_text("".join(json.dumps(metrics) + "\n" for metrics in history))
        except OSError as error:
            raise OSError(f"could not write {file} ({error})") from error

    def write_events(self, scalars: Sequence[tuple[str, float, int]], first: int) -> None:
        """Scalars (name, value, step) for TensorBoard, where it is installed; older ones from step `first` on go."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        if self._events is None:
            self._events = SummaryWriter(f"{self.path}/tensorboard", purge_step=first)
        self._submit(self._write_events, scalars)

    def _write_events(self, scalars: Sequence[tuple[str, float, int]]) -> None:
        for name, value, step in scalars:
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def _submit(self, task: Callable[..., None], *args: Any) -> None:
        self._pending.append(self._background.submit(task, *args))

    def wait(self) -> None:
        """Until everything is on the disk; an error of the background is raised here."""
        pending, self._pending = self._pending, []
        for task in pending:
            task.result()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._background.shutdown()
            if self._events is not None:
                self._events.close()


def _write_weights(file: Path, weights: dict[str, Tensor], about: dict[str, str]) -> None:
    try:
        with replacing(file) as beside:
            save_file(weights, beside, about)
    except (OSError, SafetensorError) as error:
        raise OSError(f"could not write {file} ({error})") from error


def event_names(metrics: dict[str, Any]) -> dict[str, float]:
    """An epoch's metrics under names that TensorBoard groups by what precedes the slash."""
    named = {}
    for name, value in metrics.items():
        if name.endswith(("seconds", "bytes")):
            named[f"cost/{name}"] = value
        elif name.startswith("train_"):
            named[f"epoch/{name}"] = value
        elif name != "epoch":
            named[GROUPS.get(name, name.replace("_", "/", 1))] = value
    return named


@contextlib.contextmanager
def created(path: Path, numbered: bool = False) -> Iterator[RunFolder]:
    """The folder of a new run; if the run fails before its first step, no folder is left.

    numbered: where there is something already, the first of NAME-2, NAME-3, ... that is free.
    """
    made = numbered or not path.exists()
    path = new_folder(path) if numbered else path
    path.mkdir(parents=True, exist_ok=True)
    with locked(path):
        if holds_run(path):
            raise FileExistsError(
                f"{path} already contains a run: pass resume=True (threepass train --resume {path}) to continue it, or "
                "choose another folder"
            )
        folder = RunFolder(path)
        try:
            with contextlib.closing(folder):
                yield folder
        except Exception:
            if made and not folder.has_begun:
                shutil.rmtree(path, ignore_errors=True)
            raise


@contextlib.contextmanager
def resumed(path: Path) -> Iterator[RunFolder]:
    """The folder of a run that goes on, from its checkpoint or, if it has none yet, from its start."""
    if not path.is_dir():
        raise FileNotFoundError(f"no run at {path}: start it without resume")
    with locked(path):
        folder = RunFolder(path)
        if not folder.has_checkpoint and holds_run(path):
            raise FileNotFoundError(f"no checkpoint at {path / 'checkpoint'}, so the run in {path} cannot be resumed")
        with contextlib.closing(folder):
            yield folder


def holds_run(path: Path) -> bool:
    return (path / "metrics.jsonl").exists() or checkpoint.exists(path / "checkpoint")


def new_folder(path: Path) -> Path:
    """Makes the folder, or the first of NAME-2, NAME-3, ... that is not there: no run overwrites another."""
    number, wanted = 2, path
    wanted.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            path = wanted.with_name(f"{wanted.name}-{number}")
            number += 1


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the folder for this process, or says which one has it."""
    with locked_file(path / LOCK) as (file, held):
        if not held:
            raise BlockingIOError(f"{path} is in use by {_owner(file)}: wait for it, or stop it first")
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": platform.node()}, file)
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _owner(file: TextIO) -> str:
    file.seek(0)
    try:
        owner = json.load(file)
        return f"process {owner['pid']} on {owner['host']}"
    except (ValueError, TypeError, KeyError):  # that process has just begun
        return "another process"
