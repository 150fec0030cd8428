"""One label from many votes: majority, Dawid and Skene's model, and weights.

Notable here:
- a tie is broken by a hash of the item's index and its votes, which favors no label and gives the same result each time
- Dawid and Skene's EM works on the distinct rows of votes, of which there are few even when there are many items
- weights that need the gold labels are cross-fitted: an item is decided by weights estimated on the other folds
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge

from pippin.core.checks import checked
from pippin.core.errors import InferenceAtRisk, InvalidArgument, InvalidInput
from pippin.evaluate.judges.votes import Codes, Floats, as_array, encode, missing, patterns

Weights = Literal["accuracy", "decorrelated"]


@dataclass(frozen=True)
class DawidSkene:
    """The result of Dawid and Skene's EM algorithm for n items, k judges and C classes.

    Attributes:
        labels: [n], the most probable class of each item.
        posterior: [n, C], the probability of each class for each item.
        prior: [C], the estimated share of each class.
        confusion: [k, C, C]; row c of a judge's matrix holds the probabilities of its labels on items of class c.
        log_likelihood: log-likelihood of the votes, in nats, after each iteration.
        converged: whether the last iteration changed the posterior by no more than the tolerance.
    """

    labels: Codes
    posterior: Floats
    prior: Floats
    confusion: Floats
    log_likelihood: tuple[float, ...]
    converged: bool


@checked
def aggregate(
    labels: Any,
    method: Literal["majority", "dawid_skene", "weighted"] = "majority",
    *,
    weights: Any = None,
    classes: Any = None,
) -> list[Any]:
    """Combine the votes of several judges into one label per item.

    Args:
        labels: [n, k], one row per item and one column per judge; None or NaN where a judge gave no label.
        method: "majority"; "dawid_skene", which estimates each judge's reliability from the votes alone; or
            "weighted", a majority weighted by ``weights``.
        weights: [k] finite numbers; required for "weighted" and not allowed otherwise.
        classes: every label that may occur; None takes the labels that do occur.

    Returns:
        One label for each of the n items.

    Raises:
        InvalidArgument: weights without "weighted" or the reverse, or not k finite numbers.
        InvalidInput: an item without any vote, or labels that cannot be used.

    >>> aggregate([["yes", "yes", "no"], ["no", "no", "no"]])
    ['yes', 'no']
    >>> aggregate([["yes", "yes", "no"], ["no", "no", "no"]], "weighted", weights=[1, 1, 3])
    ['no', 'no']
    """
    if (weights is not None) != (method == "weighted"):
        raise InvalidArgument(f"weights go with method 'weighted', and it with them; got method {method!r}")
    codes, _, known = encode(labels, classes=classes)
    check_voted(codes)
    if method == "dawid_skene":
        chosen = dawid_skene(codes, len(known)).labels
    else:
        given = None if weights is None else _checked(as_array(weights), codes.shape[1])
        chosen, _ = majority(codes, len(known), given)
    return [known[label] for label in chosen]


def majority(codes: Codes, classes: int, weights: Floats | None = None) -> tuple[Codes, Codes]:
    """Choose for each item the label with the most votes, or with the largest sum of weights.

    Args:
        codes: [n, k] class indices below ``classes``; -1 is a missing vote.
        classes: the number of classes.
        weights: [k], the same for all items, or [n, k]; None counts each vote once.

    Returns:
        Labels [n], and the indices of the tied items. In a tie the SHA-256 of the item's index and votes chooses among
        the labels with the most votes.

    >>> majority(np.array([[0, 0, 1], [2, 2, -1]]), 3)[0].tolist()
    [0, 2]
    """
    given: Any = np.ones(codes.shape[1]) if weights is None else weights
    sums = np.stack([np.where(codes == label, given, 0.0).sum(1) for label in range(classes)], 1)
    chosen = sums.argmax(1)
    first = sums >= sums.max(1, keepdims=True) - 1e-12
    tied = np.flatnonzero(first.sum(1) > 1)
    for item in tied:
        options = np.flatnonzero(first[item])
        text = f"{item}:{','.join(map(str, codes[item]))}"
        chosen[item] = options[int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % len(options)]
    return chosen, tied


def dawid_skene(codes: Codes, classes: int, *, max_iterations: int = 500, tolerance: float = 1e-6) -> DawidSkene:
    r"""Estimate the class of each item and the reliability of each judge from votes alone.

    Judge j gives label l to an item of class c with probability $\pi^{(j)}_{cl}$, independently for each item. EM
    starts from the vote shares and alternates between the posterior over classes and $\pi$. The model has no notion of
    item difficulty: judges who make the same mistakes look reliable to it.

    Args:
        codes: [n, k] class indices below ``classes``; -1 is a missing vote.
        classes: the number of classes.
        max_iterations: the largest number of EM iterations.
        tolerance: EM stops when no posterior probability changes by more than this.

    Warns:
        InferenceAtRisk: EM did not converge within ``max_iterations``.

    Source: Dawid and Skene, Maximum likelihood estimation of observer error-rates using the EM algorithm, 1979.
    """
    first, inverse, counts = patterns(codes)
    rows, weight = codes[first], counts.astype(np.float64)  # distinct rows [m, k], and how often each occurs [m]
    votes = np.stack([(rows == label).sum(1) for label in range(classes)], 1).astype(np.float64)
    posterior = votes / votes.sum(1, keepdims=True)
    likelihoods: list[float] = []
    converged = False
    while not converged and len(likelihoods) < max_iterations:
        prior, confusion = _reliability(rows, posterior * weight[:, None], classes)
        with np.errstate(divide="ignore"):
            joint = np.log(prior) + _log_votes(rows, np.log(confusion))  # log p(class, votes), [m, C]
        top = joint.max(1, keepdims=True)  # log-sum-exp with the maximum taken out
        total = top[:, 0] + np.log(np.exp(joint - top).sum(1))
        new = np.exp(joint - total[:, None])
        likelihoods.append(float(weight @ total))
        converged = bool(np.abs(new - posterior).max() <= tolerance)
        posterior = new
    if not converged:
        warnings.warn(
            f"Dawid and Skene's EM did not converge within {max_iterations} iterations; raise max_iterations",
            InferenceAtRisk,
            2,
        )
    of_items = posterior[inverse]  # from distinct rows back to items, [n, C]
    return DawidSkene(of_items.argmax(1), of_items, prior, confusion, tuple(likelihoods), converged)


def _reliability(rows: Codes, mass: Floats, classes: int) -> tuple[Floats, Floats]:
    """The M step: class shares [C] and confusion matrices [k, C, C]; a class without items gets uniform rows."""
    prior = mass.sum(0) / mass.sum()
    confusion = np.empty((rows.shape[1], classes, classes))
    for judge, column in enumerate(rows.T):
        for label in range(classes):
            confusion[judge, :, label] = mass[column == label].sum(0)
    totals = confusion.sum(2, keepdims=True)
    return prior, np.where(totals > 0, confusion / np.where(totals > 0, totals, 1), 1 / classes)


def _log_votes(rows: Codes, log_confusion: Floats) -> Floats:
    """Log-probability of each row of votes under each class, [m, C]; -inf for a label that a judge never gives."""
    total = np.zeros((len(rows), log_confusion.shape[1]))
    for judge, column in enumerate(rows.T):
        voted = column >= 0
        total[voted] += log_confusion[judge][:, column[voted]].T
    return total


@checked
def weighted(
    codes: Codes,
    gold: Codes,
    classes: int,
    by: Weights = "accuracy",
    *,
    folds: Annotated[int, Ge(2)] = 5,
    seed: int = 0,
) -> Codes:
    """Weighted majority vote with cross-fitted weights: no item is decided by weights that were estimated on it.

    Args:
        codes: [n, k] class indices below ``classes``; -1 is a missing vote.
        gold: [n] right labels, as class indices.
        classes: the number of classes.
        by: "accuracy" weights a judge by its accuracy; "decorrelated" by the row sums of the inverse correlation
            matrix of errors, which is optimal for equally accurate judges and unstable for strongly correlated ones.
        folds: number of folds for cross-fitting, 2 or more.
        seed: seed of the random assignment of items to folds.

    Returns:
        The label of each item, [n].

    Raises:
        InvalidArgument: fewer items than folds.
    """
    if folds > len(codes):
        raise InvalidArgument(f"{folds} folds of {len(codes)} items; every fold needs at least one item")
    fold_of = np.random.default_rng(seed).permutation(len(codes)) % folds
    weights = np.empty(codes.shape)
    right = np.where(codes < 0, np.nan, codes == gold[:, None])
    for fold in range(folds):
        train = right[fold_of != fold]
        weights[fold_of == fold] = _accuracies(train) if by == "accuracy" else _decorrelated(train)
    return majority(codes, classes, weights)[0]


def _accuracies(right: Floats) -> Floats:
    voted = ~np.isnan(right)
    found: Floats = np.where(voted, right, 0).sum(0) / np.maximum(voted.sum(0), 1)
    return found


def _decorrelated(right: Floats) -> Floats:
    """Row sums of the inverse correlation matrix; a judge without variance gets the mean weight of the others."""
    filled = np.where(np.isnan(right), _accuracies(right), right)
    varied = filled.std(0) > 0
    if varied.sum() < 2:
        return np.ones(len(varied))
    inverse = np.linalg.pinv(np.corrcoef(filled[:, varied].T), hermitian=True)
    weights = np.full(len(varied), inverse.sum() / varied.sum())
    weights[varied] = inverse.sum(1)
    return weights


def check_voted(codes: Codes) -> None:
    """Check that every item has at least one vote.

    Raises:
        InvalidInput: an item has no votes.
    """
    unvoted = (codes < 0).all(1)
    if unvoted.any():
        raise InvalidInput(f"item {int(unvoted.argmax())} has no vote at all; leave it out")


def _checked(weights: Any, judges: int) -> Floats:
    if weights.shape != (judges,) or weights.dtype.kind not in "iuf" or missing(weights).any():
        raise InvalidArgument(f"weights must be one number for each of {judges} judges; got {weights.tolist()}")
    if not np.isfinite(weights).all():
        raise InvalidArgument(f"weights must be finite; got {weights.tolist()}")
    found: Floats = weights.astype(np.float64)
    return found
