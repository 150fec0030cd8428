r"""Robust fits of sums of power laws to measured losses, from many initial values, with bootstrap intervals.

Notable here:
- a law is a sum of terms given by their logarithms, $\log \hat L = \mathrm{logsumexp}_t\, f_t(\theta)$, so that a term
  like $N^{-\alpha}$ never underflows
- the Huber loss of $\log \hat L - \log L$ is minimized by Levenberg-Marquardt with analytic derivatives; initial values
  and bootstrap resamples are rows of one array and are optimized in parallel
- a resample is a vector of weights on the same runs, so a hundred refits cost little more than a few
- units of the runs cancel: variables are centered logarithms, and initial values are fractions of the loss
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
"""From coefficients [starts, P]: log terms [starts, T, runs] and their derivatives [starts or 1, T, runs, P]."""

_FIRST, _FINAL = 20, 400  # iterations from every initial value, and from the best of them
_NUM_BEST = 24  # initial values that are optimized to convergence
_MAX_ELEMENTS = 4_000_000  # of the largest array


@dataclass(frozen=True)
class Fit:
    """The coefficients with the lowest Huber loss.

    Attributes:
        theta: the coefficients [P].
        samples: the coefficients of each resample [resamples, P].
        objective: mean Huber loss over the runs.
        agreeing: number of initial values that converged to this loss, within 0.1 %.
        finished: number of initial values that were optimized to convergence.
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
    r"""Minimize $\sum_i \mathrm{Huber}_\delta(\log \hat L_i - \log L_i)$ from all initial values, then for resamples.

    All initial values are optimized for some iterations, and the best of them to convergence. Resamples start at the
    fitted coefficients.

    Args:
        terms: the law at the runs.
        loss: measured loss of each run, above 0.
        starts: initial coefficients [starts, P].
        delta: difference of log losses beyond which the Huber loss is linear.
        num_resamples: bootstrap resamples of the runs; 0 for none.
        seed: of the resamples.
        distinct: variables, each with the number of distinct values that a resample needs to determine the law.

    Raises:
        InvalidArgument: one resample, from which no interval can be computed.

    Source: Hoffmann et al., arXiv:2203.15556, section D.2 (loss and initial values); Levenberg-Marquardt with Huber
    weights finds the same minimum as L-BFGS in a few dozen iterations.
    """
    if num_resamples == 1:
        raise InvalidArgument("num_resamples must be 0, for no intervals, or at least 2, got 1")
    target, one = np.log(loss), np.ones((1, len(loss)))
    first = _in_parts(terms, target, starts, one, delta, _FIRST)
    best = np.argsort(_values(terms, target, first, one, delta), kind="stable")[:_NUM_BEST]
    final = _in_parts(terms, target, first[best], one, delta, _FINAL)
    values = _values(terms, target, final, one, delta)
    theta, minimum = final[values.argmin()], float(values.min())
    agreeing = int((values <= minimum * 1.001 + 1e-15).sum())
    samples = np.empty((0, len(theta)))
    if num_resamples:
        weights = _resamples(len(loss), num_resamples, seed, distinct)
        samples = _in_parts(terms, target, np.repeat(theta[None], num_resamples, 0), weights, delta, _FINAL)
    return Fit(theta, samples, minimum / len(loss), agreeing, len(values))


def _resamples(runs: int, count: int, seed: int, distinct: Sequence[tuple[Array, int]]) -> Array:
    """Counts of each run in each bootstrap resample [count, runs]; indeterminate ones are redrawn."""
    generator = np.random.default_rng(seed)
    weights = np.empty((count, runs))
    for row in weights:
        for _ in range(1000):
            row[:] = np.bincount(generator.integers(runs, size=runs), minlength=runs)
            if all(len(np.unique(values[row > 0])) >= required for values, required in distinct):
                break
    return weights


