"""Data: formats and their errors, lookup, downloads, batches and augmentation, and the real sets where they are."""

import dataclasses
import gzip
import hashlib
import importlib.util
import io
import os
import pickle
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from threepass.train import extras
from threepass.train.data import Batches, DataError, DataSet, Split, from_dataset, load, published
from threepass.train.data.batches import crop_and_flip
from threepass.train.data.download import Remote, download
from threepass.train.data.formats import read_idx, unpickle

REAL = Path(__file__).parents[3] / "shared" / "data"
TRAIN, VAL = 20, 10


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("THREEPASS_DATA", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def small(monkeypatch):
    """The published sets with 20 and 10 images."""
    for name, full in published.SETS.items():
        monkeypatch.setitem(published.SETS, name, dataclasses.replace(full, counts=(TRAIN, VAL)))


def pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def idx(array):
    return b"".join(n.to_bytes(4, "big") for n in (0x800 + array.ndim, *array.shape)) + array.tobytes()


def write_idx(folder, zipped, classes=10):
    folder.mkdir(parents=True)
    arrays = {}
    for part, count in (("train", TRAIN), ("t10k", VAL)):
        arrays[f"{part}-images-idx3-ubyte"] = pixels(count, 28, 28, seed=count)
        arrays[f"{part}-labels-idx1-ubyte"] = np.arange(count, dtype=np.uint8) % classes
    for name, array in arrays.items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return list(arrays.values())


def cifar(name):
    """Images and fine labels of the small CIFAR sets: 20 for training, 10 for validation."""
    classes = 10 if name == "cifar10" else 100
    return [(pixels(n, 3, 32, 32, seed=n), (np.arange(n) * 7 % classes).astype(np.uint8)) for n in (TRAIN, VAL)]


def write_cifar_binary(folder, name):
    folder.mkdir(parents=True)
    train, val = cifar(name)
    for part, (x, y) in (("train", train), ("test", val)):
        coarse = [] if name == "cifar10" else [np.full((len(y), 1), 19, np.uint8)]
        rows = np.hstack([*coarse, y[:, None], x.reshape(len(x), -1)])
        if name == "cifar100":
            (folder / f"{part}.bin").write_bytes(rows.tobytes())
        elif part == "test":
            (folder / "test_batch.bin").write_bytes(rows.tobytes())
        else:
            for i in range(5):
                (folder / f"data_batch_{i + 1}.bin").write_bytes(rows[4 * i : 4 * i + 4].tobytes())


def write_cifar_python(folder, name, protocol):
    folder.mkdir(parents=True)
    train, val = cifar(name)

    def write(file, x, y):
        key = b"labels" if name == "cifar10" else b"fine_labels"
        batch = {b"data": x.reshape(len(x), -1), key: y.tolist(), b"filenames": [b"a.png"]}
        (folder / file).write_bytes(pickle.dumps(batch, protocol))

    if name == "cifar100":
        write("train", *train)
        write("test", *val)
    else:
        for i in range(5):
            write(f"data_batch_{i + 1}", *(part[4 * i : 4 * i + 4] for part in train))
        write("test_batch", *val)


def same(tensor, array):
    return torch.equal(tensor, torch.tensor(array, dtype=tensor.dtype))


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "MNIST/raw"),
        ("mnist", "mnist"),
        ("mnist", "."),
        ("fashion-mnist", "FashionMNIST/raw"),
        ("fashion-mnist", "fashion-mnist"),
    ],
)
def test_idx(small, tmp_path, name, folder, zipped):
    arrays = write_idx(tmp_path / "data" / folder, zipped)
    data = load(name, root=tmp_path / "data")
    assert data.name == name
    assert len(data.classes) == 10
    assert data.train.x.shape == (TRAIN, 1, 28, 28)
    assert data.train.x.dtype == torch.uint8
    assert data.train.y.dtype == torch.int64
    for tensor, array in zip((data.train.x[:, 0], data.train.y, data.val.x[:, 0], data.val.y), arrays, strict=True):
        assert same(tensor, array)
    assert data.mean[0] == pytest.approx((arrays[0] / 255).mean(), abs=1e-12)
    assert data.std[0] == pytest.approx((arrays[0] / 255).std(), abs=1e-12)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("kind", ["binary", "binary, folder itself", "python 2", "python 4"])
