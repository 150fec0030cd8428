"""Correlations between the errors of judges, and the effective number of independent votes that they imply.

Notable here:
- the sums behind a correlation are linear in the item weights, so all bootstrap samples are one matrix product
- the permutation test shuffles the errors where that is affordable; with millions of items it samples each pair's
  count of common errors instead, which has the same mean and variance
- the errors of judges who always or never err have no correlation: these judges are named in a warning and left out,
  never counted as independent
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from pippin.core.checks import checked
from pippin.core.errors import InferenceAtRisk, InvalidInput
from pippin.evaluate.judges.votes import Codes, Floats, as_array, listed

_ENTRIES = 8_000_000


def phi_matrix(errors: Any) -> Floats:
    """The matrix of phi coefficients (correlations of binary variables) between the errors of judges.

    Args:
        errors: [n, k], 1 where a judge erred and 0 where not; NaN where there is no vote, and then each pair is
            compared on the items that both voted on.

    Returns:
        [k, k], with NaN in the rows and columns of judges who always or never err.

    Raises:
        InvalidInput: another shape, or values that are neither 0, 1 nor NaN.
    """
    table = _checked(errors)
    found: Floats = phi_from_sums(weighted_sums(table, np.ones((1, len(table)))))[0]
    return found


@checked
def effective_votes(errors: Any, method: Literal["kish", "eigen"] = "kish") -> float:
    r"""The effective number of independent votes of a panel whose errors are correlated.

    Kish's formula is $k / (1 + (k-1) \bar\varphi)$ with $\bar\varphi$ the mean correlation of errors over all pairs.
    The eigenvalue variant is $k / \lambda_{max}$ of the correlation matrix, which does not assume that all pairs are
    equally correlated and is biased low near independence.

    Args:
        errors: [n, k], 1 where a judge erred, 0 where not, NaN where there is no vote.
        method: "kish" or "eigen".

    Raises:
        InvalidInput: fewer than two judges who err sometimes and not always, or errors so negatively correlated that
            Kish's formula gives no finite number.

    Warns:
        InferenceAtRisk: judges who always or never err are left out.

    >>> effective_votes([[0, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 1]])
    1.0
    """
    phi = varied_part(phi_matrix(errors), None)
    if method == "eigen":
        return float(len(phi) / np.linalg.eigvalsh(phi)[-1])
    votes = float(kish(len(phi), mean_phi(phi)))
    if math.isinf(votes):
        raise InvalidInput(
            f"the mean correlation of errors is {mean_phi(phi):.3f}: these {len(phi)} judges cancel each other's "
            "errors, and the number of effective votes is infinite. Give more items"
        )
    return votes


def kish(judges: Any, phi: Any) -> Any:
    """``judges / (1 + (judges - 1) phi)``, infinite where the errors cancel; works on arrays.

    >>> round(float(kish(9, 0.391)), 3), round(float(kish(5, 0.391)), 3)
    (2.18, 1.95)
    """
    below = 1 + (np.asarray(judges) - 1) * np.asarray(phi)
    return np.where(below > 1e-9, np.asarray(judges) / np.where(below > 1e-9, below, 1.0), np.inf)


def mean_phi(phi: Floats) -> float:
    """The mean of the off-diagonal elements of a correlation matrix [k, k]."""
    k = len(phi)
    return float((phi.sum() - np.trace(phi)) / (k * (k - 1)))


def varied_part(phi: Floats, judges: Sequence[str] | None) -> Floats:
    """The rows and columns of the correlation matrix [k, k] of the judges who err sometimes and not always.

    Args:
        phi: correlations of errors, NaN for judges who always or never err.
        judges: names for messages; None uses indices.

    Raises:
        InvalidInput: fewer than two such judges, or a pair without a defined correlation.

    Warns:
        InferenceAtRisk: some judges are left out.
    """
    varied = ~np.isnan(np.diag(phi))
    constant = [judges[int(i)] if judges else str(i) for i in np.flatnonzero(~varied)]
    if varied.sum() < 2:
        raise InvalidInput(
            f"{int(varied.sum())} of {len(varied)} judges err sometimes and not always; correlations of errors need "
            "2 or more. Give more or harder items"
        )
    if constant:
        warnings.warn(
            f"judges who always or never err have no correlations and are left out of the effective votes: "
            f"{listed(constant)}",
            InferenceAtRisk,
            4,
        )
    inner: Floats = phi[np.ix_(varied, varied)]
    if np.isnan(inner).any():
        raise InvalidInput("some pairs of judges have too few items in common to compare their errors")
    return inner


def votes_of(phi: Floats) -> Floats:
    """Effective votes [b] of correlation matrices [b, k, k].

    A judge whose errors do not vary in a bootstrap sample counts as uncorrelated in it.
    """
    k = phi.shape[-1]
    clean = np.nan_to_num(phi)
    pairs = clean.sum((1, 2)) - np.trace(clean, axis1=1, axis2=2)
    found: Floats = kish(k, pairs / (k * (k - 1)))
    return found


def votes_without(phi: Floats) -> Floats:
    """Effective votes [b, k] of correlation matrices [b, k, k] after removing each judge; NaN where one is left."""
    k = phi.shape[-1]
    if k < 3:
        return np.full(phi.shape[:2], math.nan)
    clean = np.nan_to_num(phi)
    diagonal = np.diagonal(clean, axis1=1, axis2=2)
    pairs = (clean.sum((1, 2)) - diagonal.sum(1))[:, None] - 2 * (clean.sum(2) - diagonal)
    found: Floats = kish(k - 1, pairs / ((k - 1) * (k - 2)))
    return found


def _checked(errors: Any) -> Floats:
    table = as_array(errors)
    if table.ndim != 2 or table.shape[1] < 2 or len(table) < 2 or table.dtype.kind not in "biuf":
        raise InvalidInput(f"errors must be numbers [items, judges], 2 or more of each; got shape {table.shape}")
    found: Floats = table.astype(np.float64)
    odd = ~(np.isnan(found) | (found == 0) | (found == 1))
    if odd.any():
        raise InvalidInput(f"errors must be 0, 1 or NaN; got {found[odd][0]}")
    return found


# --- many samples -----------------------------------------------------------------------------------------------------


def weighted_sums(errors: Floats, weights: Floats) -> tuple[Floats, Floats, Floats]:
    """The weighted counts from which the correlation of each pair of judges is computed.

    Args:
        errors: [n, k] of 0, 1 and NaN.
        weights: [b, n], how often each item counts in each sample.

    Returns:
        Over the items that both judges of a pair voted on: the number of items, of errors of the first judge, and of
        common errors, each [b, k, k].
    """
    voted = ~np.isnan(errors)
    erred = np.where(voted, errors, 0.0)
    k = errors.shape[1]

    def pairs(left: Floats, right: Floats) -> Floats:
        products = (left[:, :, None] * right[:, None, :]).reshape(len(left), k * k)  # one column for each pair
        found: Floats = (weights @ products).reshape(len(weights), k, k)
        return found

    both = pairs(erred, erred)
    if voted.all():
        totals = np.broadcast_to(weights.sum(1)[:, None, None], both.shape)
        return totals, np.broadcast_to((weights @ erred)[:, :, None], both.shape), both
    there = voted.astype(np.float64)
    return pairs(there, there), pairs(erred, there), both


def phi_from_sums(sums: tuple[Floats, Floats, Floats]) -> Floats:
    """Phi coefficients [b, k, k] from the counts of `weighted_sums`.

    NaN for a judge whose errors do not vary, and for a pair whose errors do not vary on its common items.
    """
    items, left, both = sums
    right = np.swapaxes(left, 1, 2)  # errors of the second judge of each pair
    spread = left * (items - left) * right * (items - right)
    with np.errstate(invalid="ignore", divide="ignore"):
        phi: Floats = np.where(spread > 0, (items * both - left * right) / np.sqrt(spread), np.nan)
    own = np.diagonal(spread, axis1=1, axis2=2) > 0
    k = phi.shape[1]
    phi[:, np.arange(k), np.arange(k)] = np.where(own, 1.0, np.nan)
    return phi


def shuffled_phi(errors: Floats, level: Codes, samples: int, rng: np.random.Generator) -> Floats:
    """The permutation distribution of the mean correlation: each judge's errors are shuffled within difficulty levels.

    Shuffling keeps each judge's error rate, so the mean over pairs follows from the squared sum over judges of the
    standardized errors, without a correlation matrix.

    Args:
        errors: [n, k] of 0 and 1; no missing votes.
        level: [n], the difficulty level of each item.
        samples: number of permutations.
        rng: source of randomness.

    Returns:
        Mean correlations, [samples].
    """
    n, k = errors.shape
    order = np.argsort(level, kind="stable")
    columns = errors[order].astype(np.uint8).T
    edges = np.flatnonzero(np.diff(level[order], prepend=-1, append=level.max() + 1))
    spread = errors.std(0)
    scale = (1 / spread).astype(np.float32)
    center = float((errors.mean(0) / spread).sum())
    step, found = max(1, _ENTRIES // (n * k)), []
    for start in range(0, samples, step):
        count = min(step, samples - start)
        copies = np.tile(columns, (count, 1))
        for low, high in itertools.pairwise(edges):
            copies[:, low:high] = rng.permuted(copies[:, low:high], axis=1)
        total = np.einsum("pkn,k->pn", copies.reshape(count, k, n), scale, optimize=True) - center
        found.append((np.square(total, dtype=np.float64).mean(1) - k) / (k * (k - 1)))
    return np.concatenate(found)


def sampled_phi(errors: Floats, level: Codes, samples: int, rng: np.random.Generator) -> Floats:
    """An approximation of `shuffled_phi` that samples the common errors of each pair instead of shuffling.

    Under a permutation within a level the number of common errors of a pair is hypergeometric. Pairs are sampled
    independently, which gives the exact mean and variance of the mean correlation and ignores dependence among three
    or more judges. Missing votes are allowed: a pair is compared on the items that both voted on.

    Args:
        errors: [n, k] of 0, 1 and NaN.
        level: [n], the difficulty level of each item.
        samples: number of samples.
        rng: source of randomness.

    Returns:
        Mean correlations, [samples].
    """
    k = errors.shape[1]
    total = np.zeros(samples)
    for i in range(k):
        for j in range(i + 1, k):
            shared = ~np.isnan(errors[:, i]) & ~np.isnan(errors[:, j])
            left, right = errors[shared, i], errors[shared, j]
            both = np.zeros(samples)
            for value in np.unique(level[shared]):
                here = level[shared] == value
                a, b = int(left[here].sum()), int(right[here].sum())
                both += rng.hypergeometric(a, int(here.sum()) - a, b, samples)
            n = len(left)
            spread = float(np.sqrt(left.mean() * (1 - left.mean()) * right.mean() * (1 - right.mean())))
            if spread > 0:
                total += (both / n - left.mean() * right.mean()) / spread
    found: Floats = total / (k * (k - 1) / 2)
    return found
