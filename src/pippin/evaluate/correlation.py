"""Correlations of errors between judges, and the number of independent votes they leave; in many samples at once.

Notable here:
- the sums behind a correlation are linear in the weights of the items, so many samples are one matrix product
- shuffling is exact where it is affordable; for millions of items the pairs' counts are drawn instead, which have the
  same mean and variance
- judges who always or never err have no correlations: they are named and left out, never counted as independent
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from pippin.core.errors import InferenceAtRisk, InvalidArgument, InvalidInput
from pippin.evaluate.votes import Codes, Floats, listed, plain

_ENTRIES = 8_000_000


def phi_matrix(errors: Any) -> Floats:
    """Correlations of errors between judges.

    Args:
        errors: [n, k], 1 where a judge erred and 0 where not; NaN where there is no vote, and then each pair is
            compared on the items that both voted on.

    Returns:
        [k, k], with NaN in the rows and columns of judges who always or never err.

    Raises:
        InvalidInput: another shape, or values that are neither 0, 1 nor NaN.
    """
    table = _errors(errors)
    found: Floats = phi_from_sums(weighted_sums(table, np.ones((1, len(table)))))[0]
    return found


def effective_votes(errors: Any, method: Literal["kish", "eigen"] = "kish") -> float:
    r"""The number of independent judges who would err together as little as these.

    Kish's $k / (1 + (k-1) \bar\varphi)$ with the mean correlation of errors over all pairs; or $k / \lambda_{max}$ of
    the matrix of correlations, which does not take all pairs for equal, and reads low near independence.

    Args:
        errors: [n, k], 1 where a judge erred, 0 where not, NaN where there is no vote.
        method: "kish" or "eigen".

    Raises:
        InvalidArgument: an unknown method.
        InvalidInput: fewer than two judges who err sometimes and not always, or judges whose errors cancel, so that
            the number is infinite.

    Warns:
        InferenceAtRisk: judges who always or never err are left out.

    >>> effective_votes([[0, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 1]])
    1.0
    """
    if method not in ("kish", "eigen"):
        raise InvalidArgument(f"method {method!r} is not known; use 'kish' or 'eigen'")
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
    """The mean over the pairs of a matrix [k, k]."""
    k = len(phi)
    return float((phi.sum() - np.trace(phi)) / (k * (k - 1)))


def varied_part(phi: Floats, judges: Sequence[str] | None) -> Floats:
    """The part of the matrix of judges who err sometimes and not always."""
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
    """Effective votes of matrices [b, k, k]; a judge without spread in a sample counts as uncorrelated there."""
    k = phi.shape[-1]
    clean = np.nan_to_num(phi)
    pairs = clean.sum((1, 2)) - np.trace(clean, axis1=1, axis2=2)
    found: Floats = kish(k, pairs / (k * (k - 1)))
    return found


def votes_without(phi: Floats) -> Floats:
    """Effective votes without each judge, [b, k]; NaN where only one is left."""
    k = phi.shape[-1]
    if k < 3:
        return np.full(phi.shape[:2], math.nan)
    clean = np.nan_to_num(phi)
    diagonal = np.diagonal(clean, axis1=1, axis2=2)
    pairs = (clean.sum((1, 2)) - diagonal.sum(1))[:, None] - 2 * (clean.sum(2) - diagonal)
    found: Floats = kish(k - 1, pairs / ((k - 1) * (k - 2)))
    return found


def _errors(errors: Any) -> Floats:
    table = plain(errors)
    if table.ndim != 2 or table.shape[1] < 2 or len(table) < 2 or table.dtype.kind not in "biuf":
        raise InvalidInput(f"errors must be numbers [items, judges], 2 or more of each; got shape {table.shape}")
    found: Floats = table.astype(np.float64)
    odd = ~(np.isnan(found) | (found == 0) | (found == 1))
    if odd.any():
        raise InvalidInput(f"errors must be 0, 1 or NaN; got {found[odd][0]}")
    return found


# --- many samples -----------------------------------------------------------------------------------------------------


def weighted_sums(errors: Floats, weights: Floats) -> tuple[Floats, Floats, Floats]:
    """Sums over the items that both judges of a pair voted on.

    Args:
        errors: [n, k] of 0, 1 and NaN.
        weights: [b, n], how often each item counts.

    Returns:
        Items in common, errors of the first, and common errors, each [b, k, k].
    """
    voted = ~np.isnan(errors)
    erred = np.where(voted, errors, 0.0)
    k = errors.shape[1]

    def pairs(left: Floats, right: Floats) -> Floats:
        products = (left[:, :, None] * right[:, None, :]).reshape(len(left), k * k)
        found: Floats = (weights @ products).reshape(len(weights), k, k)
        return found

    both = pairs(erred, erred)
    if voted.all():
        totals = np.broadcast_to(weights.sum(1)[:, None, None], both.shape)
        return totals, np.broadcast_to((weights @ erred)[:, :, None], both.shape), both
    there = voted.astype(np.float64)
    return pairs(there, there), pairs(erred, there), both


def phi_from_sums(sums: tuple[Floats, Floats, Floats]) -> Floats:
    """Correlations [b, k, k]; NaN for a judge without spread, and for a pair without spread on its common items."""
    items, left, both = sums
    right = np.swapaxes(left, 1, 2)
    spread = left * (items - left) * right * (items - right)
    with np.errstate(invalid="ignore", divide="ignore"):
        phi: Floats = np.where(spread > 0, (items * both - left * right) / np.sqrt(spread), np.nan)
    own = np.diagonal(spread, axis1=1, axis2=2) > 0
    k = phi.shape[1]
    phi[:, np.arange(k), np.arange(k)] = np.where(own, 1.0, np.nan)
    return phi


def shuffled_phi(errors: Floats, level: Codes, samples: int, rng: np.random.Generator) -> Floats:
    """Mean correlations when each judge's errors are shuffled within the levels, by themselves: [samples].

    The margins stay, so the mean over pairs follows from the squared sums over judges of standardised errors.
    """
    n, k = errors.shape
    order = np.argsort(level, kind="stable")
    columns = errors[order].astype(np.uint8).T
    edges = np.flatnonzero(np.diff(level[order], prepend=-1, append=level.max() + 1))
    spread = errors.std(0)
    scale = (1 / spread).astype(np.float32)
    centre = float((errors.mean(0) / spread).sum())
    step, found = max(1, _ENTRIES // (n * k)), []
    for start in range(0, samples, step):
        count = min(step, samples - start)
        copies = np.tile(columns, (count, 1))
        for low, high in itertools.pairwise(edges):
            copies[:, low:high] = rng.permuted(copies[:, low:high], axis=1)
        total = np.einsum("pkn,k->pn", copies.reshape(count, k, n), scale, optimize=True) - centre
        found.append((np.square(total, dtype=np.float64).mean(1) - k) / (k * (k - 1)))
    return np.concatenate(found)


def drawn_phi(errors: Floats, level: Codes, samples: int, rng: np.random.Generator) -> Floats:
    """The same without shuffling: common errors of each pair in each level are hypergeometric: [samples].

    Pairs of independently shuffled columns are uncorrelated, so mean and variance of the mean are right; what three
    judges have in common beyond that is left out. Works with missing votes, on the items that a pair has in common.
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