def test_cifar(small, tmp_path, name, kind):
    number = name.removeprefix("cifar")
    if kind == "binary, folder itself":
        write_cifar_binary(tmp_path / "data", name)
    elif kind == "binary":
        write_cifar_binary(tmp_path / "data" / {"10": "cifar-10-batches-bin", "100": "cifar-100-binary"}[number], name)
    else:
        folder = {"10": "cifar-10-batches-py", "100": "cifar-100-python"}[number]
        write_cifar_python(tmp_path / "data" / folder, name, protocol=int(kind[-1]))
    data = load(name, root=str(tmp_path / "data"))
    assert len(data.classes) == int(number)
    for split, (x, y) in zip((data.train, data.val), cifar(name), strict=True):
        assert same(split.x, x)
        assert same(split.y, y)
    assert data.mean == pytest.approx((cifar(name)[0][0] / 255).mean((0, 2, 3)), abs=1e-12)
    assert data.std == pytest.approx((cifar(name)[0][0] / 255).std((0, 2, 3)), abs=1e-12)


def test_a_pickle_from_before_numpy_moved_its_modules(tmp_path):
    array = pixels(2, 3)
    old = pickle.dumps({b"data": array}, 2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    (tmp_path / "old").write_bytes(old)
    assert np.array_equal(unpickle(tmp_path / "old")[b"data"], array)


class Evil:
    def __reduce__(self):
        return os.system, ("echo ran > ran",)


def test_a_malicious_pickle_is_refused_and_not_run(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_cifar_python(tmp_path / "cifar-100-python", "cifar100", protocol=2)
    (tmp_path / "cifar-100-python" / "train").write_bytes(pickle.dumps({b"data": Evil()}))
    with pytest.raises(DataError, match=rf"train: refused to load {os.name}\.?\w*\.system from the pickle"):
        load("cifar100", root=tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("ask", [b"cbuiltins\neval\n.", b"cnumpy\nload\n.", b"cnumpy.core.multiarray\nscalar\n."])
def test_only_what_arrays_need_is_admitted(tmp_path, ask):
    (tmp_path / "batch").write_bytes(ask)
    with pytest.raises(DataError, match="refused to load"):
        unpickle(tmp_path / "batch")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(np.zeros((2, 3), np.uint8)), "magic number is 0x00000802, not 0x00000803"),
        (b"", "magic number is 0x00000000"),
        (idx(np.zeros((2, 3, 3), np.uint8))[:-1], "truncated: 33 bytes where 34 are expected"),
        (idx(np.zeros((2, 3, 3), np.uint8))[:6], "truncated"),
        (idx(np.zeros((2, 3, 3), np.uint8)) + b"x", "too long: 35 bytes where 34"),
    ],
)
def test_broken_idx(tmp_path, content, message):
    (tmp_path / "images").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / "images", 3)


@pytest.mark.parametrize("broken", [b"no gzip", gzip.compress(idx(pixels(5, 5, 5)))[:-20]])
def test_broken_gzip(tmp_path, broken):
    (tmp_path / "images.gz").write_bytes(broken)
    with pytest.raises(DataError, match=r"images\.gz: truncated or invalid gzip file"):
        read_idx(tmp_path / "images.gz", 3)


def test_wrong_counts_and_labels(small, tmp_path, monkeypatch):
    write_idx(tmp_path / "mnist", zipped=False)
    labels = tmp_path / "mnist" / "train-labels-idx1-ubyte"
    labels.write_bytes(idx(np.full(TRAIN, 10, np.uint8)))
    with pytest.raises(DataError, match="labels must be in 0 to 9; found 0 to 10"):
        load("mnist", root=tmp_path)
    labels.write_bytes(idx(np.zeros(TRAIN - 1, np.uint8)))
    with pytest.raises(DataError, match=r"must have images \(20, 1, 28, 28\) and 20 labels; .* and 19"):
        load("mnist", root=tmp_path)


