"""`fit`: Algorithm 1 of the paper, in mini-batches or as printed.

    repeat
        for every batch: three passes (alpha, 1 - alpha), E += l, E_x += l_x
                         update the weights            (update="batch")
        update the weights                             (update="epoch")
    until n epochs, or E <= epsilon

The paper prints "until epoch < n", a slip for "epoch >= n". It sums gradients over the set where we take the mean, so
its eta is our lr / m for a set of m samples, and its l_x is each sample's own: reduction="sample".

Everything that a step depends on is a function of the config and of its position (epoch, batch): learning rate, alpha,
data order, augmentation. So a run that stops after any step goes on from its checkpoint as if it had not stopped.
"""

import contextlib
import dataclasses
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.engine import run as three_passes
from ..core.options import Options
from ..core.penalty import Penalty
from ..inspect.alignment import alignment
from ..tape.state import unchanged_on_error
from . import checkpoint
from .captured import CapturedSteps
from .config import Config
from .data import Batches, DataSet
from .optimizer import make_optimizer
from .progress import Progress
from .recorder import Recorder
from .steps import SUMS, Steps
from .validation import Validation, size_of_batches

VERSION = 1


@dataclass(frozen=True)
class Fit:
    """What training gives: the model, the last epoch's total error E and input error E_x, and every epoch's metrics."""

    model: nn.Module
    E: float
    E_x: float
    history: list[dict[str, Any]]


