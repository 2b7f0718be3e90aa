"""`threepass robustness`: the accuracy under noise and attacks of runs of `threepass train`, for their reports."""

from pathlib import Path
from typing import Any

from ..errors import warn_caller
from ..train.files import write_json
from ..train.folder import resumed
from ..train.runs import Run
from ..train.trainer import Trainer
from . import attacks
from .report_columns import ATTACKS


def measure(folder: Path, where: dict[str, Any], examples: int = 500) -> dict[str, Any]:
    """Measures the last weights of a run, and writes robustness.json into its folder, which `report` shows.

    where: the device and data_dir to use instead of the run's own.
    """
    if (folder / "compare.json").exists():
        raise ValueError(f"{folder} is a comparison, and its runs are measured already: see its report.html")
    run = Run.read(folder).resumed(where)
    data = run.load()
    if not data.classes:
        raise ValueError(f"{folder}: robustness measures accuracy, but {data.name} has no classes")
    low, high = data.train.x.aminmax()
    if data.train.x.dim() == 2 and data.train.x.is_floating_point() and (low < 0 or high > 1):
        spread = f"{min(data.std):.3g} to {max(data.std):.3g}"
        text = (
            f"the inputs of {data.name} are features, not pixels: sizes of noise and attacks are in their units; their "
            f"standard deviations are {spread}"
        )
        warn_caller(text, UserWarning)
    trainer = Trainer(run.make_model(data), data, run.config)
    with resumed(folder) as files:
        trainer.begin(files)
        if not trainer.history:
            raise ValueError(f"{folder}: the run has not finished an epoch yet")
        if trainer.average is not None:
            trainer.average.swap_in()
        curves = attacks.robustness(trainer.model, data, examples=examples) | {"epochs": len(trainer.history)}
        write_json(folder / "robustness.json", curves)
    return curves


def in_words(curves: dict[str, Any]) -> list[str]:
    """One line for each kind of disturbance: its sizes, and the accuracies under them.

    >>> in_words({kind: {"at": [0.0, 0.1], "accuracy": [0.95, 0.5]} for kind in ATTACKS})[0]
    'Gaussian noise  0: 95.0%  0.1: 50.0%'
    """
    lines = []
    for kind, name in ATTACKS.items():
        pairs = zip(curves[kind]["at"], curves[kind]["accuracy"], strict=True)
        lines.append(f"{name:<14}  " + "  ".join(f"{at:g}: {accuracy:.1%}" for at, accuracy in pairs))
    return lines
