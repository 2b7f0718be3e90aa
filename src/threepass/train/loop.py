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
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.misuse import warn_of_masks, warn_of_sum
from ..core.penalty import Penalty
from ..errors import DivergedError, warn_caller
from . import checkpoint
from .average import MovingAverage
from .captured import CapturedSteps
from .checks import check_outputs, first_output
from .config import RESUME_MAY_CHANGE, Config
from .data import LoaderBatches
from .feed import Data, Feed, feed
from .folder import RunFolder, created, event_names, resumed
from .interrupts import Interrupts, interrupts_between_steps
from .metrics import LossFn, Metric, cross_entropy, default_metric, mean_squared_error, name_of
from .optimizer import make_optimizer
from .probes import compare_passes, measure_alignment
from .progress import Progress
from .recorder import Recorder
from .steps import SUMS, CompiledLoaderSteps, Steps
from .validation import CapturedValidation, Validation

VERSION = 1
AfterStep = Callable[[int, int], None]


@dataclass(frozen=True)
class Fit:
    """What training gives: the model, the last epoch's total error E and input error E_x, and every epoch's metrics."""

    model: nn.Module = field(repr=False)
    E: float
    E_x: float
    history: list[dict[str, Any]] = field(repr=False)

    def best(self, monitor: str = "val_loss") -> dict[str, Any]:
        """The metrics of the epoch in which this one was lowest."""
        return min(self.history, key=lambda metrics: metrics[monitor])


def fit(
    model: nn.Module,
    data: Data,
    config: Config | None = None,
    *,
    folder: Path | str | None = None,
    resume: bool = False,
    loss_fn: LossFn | None = None,
    metric: Metric | None = None,
    penalty: Penalty | None = None,
    after_step: AfterStep | None = None,
    keep_going: bool = False,
    **settings: Any,
) -> Fit:
    """Trains the model by three passes (alpha=1: by two), and returns it with E and E_x.

    Args:
        model: on the device that it is to be trained on; a data set's tensors must be there too.
        data: a `threepass.train.data.DataSet`, as `load` and `from_dataset` give it, or two torch DataLoaders,
            `(train_loader, val_loader)`, of pairs (x, y) with x a tensor, or a tuple or dict of what the model takes.
        config: the settings.
        folder: where metrics (JSON lines, TensorBoard) and checkpoints go; none: nothing is written. A folder that
            holds a run is refused unless `resume` is set, and so is one that another process trains in.
        resume: go on from the folder's checkpoint, by the settings in it; a larger `epochs` extends the run.
        loss_fn: `loss_fn(output, y)`, a mean over the batch; default: the mean squared error for floating-point
            targets, else cross-entropy with the config's label smoothing.
        metric: `metric(output, y)`, a mean over the batch, reported under the function's name; default: the error, for
            floating-point targets the absolute error.
        penalty: as for `three_pass`, a name or a function; default: the config's.
        after_step: called with the epoch and the number of batches done.
        keep_going: train on when the loss is not finite; else that raises a `DivergedError`.
        settings: settings as keywords, `fit(model, data, epochs=5, alpha=0.8)`; they replace those of the config.
    """
    if resume and folder is None:
        raise ValueError("resume needs the folder of the run")
    if resume and config is None:
        config = saved_config(Path(str(folder)))
    if isinstance(penalty, str):
        settings, penalty = settings | {"penalty": penalty}, None
    config = (config or Config()).with_settings(settings)
    trainer = Trainer(model, data, config, loss_fn, metric, penalty)
    if folder is None:
        return trainer.run(after_step, keep_going)
    with resumed(Path(folder)) if resume else created(Path(folder)) as files:
        trainer.begin(files)
        try:
            return trainer.run(after_step, keep_going)
        except (KeyboardInterrupt, SystemExit):
            where = f"{trainer.epoch} epochs and {trainer.done} batches"
            print(f"stopped after {where}; go on with fit(..., folder={str(folder)!r}, resume=True)")
            raise


def saved_config(folder: Path) -> Config | None:
    """The config in the folder's checkpoint, if there is one."""
    if not checkpoint.exists(folder / "checkpoint"):
        return None
    place = checkpoint.find(folder / "checkpoint")
    return Config.from_dict(checkpoint.read_state(place)["config"], place / "state.json")