def test_broken_cifar(small, tmp_path):
    write_cifar_binary(tmp_path / "cifar-100-binary", "cifar100")
    file = tmp_path / "cifar-100-binary" / "test.bin"
    content = file.read_bytes()
    file.write_bytes(content[:-7])
    with pytest.raises(DataError, match=r"test\.bin: truncated: 30733 bytes where 30740"):
        load("cifar100", root=tmp_path)
    file.write_bytes(content[:-3074])
    with pytest.raises(DataError, match=r"must have images \(10, 3, 32, 32\)"):
        load("cifar100", root=tmp_path)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (pickle.dumps({b"data": 1}), "no dict with the keys"),
        (
            pickle.dumps({b"data": pixels(3, 5), b"fine_labels": [1, 2, 3]}, 2),
            r"must be a uint8 array of shape \(3, 3072\)",
        ),
        (pickle.dumps({b"data": 1})[:-3], "truncated or invalid pickle"),
    ],
)
def test_broken_cifar_python(small, tmp_path, batch, message):
    write_cifar_python(tmp_path / "cifar-100-python", "cifar100", protocol=2)
    (tmp_path / "cifar-100-python" / "test").write_bytes(batch)
    with pytest.raises(DataError, match=message):
        load("cifar100", root=tmp_path)


def test_places_are_searched_in_order(small, tmp_path, monkeypatch):
    for i, place in enumerate(("root", "env", "home/.cache/threepass")):
        write_idx(tmp_path / place / "mnist", zipped=False, classes=2 + i)
    monkeypatch.setenv("THREEPASS_DATA", str(tmp_path / "env"))
    assert load("mnist", root=tmp_path / "root").train.y.max() == 1
    assert load("mnist", root=tmp_path / "nowhere").train.y.max() == 2
    monkeypatch.delenv("THREEPASS_DATA")
    assert load("mnist").train.y.max() == 3


def test_an_absent_set_says_where_it_looked_and_what_to_type(small, tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        load("cifar10")
    text = str(error.value)
    assert str(tmp_path / "home/.cache/threepass/cifar-10-batches-py") in text
    assert "`threepass data cifar10 --download`" in text
    assert "`load('cifar10', download=True)`" in text
    write_idx(tmp_path / "d" / "mnist", zipped=True)
    (tmp_path / "d" / "mnist" / "t10k-images-idx3-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"mnist \(incomplete, lacks t10k-images-idx3-ubyte\)") as error:
        load("mnist", root=tmp_path / "d")
    assert f"`threepass data mnist --download --data-dir {tmp_path / 'd'}`" in str(error.value)


def test_an_unknown_name(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"neither a folder, nor a .npz file, nor one of the sets digits, mnist"
    ):
        load("minst")


def test_a_missing_package_names_the_extra():
    with pytest.raises(ImportError, match=r"the set x needs no_such_package: pip install 'threepass\[train\]'"):
        extras.require("no_such_package", "the set x")


def test_digits():
    data = load("digits")
    assert data.train.x.shape == (1437, 1, 8, 8)
    assert data.val.x.shape == (360, 1, 8, 8)
    assert (data.train.x.min(), data.train.x.max()) == (0, 1)
    counts = data.val.y.bincount()
    assert counts.min() >= 34
    assert counts.max() <= 37
    assert torch.equal(load("digits").train.x, data.train.x)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", ["uint8 images", "float64 images", "grey images", "features"])
def test_folder_of_arrays(tmp_path, kind, together):
    shape = {"grey images": (6, 5), "features": (7,)}.get(kind, (3, 6, 5))
    x = pixels(12, *shape)
    x = x if "uint8" in kind else x / 255
    arrays = {"x_train": x[:8], "y_train": np.arange(8) % 3, "x_val": x[8:], "y_val": np.arange(4, dtype=np.int32) % 2}
    if together:
        np.savez(tmp_path / "data.npz", **arrays)
    else:
        for key, array in arrays.items():
            np.save(tmp_path / f"{key}.npy", array)
    data = load(tmp_path)
    assert data.classes == ("0", "1", "2")
    assert data.train.x.dtype == (torch.uint8 if "uint8" in kind else torch.float32)
    assert same(data.val.x, x[8:, None] if kind == "grey images" else x[8:])
    assert same(data.val.y, arrays["y_val"])
    batches = Batches(data.train, 8, normalise=(data.mean, data.std), shuffle=False, seed=0)
    ((out, _),) = batches.epoch(0)
    flat = out.transpose(0, 1).flatten(1)
    torch.testing.assert_close(flat.mean(1), torch.zeros(len(flat)), atol=1e-6, rtol=0)
    torch.testing.assert_close(flat.std(1, correction=0), torch.ones(len(flat)))


def test_broken_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"lacks x_train.npy, y_train.npy, x_val.npy, y_val.npy"):
        load(tmp_path)
    np.savez(tmp_path / "data.npz", x_train=pixels(2, 2))
    with pytest.raises(DataError, match="lacks y_train, x_val, y_val; it has x_train"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y_train": np.arange(3)}, "train: x has 4 examples and y has 3"),
        ({"y_train": np.arange(4) / 2}, r"training targets are float32 \(4,\) and validation targets int64 \(4,\)"),
        ({"y_train": np.arange(4.0)}, "train: y is float64 .4,. with integer values only: convert it to an integer"),
        ({"y_train": np.arange(4) + 0.5, "y_val": np.array([0.5, 1, 2, np.inf])}, "targets contain NaN or infinity"),
        (
            {"y_train": np.array([0, 1, 2, 10**6])},
            "run to 1000000, but only 5 different ones occur: number the classes",
        ),
        ({"x_train": np.empty((0, 4)), "y_train": np.empty(0, int)}, "with N > 0"),
        ({"x_train": np.array(3.0)}, r"got \(\) and \(4,\)"),
        ({"x_train": np.array(["a", "b", "c", "d"])}, "train: x and y must be numbers, got arrays of <U1 and int64"),
        ({"y_train": np.arange(4) - 1}, "labels must be in 0 to 3; found -1 to 3"),
        ({"x_val": pixels(4, 1, 2, 3)}, "differ in dtype or shape"),
        ({"x_val": np.zeros((4, 1, 2, 2))}, "differ in dtype or shape"),
        (
            {"x_train": np.full((4, 1, 2, 2), np.nan), "x_val": np.zeros((4, 1, 2, 2))},
            "4 of 4 training examples contain",
        ),
        (
            {"x_train": np.zeros((4, 1, 2, 2)), "x_val": np.diag([0, 1, np.nan, 0])[..., None, None]},
            "training and validation examples differ in dtype or shape",
        ),
        ({"x_train": np.zeros((4, 4)), "x_val": np.diag([0, 1, np.inf, 0])}, "1 of 4 validation examples contain NaN"),
    ],
)
def test_broken_arrays(tmp_path, change, message):
    x, y = pixels(4, 1, 2, 2), np.arange(4)
    np.savez(tmp_path / "data.npz", **({"x_train": x, "y_train": y, "x_val": x, "y_val": y} | change))
    with pytest.raises(DataError, match=message):
        load(tmp_path)


