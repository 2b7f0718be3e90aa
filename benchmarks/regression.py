"""The search that found `fit`'s learning rate for regression by the mean squared error, `threepass.train.config`.

    PYTHONPATH=src python benchmarks/regression.py --out results/recipes/regression.json

Every row is one set, net, method and learning rate, with all other settings at their defaults (SGD, momentum 0.9,
batches of 128, 10 epochs), over seeds from 100 on: how many runs diverged, and the means over the others of the
validation loss relative to that of predicting the mean of the validation targets: 1 is no better than that. The sets
are scikit-learn's: diabetes (442 people, 10 features) and Friedman's synthetic functions 1 and 2 (2,000 samples each),
with targets as they come, and standardised by the training targets. A quarter of each is the validation set.

It takes about three minutes on one CPU core. --quick runs one epoch with one seed: its figures mean nothing.

Result: results/recipes/regression.json, quoted by docs/choose.md. With standardised targets 18 of 36 runs
diverged at lr 0.1, and 0 at 0.03.
"""

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

import torch
from sklearn import datasets
from torch import Tensor
from torch.utils.data import TensorDataset

from threepass.models import mlp
from threepass.train.data import DataSet, from_dataset
from threepass.train.loop import fit

SETS = {
    "diabetes": lambda: datasets.load_diabetes(return_X_y=True),
    "friedman1": lambda: datasets.make_friedman1(2000, noise=1.0, random_state=0),
    "friedman2": lambda: datasets.make_friedman2(2000, noise=10.0, random_state=0),
}
NETS = {"512": (512,), "512-512": (512, 512)}  # the widths of hidden layers; the first is the net of `threepass train`
METHODS: dict[str, dict[str, Any]] = {"two passes": {"alpha": 1.0}, "strength 0.1": {"strength": 0.1}}
RATES = (0.1, 0.03, 0.01, 0.003, 0.001)


def load(name: str, standardised: bool) -> DataSet:
    x, y = (torch.tensor(z, dtype=torch.float32) for z in SETS[name]())
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, val = order[len(x) // 4 :], order[: len(x) // 4]
    if standardised:
        y = (y - y[train].mean()) / y[train].std()
    y = y[:, None]
    return from_dataset(TensorDataset(x[train], y[train]), TensorDataset(x[val], y[val]), name)


def run(data: DataSet, widths: tuple[int, ...], settings: dict[str, Any]) -> float:
    """The relative validation loss."""
    torch.manual_seed(settings["seed"])
    model = mlp(data.train.x.shape[1], *widths, 1)
    last = fit(model, data, probe_every=0, keep_going=True, **settings).history[-1]
    return last["val_loss"] / variance(data.val.y)


def variance(y: Tensor) -> float:
    return y.double().var(correction=0).item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seeds, short = (range(100, 101), {"epochs": 1}) if given.quick else (range(100, 103), {})
    rows = []
    for name, standardised in itertools.product(SETS, (True, False)):
        data = load(name, standardised)
        for net, method, lr in itertools.product(NETS, METHODS, RATES):
            own = METHODS[method] | {"lr": lr} | short
            losses = [run(data, NETS[net], own | {"seed": seed}) for seed in seeds]
            finite = [loss for loss in losses if math.isfinite(loss)]
            mean = sum(finite) / len(finite) if finite else None
            row = {"data": name, "standardised": standardised, "net": net, "method": method, "lr": lr}
            rows.append(row | {"runs": len(losses), "diverged": len(losses) - len(finite), "relative_loss": mean})
            print(json.dumps(rows[-1]), flush=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
