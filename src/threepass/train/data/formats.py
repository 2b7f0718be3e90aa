"""The files that the authors of MNIST and CIFAR publish, read into numpy arrays and checked on the way."""

import codecs
import gzip
import io
import math
import pickle
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Arrays = tuple[np.ndarray, np.ndarray]  # images N x C x H x W, uint8; labels N


class DataError(ValueError):
    """Data that is there but is not what it should be."""


def read_idx_pair(paths: Sequence[Path]) -> Arrays:
    """MNIST's pair of files: images as N x 1 x H x W, and labels."""
    images, labels = (read_idx(path, dims) for path, dims in zip(paths, (3, 1), strict=True))
    return images[:, None], labels


def read_idx(path: Path, dims: int) -> np.ndarray:
    """An idx file of bytes: the magic number 0x0800 + dims, the sizes, all big-endian 32 bits, then the values."""
    content = _read(path)
    header = 4 * (1 + dims)
    magic = int.from_bytes(content[:4], "big")
    if magic != 0x800 + dims:
        raise DataError(f"{path}: the magic number is {magic:#010x}, not {0x800 + dims:#010x} (idx, {dims}-d, bytes)")
    sizes = [int.from_bytes(content[at : at + 4], "big") for at in range(4, header, 4)]
    _check_size(path, len(content), header + math.prod(sizes))
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes).copy()  # torch wants memory it may write to


def read_cifar_binary(paths: Sequence[Path], label_bytes: int) -> Arrays:
    """CIFAR's binary version: rows of label bytes, the last the one to learn, then 32 x 32 R, G and B planes."""
    rows = []
    for path in paths:
        content = _read(path)
        width = label_bytes + 3 * 32 * 32
        _check_size(path, len(content), -(-len(content) // width) * width or width)
        rows.append(np.frombuffer(content, np.uint8).reshape(-1, width))
    images = np.concatenate([part[:, label_bytes:] for part in rows])
    return images.reshape(-1, 3, 32, 32), np.concatenate([part[:, label_bytes - 1] for part in rows])


def read_cifar_python(paths: Sequence[Path], key: bytes) -> Arrays:
    """CIFAR's Python version: pickled dicts with b"data", N x 3072 bytes, and the labels as a list under `key`."""
    images, labels = [], []
    for path in paths:
        batch = unpickle(path)
        if not isinstance(batch, dict) or not {b"data", key} <= batch.keys():
            raise DataError(f"{path}: no dict with the keys b'data' and {key!r}")
        pixels, y = batch[b"data"], np.asarray(batch[key])
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape != (len(y), 3 * 32 * 32):
            raise DataError(f"{path}: b'data' must be a uint8 array of shape ({len(y)}, 3072), one row per label")
        images.append(pixels.reshape(-1, 3, 32, 32))
        labels.append(y)
    return np.concatenate(images), np.concatenate(labels)


def unpickle(path: Path) -> Any:
    """Plain containers and numpy arrays from a pickle; anything else it asks for is refused, and not run."""
    try:
        return _ArrayUnpickler(io.BytesIO(_read(path)), encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except Exception as error:  # broken pickles raise nearly every type there is
        raise DataError(f"{path}: truncated or invalid pickle ({type(error).__name__}: {error})") from error


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # The objects come from a table, not from an import: the modules that old files name have moved since.
        if (module, name) not in ADMITTED:
            raise DataError(
                f"refused to load {module}.{name} from the pickle: only NumPy arrays and plain containers are allowed"
            )
        return ADMITTED[module, name]


ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,
}


def _read(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: truncated or invalid gzip file ({error}); delete it and download it again") from error


def _check_size(path: Path, size: int, expected: int) -> None:
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise DataError(f"{path}: {what}: {size} bytes where {expected} are expected; delete it and download it again")
