"""Data for training: whole sets as one tensor on the training device, and batches of them.

data = load("cifar10", root="~/data", device="cuda")
batches = Batches(data.train, 128, normalise=(data.mean, data.std), augment=True, shuffle=True, seed=0)
for x, y in batches.epoch(0):
    ...
"""

from .batches import Batches
from .dataset import DataSet, Split, from_dataset
from .formats import DataError
from .inputs import Inputs
from .loaders import LoaderBatches
from .sources import NAMES, load

__all__ = ["NAMES", "Batches", "DataError", "DataSet", "Inputs", "LoaderBatches", "Split", "from_dataset", "load"]
