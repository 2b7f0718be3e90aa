"""`load`: a data set by name, or from a folder of arrays."""

import os
from pathlib import Path

import numpy as np
import torch

from ..extras import require
from . import names, published
from .dataset import DataSet, Device, Split, assemble, make_split
from .download import download as fetch
from .formats import DataError

NAMES = ("digits", *published.SETS)


def load(name: str | Path, root: str | Path | None = None, download: bool = False, device: Device = "cpu") -> DataSet:
    """One of NAMES, or the arrays in a folder, as a DataSet on the device.

    The files of mnist, fashion-mnist, cifar10 and cifar100 are looked for below `root`, then $THREEPASS_DATA, then
    ~/.cache/threepass, as their authors publish them and as torchvision keeps them; with `download`, missing ones are
    put into the first of these that is named. Their test sets are the validation split. digits comes with scikit-learn.

    A folder holds x_train.npy, y_train.npy, x_val.npy and y_val.npy, or data.npz with these four keys: x is
    N x C x H x W, N x H x W or N x F, uint8 pixels or numbers; y is N whole numbers from 0 on.

    >>> data = load("digits")
    >>> data.train.x.shape, len(data.val), data.classes[3]
    (torch.Size([1437, 1, 8, 8]), 360, '3')
    """
    if name == "digits":
        return _digits(device)
    if str(name) in published.SETS:
        return _published(str(name), root, download, device)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _folder(folder, device)
    raise FileNotFoundError(f"{str(name)!r} is neither a folder nor one of the sets {', '.join(NAMES)}")


def _published(name: str, root: str | Path | None, download: bool, device: Device) -> DataSet:
    named = [place for place in (root, os.environ.get("THREEPASS_DATA")) if place]
    places = [Path(place).expanduser() for place in (*named, "~/.cache/threepass")]
    found, looked = published.find(name, places)
    if found is None and download:
        for remote in published.SETS[name].remotes:
            fetch(remote, places[0])
        found, looked = published.find(name, places)
    if found is None:
        lines = "\n".join(f"  - {line}" for line in dict.fromkeys(looked))
        where = ("", "") if root is None else (f" --data-dir {root}", f", root={str(root)!r}")
        raise FileNotFoundError(
            f"{name} is not in any of\n{lines}\n"
            f"Download it with `threepass data {name} --download{where[0]}`, "
            f"in Python `load({name!r}{where[1]}, download=True)`. "
            "If you have it elsewhere, name that folder: --data-dir, root= or THREEPASS_DATA."
        )
    return published.read(name, found, device)


def _digits(device: Device) -> DataSet:
    """scikit-learn's 1,797 digits, 1 x 8 x 8, from 0 to 1; every class as frequent in both splits."""
    datasets = require("sklearn.datasets", "the set digits")
    selection = require("sklearn.model_selection", "the set digits")
    pixels, labels = datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    train, val = selection.train_test_split(range(len(y)), test_size=360, stratify=labels, random_state=0)
    return assemble(Split(x[train], y[train]), Split(x[val], y[val]), "digits", names.DIGITS, device)


def _folder(folder: Path, device: Device) -> DataSet:
    keys = ("x_train", "y_train", "x_val", "y_val")
    together = folder / "data.npz"
    missing = [f"{key}.npy" for key in keys if not (folder / f"{key}.npy").exists()]
    if together.exists():
        with np.load(together, allow_pickle=False) as arrays:
            missing = [key for key in keys if key not in arrays]
            if missing:
                raise DataError(f"{together} lacks {', '.join(missing)}")
            x_train, y_train, x_val, y_val = (arrays[key] for key in keys)
    elif missing:
        raise FileNotFoundError(f"{folder} has no data.npz and lacks {', '.join(missing)}")
    else:
        x_train, y_train, x_val, y_val = (np.load(folder / f"{key}.npy", allow_pickle=False) for key in keys)
    train, val = make_split(x_train, y_train, "train"), make_split(x_val, y_val, "val")
    return assemble(train, val, folder.name, device=device)