def test_arrays_with_pickled_objects_are_refused(tmp_path):
    x = pixels(4, 1, 2, 2)
    np.savez(tmp_path / "data.npz", x_train=np.array([Evil()]), y_train=x, x_val=x, y_val=x)
    with pytest.raises(DataError, match=r"data\.npz: x_train is damaged, or is no array of numbers.*allow_pickle"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"", "is damaged, or contains no array of numbers"),
        (lambda content: b"garbage", r"is damaged, or contains no array of numbers \(it starts with b'garbag'\)"),
        (lambda content: content[: len(content) // 2], "is damaged, or contains no array of numbers"),
        (lambda content: content[:200] + b"garbled" + content[207:], "x_train is damaged, or is no array of numbers"),
    ],
)
def test_damaged_archives(tmp_path, damage, message):
    x, y = pixels(40, 1, 2, 2), np.arange(40) % 3
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_val=x, y_val=y)
    data = load(tmp_path / "mine.npz")
    assert (data.name, len(data.train)) == ("mine", 40)
    (tmp_path / "mine.npz").write_bytes(damage((tmp_path / "mine.npz").read_bytes()))
    with pytest.raises(DataError, match=rf"mine\.npz:? {message}"):
        load(tmp_path / "mine.npz")


def test_an_array_alone_is_no_data_set(tmp_path):
    with open(tmp_path / "mine.npz", "wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match="contains one array without a name"):
        load(tmp_path / "mine.npz")


def test_a_data_set_prints_in_one_line():
    text = repr(load("digits"))
    assert "[1437, 1, 8, 8], y=int64[1437])" in text
    assert len(text) < 400


def test_a_class_that_only_validation_has_is_said():
    x = torch.rand(4, 3)
    train, val = TensorDataset(x, torch.tensor([0, 1, 0, 1])), TensorDataset(x, torch.tensor([0, 1, 2, 4]))
    with pytest.warns(UserWarning, match="no training example is of class 2, 4, which validation has") as caught:
        from_dataset(train, val)
    assert caught[0].filename == __file__


def test_targets_of_a_regression():
    x = torch.rand(4, 3)
    data = from_dataset([(x[i], i + 0.5) for i in range(4)], TensorDataset(x, torch.arange(4.0) / 3))
    assert data.classes == ()
    assert data.train.y.tolist() == [0.5, 1.5, 2.5, 3.5]
    with pytest.raises(DataError, match="integer values only"):
        from_dataset(TensorDataset(x, torch.arange(4.0)), TensorDataset(x, torch.arange(4.0)))
    column = TensorDataset(x, torch.arange(4.0)[:, None])
    assert from_dataset(column, column).val.y.shape == (4, 1)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(np.full((2, 2), i, np.float32), i) for i in range(3)])


