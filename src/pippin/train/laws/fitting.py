r"""Sums of power laws fitted to measured losses: robustly, from many starts at once, with the spread of what is found.

Notable here:
- a law is a sum of terms given by their logarithms, $\log \hat L = \mathrm{logsumexp}_t\, f_t(\theta)$, so that a term
  like $N^{-\alpha}$ never underflows
- Huber's loss on $\log \hat L - \log L$ is minimized by Levenberg-Marquardt with the derivative in closed form; starts,
  and resamples of the bootstrap, are rows of one array, and go down side by side
- a resample is a vector of weights on the same runs, so a hundred refits cost little more than a few
- what the runs are measured in cancels: variables are logarithms around their means, and starts are shares of the loss
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pippin.core.checks import NonNegativeInt, PositiveFloat, checked
from pippin.core.errors import Extrapolation, InvalidArgument

Array = NDArray[np.float64]
Terms = Callable[[Array], tuple[Array, Array]]
"""From coefficients [starts, P]: logarithms of terms [starts, T, runs], and their slopes [starts or 1, T, runs, P]."""

_FIRST, _FINAL = 20, 400  # steps from every start, and from the best of them
_KEPT = 24  # starts that go down to the end
_MAX_ELEMENTS = 4_000_000  # of the largest array


@dataclass(frozen=True)
class Fit:
    """Coefficients of the smallest loss.

    Attributes:
        theta: the coefficients [P].
        samples: those of each resample [resamples, P].
        objective: mean Huber loss over the runs.
        agreeing: how many of the starts that went to the end came to this loss, within a thousandth.
        finished: how many went to the end.
    """

    theta: Array
    samples: Array
    objective: float
    agreeing: int
    finished: int


@checked
def fit(
    terms: Terms,
    loss: Array,
    starts: Array,
    *,
    delta: PositiveFloat = 1e-3,
    num_resamples: NonNegativeInt = 100,
    seed: int = 0,
    distinct: Sequence[tuple[Array, int]] = (),
) -> Fit:
    r"""Minimize $\sum_i \mathrm{Huber}_\delta(\log \hat L_i - \log L_i)$ from all starts, then for resampled runs.

    Every start makes some steps; the best of them go on until nothing changes. Resamples begin at what was found.

    Args:
        terms: the law at the runs.
        loss: measured, one for each run; above 0.
        starts: coefficients to begin with [starts, P].
        delta: differences of logarithms beyond which the loss grows linearly.
        num_resamples: resamples of the runs with replacement; 0 for none.
        seed: of the resamples.
        distinct: variables, and how many of their values a resample has to hold to determine the law.

    Raises:
        InvalidArgument: one resample, which has no interval.

    Source: Hoffmann et al., arXiv:2203.15556, section D.2 (loss and starts); Levenberg-Marquardt with Huber's weights
    finds the minimum that L-BFGS finds, in a few dozen steps.
    """
    if num_resamples == 1:
        raise InvalidArgument("num_resamples must be 0, for no intervals, or at least 2, got 1")
    wanted, one = np.log(loss), np.ones((1, len(loss)))
    begun = _in_parts(terms, wanted, starts, one, delta, _FIRST)
    best = np.argsort(_values(terms, wanted, begun, one, delta), kind="stable")[:_KEPT]
    ended = _in_parts(terms, wanted, begun[best], one, delta, _FINAL)
    values = _values(terms, wanted, ended, one, delta)
    theta, least = ended[values.argmin()], float(values.min())
    agreeing = int((values <= least * 1.001 + 1e-15).sum())
    samples = np.empty((0, len(theta)))
    if num_resamples:
        weights = _resamples(len(loss), num_resamples, seed, distinct)
        samples = _in_parts(terms, wanted, np.repeat(theta[None], num_resamples, 0), weights, delta, _FINAL)
    return Fit(theta, samples, least / len(loss), agreeing, len(values))


def _resamples(runs: int, count: int, seed: int, distinct: Sequence[tuple[Array, int]]) -> Array:
    """How often each run occurs in each bootstrap resample; resamples that cannot determine the law are repeated."""
    generator = np.random.default_rng(seed)
    weights = np.empty((count, runs))
    for row in weights:
        for _ in range(1000):
            row[:] = np.bincount(generator.integers(runs, size=runs), minlength=runs)
            if all(len(np.unique(values[row > 0])) >= least for values, least in distinct):
                break
    return weights


def _in_parts(terms: Terms, wanted: Array, theta: Array, weights: Array, delta: float, steps: int) -> Array:
    """Go down from all rows of theta, as many at a time as fit into memory."""
    size = max(1, _MAX_ELEMENTS // (len(wanted) * theta.shape[1] * 4))
    parts = []
    for start in range(0, len(theta), size):
        here = weights[start : start + size] if len(weights) > 1 else weights
        parts.append(_descend(terms, wanted, theta[start : start + size], here, delta, steps))
    return np.concatenate(parts)


def _values(terms: Terms, wanted: Array, theta: Array, weights: Array, delta: float) -> Array:
    return np.array([_evaluate(terms, wanted, row[None], weights, delta)[0][0] for row in theta])


def _evaluate(terms: Terms, wanted: Array, theta: Array, weights: Array, delta: float) -> tuple[Array, Array, Array]:
    """Huber losses [rows], differences [rows, runs] and their slopes [rows, runs, P]; infinite where not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        logs, slopes = terms(theta)
        high = logs.max(1, keepdims=True)
        shares = np.exp(logs - high)
        total = shares.sum(1)
        off = high[:, 0] + np.log(total) - wanted
        shares /= total[:, None]
        slope = sum(shares[:, t, :, None] * slopes[:, t] for t in range(shares.shape[1]))
        size = np.abs(off)
        huber = np.where(size <= delta, 0.5 * off**2, delta * (size - 0.5 * delta))
        value = (weights * huber).sum(1)
    return np.where(np.isfinite(value), value, np.inf), off, np.asarray(slope)