class Trainer:
    """One run: its model, optimizer, data, position and sums. `fit` is the way in."""

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        config: Config,
        loss_fn: LossFn | None = None,
        metric: Metric | None = None,
        penalty: Penalty | None = None,
    ):
        self.model, self.config = model, config
        self.penalty = config.penalty if penalty is None else penalty
        if config.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.device = next(model.parameters()).device
        self.feed = feed(data, config, self.device)
        self.loss_fn, self.metric = _loss_and_metric(model, self.feed, config, loss_fn, metric)
        self.optimizer = make_optimizer(model, config)
        self.average = MovingAverage(model, config.ema) if config.ema else None
        self._make_steps()
        self.epoch, self.done = 0, 0  # the position: epochs finished, batches of the next one done
        self.seconds = 0.0  # of the epoch so far
        self.history: list[dict[str, Any]] = []
        self.folder: RunFolder | None = None
        self._interrupts = Interrupts()
        self._saved = self._watched = time.monotonic()
        self._logged = 0  # batches of the epoch whose figures are in TensorBoard's files

    def _make_steps(self) -> None:
        """Steps and validation: eager; recorded, for data in memory; or compiled batch by batch, for loaders."""
        self.batches, self.recorder = self.feed.train, None
        parts = (self.model, self.loss_fn, self.metric, self.batches, self.optimizer, self.config, self.penalty)
        measured = (self.model, self.loss_fn, self.metric, self.feed.val, self.config, self.penalty)
        self.evaluate = Validation(*measured)
        if not self.config.compile:
            self.steps = Steps(*parts)
        elif isinstance(self.batches, LoaderBatches):
            self.steps = CompiledLoaderSteps(*parts)
        else:
            self.recorder = Recorder(self.device, self.model, self.loss_fn, self.config.compile == "require")
            self.recorder.programs.signature.watch("penalty", self.penalty)
            self.steps = CapturedSteps(*parts, recorder=self.recorder)
            self.evaluate = CapturedValidation(*measured, recorder=self.recorder)

    def begin(self, folder: RunFolder) -> None:
        """Goes on from the folder's checkpoint; a new run gets its first one, and can be resumed from the start on."""
        self.folder = folder
        if folder.has_checkpoint:
            self.resume()
        else:
            self.save()

    def run(self, after_step: AfterStep | None = None, keep_going: bool = False) -> Fit:
        """Trains to the end; Ctrl-C and SIGTERM stop after the step in hand, and save."""
        with (
            numerics(self.config),
            interrupts_between_steps() as self._interrupts,
            Progress(self.config.epochs, len(self.batches), self.epoch) as progress,
        ):
            if self.recorder is not None:
                self.recorder.announce = progress.announce
            try:
                while not self._finished():
                    self._train_epoch(progress, after_step, keep_going)
                    self._finish_epoch(progress, keep_going)
            except (KeyboardInterrupt, SystemExit):
                if not self._interrupts.at_once:
                    self.save()
                raise
        if self.average is not None:
            self.average.put()
        last = self.history[-1]
        return Fit(self.model, last["E"], last["E_x"], self.history)

    def _finished(self) -> bool:
        c = self.config
        reached = c.epsilon is not None and bool(self.history) and self.history[-1]["E"] <= c.epsilon
        worse = bool(c.patience and self.history) and self.epoch - self._best() >= c.patience
        return self.epoch >= c.epochs or ((reached or worse) and self.done == 0)

    def _best(self) -> int:
        """The epoch, counted from 1, in which the monitored metric was lowest."""
        values = [(metrics[self.config.monitor], metrics["epoch"]) for metrics in self.history]
        return min((value if math.isfinite(value) else math.inf, epoch) for value, epoch in values)[1]

    def _train_epoch(self, progress: Progress, after_step: AfterStep | None, keep_going: bool) -> None:
        """All batches that are left of the epoch; unless it is to keep going, up to a loss that is not finite."""
        self.model.train()
        began = time.perf_counter() - self.seconds
        self.steps.begin(self.epoch, self.done)
        first = self.epoch * len(self.batches)
        for position in range(first + self.done, first + len(self.batches)):
            self.steps(position)
            if self.average is not None and self.config.update == "batch":
                self.average.update()
            self.done += 1
            self.seconds = time.perf_counter() - began
            if self.folder is not None:
                self.folder.has_begun = True
            progress.step(self.epoch, self.done, self.steps.loss)
            if not keep_going and self._has_diverged():
                return
            if after_step is not None:
                after_step(self.epoch, self.done)
            self._interrupts.check()
            self._save_in_time()
        self.steps.finish(first + len(self.batches) - 1)
        if self.average is not None and self.config.update == "epoch":
            self.average.update()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds = time.perf_counter() - began

    def _has_diverged(self) -> bool:
        """Looks at the newest loss; on a GPU once a second, because reading it waits for the device."""
        if self.device.type != "cpu" and time.monotonic() - self._watched < 1:
            return False
        self._watched = time.monotonic()
        return not math.isfinite(self.steps.loss.item())

    def _finish_epoch(self, progress: Progress, keep_going: bool) -> None:
        with contextlib.nullcontext() if self.average is None else self.average.in_place():
            metrics = self._measure_epoch()
            self.history.append(metrics)
            if self.folder is not None and self._best() == metrics["epoch"]:
                self.folder.save_best(self.model.state_dict(), metrics)
        losses = self.steps.curve[: self.done, 0].isfinite()
        bad = None if keep_going or bool(losses.all()) else int(losses.int().argmin())
        diverged = bad is not None or not (keep_going or math.isfinite(metrics["val_loss"]))
        if self.folder is not None:
            self._write_events(metrics)
            self.folder.write_metrics(self.history)
        if diverged:
            raise DivergedError(self.epoch + 1, bad, self.epoch * len(self.batches) + (bad or 0))
        self.epoch, self.done, self.seconds, self._logged = self.epoch + 1, 0, 0.0, 0
        self.steps.sums.zero_()
        if self.epoch % self.config.save_every == 0 or self.epoch == self.config.epochs:
            self.save()
        progress.epoch(metrics)

    def _measure_epoch(self) -> dict[str, Any]:
        began = time.perf_counter() - self.seconds
        step_seconds = (self.seconds - self._recording()) / self.done
        validation = self.evaluate()
        val_seconds = time.perf_counter() - began - self.seconds
        train = dict(zip(SUMS, self.steps.sums.tolist(), strict=True))
        n, last = train["samples"], (self.epoch + 1) * len(self.batches) - 1
        metrics: dict[str, Any] = {
            "epoch": self.epoch + 1,
            "E": train["loss"],
            "E_x": train["input_loss"],
            "train_loss": train["loss"] / n,
            "train_input_loss": train["input_loss"] / n,
            "val_loss": validation["loss"],
            "val_input_loss": validation["input_loss"],
            "lr": self.steps.schedule.lr(last),
            "alpha": self.steps.schedule.alpha(last),
        }
        if self.metric is not None:
            name = name_of(self.metric)
            metrics |= {f"train_{name}": train["metric"] / n, f"val_{name}": validation["metric"]}
        c, number = self.config, self.epoch + 1
        if c.probe_every and number % c.probe_every == 0:
            metrics |= compare_passes(self.model, self.loss_fn, *self.feed.first, c, self.penalty)
        if c.align_every and number % c.align_every == 0:
            metrics |= measure_alignment(self.model, self.loss_fn, *self.feed.first, c)
        seconds = time.perf_counter() - began
        return (
            metrics | {"step_seconds": step_seconds, "val_seconds": val_seconds, "seconds": seconds} | self._recorded()
        )

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

    def _write_events(self, metrics: dict[str, Any] | None = None) -> None:
        """For TensorBoard: the figures of the epoch's steps since the last call, and the epoch's own. x: steps done."""
        assert self.folder is not None
        first, lr = self.epoch * len(self.batches), self.steps.schedule.lr
        scalars = []
        for i, (loss, input_loss) in enumerate(
            self.steps.curve[self._logged : self.done].tolist(), first + self._logged
        ):
            values = {"train/loss": loss, "train/input_loss": input_loss, "train/lr": lr(i)}
            scalars += [(name, value, i + 1) for name, value in values.items()]
        scalars += [(name, value, first + self.done) for name, value in event_names(metrics or {}).items()]
        self.folder.write_events(scalars, first + self._logged + 1)
        self._logged = self.done

    def save(self) -> None:
        """The run as it stands, whole or not at all; the disk's part goes on beside the next epoch."""
        if self.folder is None:
            return
        sums = dict(zip(SUMS, self.steps.sums, strict=True))
        sums |= {f"grad {n}": p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        if self.average is not None:
            sums |= {f"average {name}": z for name, z in self.average.weights.items()}
        state = {
            "version": VERSION,
            "average_updates": 0 if self.average is None else self.average.updates,
            "config": self.config.to_dict(),
            "position": [self.epoch, self.done],
            "seconds": self.seconds,
            "history": list(self.history),
        }
        self._saved = time.monotonic()
        self.folder.save(checkpoint.pack(self.model, self.optimizer, sums, state))

    def _save_in_time(self) -> None:
        minutes = self.config.save_minutes
        if self.folder is not None and minutes and time.monotonic() - self._saved >= 60 * minutes:
            self._write_events()
            self.save()

    def resume(self) -> None:
        """Goes back to the folder's checkpoint; its config must be this run's, but for what may change."""
        assert self.folder is not None
        place = self.folder.path / "checkpoint"
        sums, state = checkpoint.load(place, self.model, self.optimizer)
        saved = Config.from_dict(state["config"], place / "state.json")
        self.epoch, self.done = state["position"]
        self._check_resumed(saved)
        self.seconds, self.history, self._logged = state["seconds"], state["history"], self.done
        self.steps.sums.copy_(torch.stack([sums[name] for name in SUMS]))
        for name, p in self.model.named_parameters():
            p.grad = sums.get(f"grad {name}")
        if self.average is not None:
            self.average.updates = state["average_updates"]
            self.average.weights = {name: sums[f"average {name}"] for name in self.average.weights}

    def _check_resumed(self, saved: Config) -> None:
        changed = saved.differing(self.config)
        if refused := [name for name in changed if name not in RESUME_MAY_CHANGE]:
            raise ValueError(
                f"the run was made with other settings of {', '.join(refused)}: resume it with its own "
                f"(only {', '.join(RESUME_MAY_CHANGE)} may change)"
            )
        begun = self.epoch + (self.done > 0)
        if self.config.epochs < begun:
            raise ValueError(f"epochs is {self.config.epochs}, and the run is in epoch {begun} already")
        if "epochs" in changed and (stretched := saved.depends_on_epochs):
            warn_caller(
                f"the run goes on with {self.config.epochs} epochs in place of {saved.epochs}: {', '.join(stretched)} "
                f"now depends on the new length, from epoch {self.epoch + 1} on, so the learning rate or alpha jumps "
                "there",
                UserWarning,
            )


def _loss_and_metric(
    model: nn.Module, feed: Feed, config: Config, loss_fn: LossFn | None, metric: Metric | None
) -> tuple[LossFn, Metric | None]:
    """Those given, or the defaults for the targets; tried on a batch."""
    output, y = first_output(model, feed, config), feed.first[1]
    smoothing = config.label_smoothing
    if smoothing and (loss_fn is not None or y.is_floating_point()):
        raise ValueError("label_smoothing is that of the default cross-entropy, which is not used here: leave it out")
    if loss_fn is None:
        check_outputs(output, feed)
        loss_fn = mean_squared_error if y.is_floating_point() else partial(cross_entropy, label_smoothing=smoothing)
    metric = default_metric(output, y) if metric is None else metric
    with torch.no_grad():
        warn_of_sum(model, loss_fn, feed.first[0], y, output, loss_fn(output, y))
        if metric is not None:
            metric(output, y)
    _check_monitor(config, metric)
    if config.input_at is None:
        warn_of_masks(model, feed.first[0])
    return loss_fn, metric


def _check_monitor(config: Config, metric: Metric | None) -> None:
    measured = ["loss", "input_loss"] if metric is None else ["loss", "input_loss", name_of(metric)]
    known = [f"{part}_{name}" for part in ("val", "train") for name in measured]
    if config.monitor not in known:
        raise ValueError(f"monitor must be one of {', '.join(known)}, got {config.monitor!r}")


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
