"""Mean, spread and paired t intervals over seeds."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom
T = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip


class Difference(NamedTuple):
    """The mean difference of n pairs and its 95 % interval; with one pair there is no interval."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def shown(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def t_quantile(df: int) -> float:
    """The 97.5 % quantile of Student's t; beyond 30 degrees of freedom by Cornish and Fisher's series.

    >>> round(t_quantile(2), 3), round(t_quantile(40), 3)
    (4.303, 2.021)
    """
    z = 1.959964
    return T[df - 1] if df <= len(T) else z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)


def paired(after: Sequence[float], before: Sequence[float]) -> Difference | None:
    """The mean of after - before over pairs, +- t s / sqrt(n); None without a pair.

    >>> paired([3.0, 5.0], [1.0, 1.0])
    Difference(mean=3.0, low=-9.7062, high=15.7062, n=2)
    """
    differences = [a - b for a, b in zip(after, before, strict=True)]
    n = len(differences)
    if n < 2:
        return Difference(differences[0], None, None, 1) if n else None
    mean, half = fmean(differences), t_quantile(n - 1) * stdev(differences) / math.sqrt(n)
    return Difference(mean, round(mean - half, 12), round(mean + half, 12), n)