def fit(
    model: nn.Module,
    data: DataSet,
    config: Config | None = None,
    *,
    folder: Path | str | None = None,
    resume: bool = False,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    penalty: Penalty | None = None,
    after_step: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> Fit:
    """Trains the model by three passes (alpha=1: by two), and returns it with E and E_x.

    Args:
        model: on the device that it is to be trained on; the data's tensors must be there too.
        data: a `threepass.train.data.DataSet`, as `load` gives it.
        config: the settings, or give them as keywords: `fit(model, data, epochs=5, alpha=0.8)`.
        folder: where metrics (JSON lines, TensorBoard) and checkpoints go; none: nothing is written.
        resume: go on from the folder's checkpoint.
        loss_fn: `loss_fn(output, y)`, a mean over the batch; default: cross-entropy with the config's label smoothing.
        penalty: as for `three_pass`, a name or a function; default: the config's.
        after_step: called with the epoch and the number of batches done.
    """
    config = Config.from_dict(settings) if config is None else config
    if isinstance(penalty, str):
        config, penalty = dataclasses.replace(config, penalty=penalty), None
    trainer = Trainer(model, data, config, None if folder is None else Path(folder), loss_fn, penalty)
    if resume:
        trainer.resume()
    return trainer.run(after_step)


class Trainer:
    """One run: its model, optimizer, data, position and sums. `fit` is the way in."""

    def __init__(
        self, model: nn.Module, data: DataSet, config: Config, folder: Path | None, loss_fn=None, penalty=None
    ):
        self.model, self.data, self.config, self.folder = model, data, config, folder
        if config.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.loss_fn = loss_fn or (lambda out, y: F.cross_entropy(out, y, label_smoothing=config.label_smoothing))
        self.optimizer = make_optimizer(model, config)
        self.device = next(model.parameters()).device
        common: dict[str, Any] = {
            "normalise": (data.mean, data.std), "channels_last": config.channels_last, "seed": config.seed,
        }  # fmt: skip
        self.batches = Batches(data.train, config.batch_size, augment=config.augment, shuffle=True, **common)
        size = size_of_batches(len(data.val), data.val.x[0].numel(), config.batch_size)
        val_batches = Batches(data.val, size, shuffle=False, **common)
        required = config.compile == "require"
        self.recorder = Recorder(self.device, model, self.loss_fn, required) if config.compile else None
        parts = (model, self.loss_fn, self.batches, self.optimizer, config, penalty)
        self.steps = Steps(*parts) if self.recorder is None else CapturedSteps(*parts, recorder=self.recorder)
        if self.recorder is not None:
            self.recorder.programs.signature.watch("penalty", self.steps.schedule.penalty)
        self.evaluate = Validation(model, self.loss_fn, val_batches, self.steps.schedule, self.recorder)
        self.epoch, self.done = 0, 0  # the position: epochs finished, batches of the next one done
        self.seconds = 0.0  # of the epoch so far
        self._interrupted = threading.Event()
        self._writer: Any = None
        self._disk = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[None] | None = None
        self.history: list[dict[str, Any]] = []

    def run(self, after_step=None) -> Fit:
        """Trains to the end; Ctrl-C stops after the step in hand, saves, and says how to go on."""
        with (
            numerics(self.config),
            _interrupts_between_steps() as self._interrupted,
            Progress(self.config.epochs, len(self.batches)) as progress,
        ):
            try:
                while not self._finished():
                    self._train_epoch(progress, after_step)
                    progress.epoch(self._finish_epoch())
            except KeyboardInterrupt:
                if self.folder is not None:
                    self.save()
                    self._await_save()
                    where = f"{self.epoch} epochs and {self.done} batches"
                    print(f"stopped after {where}; go on with fit(..., folder={str(self.folder)!r}, resume=True)")
                raise
            finally:
                self._await_save()
                if self._writer is not None:
                    self._writer.close()
                    self._writer = None
        last = self.history[-1]
        return Fit(self.model, last["E"], last["E_x"], self.history)

    def _finished(self) -> bool:
        c = self.config
        reached = c.epsilon is not None and bool(self.history) and self.history[-1]["E"] <= c.epsilon
        return self.epoch >= c.epochs or (reached and self.done == 0)

    def _train_epoch(self, progress: Progress, after_step) -> None:
        self.model.train()
        began = time.perf_counter() - self.seconds
        self.steps.begin(self.epoch, self.done)
        first = self.epoch * len(self.batches)
        for position in range(first + self.done, first + len(self.batches)):
            self.steps(position)
            self.done += 1
            self.seconds = time.perf_counter() - began
            progress.step(self.epoch, self.done, self.steps.loss)
            if after_step is not None:
                after_step(self.epoch, self.done)
            if self._interrupted.is_set():
                raise KeyboardInterrupt
        self.steps.finish(first + len(self.batches) - 1)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds = time.perf_counter() - began

    def _finish_epoch(self) -> dict[str, Any]:
        began = time.perf_counter() - self.seconds
        step_seconds = (self.seconds - self._recording()) / len(self.batches)
        validation = self.evaluate()
        val_seconds = time.perf_counter() - began - self.seconds
        train = dict(zip(SUMS, self.steps.sums.tolist(), strict=True))
        n, last = train["samples"], (self.epoch + 1) * len(self.batches) - 1
        metrics: dict[str, Any] = {
            "epoch": self.epoch + 1,
            "E": train["loss"],
            "E_x": train["input_loss"],
            "train_loss": train["loss"] / n,
            "train_error": train["wrong"] / n,
            "train_input_loss": train["input_loss"] / n,
            **{f"val_{k}": v for k, v in validation.items()},
            "lr": self.steps.schedule.lr(last),
            "alpha": self.steps.schedule.alpha(last),
        }
        if self.config.probe_every and (self.epoch + 1) % self.config.probe_every == 0:
            metrics |= self._probe()
        if self.config.align_every and (self.epoch + 1) % self.config.align_every == 0:
            metrics |= self._align()
        seconds = time.perf_counter() - began
        metrics |= {"step_seconds": step_seconds, "val_seconds": val_seconds, "seconds": seconds} | self._recorded()
        self.history.append(metrics)
        self.epoch, self.done, self.seconds = self.epoch + 1, 0, 0.0
        self.steps.sums.zero_()
        if self.folder is not None:
            self._write_metrics()
            if self.epoch % self.config.save_every == 0 or self.epoch == self.config.epochs:
                self.save()
        return metrics

    def _recording(self) -> float:
        """The time that recording took in this epoch so far."""
        return 0.0 if self.recorder is None else self.recorder.seconds

    def _recorded(self) -> dict[str, Any]:
        """What recording cost, in the epochs in which something was recorded."""
        if self.recorder is None or not self.recorder.seconds:
            return {}
        recorder = self.recorder
        cost = {
            "compile_seconds": recorder.seconds, "check_seconds": recorder.check_seconds, "graph_bytes": recorder.bytes,
        }  # fmt: skip
        recorder.seconds = recorder.check_seconds = 0.0
        return {name: value for name, value in cost.items() if value is not None}

    def _probe(self) -> dict[str, float]:
        """The gradients' norms and the cosine between passes 2 and 3, on the first batch of the set."""
        x, y = self._first_batch()
        c = self.config
        kind = self.steps.schedule.penalty
        options = Options(c.alpha, c.reduction, c.mode, c.strength, c.input_at, separate=True, penalty=kind)
        with unchanged_on_error(self.model, always=True):
            r = three_passes(self.model, self.loss_fn, x, y, options, warn=False)
        back, third = (
            torch.cat([g.double().flatten() for g in (t or {}).values()]) for t in (r.backprop_grads, r.third_grads)
        )
        norms = back.norm().item(), third.norm().item()
        cosine = (back @ third).item() / (norms[0] * norms[1]) if all(norms) else 0.0
        return {"grad_norm": norms[0], "third_norm": norms[1], "grad_cosine": cosine}

    def _align(self) -> dict[str, float]:
        x, y = self._first_batch()
        found = alignment(self.model, self.loss_fn, x, y, self.config.input_at)
        return {"alignment_cosine": found.cosine, "alignment_ratio": found.norm_ratio}

    def _first_batch(self) -> tuple[Tensor, Tensor]:
        """As many samples of the validation set as a training batch has."""
        return self.evaluate.batches.cut(self.evaluate.drawn[:, : self.config.batch_size])

    def _write_metrics(self) -> None:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(m) + "\n" for m in self.history)
        beside = self.folder / "metrics.jsonl.new"
        beside.write_text(text)
        beside.replace(self.folder / "metrics.jsonl")
        self._write_tensorboard(self.history[-1])

    def _write_tensorboard(self, metrics: dict[str, Any]) -> None:
        """The newest metrics for TensorBoard, where it is installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        if self._writer is None:
            self._writer = SummaryWriter(f"{self.folder}/tensorboard")
        for name, value in metrics.items():
            if name != "epoch":
                self._writer.add_scalar(name.replace("_", "/", 1), value, metrics["epoch"])
        self._writer.flush()

    def save(self) -> None:
        """The run as it stands, whole or not at all; the disk's part goes on beside the next epoch."""
        assert self.folder is not None
        self._await_save()
        sums = dict(zip(SUMS, self.steps.sums, strict=True))
        sums |= {f"grad {n}": p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        state = {
            "version": VERSION,
            "config": self.config.to_dict(),
            "position": [self.epoch, self.done],
            "seconds": self.seconds,
            "history": list(self.history),
        }
        packed = checkpoint.pack(self.model, self.optimizer, sums, state)
        self._saving = self._disk.submit(checkpoint.write, self.folder / "checkpoint", packed)

    def _await_save(self) -> None:
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def resume(self) -> None:
        """Goes back to the folder's checkpoint; its config must be this run's."""
        if self.folder is None:
            raise ValueError("resume needs the folder of the run")
        sums, state = checkpoint.load(self.folder / "checkpoint", self.model, self.optimizer)
        saved = Config.from_dict(state["config"])
        if saved != self.config:
            changed = [k for k, v in saved.to_dict().items() if v != self.config.to_dict()[k]]
            raise ValueError(
                f"the run was made with other settings of {', '.join(changed)}: resume it with its own config"
            )
        self.epoch, self.done = state["position"]
        self.seconds, self.history = state["seconds"], state["history"]
        self.steps.sums.copy_(torch.stack([sums[name] for name in SUMS]))
        for name, p in self.model.named_parameters():
            p.grad = sums.get(f"grad {name}")


@contextlib.contextmanager
def numerics(config: Config) -> Iterator[None]:
    """TF32 and determinism as the config has them, and as they were afterwards.

    Recorded steps run often enough to try all of cuDNN's algorithms first.
    """
    precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn.allow_tf32
    benchmark = torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = config.precision == "tf32"
    torch.backends.cudnn.benchmark = benchmark or (bool(config.compile) and not config.deterministic)
    torch.use_deterministic_algorithms(config.deterministic)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = cudnn
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(deterministic)


@contextlib.contextmanager
def _interrupts_between_steps() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, which the loop reads after each step; a second one interrupts at once."""
    wanted = threading.Event()

    def handler(number, frame):
        if wanted.is_set():
            raise KeyboardInterrupt
        wanted.set()

    if threading.current_thread() is not threading.main_thread():
        yield wanted
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield wanted
    finally:
        signal.signal(signal.SIGINT, before)
