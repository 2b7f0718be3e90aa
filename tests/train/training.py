"""Data, nets and comparisons that tests of training share."""

import torch
from torch import nn

from threepass.train.data import DataSet, Split


def data(n=40, classes=3) -> DataSet:
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n + 20, 1, 6, 6), generator=g, dtype=torch.uint8)
    y = x.float().mean((1, 2, 3)).argsort().argsort() * classes // (n + 20)
    parts = [Split(x[:n], y[:n]), Split(x[n:], y[n:])]
    return DataSet(*parts, mean=(0.5,), std=(0.3,), classes=tuple(map(str, range(classes))), name="made")


def net() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(144, 3))


def simple() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 3))


def without_times(metrics: dict) -> dict:
    return {k: v for k, v in metrics.items() if not k.endswith("seconds")}


def assert_same(got, expected):
    for z, other in zip(got.model.state_dict().values(), expected.model.state_dict().values(), strict=True):
        assert torch.equal(z, other)
    assert [without_times(m) for m in got.history] == [without_times(m) for m in expected.history]