def _descend(terms: Terms, wanted: Array, theta: Array, weights: Array, delta: float, steps: int) -> Array:
    """Damped Gauss-Newton steps with Huber's weights; a step that does not help is not made, and damps the next."""
    theta = theta.copy()
    damping = np.full(len(theta), 1e-2)
    value, off, slope = _evaluate(terms, wanted, theta, weights, delta)
    diagonal_index = np.arange(theta.shape[1])
    still = np.zeros(len(theta), dtype=int)
    for _ in range(steps):
        weight = weights * np.minimum(1.0, delta / np.maximum(np.abs(off), 1e-300))
        weighted = slope * weight[..., None]
        with np.errstate(all="ignore"):
            curve = weighted.transpose(0, 2, 1) @ slope
            down = (weighted * off[..., None]).sum(1)
            ok = np.isfinite(curve).all((1, 2)) & np.isfinite(down).all(1)
        curve[~ok], down[~ok] = np.eye(len(diagonal_index)), 0.0
        diagonal = curve[:, diagonal_index, diagonal_index]
        floor = 1e-12 * diagonal.max(1, keepdims=True) + 1e-300
        curve[:, diagonal_index, diagonal_index] += damping[:, None] * diagonal + floor
        trial = theta - np.linalg.solve(curve, down[..., None])[..., 0]
        new, new_off, new_slope = _evaluate(terms, wanted, trial, weights, delta)
        better = new < value
        still = np.where(better & (value - new > 1e-10 * value), 0, still + 1)
        theta[better], value = trial[better], np.where(better, new, value)
        off[better], slope[better] = new_off[better], new_slope[better]
        damping = np.clip(np.where(better, damping / 4, damping * 3), 1e-12, 1e12)
        if (still >= 12).all():
            break
    return theta


@dataclass(frozen=True)
class Goodness:
    """How well predictions fit measured losses.

    Attributes:
        mse: mean squared error.
        r2: share of the variance that is explained; NaN for a single run.
        mae: mean of the absolute error over the loss, as a share (0.01 is 1 %).
    """

    mse: float
    r2: float
    mae: float


def goodness(predicted: ArrayLike, measured: ArrayLike) -> Goodness:
    """Errors of predictions.

    >>> goodness([1.0, 2.1], [1.0, 2.0]).mae
    0.025...
    """
    found, truth = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    squares = (found - truth) ** 2
    spread = ((truth - truth.mean()) ** 2).sum()
    r2 = 1 - float(squares.sum() / spread) if spread > 0 else math.nan
    return Goodness(float(squares.mean()), r2, float((np.abs(found - truth) / np.abs(truth)).mean()))


def columns(**given: ArrayLike) -> dict[str, Array]:
    """The variables of the runs as arrays of one length.

    Raises:
        InvalidArgument: lengths that differ, or a number that is not finite.
    """
    found = {name: np.atleast_1d(np.asarray(values, dtype=float)) for name, values in given.items()}
    lengths = {name: len(values) for name, values in found.items()}
    if any(values.ndim != 1 for values in found.values()) or len(set(lengths.values())) > 1:
        raise InvalidArgument(f"every run needs each variable once; got {lengths} values")
    for name, values in found.items():
        if not np.isfinite(values).all():
            run = int(np.flatnonzero(~np.isfinite(values))[0])
            raise InvalidArgument(f"{name} of run {run} is {values[run]}; leave runs that failed out")
    return found


def check_positive(**given: Array) -> None:
    """Refuse numbers that have no logarithm.

    Raises:
        InvalidArgument: a number of 0 or below; the first is named.
    """
    for name, values in given.items():
        if (values <= 0).any():
            run = int(np.flatnonzero(values <= 0)[0])
            raise InvalidArgument(f"{name} of run {run} is {values[run]:g}; it must be above 0")


def check_runs(runs: Mapping[str, Array], least: int, **distinct: int) -> None:
    """Refuse runs that cannot determine a law.

    Args:
        runs: the variables.
        least: how many runs it takes.
        distinct: how many different values of a variable.

    Raises:
        InvalidArgument: there are fewer.
    """
    count = len(next(iter(runs.values())))
    if count < least:
        raise InvalidArgument(f"the law needs at least {least} runs, got {count}")
    for name, wanted in distinct.items():
        values = np.unique(runs[name])
        if len(values) < wanted:
            some = ", ".join(f"{value:g}" for value in values)
            raise InvalidArgument(f"the law needs at least {wanted} different values of {name}, got {some}")


def warn_if_uncertain(found: Fit, exponents: Mapping[str, tuple[float, Array]]) -> None:
    """Say so where a fit is uncertain.

    Warns:
        Extrapolation: the spread of an exponent over the resamples exceeds 30 % of it; or few starts came to the same
            minimum, so that there may be a lower one.
    """
    for name, (value, samples) in exponents.items():
        spread = float(np.std(samples, ddof=1)) if len(samples) > 1 else 0.0
        if spread > 0.3 * abs(value):
            warnings.warn(
                f"{name} is uncertain: {value:.3g} with a standard deviation of {spread:.2g} over the resamples; more "
                "runs, over a wider range, would settle it",
                Extrapolation,
                stacklevel=3,
            )
    if found.agreeing < min(3, found.finished):
        warnings.warn(
            f"only {found.agreeing} of the {found.finished} best starts came to the same minimum; the runs may not "
            "determine the law",
            Extrapolation,
            stacklevel=3,
        )


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values with lists in place of arrays, for JSON."""
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}
