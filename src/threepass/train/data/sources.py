"""`load`: a data set by name, or from arrays in files."""

import contextlib
import difflib
import os
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..extras import require
from . import names, published
from .dataset import DataSet, Device, Split, assemble, make_split
from .download import download as fetch
from .formats import DataError

NAMES = ("digits", *published.SETS)
KEYS = ("x_train", "y_train", "x_val", "y_val")


def load(name: str | Path, root: str | Path | None = None, download: bool = False, device: Device = "cpu") -> DataSet:
    """A data set by name, or the arrays in a .npz file or a folder, as a DataSet on the device.

    The files of mnist, fashion-mnist, cifar10 and cifar100 are read as their authors publish them and as torchvision
    keeps them; their test sets are the validation split. digits comes with scikit-learn.

    A .npz file has the keys x_train, y_train, x_val and y_val; a folder contains these as .npy files, or data.npz.
    There x is N x C x H x W, N x H x W or N x F, uint8 pixels or numbers; y is N integers from 0 on, or for regression
    floating-point targets, N x D or N.

    Args:
        name: digits, mnist, fashion-mnist, cifar10, cifar100, or the path of a .npz file or a folder.
        root: where the files are looked for first; then in $THREEPASS_DATA, then in ~/.cache/threepass.
        download: download missing files into the first of these folders that is set.
        device: to put the tensors on.

    >>> data = load("digits")
    >>> data.train.x.shape, len(data.val), data.classes[3]
    (torch.Size([1437, 1, 8, 8]), 360, '3')
    """
    if name == "digits":
        return _digits(device)
    if str(name) in published.SETS:
        return _published(str(name), root, download, device)
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_arrays(_folder(path), path.name, device)
    if path.suffix == ".npz" and path.is_file():
        return _from_arrays(_read_npz(path), path.stem, device)
    if path.suffix == ".npz":
        raise FileNotFoundError(f"there is no file {path}")
    near = difflib.get_close_matches(str(name), NAMES, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise FileNotFoundError(
        f"{str(name)!r} is neither a folder, nor a .npz file, nor one of the sets {', '.join(NAMES)}{hint}"
    )


def _published(name: str, root: str | Path | None, download: bool, device: Device) -> DataSet:
    named = [place for place in (root, os.environ.get("THREEPASS_DATA")) if place]
    places = [Path(place).expanduser() for place in (*named, "~/.cache/threepass")]
    files, looked = published.find(name, places)
    if files is None and download:
        for remote in published.SETS[name].remotes:
            fetch(remote, places[0])
        files, looked = published.find(name, places)
    if files is None:
        lines = "\n".join(f"  - {line}" for line in dict.fromkeys(looked))
        where = ("", "") if root is None else (f" --data-dir {root}", f", root={str(root)!r}")
        raise FileNotFoundError(
            f"{name} is not in any of\n{lines}\n"
            f"Download it with `threepass data {name} --download{where[0]}`, "
            f"in Python `load({name!r}{where[1]}, download=True)`. "
            "If you have it elsewhere, name that folder: --data-dir, root= or THREEPASS_DATA."
        )
    return published.read(name, files, device)


def _digits(device: Device) -> DataSet:
    """scikit-learn's 1,797 digits, 1 x 8 x 8, from 0 to 1; every class as frequent in both splits."""
    datasets = require("sklearn.datasets", "the set digits")
    selection = require("sklearn.model_selection", "the set digits")
    pixels, labels = datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    train, val = selection.train_test_split(range(len(y)), test_size=360, stratify=labels, random_state=0)
    return assemble(Split(x[train], y[train]), Split(x[val], y[val]), "digits", names.DIGITS, device)


def _from_arrays(arrays: dict[str, np.ndarray], name: str, device: Device) -> DataSet:
    train, val = (make_split(arrays[f"x_{part}"], arrays[f"y_{part}"], part) for part in ("train", "val"))
    return assemble(train, val, name, device=device)


def _folder(folder: Path) -> dict[str, np.ndarray]:
    if (folder / "data.npz").exists():
        return _read_npz(folder / "data.npz")
    missing = [f"{key}.npy" for key in KEYS if not (folder / f"{key}.npy").exists()]
    if missing:
        raise FileNotFoundError(f"{folder} has no data.npz and lacks {', '.join(missing)}")
    arrays = {}
    for key in KEYS:
        with _opened(folder / f"{key}.npy") as arrays[key]:
            pass
    return arrays


def _read_npz(file: Path) -> dict[str, np.ndarray]:
    with _opened(file) as archive:
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataError(
                f"{file} contains one array without a name: write it with numpy.savez(file, x_train=..., ...)"
            )
        missing = [key for key in KEYS if key not in archive]
        if missing:
            raise DataError(f"{file} lacks {', '.join(missing)}; it has {', '.join(archive) or 'no arrays'}")
        return {key: _part(archive, key, file) for key in KEYS}


def _part(archive: Any, key: str, file: Path) -> np.ndarray:
    try:
        return archive[key]
    except DAMAGED as error:
        raise DataError(f"{file}: {key} is damaged, or is no array of numbers ({error})") from error


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """What NumPy finds in a file; an archive's arrays are read when they are asked for."""
    with open(file, "rb") as content:
        start = content.read(6)
        if not start.startswith((b"PK", b"\x93NUMPY")):  # NumPy takes whatever else there is for a pickle
            raise DataError(f"{file} is damaged, or contains no array of numbers (it starts with {start!r})")
        content.seek(0)
        try:
            array = np.load(content, allow_pickle=False)
        except DAMAGED as error:
            raise DataError(f"{file} is damaged, or contains no array of numbers ({error})") from error
        yield array


DAMAGED = (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error)
