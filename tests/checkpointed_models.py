"""Models whose blocks run under activation checkpointing, and the kinds of blocks."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    """Blocks, a function f(block, x) that runs each, and a head; with or without checkpoints around f."""

    def __init__(self, f, *blocks, checkpointed=True, width=6):
        super().__init__()
        self.f, self.blocks, self.head = f, nn.ModuleList(blocks), nn.Linear(width, 4)
        self.checkpointed = checkpointed

    def run(self, function, *args, **kwargs):
        if self.checkpointed:
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        return function(*args, **kwargs)

    def forward(self, x):
        for block in self.blocks:
            x = self.f(self, block, x)
        return self.head(x)


class Scaled(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x, other=None, *, scale=1.0):
        return torch.tanh(self.layer(x)) * scale + (0 if other is None else other)


def norm_last():
    return nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.LayerNorm(6))


def view_last():
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 3), nn.Tanh(), nn.Flatten())


class Inner(nn.Sequential):
    def forward(self, x):
        return self[1](checkpoint(self[0], x, use_reentrant=False))


def plainly(model, block, x):
    return model.run(block, x)


ALONE = {  # blocks that are recorded as one operation
    "norm last": (plainly, norm_last),
    "view last": (plainly, view_last),
    "dropout": (plainly, lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))),
    "two inputs and a keyword": (lambda model, block, x: model.run(block, x, torch.sin(x), scale=0.5), Scaled),
    "residual, written to later": (lambda model, block, x: x.clone().add_(model.run(block, x)), norm_last),
    "a frozen argument": (lambda model, block, x: model.run(block, x, torch.ones(6).to(x)), Scaled),
    "a checkpoint inside": (plainly, lambda: Inner(norm_last(), nn.Linear(6, 6))),
    "a weight as an argument": (lambda model, block, x: model.run(F.linear, x, block.weight), lambda: nn.Linear(6, 6)),
}


def several_outputs(model, block, x):
    a, b = model.run(lambda x: (block(x), x.sin() * block.layer.bias), x)
    return a + b


class Leaking(Scaled):
    def forward(self, x):
        self.kept = self.layer(x)
        return torch.tanh(self.kept)


def in_place():
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))


APART = {  # blocks whose operations stay on the tape
    "several outputs": (several_outputs, Scaled),
    "a result that is not returned": (lambda model, block, x: model.run(block, x) + block.kept, Leaking),
    "an activation in a closure": (lambda model, block, x: model.run(lambda z: block(z) * x, torch.sin(x)), Scaled),
    "in place": (plainly, in_place),
    "running statistics": (plainly, lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))),
    "weight norm": (plainly, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))),
}


def batch():
    torch.manual_seed(2)
    return torch.randn(5, 6).double(), torch.randint(4, (5,))
