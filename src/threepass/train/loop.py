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
import inspect
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..alignment import alignment
from ..engine import run as three_passes
from ..options import Options
from ..step import add_to_grad
from ..surroundings import unchanged_on_error
from . import checkpoint
from .config import OPTIMIZERS, Config
from .data import Batches, DataSet
from .progress import Progress

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
        after_step: called with the epoch and the number of batches done.
    """
    config = Config.from_dict(settings) if config is None else config
    trainer = Trainer(model, data, config, None if folder is None else Path(folder), loss_fn)
    if resume:
        trainer.resume()
    return trainer.run(after_step)


class Trainer:
    """One run: its model, optimizer, data, position and sums. `fit` is the way in."""

    def __init__(self, model: nn.Module, data: DataSet, config: Config, folder: Path | None, loss_fn=None):
        self.model, self.data, self.config, self.folder = model, data, config, folder
        self.loss_fn = loss_fn or (lambda out, y: F.cross_entropy(out, y, label_smoothing=config.label_smoothing))
        self.optimizer = make_optimizer(model, config)
        self.device = next(model.parameters()).device
        common: dict[str, Any] = {"normalise": (data.mean, data.std), "channels_last": config.channels_last}
        size, seed = config.batch_size, config.seed
        self.batches = Batches(data.train, size, augment=config.augment, shuffle=True, seed=seed, **common)
        self.val_batches = Batches(data.val, size, augment=False, shuffle=False, seed=seed, **common)
        self.epoch, self.done = 0, 0  # the position: epochs finished, batches of the next one done
        self.seconds = 0.0
        self._interrupted = threading.Event()
        self._writer: Any = None
        self.sums = self._no_sums()
        self.history: list[dict[str, Any]] = []
        if config.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def run(self, after_step=None) -> Fit:
        """Trains to the end; Ctrl-C stops after the step in hand, saves, and says how to go on."""
        with (
            _numerics(self.config),
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
                    where = f"{self.epoch} epochs and {self.done} batches"
                    print(f"stopped after {where}; go on with fit(..., folder={str(self.folder)!r}, resume=True)")
                raise
            finally:
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
        for x, y in self.batches.epoch(self.epoch, start=self.done):
            loss = self._step(x, y)
            self.done += 1
            self.seconds = time.perf_counter() - began
            progress.step(self.epoch, self.done, loss)
            if after_step is not None:
                after_step(self.epoch, self.done)
            if self._interrupted.is_set():
                raise KeyboardInterrupt
        if self.config.update == "epoch":
            self._update(self.epoch * len(self.batches) + len(self.batches) - 1)

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        position = self.epoch * len(self.batches) + self.done
        whole = len(self.data.train.y) if self.config.update == "epoch" else None
        c = self.config
        options = Options(self._alpha(position), c.reduction, c.mode, c.strength, c.input_at, whole)
        if c.update == "batch":
            self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=c.precision == "bf16"):
            r = three_passes(self.model, self.loss_fn, x, y, options, third=position % c.every == 0)
        add_to_grad(self.model, r)
        if c.update == "batch":
            self._update(position)
        self.sums["loss"] += r.loss.double() * len(x)
        self.sums["wrong"] += (r.output.argmax(-1) != y).sum().double() if r.output.dim() == 2 else 0
        self.sums["input_loss"] += r.input_loss.double() * len(x)
        self.sums["samples"] += len(x)
        return r.loss

    def _update(self, position: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr(position)
        self.optimizer.step()
        if self.config.update == "epoch":
            self.optimizer.zero_grad()

    def _alpha(self, position: int) -> float:
        c = self.config
        last = max(1, c.epochs * len(self.batches) - 1)
        return c.alpha if c.alpha_end is None else c.alpha + (c.alpha_end - c.alpha) * position / last

    def _lr(self, position: int) -> float:
        """The learning rate of a step: warm-up, then the schedule; by the paper's rule over alpha."""
        c, a = self.config, len(self.batches)
        progress = position / (c.epochs * a)
        lr = c.lr / self._alpha(position) if c.eta_over_alpha else c.lr
        if position < c.warmup * a:
            return lr * (position + 1) / (c.warmup * a)
        if c.schedule == "cosine":
            return lr * 0.5 * (1 + math.cos(math.pi * progress))
        if c.schedule == "step":
            return lr * c.gamma ** sum(progress >= m for m in c.milestones)
        return lr

    def _finish_epoch(self) -> dict[str, Any]:
        train = {k: v.item() for k, v in self.sums.items()}
        n = train["samples"]
        metrics: dict[str, Any] = {
            "epoch": self.epoch + 1,
            "E": train["loss"],
            "E_x": train["input_loss"],
            "train_loss": train["loss"] / n,
            "train_error": train["wrong"] / n,
            "train_input_loss": train["input_loss"] / n,
            **{f"val_{k}": v for k, v in self.evaluate().items()},
            "lr": self.optimizer.param_groups[0]["lr"],
            "alpha": self._alpha((self.epoch + 1) * len(self.batches) - 1),
            "seconds": self.seconds,
        }
        if self.config.probe_every and (self.epoch + 1) % self.config.probe_every == 0:
            metrics |= self._probe()
        if self.config.align_every and (self.epoch + 1) % self.config.align_every == 0:
            metrics |= self._align()
        self.history.append(metrics)
        self.epoch, self.done, self.seconds, self.sums = self.epoch + 1, 0, 0.0, self._no_sums()
        if self.folder is not None:
            self._write_metrics()
            if self.epoch % self.config.save_every == 0 or self.epoch == self.config.epochs:
                self.save()
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Loss, error and input loss on the validation set, in eval mode."""
        self.model.eval()
        sums = self._no_sums()
        for x, y in self.val_batches.epoch(0):
            x = x.detach().requires_grad_(x.is_floating_point() and self.config.input_at is None)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
                out = self.model(x)
                loss = self.loss_fn(out, y)
            sums["loss"] += loss.detach().double() * len(x)
            sums["wrong"] += (out.argmax(-1) != y).sum().double() if out.dim() == 2 else 0
            if x.requires_grad:
                (dx,) = torch.autograd.grad(loss, x)
                sums["input_loss"] += 0.5 * dx.double().square().sum() * len(x) ** 2
            sums["samples"] += len(x)
        self.model.train()
        n = sums["samples"].item()
        return {
            "loss": sums["loss"].item() / n,
            "error": sums["wrong"].item() / n,
            "input_loss": sums["input_loss"].item() / n,
        }

    def _probe(self) -> dict[str, float]:
        """The gradients' norms and the cosine between passes 2 and 3, on the first batch of the set."""
        x, y = next(iter(self.val_batches.epoch(0)))
        c = self.config
        options = Options(c.alpha, c.reduction, c.mode, c.strength, c.input_at, separate=True)
        with unchanged_on_error(self.model, always=True):
            r = three_passes(self.model, self.loss_fn, x, y, options, warn=False)
        back, third = (
            torch.cat([g.double().flatten() for g in (t or {}).values()]) for t in (r.backprop_grads, r.third_grads)
        )
        norms = back.norm().item(), third.norm().item()
        cosine = (back @ third).item() / (norms[0] * norms[1]) if all(norms) else 0.0
        return {"grad_norm": norms[0], "third_norm": norms[1], "grad_cosine": cosine}

    def _align(self) -> dict[str, float]:
        x, y = next(iter(self.val_batches.epoch(0)))
        found = alignment(self.model, self.loss_fn, x, y, self.config.input_at)
        return {"alignment_cosine": found.cosine, "alignment_ratio": found.norm_ratio}

    def _no_sums(self) -> dict[str, Tensor]:
        names = ("loss", "wrong", "input_loss", "samples")
        return {name: torch.zeros((), dtype=torch.float64, device=self.device) for name in names}

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
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            return
        if self._writer is None:
            self._writer = EventFileWriter(str(self.folder / "tensorboard")) if self.folder is not None else None
        numbers = {k.replace("_", "/", 1): float(v) for k, v in metrics.items() if k != "epoch"}
        values = [summary_pb2.Summary.Value(tag=tag, simple_value=v) for tag, v in numbers.items()]
        summary = summary_pb2.Summary(value=values)
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=metrics["epoch"], summary=summary))
        self._writer.flush()

    def save(self) -> None:
        """The run as it stands, whole or not at all."""
        assert self.folder is not None
        sums = dict(self.sums)
        sums |= {f"grad {n}": p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        state = {
            "version": VERSION,
            "config": self.config.to_dict(),
            "position": [self.epoch, self.done],
            "seconds": self.seconds,
            "history": self.history,
        }
        checkpoint.save(self.folder / "checkpoint", self.model, self.optimizer, sums, state)

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
        self.sums = {k: z for k, z in sums.items() if not k.startswith("grad ")}
        for name, p in self.model.named_parameters():
            p.grad = sums.get(f"grad {name}")


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """SGD with momentum, Adam, AdamW, or any class of torch.optim by its name."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, config.lr, config.momentum, weight_decay=config.weight_decay)
    by_name = {"adam": "Adam", "adamw": "AdamW"}.get(config.optimizer, config.optimizer)
    made = getattr(torch.optim, by_name, None)
    if not (isinstance(made, type) and issubclass(made, torch.optim.Optimizer)):
        raise ValueError(
            f"optimizer must be one of {', '.join(OPTIMIZERS)} or a class of torch.optim, got {config.optimizer!r}"
        )
    accepted = inspect.signature(made).parameters
    options: dict[str, Any] = {"lr": config.lr}
    if "weight_decay" in accepted:
        options["weight_decay"] = config.weight_decay
    elif config.weight_decay:
        raise ValueError(f"optimizer {config.optimizer!r} has no weight decay: leave weight_decay at 0")
    if made is torch.optim.LBFGS:
        raise ValueError("LBFGS evaluates the loss several times a step, and a three-pass step is evaluated once")
    return made(parameters, **options)


@contextlib.contextmanager
def _numerics(config: Config) -> Iterator[None]:
    """TF32 and determinism as the config has them, and as they were afterwards."""
    precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = config.precision == "tf32"
    torch.use_deterministic_algorithms(config.deterministic)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = cudnn
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
