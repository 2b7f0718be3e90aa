"""One run from its first step to its last: steps, epochs, metrics, checkpoints."""

import contextlib
import itertools
import math
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..compile.programs import Programs
from ..errors import DivergedError, warn_caller
from ..integrations.loggers import Logger
from . import checkpoint
from .average import MovingAverage
from .batch_source import Data, batch_source
from .captured import CapturedSteps
from .checks import choose_objective
from .config import RESUME_MAY_CHANGE, Config
from .data import DataSet, Inputs, LoaderBatches
from .folder import RunFolder, event_names
from .graph_capture import GraphCapture
from .interrupts import Interrupts, interrupts_between_steps
from .loss_watch import LossWatch, bad_values
from .metrics import DEFAULTS, GivenFunctions, best_of, is_squared_error, name_of
from .optimizer import make_optimizer
from .precision import backend_flags
from .probes import compare_passes, measure_alignment
from .progress import Progress
from .ranks import ALONE, Ranks
from .recipes import with_default_lr
from .steps import SUMS, CompiledGradientSteps, EagerSteps
from .validation import CapturedValidation, Validation

VERSION = 1
AfterStep = Callable[[int, int], None]


class Trainer:
    """One run: its model, optimizer, data, position and sums. `fit` is the way in."""

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        config: Config,
        given: GivenFunctions = DEFAULTS,
        ranks: Ranks = ALONE,
        logger: Logger | None = None,
    ):
        self.model, self.ranks, self.logger = model, ranks, logger
        self.labels = data.val.y if isinstance(data, DataSet) else None  # of validation, for data in memory
        if ranks.size > 1 and config.sam:
            raise ValueError("sam is for one process: it perturbs the weights along the gradient of a whole batch")
        if config.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.device = next(model.parameters()).device
        self.source = batch_source(data, config, self.device, ranks)
        self.config = config = with_default_lr(config, self.source.is_regression and is_squared_error(given.loss_fn))
        self.objective = choose_objective(model, self.source, config, given)
        self.optimizer = make_optimizer(model, config)
        self.average = MovingAverage(model, config.ema) if config.ema else None
        self._make_steps()
        self.epoch, self.done = 0, 0  # the position: epochs finished, batches of the next one done
        self.seconds = 0.0  # of the epoch so far
        self.history: list[dict[str, Any]] = []
        self.folder: RunFolder | None = None
        self._losses = LossWatch()
        self._interrupts = Interrupts()
        self._saved = self._watched = time.monotonic()
        self._logged = 0  # batches of the epoch whose figures are logged

    def _make_steps(self) -> None:
        """Steps and validation: eager; captured, for data in memory; or compiled batch by batch.

        Loaders, and several ranks, which exchange gradients before an update, are compiled batch by batch.
        """
        self.batches = self.source.train
        self.programs: Programs[Any] | None = None
        parts = (self.model, self.config, self.objective, self.batches, self.optimizer)
        measured = (self.model, self.config, self.objective, self.source.val)
        self.evaluate = Validation(*measured, self.ranks)
        if not self.config.compile:
            self.steps = EagerSteps(*parts, self.ranks)
        elif isinstance(self.batches, LoaderBatches) or self.ranks.size > 1:
            self.steps = CompiledGradientSteps(*parts, self.ranks)
            self.programs = self.steps.compiled.programs
        else:
            graphs = GraphCapture(self.device, self.model, self.objective.loss_fn, self.config.compile)
            self.programs = graphs.programs
            self.programs.signature.watch({"penalty": self.objective.penalty})
            self.steps = CapturedSteps(*parts, graphs=graphs)
            self.evaluate = CapturedValidation(*measured, graphs=graphs)

    def begin(self, folder: RunFolder) -> None:
        """Goes on from the folder's checkpoint; a new run gets its first one, and can be resumed from the start on."""
        self.folder = folder
        if self.ranks.is_first and not Inputs.is_in(folder.path):
            self.source.inputs.write(folder.path)
        if folder.has_checkpoint:
            self.resume()
        else:
            self.ranks.take_from_first([*self.model.parameters(), *self.model.buffers()])
            self.save()

    def run(self, after_step: AfterStep | None = None, keep_going: bool = False) -> list[dict[str, Any]]:
        """Trains to the end and returns every epoch's metrics.

        Ctrl-C and SIGTERM stop after the step in hand, and save.
        """
        with (
            backend_flags(self.config),
            interrupts_between_steps() as self._interrupts,
            Progress(self.config.epochs, len(self.batches), self.ranks.is_first) as progress,
        ):
            if self.programs is not None:
                self.programs.announce = progress.announce
            try:
                while not self._finished():
                    self._train_epoch(progress, after_step, keep_going)
                    self._finish_epoch(progress, keep_going)
            except (KeyboardInterrupt, SystemExit):
                if not self._interrupts.at_once:
                    self.save()
                raise
        if self.average is not None:
            self.average.swap_in()
        return self.history

    @property
    def where(self) -> str:
        """The position, in words."""
        return f"after {self.epoch} epochs and {self.done} batches"

    def _finished(self) -> bool:
        c = self.config
        reached = c.epsilon is not None and bool(self.history) and self.history[-1]["E"] <= c.epsilon
        worse = bool(c.patience and self.history) and self.epoch - self._best() >= c.patience
        return self.epoch >= c.epochs or ((reached or worse) and self.done == 0)

    def _best(self) -> int:
        """The epoch, counted from 1, in which the monitored metric was best."""
        return best_of(self.history, self.config.monitor, self.config.monitor_mode)["epoch"]

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
            self._stop_or_save()
        self.steps.finish(first + len(self.batches) - 1)
        if self.average is not None and self.config.update == "epoch":
            self.average.update()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds = time.perf_counter() - began

    def _has_diverged(self) -> bool:
        """Looks at the newest loss; on a GPU once a second, because reading it waits for the device.

        Several ranks look at every step: they must stop at the same one.
        """
        is_recent = self._losses.first is not None and time.monotonic() - self._watched < 1
        if self.device.type != "cpu" and self.ranks.size == 1 and is_recent:
            return False
        self._watched = time.monotonic()
        lr = self.steps.schedule.lr(self.epoch * len(self.batches) + self.done - 1)
        return not self._losses.is_finite(self.steps.loss.item(), lr)

    def _finish_epoch(self, progress: Progress, keep_going: bool) -> None:
        with contextlib.nullcontext() if self.average is None else self.average.in_place():
            metrics = self._measure_epoch()
            self.history.append(metrics)
            if self.folder is not None and self._best() == metrics["epoch"]:
                self.folder.save_best(self.model.state_dict(), metrics)
        losses = self.steps.curve[: self.done, 0].isfinite()
        bad = None if keep_going or bool(losses.all()) else int(losses.int().argmin())
        diverged = bad is not None or not (keep_going or math.isfinite(metrics["val_loss"]))
        self._log(metrics)
        if self.folder is not None:
            self.folder.write_metrics(self.history)
        if diverged:
            position = self.epoch * len(self.batches) + (bad or 0)
            raise DivergedError(self.epoch + 1, bad, position, self._bad_data(bad))
        self.epoch, self.done, self.seconds, self._logged = self.epoch + 1, 0, 0.0, 0
        self.steps.sums.zero_()
        if self.epoch % self.config.save_every == 0 or self._finished():
            self.save()
        progress.epoch(metrics)

    def _bad_data(self, batch: int | None) -> str | None:
        """What is not finite in a batch of this epoch, which is read again; None: in the validation set."""
        batches = self.source.val.epoch(0) if batch is None else self.batches.epoch(self.epoch, batch)
        return bad_values(itertools.islice(batches, None if batch is None else 1))

    def _measure_epoch(self) -> dict[str, Any]:
        began = time.perf_counter() - self.seconds
        capturing = 0.0 if self.programs is None else self.programs.seconds
        step_seconds = (self.seconds - capturing) / self.done
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
        }
        if self.config.strength is None:
            metrics["alpha"] = self.steps.schedule.alpha(last)
        if (metric := self.objective.metric) is not None:
            name = name_of(metric)
            metrics |= {f"train_{name}": train["metric"] / n, f"val_{name}": validation["metric"]}
        c, number = self.config, self.epoch + 1
        if c.probe_every and number % c.probe_every == 0:
            metrics |= compare_passes(self.model, self.objective, *self.source.first, c)
        if c.align_every and number % c.align_every == 0:
            metrics |= measure_alignment(self.model, self.objective.loss_fn, *self.source.first, c)
        seconds = time.perf_counter() - began
        return (
            metrics | {"step_seconds": step_seconds, "val_seconds": val_seconds, "seconds": seconds} | self._captured()
        )

    def _captured(self) -> dict[str, Any]:
        """What capturing cost, in the epochs in which something was captured."""
        programs = self.programs
        if programs is None or not programs.seconds:
            return {}
        cost = {
            "compile_seconds": programs.seconds, "check_seconds": programs.check_seconds,
            "graph_bytes": programs.graph_bytes,
        }  # fmt: skip
        programs.seconds = programs.check_seconds = 0.0
        return {name: value for name, value in cost.items() if value is not None}

    def _log(self, metrics: dict[str, Any] | None = None) -> None:
        """For TensorBoard and the logger: the figures of the epoch's steps since the last call, and the epoch's own."""
        if self.folder is None and self.logger is None:
            return
        first, lr = self.epoch * len(self.batches), self.steps.schedule.lr
        logged: dict[int, dict[str, float]] = {}  # by the number of steps done
        for i, (loss, input_loss) in enumerate(
            self.steps.curve[self._logged : self.done].tolist(), first + self._logged
        ):
            logged[i + 1] = {"train/loss": loss, "train/input_loss": input_loss, "train/lr": lr(i)}
        if metrics is not None:
            logged.setdefault(first + self.done, {}).update(event_names(metrics))
        if self.folder is not None:
            scalars = [(name, value, step) for step, values in logged.items() for name, value in values.items()]
            self.folder.write_events(scalars, first + self._logged + 1)
        if self.logger is not None and self.ranks.is_first:
            for step, values in logged.items():
                self.logger.log(step, values)
        self._logged = self.done

    def save(self) -> None:
        """The run as it stands, whole or not at all; the disk's part goes on beside the next epoch."""
        if self.config.update == "epoch":
            self.ranks.average_gradients(self.model.parameters())
        if self.folder is None or not self.ranks.is_first:
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

    def _stop_or_save(self) -> None:
        """Between two steps: stops after a signal, saves when it is time; if one rank does it, all do."""
        minutes = self.config.save_minutes
        is_time = self.folder is not None and bool(minutes) and time.monotonic() - self._saved >= 60 * minutes
        stop, save = self.ranks.any(self._interrupts.received is not None, is_time and self.ranks.is_first)
        if stop and self._interrupts.received is None:
            self._interrupts.received = signal.SIGTERM
        if stop:  # a signal since then stops all ranks after the next step
            self._interrupts.check()
        if save:
            self._log()
            self.save()

    def resume(self) -> None:
        """Goes back to the folder's checkpoint; its config must be this run's, but for what may change."""
        assert self.folder is not None
        place = self.folder.path / "checkpoint"
        packed = checkpoint.read(place) if self.ranks.is_first else None
        sums, state = checkpoint.unpack(self.ranks.share(packed), self.model, self.optimizer)
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
                f"cannot resume the run with other values of {', '.join(refused)}: use those it was started with (only "
                f"{', '.join(RESUME_MAY_CHANGE)} may change)"
            )
        begun = self.epoch + (self.done > 0)
        if self.config.epochs < begun:
            raise ValueError(f"epochs is {self.config.epochs}, but the run has already reached epoch {begun}")
        if "epochs" in changed and (stretched := saved.depends_on_epochs):
            warn_caller(
                f"the run continues with {self.config.epochs} epochs instead of {saved.epochs}: {', '.join(stretched)} "
                f"{'is' if len(stretched) == 1 else 'are'} recomputed for the new length, so the learning rate or "
                f"alpha jumps at epoch {self.epoch + 1}",
                UserWarning,
            )
