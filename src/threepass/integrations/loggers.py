"""Where the figures of a run go: anything with one method, and adapters for W&B and MLflow.

    threepass.fit(model, data, logger=WandbLogger(wandb.init(project="digits")))
    threepass.fit(model, data, logger=MlflowLogger(mlflow.start_run()))

The adapters use the run that you made and import neither package; its settings, its name and its end are yours.
"""

import math
from typing import Any, Protocol


class Logger(Protocol):
    """Takes the figures of a run."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """values: by name, as in TensorBoard ("train/loss", "epoch/E"), after so many steps of the run."""


class WandbLogger:
    """Logs to a run of W&B, as `wandb.init` returns it."""

    def __init__(self, run: Any):
        self.run = run

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)


class MlflowLogger:
    """Logs to a run of MLflow, as `mlflow.start_run` returns it; values that are not finite are left out.

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
