"""The search that found the settings of `threepass.train.recipes`: learning rates and strengths.

    PYTHONPATH=src python benchmarks/recipes.py mnist --out results/recipes/mnist-search.json

Every row is one run of mlp(pixels, 512, 10), in the searches `vit` and `resnet` of vit and resnet20 on digits, with
SGD, momentum 0.9, by final validation error, input loss and accuracy under noise and PGD. Seeds are from 100 on, which
the comparisons that show the recipes do not use; the validation images are the same. A run whose loss is not finite at
the end has diverged.

The file is written after every run, and a search that was stopped goes on from it: rows that it has are not repeated.
By the epochs' times in results/recipes, one seed of the grid takes 10 to 20 minutes on mnist and 2 to 4 on digits, on
two CPU cores. --quick runs the whole grid on a few examples for one epoch, in seconds: its figures mean nothing.

Result: results/recipes/mnist-search.json, digits-search.json, vit-search.json and resnet-search.json, quoted by
docs/choose.md. The lowest validation error on mnist is 1.35% by exact mode at strength 3, 1.61% by two passes.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from threepass.study import attacks
from threepass.train.config import Config
from threepass.train.data import DataSet, Split, load
from threepass.train.loop import fit
from threepass.train.runs import build

SIGMAS, RADII = (0.0, 0.1, 0.2, 0.3), (0.0, 0.05, 0.1, 0.15, 0.2)
PLAIN: dict[str, Any] = {"alpha": 1.0}
FEW = 128  # examples of --quick
Row = dict[str, Any]


def by(mode: str, strength: float, lr: float, **settings: Any) -> dict[str, Any]:
    return {"strength": strength, "mode": mode, "lr": lr} | settings


NORMED: tuple[dict[str, Any], list[dict[str, Any]]] = (
    {"epochs": 10, "batch_size": 128},
    [settings for lr in (0.1, 0.03, 0.01) for settings in (PLAIN | {"lr": lr}, by("exact", 0.1, lr))],
)
GRIDS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "mnist": (
        {"epochs": 5, "batch_size": 128, "schedule": "cosine"},
        [
            *(PLAIN | {"lr": lr} for lr in (0.1, 0.03)),
            *(by("paper", s, 0.1) for s in (0.1, 1.0, 3.0)),
            *(by("paper", s, 0.03) for s in (0.3, 1.0, 3.0)),
            *(by("exact", s, 0.1) for s in (0.1, 0.3, 1.0, 3.0, 10.0)),
            *(by("exact", s, 0.03) for s in (1.0, 3.0, 10.0)),
            by("exact", 3.0, 0.1, warmup=1),
            *(by(mode, 1.0, 0.1, schedule="constant") for mode in ("paper", "exact")),
        ],
    ),
    "digits": (
        {"epochs": 30, "batch_size": 64, "schedule": "cosine"},
        [
            *(PLAIN | {"lr": lr} for lr in (0.1, 0.05, 0.03)),
            *(by("exact", s, 0.1) for s in (0.3, 1.0, 3.0)),
            *(by("exact", s, 0.05) for s in (1.0, 3.0)),
            *(by("exact", s, 0.03) for s in (1.0, 3.0, 10.0)),
            by("paper", 1.0, 0.1),
            by("paper", 1.0, 0.05),
            by("paper", 3.0, 0.03),
        ],
    ),
    "vit": NORMED,
    "resnet": NORMED,
}
TASKS = {  # model and data
    "mnist": ("mlp", "mnist"), "digits": ("mlp", "digits"), "vit": ("vit", "digits"), "resnet": ("resnet20", "digits"),
}  # fmt: skip


def settings_of(task: str, seeds: int = 1) -> list[dict[str, Any]]:
    """Of every run of a search."""
    common, grid = GRIDS[task]
    return [common | own | {"seed": seed} for seed in range(100, 100 + seeds) for own in grid]


def measure(model_name: str, data: DataSet, settings: dict[str, Any]) -> Row:
    config = Config(probe_every=0, **settings)
    torch.manual_seed(config.seed)
    model = build(model_name, data)
    last = fit(model, data, config, keep_going=True).history[-1]
    diverged = not math.isfinite(last["train_loss"])
    row = {"settings": settings, "diverged": diverged, "val_error": last["val_error"]}
    if diverged:
        return row
    found = attacks.robustness(model, data, SIGMAS, RADII)
    under = {kind: dict(zip(found[kind]["at"], found[kind]["accuracy"], strict=True)) for kind in ("noise", "pgd")}
    return row | {"train_error": last["train_error"], "val_input_loss": last["val_input_loss"]} | under


def search(model_name: str, data: DataSet, runs: Sequence[dict[str, Any]], out: Path) -> None:
    """Adds to the file what it does not have yet."""
    rows: list[Row] = json.loads(out.read_text()) if out.exists() else []
    done = [row["settings"] for row in rows]
    out.parent.mkdir(parents=True, exist_ok=True)
    for settings in runs:
        if settings not in done:
            rows.append(measure(model_name, data, settings))
            print(json.dumps(rows[-1]), flush=True)
            out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def few(data: DataSet) -> DataSet:
    train, val = (Split(split.x[:FEW], split.y[:FEW]) for split in (data.train, data.val))
    return replace(data, train=train, val=val)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=GRIDS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    model_name, name = TASKS[given.task]
    data, runs = load(name, given.data_dir), settings_of(given.task, given.seeds)
    if given.quick:
        data, runs = few(data), [settings | {"epochs": 1} for settings in runs]
    search(model_name, data, runs, given.out)


if __name__ == "__main__":
    main()
