"""Confidence intervals: of a share, of a mean, of a paired difference, and by the bootstrap.

Notable here:
- Wilson's interval of a share has the right coverage at 0 and 1, where the Wald interval has no width
- intervals of means over few seeds or items use Student's t distribution, whose quantile is computed numerically
- the bootstrap resamples whole cases, so that rows of several lists stay together
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pippin.core.checks import NonNegativeInt, OpenFraction, PositiveInt, checked
from pippin.core.errors import InvalidArgument, InvalidInput

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class IntervalEstimate:
    """A value with its confidence interval.

    Attributes:
        value: the estimate.
        low: lower end of the interval.
        high: upper end.
        n: number of cases.
    """

    value: float
    low: float
    high: float
    n: int


@checked
def wilson_interval(successes: NonNegativeInt, n: PositiveInt, *, level: OpenFraction = 0.95) -> IntervalEstimate:
    """A share of cases with Wilson's score interval.

    Args:
        successes: number of successes.
        n: number of cases.
        level: coverage of the interval.

    Raises:
        InvalidArgument: no cases, or more successes than cases.

    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927), 209-212.

    >>> share = wilson_interval(0, 200)
    >>> share.value, share.low, round(share.high, 4)
    (0.0, 0.0, 0.0188)
    """
    if successes > n:
        raise InvalidArgument(f"successes must be at most n, got {successes} of {n}")
    z = NormalDist().inv_cdf((1 + level) / 2)
    p, z2 = successes / n, z * z
    center = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return IntervalEstimate(p, 0.0 if successes == 0 else center - half, 1.0 if successes == n else center + half, n)


@checked
def mean_interval(values: npt.ArrayLike, *, level: OpenFraction = 0.95) -> IntervalEstimate:
    """The mean with Student's t interval; a single value is its own interval.

    Args:
        values: independent values [n], such as one for each seed.
        level: coverage of the interval, for normally distributed values.

    Raises:
        InvalidInput: no values.

    >>> found = mean_interval([1.0, 2.0, 3.0])
    >>> round(found.low, 3), found.value, round(found.high, 3)
    (-0.484, 2.0, 4.484)
    """
    x = _values(values)
    mean = float(x.mean())
    if len(x) == 1:
        return IntervalEstimate(mean, mean, mean, 1)
    half = _student_quantile((1 + level) / 2, len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return IntervalEstimate(mean, mean - half, mean + half, len(x))


def paired_difference(first: npt.ArrayLike, second: npt.ArrayLike, *, level: float = 0.95) -> IntervalEstimate:
    """The mean of ``first - second``, pair by pair, with Student's t interval.

    Args:
        first: a value for each seed or item [n].
        second: the value of the other method for the same seed or item [n].
        level: coverage of the interval.

    Raises:
        InvalidInput: no values, or lists of different lengths.

    >>> paired_difference([3.0, 5.0], [1.0, 3.0])
    IntervalEstimate(value=2.0, low=2.0, high=2.0, n=2)
    """
    a, b = _values(first), _values(second)
    if len(a) != len(b):
        raise InvalidInput(f"first has {len(a)} values and second {len(b)}; a paired difference needs pairs")
    return mean_interval(a - b, level=level)


@checked
def bootstrap_interval(
    *data: npt.ArrayLike,
    statistic: Callable[..., Any] = np.mean,
    num_resamples: PositiveInt = 2000,
    level: OpenFraction = 0.95,
    seed: int = 0,
) -> IntervalEstimate:
    """A statistic with its percentile bootstrap interval.

    Args:
        data: one or more lists with one row for each case [n, ...]; rows of the same case are resampled together.
        statistic: maps the lists to a number; called once on the data and once for each resample.
        num_resamples: number of resamples of the cases, with replacement.
        level: coverage of the interval.
        seed: seed of the resamples.

    Raises:
        InvalidInput: no cases, or lists of different lengths.

    Source: Efron and Tibshirani, "An introduction to the bootstrap", 1993, chapter 13.

    >>> found = bootstrap_interval([1.0, 2.0, 3.0, 4.0], num_resamples=500)
    >>> found.value, found.low < 2 < 3 < found.high
    (2.5, True)
    """
    lists = [np.asarray(part) for part in data]
    lengths = {len(part) if part.ndim else 0 for part in lists}
    if len(lengths) != 1 or lengths == {0}:
        raise InvalidInput(f"data must be lists of the same length, at least 1, got {sorted(lengths)}")
    n = len(lists[0])
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(num_resamples):
        rows = generator.integers(n, size=n)
        found.append(float(statistic(*(part[rows] for part in lists))))
    low, high = percentile_interval(found, level=level)
    return IntervalEstimate(float(statistic(*lists)), float(low), float(high), n)


@checked
def percentile_interval(
    samples: npt.ArrayLike,
    *,
    level: OpenFraction = 0.95,
    axis: int = 0,
    method: Literal["linear", "nearest"] = "linear",
    skip_nan: bool = False,
) -> Floats:
    """The central interval of samples along an axis, with its two ends in the first dimension [2, ...].

    Args:
        samples: values of a statistic, one for each resample.
        level: share of the samples inside.
        axis: axis of the samples.
        method: interpolate between samples, or take the nearest one (necessary for infinite values).
        skip_nan: whether to ignore NaN; otherwise it makes both ends NaN.

    Returns:
        The ends of the interval; NaN if there are no samples.
    """
    values = np.asarray(samples, dtype=np.float64)
    if not values.shape[axis]:
        return np.full((2, *np.delete(values.shape, axis)), math.nan)
    ends = [(1 - level) / 2, (1 + level) / 2]
    quantile = np.nanquantile if skip_nan else np.quantile
    return np.asarray(quantile(values, ends, axis=axis, method=method))


def _values(values: npt.ArrayLike) -> Floats:
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or not len(found):
        raise InvalidInput(f"values must be a list of numbers, at least one, got the shape {found.shape}")
    return found


def _student_quantile(p: float, freedom: int) -> float:
    """Quantile above the median of Student's t distribution, by bisection of its distribution function."""
    low, high = 0.0, 1.0
    while _student_cdf(high, freedom) < p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, freedom) < p else (low, middle)
    return high


def _student_cdf(t: float, freedom: int) -> float:
    """Distribution function of Student's t, a finite sum for whole degrees of freedom.

    Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.
    """
    if freedom > 1000:  # the normal distribution with the first correction is exact to 1e-7 here
        return NormalDist().cdf(t * (1 - 1 / (4 * freedom)) / math.sqrt(1 + t * t / (2 * freedom)))
    angle = math.atan2(t, math.sqrt(freedom))
    cosine2 = math.cos(angle) ** 2
    odd = freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine2 * k / (k + 1)
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return (1 + inside) / 2
