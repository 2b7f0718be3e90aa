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

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ..core.penalty import Penalty
from ..integrations.loggers import Logger
from . import checkpoint
from .batch_source import Data
from .config import Config
from .folder import created, resumed
from .metrics import GivenFunctions, LossFn, Metric, best_of
from .recipes import alpha_in_words, lr_in_words
from .trainer import AfterStep, Trainer

History = list[dict[str, Any]]  # the metrics of every epoch


@dataclass(frozen=True)
class Fit:
    """What training gives: the model, the last epoch's total error E and input error E_x, and every epoch's metrics."""

    model: nn.Module = field(repr=False)
    E: float
    E_x: float
    history: History = field(repr=False)
    config: Config = field(repr=False, default_factory=Config)

    def best(self, monitor: str | None = None, mode: str | None = None) -> dict[str, Any]:
        """The metrics of the epoch in which `monitor` was lowest, or with mode "max" highest; default: the run's."""
        is_own = monitor in (None, self.config.monitor)
        mode = mode or (self.config.monitor_mode if is_own else "min")
        return best_of(self.history, monitor or self.config.monitor, mode)


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
    logger: Logger | None = None,
    **settings: Any,
) -> Fit:
    """Trains the model by three passes (alpha=1: by two), and returns it with E and E_x.

    Args:
        model: on the device that it is to be trained on; a data set's tensors must be there too.
        data: a `threepass.train.data.DataSet`, as `load` and `from_dataset` give it, or two torch DataLoaders,
            `(train_loader, val_loader)`, of pairs (x, y) with x a tensor, or a tuple or dict of what the model takes.
            The inputs of a DataSet, not those of loaders, are standardised: the model takes `data.standardised(x)`.
        config: the settings.
        folder: where metrics (JSON lines, TensorBoard) and checkpoints go; none: nothing is written. A folder that
            contains a run is refused unless `resume` is set, and so is one that another process trains in.
        resume: go on from the folder's checkpoint, by the settings in it; a larger `epochs` extends the run.
        loss_fn: `loss_fn(output, y)`, a mean over the batch; default: the mean squared error for floating-point
            targets, else cross-entropy with the config's label smoothing.
        metric: `metric(output, y)`, a mean over the batch, reported under the function's name; default: the error, for
            floating-point targets the absolute error.
        penalty: as for `three_pass`, a name or a function; default: the config's.
        after_step: called with the epoch and the number of batches done.
        keep_going: train on when the loss is not finite; else that raises a `DivergedError`.
        logger: gets the figures of every step and epoch by `logger.log(step, values)`, besides TensorBoard's files;
            `threepass.integrations.loggers` has adapters for W&B and MLflow.
        settings: settings as keywords, `fit(model, data, epochs=5, alpha=0.8)`; they replace those of the config.
    """
    if resume and folder is None:
        raise ValueError("resume=True needs folder=, the folder of the run")
    if isinstance(penalty, str):
        settings, penalty = settings | {"penalty": penalty}, None
    if resume and config is None:
        config = saved_config(Path(str(folder)))
    config = (config or Config()).with_settings(settings)
    trainer = Trainer(model, data, config, GivenFunctions(loss_fn, metric, penalty), logger=logger)
    if not resume:
        _say_what_was_chosen(config, trainer.config)
    run = partial(trainer.run, after_step, keep_going)
    history = run() if folder is None else _run_in(Path(folder), trainer, run, resume)
    return Fit(model, history[-1]["E"], history[-1]["E_x"], history, trainer.config)


def _say_what_was_chosen(given: Config, config: Config) -> None:
    for words in (lr_in_words(config) if config.lr != given.lr else None, alpha_in_words(config)):
        if words is not None:
            print(words, file=sys.stderr)


def _run_in(folder: Path, trainer: Trainer, run: Callable[[], History], resume: bool) -> History:
    """Runs the trainer with its metrics and checkpoints in the folder; if it is stopped, says how to go on."""
    with resumed(folder) if resume else created(folder) as files:
        trainer.begin(files)
        try:
            return run()
        except (KeyboardInterrupt, SystemExit):
            print(f"stopped {trainer.where}; continue with fit(..., folder={str(folder)!r}, resume=True)")
            raise


def saved_config(folder: Path) -> Config | None:
    """The config in the folder's checkpoint, if there is one."""
    if not checkpoint.exists(folder / "checkpoint"):
        return None
    place = checkpoint.find(folder / "checkpoint")
    return Config.from_dict(checkpoint.read_state(place)["config"], place / "state.json")