def test_torch_datasets():
    x, y = torch.randn(6, 3, 4, 4), torch.tensor([0, 1, 2, 3, 4, 0])
    data = from_dataset(TensorDataset(x, y), TensorDataset(x[:2], y[:2]), name="mine")
    assert isinstance(data, DataSet)
    assert torch.equal(data.train.x, x)
    assert torch.equal(data.val.y, y[:2])
    assert (data.name, len(data.classes)) == ("mine", 5)
    stream = from_dataset(Stream(), Stream())
    assert stream.train.x.shape == (3, 1, 2, 2)
    with pytest.raises(DataError, match=r"val: example 1 is \(2,\), the first is \(1,\)"):
        from_dataset(Stream(), [(torch.zeros(1), 0), (torch.zeros(2), 0)])
    with pytest.raises(DataError, match="train: the dataset is empty"):
        from_dataset([], Stream())


@pytest.mark.parametrize("count", [1, 3, 4])
def test_images_with_their_channels_last_are_refused_or_said_to_be_so(count, tmp_path):
    x, y = pixels(6, 8, 7, count), np.arange(6) % 3
    message = rf"train: x is \(6, 8, 7, {count}\), which looks like N x H x W x C.*numpy.moveaxis\(x, -1, 1\)"
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_val=x, y_val=y)
    with pytest.raises(DataError, match=message):
        load(tmp_path / "mine.npz")
    examples = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    with pytest.raises(DataError, match=message):
        from_dataset(examples, examples)
    data = from_dataset(examples, examples, channels="last")
    assert same(data.train.x, np.moveaxis(x, -1, 1))
    assert len(data.mean) == count
    assert same(from_dataset(examples, examples, channels="first").train.x, x)
    with pytest.raises(ValueError, match='channels must be "first", "last" or None'):
        from_dataset(examples, examples, channels="middle")


def test_signals_of_one_column_are_no_images_with_their_channels_last():
    for shape in ((6, 3, 8, 1), (6, 12, 1, 1), (6, 4, 8, 3)):
        examples = TensorDataset(torch.rand(shape), torch.arange(6) % 3)
        assert from_dataset(examples, examples).train.x.shape == shape


def test_labels_that_count_from_one_are_said():
    x = torch.rand(4, 3)
    with pytest.warns(UserWarning, match=r"run from 1 to 4 and none is 0.*needs 5 outputs.*subtract 1 from") as caught:
        data = from_dataset(TensorDataset(x, torch.arange(4) + 1), TensorDataset(x, torch.arange(4) + 1))
    assert caught[0].filename == __file__
    assert len(data.classes) == 5


def test_torch_dataset_of_pil_images():
    image = pytest.importorskip("PIL.Image")
    colour, grey = pixels(5, 6, 3), pixels(5, 6)
    for channels in (None, "first", "last"):
        data = from_dataset([(image.fromarray(colour), 0)], [(image.fromarray(colour), 0)], channels=channels)
        assert same(data.train.x[0], colour.transpose(2, 0, 1))
    data = from_dataset([(image.fromarray(grey), 0)], [(image.fromarray(grey), 0)])
    assert same(data.train.x[0, 0], grey)


def test_a_constant_channel_has_std_one():
    x = torch.zeros(2, 1, 2, 2, dtype=torch.uint8)
    data = from_dataset(TensorDataset(x, torch.arange(2)), TensorDataset(x, torch.arange(2)))
    assert (data.mean, data.std) == ((0.0,), (1.0,))


