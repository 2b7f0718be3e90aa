"""The paper's numbers: W. Xiong, R. Yang, "Reverse Back Propagation to Make Full Use of Derivative", arXiv 2202.06316.

Figures of the paper are drawings without a table; of them only what the text says is used.
"""

from typing import NamedTuple

CITATION = "Xiong and Yang, Reverse Back Propagation to Make Full Use of Derivative, arXiv 2202.06316"


class Accuracy(NamedTuple):
    """Best training and best validation accuracy over the epochs, in percent."""

    train: float
    val: float


TABLE2: dict[tuple[str, str, str], Accuracy] = {  # (net, data, row): section 5.1, the table of initialisations
    ("plain20", "cifar10", "xavier"): Accuracy(95.66, 85.83),
    ("plain20", "cifar10", "kaiming"): Accuracy(95.31, 86.10),
    ("plain20", "cifar10", "alpha 0.1"): Accuracy(92.48, 87.29),
    ("plain20", "cifar100", "xavier"): Accuracy(62.62, 55.16),
    ("plain20", "cifar100", "kaiming"): Accuracy(62.82, 55.17),
    ("plain20", "cifar100", "alpha 0.1"): Accuracy(61.98, 57.17),
    ("plain32", "cifar10", "xavier"): Accuracy(90.31, 82.87),
    ("plain32", "cifar10", "kaiming"): Accuracy(90.85, 83.14),
    ("plain32", "cifar10", "alpha 0.1"): Accuracy(91.68, 85.88),
    ("plain32", "cifar100", "xavier"): Accuracy(52.58, 46.79),
    ("plain32", "cifar100", "kaiming"): Accuracy(50.59, 45.26),
    ("plain32", "cifar100", "alpha 0.1"): Accuracy(57.92, 54.59),
}
COST = 2.0  # "conduct the third pass may double the training time", section 6
