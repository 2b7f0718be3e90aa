"""Loggers for `fit(logger=...)`: an object with a method `log`, and adapters for W&B and MLflow.

    threepass.fit(model, data, logger=WandbLogger(wandb.init(project="digits")))
    threepass.fit(model, data, logger=MlflowLogger(mlflow.start_run()))

The adapters log to the run that you started; they set neither its name nor its config, and do not finish it.
"""

import math
from typing import Any, Protocol


class Logger(Protocol):
    """What `fit(logger=...)` takes: any object with this method."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Called with the values of a step or an epoch, under TensorBoard's names ("train/loss", "epoch/E").

        step: the number of training steps done in the run.
        """


class WandbLogger:
    """Logs to a run of W&B, which `wandb.init` returns."""

    def __init__(self, run: Any):
        self.run = run

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)


class MlflowLogger:
    """Logs to a run of MLflow, which `mlflow.start_run` returns; values that are not finite are left out.

    Args:
        run: the run.
        client: an `mlflow.MlflowClient`; default: one for the tracking URI that is set.
    """

    def __init__(self, run: Any, client: Any = None):
        if client is None:
            from mlflow import MlflowClient

            client = MlflowClient()
        self.run_id, self.client = run.info.run_id, client

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                self.client.log_metric(self.run_id, name, value, step=step)