@pytest.fixture
def images():
    return Split(torch.from_numpy(pixels(22, 3, 10, 12)), torch.arange(22))


NORMALISE = ((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


def naive(x, top, left, flip):
    out = []
    for image, i, j, mirrored in zip(x, top, left, flip, strict=True):
        padded = torch.zeros(image.shape[0], image.shape[1] + 8, image.shape[2] + 8)
        padded[:, 4:-4, 4:-4] = image
        crop = padded[:, i : i + image.shape[1], j : j + image.shape[2]]
        out.append(crop.flip(-1) if mirrored else crop)
    return torch.stack(out)


def test_crop_and_flip_against_a_loop():
    torch.manual_seed(0)
    x = torch.randn(50, 3, 10, 12)
    top, left = torch.randint(0, 9, (2, 50))
    flip = torch.rand(50) < 0.5
    assert torch.equal(crop_and_flip(x, top, left, flip), naive(x, top, left, flip))


def test_augmented_batches_are_normalised_crops_of_their_images(images):
    batches = Batches(images, 8, normalise=NORMALISE, augment=True, seed=3)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in NORMALISE)
    for x, y in batches.epoch(5):
        plain = (images.x[y].float() / 255 - mean) / std
        for image, out in zip(plain, x, strict=True):
            crops = naive(image.expand(162, -1, -1, -1), *np.indices((9, 9, 2)).reshape(3, -1))
            assert (crops - out).abs().amax((1, 2, 3)).min() < 1e-5


def test_every_crop_and_flip_is_about_as_frequent():
    split = Split(torch.zeros(20_000, 1, 1, 1), torch.zeros(20_000, dtype=torch.long))
    _, top, left, flip = Batches(split, 10, normalise=None, augment=True, seed=0)._draw(0)
    counts = np.bincount(top * 18 + left * 2 + flip, minlength=162)
    assert ((counts - 20_000 / 162) ** 2 / (20_000 / 162)).sum() < 230  # chi-square, 161 degrees: beyond it 0.03 %


def test_an_epoch_shows_every_example_once(images):
    batches = Batches(images, 8, normalise=None, seed=0)
    labels = [y for _, y in batches.epoch(0)]
    assert [len(y) for y in labels] == [8, 8, 6]
    assert len(batches) == 3
    assert torch.equal(torch.cat(labels).sort().values, images.y)
    dropping = Batches(images, 8, normalise=None, seed=0, drop_last=True)
    assert [len(y) for _, y in dropping.epoch(0)] == [8, 8]
    assert len(dropping) == 2


def test_without_shuffling_the_order_is_kept(images):
    batches = list(Batches(images, 8, normalise=None, shuffle=False, seed=0).epoch(4))
    assert torch.equal(torch.cat([y for _, y in batches]), images.y)
    torch.testing.assert_close(torch.cat([x for x, _ in batches]), images.x / 255)


def equal(a, b):
    return len(a) == len(b) and all(
        torch.equal(s, t) for p, q in zip(a, b, strict=True) for s, t in zip(p, q, strict=True)
    )


def test_a_pure_function_of_seed_and_epoch(images):
    def epoch(seed, number):
        return list(Batches(images, 8, normalise=NORMALISE, augment=True, seed=seed).epoch(number))

    torch.manual_seed(0)
    first = epoch(1, 2)
    torch.manual_seed(1)
    np.random.seed(1)
    assert equal(first, epoch(1, 2))
    assert not equal(first, epoch(1, 3))
    assert not equal(first, epoch(2, 2))
    assert not equal(epoch(1, 2), epoch(2, 1))


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_start_within_the_epoch_is_its_tail(images, drop_last):
    batches = Batches(images, 5, normalise=NORMALISE, augment=True, seed=0, drop_last=drop_last)
    whole = list(batches.epoch(1))
    for start in range(len(batches) + 1):
        assert equal(list(batches.epoch(1, start=start)), whole[start:])
    with pytest.raises(ValueError, match="start must be within 0 to"):
        batches.epoch(1, start=len(batches) + 1)


@pytest.mark.parametrize("augment", [False, True])
def test_channels_last(images, augment):
    def epoch(channels_last):
        options = {"normalise": NORMALISE, "augment": augment, "seed": 0, "channels_last": channels_last}
        return list(Batches(images, 8, **options).epoch(0))

    plain, last = epoch(False), epoch(True)
    assert equal(plain, last)
    assert all(x.is_contiguous() for x, _ in plain)
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x, _ in last)


