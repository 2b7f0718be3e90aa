"""The published sets: where their files are on disk and on the web, how they are read, and what they must contain."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from . import names
from .dataset import DataSet, Device, assemble, make_split
from .download import Remote
from .formats import Arrays, DataError, read_cifar_binary, read_cifar_python, read_idx_pair


@dataclass(frozen=True)
class Layout:
    """Files as published, in one of `folders` (below a place that is searched), with or without .gz."""

    folders: tuple[str, ...]
    train: tuple[str, ...]
    val: tuple[str, ...]
    read: Callable[[Sequence[Path]], Arrays]


@dataclass(frozen=True)
class Published:
    """A set: its layouts, the number of training and validation examples, one example's shape, and its downloads."""

    layouts: tuple[Layout, ...]
    counts: tuple[int, int]
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    remotes: tuple[Remote, ...]


@dataclass(frozen=True)
class Found:
    """The files of a set, and how to read them."""

    train: list[Path]
    val: list[Path]
    read: Callable[[Sequence[Path]], Arrays]


def find(name: str, places: Sequence[Path]) -> tuple[Found | None, list[str]]:
    """The set's files in the first place that has all of them, and a line for every folder looked into before."""
    looked: list[str] = []
    for place in places:
        for layout in SETS[name].layouts:
            for folder in (place / below for below in layout.folders):
                train, val = (
                    [_with_or_without_gz(folder / file) for file in part] for part in (layout.train, layout.val)
                )
                missing = [path.name for path in train + val if not path.is_file()]
                if not missing:
                    return Found(train, val, layout.read), looked
                partly = len(missing) < len(train + val)
                looked.append(f"{folder}{' (incomplete, lacks ' + ', '.join(missing) + ')' if partly else ''}")
    return None, looked


def read(name: str, location: Found, device: Device) -> DataSet:
    """The set from its files, with the shape and number of images checked."""
    published = SETS[name]
    splits = []
    for files, count in zip((location.train, location.val), published.counts, strict=True):
        x, y = location.read(files)
        if x.shape != (count, *published.shape) or len(y) != count:
            raise DataError(
                f"{files[0].parent}: {name} must have images {(count, *published.shape)} and {count} labels; "
                f"{', '.join(file.name for file in files)} contain(s) {x.shape} and {len(y)}"
            )
        splits.append(make_split(x, y, name))
    return assemble(splits[0], splits[1], name, published.classes, device)


def _with_or_without_gz(path: Path) -> Path:
    zipped = path.with_name(path.name + ".gz")
    return zipped if zipped.is_file() and not path.is_file() else path


def _idx(*folders: str) -> Layout:
    files = ("images-idx3-ubyte", "labels-idx1-ubyte")
    return Layout(folders, tuple(f"train-{f}" for f in files), tuple(f"t10k-{f}" for f in files), read_idx_pair)


def _idx_remotes(folder: str, mirrors: tuple[str, ...], *md5: str) -> tuple[Remote, ...]:
    files = [f"{file}.gz" for file in _idx().train + _idx().val]
    return tuple(
        Remote(f"{folder}/{file}", tuple(f"{mirror}/{file}" for mirror in mirrors), digest)
        for file, digest in zip(files, md5, strict=True)
    )


def _cifar_remote(file: str, md5: str, *unpack: str) -> tuple[Remote]:
    mirrors = (
        "https://www.cs.toronto.edu/~kriz",
        "https://mindspore-website.obs.cn-north-4.myhuaweicloud.com/notebook/datasets",
    )
    return (Remote(file, tuple(f"{mirror}/{file}" for mirror in mirrors), md5, unpack),)


CIFAR10_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR10_BINARY = Layout(
    ("cifar-10-batches-bin", "."),
    tuple(f"{file}.bin" for file in CIFAR10_TRAIN),
    ("test_batch.bin",),
    partial(read_cifar_binary, label_bytes=1),
)
CIFAR10_PYTHON = Layout(
    ("cifar-10-batches-py", "."), CIFAR10_TRAIN, ("test_batch",), partial(read_cifar_python, key=b"labels")
)
CIFAR100_BINARY = Layout(
    ("cifar-100-binary", "."), ("train.bin",), ("test.bin",), partial(read_cifar_binary, label_bytes=2)
)
CIFAR100_PYTHON = Layout(
    ("cifar-100-python", "."), ("train",), ("test",), partial(read_cifar_python, key=b"fine_labels")
)

SETS = {
    "mnist": Published(
        (_idx("MNIST/raw", "mnist", "."),),
        (60_000, 10_000),
        (1, 28, 28),
        names.DIGITS,
        _idx_remotes(
            "MNIST/raw",
            ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    "fashion-mnist": Published(
        # Not in the place itself: its files have the names of MNIST's, and one would be taken for the other.
        (_idx("FashionMNIST/raw", "fashion-mnist"),),
        (60_000, 10_000),
        (1, 28, 28),
        names.FASHION,
        _idx_remotes(
            "FashionMNIST/raw",
            (
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            ),
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    "cifar10": Published(
        (CIFAR10_BINARY, CIFAR10_PYTHON),
        (50_000, 10_000),
        (3, 32, 32),
        names.CIFAR10,
        _cifar_remote(
            "cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            *(f"cifar-10-batches-bin/{file}" for file in CIFAR10_BINARY.train + CIFAR10_BINARY.val),
        ),
    ),
    "cifar100": Published(
        (CIFAR100_BINARY, CIFAR100_PYTHON),
        (50_000, 10_000),
        (3, 32, 32),
        names.CIFAR100,
        _cifar_remote(
            "cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            *(f"cifar-100-binary/{file}" for file in CIFAR100_BINARY.train + CIFAR100_BINARY.val),
        ),
    ),
}
