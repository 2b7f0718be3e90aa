"""Paired differences over seeds, with Student's t intervals."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from scipy import stats

FEWEST = 3  # pairs that an interval is given for: with two, Student's t says next to nothing


class Difference(NamedTuple):
    """The mean difference of n pairs and its 95 % interval; with fewer than three pairs there is no interval."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def has_interval(self) -> bool:
        """Whether there is an interval of some width; equal differences give none."""
        return self.low is not None and self.high is not None and self.low < self.high

    @property
    def shown(self) -> bool:
        """Whether the interval excludes zero."""
        return self.has_interval and self.low * self.high > 0  # type: ignore[operator]


def t_quantile(df: int) -> float:
    """The 97.5 % quantile of Student's t.

    >>> round(t_quantile(2), 3), round(t_quantile(40), 3)
    (4.303, 2.021)
    """
    return float(stats.t.ppf(0.975, df))


def paired(after: Sequence[float], before: Sequence[float]) -> Difference | None:
    """The mean of after - before over pairs, +- t s / sqrt(n); None without a pair.

    >>> paired([3.0, 5.0, 7.0], [1.0, 1.0, 1.0])
    Difference(mean=4.0, low=-0.968275423501, high=8.968275423501, n=3)
    >>> paired([3.0, 5.0], [1.0, 1.0])
    Difference(mean=3.0, low=None, high=None, n=2)
    """
    differences = [round(a - b, 12) for a, b in zip(after, before, strict=True)]  # 66.1 - 66.1 leaves 7e-15 otherwise
    n = len(differences)
    if n < FEWEST:
        return Difference(fmean(differences), None, None, n) if n else None
    mean, half = fmean(differences), t_quantile(n - 1) * stdev(differences) / math.sqrt(n)
    return Difference(mean, round(mean - half, 12), round(mean + half, 12), n)