def test_batches_leave_the_data_alone():
    x = torch.rand(6, 1, 4, 4)
    split = Split(x.clone(), torch.arange(6))
    for batch, _ in Batches(split, 6, normalise=((0.5,), (0.1,)), augment=True, shuffle=False, seed=0).epoch(0):
        batch.zero_()
    assert torch.equal(split.x, x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 23, "drop_last": True}, "with drop_last at most 22"),
        ({"normalise": ((0.5,), (0.5,))}, "normalise needs 3 means"),
        ({"seed": -1}, "seed must not be negative"),
    ],
)
def test_bad_options(images, options, message):
    with pytest.raises(ValueError, match=message):
        Batches(images, **({"batch_size": 4, "normalise": None, "seed": 0} | options))


def test_features_are_not_cropped():
    with pytest.raises(ValueError, match="augment and channels_last need images"):
        Batches(Split(torch.rand(4, 3), torch.arange(4)), 2, normalise=None, augment=True, seed=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_devices_agree_to_the_bit(images):
    def epoch(device):
        batches = Batches(images.to(device), 8, normalise=NORMALISE, augment=True, seed=0)
        return [(x.cpu(), y.cpu()) for x, y in batches.epoch(0)]

    assert equal(epoch("cpu"), epoch("cuda"))


class Server(ThreadingHTTPServer):
    """Serves `files`, cuts the first `cuts` answers after `cut` bytes, and notes what it was asked for."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.asked = {}, []
        self.cut, self.cuts, self.ranges = 0, 0, True
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        content = self.server.files.get(self.path)
        start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-")) if self.server.ranges else 0
        self.server.asked.append((self.path, start))
        if content is None:
            return self.send_error(404)
        if start >= len(content):
            return self.send_error(416)
        self.send_response(206 if self.server.ranges else 200)
        if self.server.ranges:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        if self.server.cuts:
            self.server.cuts -= 1
            body = body[: self.server.cut]
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


CONTENT = pixels(400_000).tobytes()


def remote(*urls, content=CONTENT, **options):
    return Remote("sub/file.gz", urls, hashlib.md5(content).hexdigest(), **options)


def test_download(server, tmp_path):
    server.files["/file.gz"] = CONTENT
    download(remote(f"{server.url}/file.gz"), tmp_path)
    assert (tmp_path / "sub/file.gz").read_bytes() == CONTENT
    assert os.listdir(tmp_path / "sub") == ["file.gz"]
    download(remote(f"{server.url}/file.gz"), tmp_path)
    assert len(server.asked) == 1, "a file that is there is not fetched again"


@pytest.mark.parametrize("ranges", [True, False])
def test_a_cut_connection_is_resumed(server, tmp_path, ranges):
    server.files["/file.gz"] = CONTENT
    server.cut, server.cuts, server.ranges = 300_000, 1, ranges
    download(remote(f"{server.url}/file.gz"), tmp_path)
    assert (tmp_path / "sub/file.gz").read_bytes() == CONTENT
    (_, first), (_, second) = server.asked
    assert first == 0
    assert second > 200_000 if ranges else second == 0


def test_the_next_call_resumes(server, tmp_path):
    server.files["/file.gz"] = CONTENT
    server.cut, server.cuts = 150_000, 2
    with pytest.raises(ConnectionError, match=r"could not download file.gz:(.|\n)*the same command again to resume"):
        download(remote(f"{server.url}/file.gz"), tmp_path)
    assert not (tmp_path / "sub/file.gz").exists()
    have = (tmp_path / "sub/file.gz.part").stat().st_size
    download(remote(f"{server.url}/file.gz"), tmp_path)
    assert server.asked[-1][1] == have > 200_000
    assert (tmp_path / "sub/file.gz").read_bytes() == CONTENT


def test_a_part_that_is_whole_already(server, tmp_path):
    server.files["/file.gz"] = CONTENT
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/file.gz.part").write_bytes(CONTENT)
    download(remote(f"{server.url}/file.gz"), tmp_path)
    assert os.listdir(tmp_path / "sub") == ["file.gz"]


def test_a_part_of_something_else_is_thrown_away(server, tmp_path):
    server.files["/file.gz"] = CONTENT
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/file.gz.part").write_bytes(b"something else")
    download(remote(f"{server.url}/file.gz"), tmp_path)
    assert (tmp_path / "sub/file.gz").read_bytes() == CONTENT


def test_a_wrong_checksum(server, tmp_path):
    server.files["/file.gz"] = CONTENT[:-1] + b"x"
    with pytest.raises(ConnectionError, match="hash of downloaded file"):
        download(remote(f"{server.url}/file.gz", content=CONTENT + b"y"), tmp_path)
    assert os.listdir(tmp_path / "sub") == []


def test_dead_mirrors_are_passed_over(server, tmp_path):
    with Server() as dead:
        url = dead.url  # its port is closed again below
    server.files["/wrong"], server.files["/right"] = b"not found, with status 200", CONTENT
    download(remote(f"{url}/x", f"{server.url}/missing", f"{server.url}/wrong", f"{server.url}/right"), tmp_path)
    assert (tmp_path / "sub/file.gz").read_bytes() == CONTENT


def test_load_downloads_and_unpacks(small, server, tmp_path, monkeypatch):
    write_cifar_binary(tmp_path / "there" / "cifar-100-binary", "cifar100")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(tmp_path / "there" / "cifar-100-binary", "cifar-100-binary")
    name = published.SETS["cifar100"].remotes[0].path
    server.files[f"/{name}"] = packed.getvalue()
    here = dataclasses.replace(
        published.SETS["cifar100"].remotes[0],
        urls=(f"{server.url}/{name}",),
        md5=hashlib.md5(packed.getvalue()).hexdigest(),
    )
    monkeypatch.setitem(published.SETS, "cifar100", dataclasses.replace(published.SETS["cifar100"], remotes=(here,)))
    monkeypatch.setenv("THREEPASS_DATA", str(tmp_path / "here"))
    data = load("cifar100", download=True)
    assert same(data.train.x, cifar("cifar100")[0][0])
    assert sorted(os.listdir(tmp_path / "here" / "cifar-100-binary")) == ["test.bin", "train.bin"]
    assert os.listdir(tmp_path / "here") == ["cifar-100-binary"]
    load("cifar100", download=True)
    assert len(server.asked) == 1


def test_every_set_names_its_downloads():
    for name, entry in published.SETS.items():
        folder = Path(entry.layouts[0].folders[0])
        arrive = {path for r in entry.remotes for path in r.unpack or (r.path.removesuffix(".gz"),)}
        assert arrive == {str(folder / file) for file in entry.layouts[0].train + entry.layouts[0].val}, name
        assert all(len(r.urls) >= 2 and len(r.md5) == 32 for r in entry.remotes), name


def real(name, tmp_path):
    if not REAL.is_dir():
        pytest.skip(f"no real data: {REAL} is absent")
    if importlib.util.find_spec("PIL") is None:
        pytest.skip("unpacking the real data needs Pillow")
    subprocess.run([sys.executable, REAL / "unpack.py", tmp_path, name], check=True, stdout=subprocess.DEVNULL)
    return load(name, root=tmp_path)


def check(data, train, val, mean, std):
    assert (len(data.train), len(data.val)) == (train, val)
    assert tuple(round(value, 4) for value in data.mean) == mean
    assert tuple(round(value, 4) for value in data.std) == std


def test_real_mnist(tmp_path):
    data = real("mnist", tmp_path)
    check(data, 60_000, 10_000, (0.1307,), (0.3081,))
    assert data.train.y[:5].tolist() == [5, 0, 4, 1, 9]
    zipped = load("mnist", root=REAL)
    assert torch.equal(zipped.train.x, data.train.x)
    assert torch.equal(zipped.val.y, data.val.y)


@pytest.mark.slow
def test_real_cifar10(tmp_path):
    data = real("cifar10", tmp_path)
    check(data, 50_000, 10_000, (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616))
    assert (tmp_path / "cifar-10-batches-bin/batches.meta.txt").read_text().split() == list(data.classes)
    assert data.train.y.bincount().tolist() == [5000] * 10


@pytest.mark.slow
def test_real_cifar100(tmp_path):
    data = real("cifar100", tmp_path)
    check(data, 50_000, 10_000, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    assert (tmp_path / "cifar-100-binary/fine_label_names.txt").read_text().split() == list(data.classes)
    assert data.train.y.bincount().tolist() == [500] * 100