def _in_parts(terms: Terms, target: Array, theta: Array, weights: Array, delta: float, steps: int) -> Array:
    """Optimize all rows of theta, as many at a time as fit into memory."""
    size = max(1, _MAX_ELEMENTS // (len(target) * theta.shape[1] * 4))
    parts = []
    for start in range(0, len(theta), size):
        part_weights = weights[start : start + size] if len(weights) > 1 else weights
        parts.append(_descend(terms, target, theta[start : start + size], part_weights, delta, steps))
    return np.concatenate(parts)


def _values(terms: Terms, target: Array, theta: Array, weights: Array, delta: float) -> Array:
    return np.array([_evaluate(terms, target, row[None], weights, delta)[0][0] for row in theta])


def _evaluate(terms: Terms, target: Array, theta: Array, weights: Array, delta: float) -> tuple[Array, Array, Array]:
    """Huber losses [rows], residuals [rows, runs] and their Jacobian [rows, runs, P]; losses are inf if not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        logs, derivatives = terms(theta)
        high = logs.max(1, keepdims=True)
        shares = np.exp(logs - high)  # softmax over the terms, [rows, T, runs]
        total = shares.sum(1)
        residual = high[:, 0] + np.log(total) - target
        shares /= total[:, None]
        jacobian = sum(shares[:, t, :, None] * derivatives[:, t] for t in range(shares.shape[1]))
        size = np.abs(residual)
        huber = np.where(size <= delta, 0.5 * residual**2, delta * (size - 0.5 * delta))
        value = (weights * huber).sum(1)
    return np.where(np.isfinite(value), value, np.inf), residual, np.asarray(jacobian)


def _descend(terms: Terms, target: Array, theta: Array, weights: Array, delta: float, steps: int) -> Array:
    """Levenberg-Marquardt with Huber weights; a step that does not lower the loss is rejected, with more damping."""
    theta = theta.copy()
    damping = np.full(len(theta), 1e-2)
    value, residual, jacobian = _evaluate(terms, target, theta, weights, delta)
    diagonal_index = np.arange(theta.shape[1])
    stalled = np.zeros(len(theta), dtype=int)  # consecutive iterations without progress, by row
    for _ in range(steps):
        weight = weights * np.minimum(1.0, delta / np.maximum(np.abs(residual), 1e-300))
        weighted = jacobian * weight[..., None]
        with np.errstate(all="ignore"):
            hessian = weighted.transpose(0, 2, 1) @ jacobian  # Gauss-Newton, [rows, P, P]
            gradient = (weighted * residual[..., None]).sum(1)
            ok = np.isfinite(hessian).all((1, 2)) & np.isfinite(gradient).all(1)
        hessian[~ok], gradient[~ok] = np.eye(len(diagonal_index)), 0.0
        diagonal = hessian[:, diagonal_index, diagonal_index]
        floor = 1e-12 * diagonal.max(1, keepdims=True) + 1e-300
        hessian[:, diagonal_index, diagonal_index] += damping[:, None] * diagonal + floor
        trial = theta - np.linalg.solve(hessian, gradient[..., None])[..., 0]
        new, new_residual, new_jacobian = _evaluate(terms, target, trial, weights, delta)
        better = new < value
        stalled = np.where(better & (value - new > 1e-10 * value), 0, stalled + 1)
        theta[better], value = trial[better], np.where(better, new, value)
        residual[better], jacobian[better] = new_residual[better], new_jacobian[better]
        damping = np.clip(np.where(better, damping / 4, damping * 3), 1e-12, 1e12)
        if (stalled >= 12).all():
            break
    return theta


@dataclass(frozen=True)
class Goodness:
    """Goodness of fit of predicted losses.

    Attributes:
        mse: mean squared error.
        r2: coefficient of determination; NaN where all measured losses are equal.
        mae: mean of the relative absolute error (0.01 is 1 %).
    """

    mse: float
    r2: float
    mae: float


def goodness(predicted: ArrayLike, measured: ArrayLike) -> Goodness:
    """Compare predicted with measured losses.

    >>> goodness([1.0, 2.1], [1.0, 2.0]).mae
    0.025...
    """
    y, y_true = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    squares = (y - y_true) ** 2
    variance = ((y_true - y_true.mean()) ** 2).sum()
    r2 = 1 - float(squares.sum() / variance) if variance > 0 else math.nan
    return Goodness(float(squares.mean()), r2, float((np.abs(y - y_true) / np.abs(y_true)).mean()))


def columns(**variables: ArrayLike) -> dict[str, Array]:
    """The variables of the runs as arrays of equal length.

    Raises:
        InvalidArgument: lengths differ, or a value is not finite.
    """
    arrays = {name: np.atleast_1d(np.asarray(values, dtype=float)) for name, values in variables.items()}
    lengths = {name: len(values) for name, values in arrays.items()}
    if any(values.ndim != 1 for values in arrays.values()) or len(set(lengths.values())) > 1:
        raise InvalidArgument(f"every run needs each variable once; got {lengths} values")
    for name, values in arrays.items():
        if not np.isfinite(values).all():
            run = int(np.flatnonzero(~np.isfinite(values))[0])
            raise InvalidArgument(f"{name} of run {run} is {values[run]}; leave runs that failed out")
    return arrays


def check_positive(**variables: Array) -> None:
    """Check that all values are positive, so that they have logarithms.

    Raises:
        InvalidArgument: a value of 0 or below; the message names the first.
    """
    for name, values in variables.items():
        if (values <= 0).any():
            run = int(np.flatnonzero(values <= 0)[0])
            raise InvalidArgument(f"{name} of run {run} is {values[run]:g}; it must be above 0")


def check_runs(runs: Mapping[str, Array], min_runs: int, **distinct: int) -> None:
    """Check that there are enough runs to determine a law.

    Args:
        runs: the variables.
        min_runs: required number of runs.
        distinct: required number of distinct values, by variable.

    Raises:
        InvalidArgument: there are fewer.
    """
    count = len(next(iter(runs.values())))
    if count < min_runs:
        raise InvalidArgument(f"the law needs at least {min_runs} runs, got {count}")
    for name, required in distinct.items():
        values = np.unique(runs[name])
        if len(values) < required:
            listed = ", ".join(f"{value:g}" for value in values)
            raise InvalidArgument(f"the law needs at least {required} different values of {name}, got {listed}")


def warn_if_uncertain(fitted: Fit, exponents: Mapping[str, tuple[float, Array]]) -> None:
    """Warn if a fit is uncertain.

    Warns:
        Extrapolation: the standard deviation of an exponent over the resamples exceeds 30 % of its value; or few
            initial values converged to the same minimum, so that there may be a lower one.
    """
    for name, (value, samples) in exponents.items():
        deviation = float(np.std(samples, ddof=1)) if len(samples) > 1 else 0.0
        if deviation > 0.3 * abs(value):
            warnings.warn(
                f"{name} is uncertain: {value:.3g} with a standard deviation of {deviation:.2g} over the resamples; "
                "add runs over a wider range",
                Extrapolation,
                stacklevel=3,
            )
    if fitted.agreeing < min(3, fitted.finished):
        warnings.warn(
            f"only {fitted.agreeing} of the {fitted.finished} best initial values converged to the same minimum; the "
            "runs may not determine the law",
            Extrapolation,
            stacklevel=3,
        )


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arrays to lists, for JSON."""
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}
