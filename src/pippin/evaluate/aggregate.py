"""One label from many votes: majority, Dawid and Skene's model, and weights.

Notable here:
- a tie is broken by a hash of the item's number and its votes: nobody is favoured, and the result repeats
- Dawid and Skene's EM works on the distinct rows of votes, of which there are few, whatever the number of items
- weights that need the right labels are fitted on four fifths of the items and applied to the fifth that is left
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pippin.core.errors import InferenceAtRisk, InvalidArgument, InvalidInput
from pippin.evaluate.votes import Codes, Floats, encode, missing, patterns, plain

Weights = Literal["accuracy", "decorrelated"]


@dataclass(frozen=True)
class DawidSkene:
    """What Dawid and Skene's EM found.

    Attributes:
        labels: [n], the likeliest class of each item.
        posterior: [n, C].
        prior: [C], shares of the classes.
        confusion: [k, C, C]; in row c of a judge the probabilities of its labels on items of class c.
        log_likelihood: of the votes, in nats, after each iteration.
        converged: whether the last iteration changed the posterior by no more than the tolerance.
    """

    labels: Codes
    posterior: Floats
    prior: Floats
    confusion: Floats
    log_likelihood: tuple[float, ...]
    converged: bool


def aggregate(
    labels: Any,
    method: Literal["majority", "dawid_skene", "weighted"] = "majority",
    *,
    weights: Any = None,
    classes: Any = None,
) -> list[Any]:
    """One label per item from a table of votes.

    Args:
        labels: [n, k], one column per judge; None or NaN where a judge gave none.
        method: "majority"; "dawid_skene", which learns how reliable each judge is from the votes alone; "weighted".
        weights: [k] finite numbers, for "weighted" and for nothing else.
        classes: every label that may occur; None takes those that do.

    Raises:
        InvalidArgument: an unknown method, or weights that do not fit.
        InvalidInput: an item without any vote, or labels that cannot be used.

    >>> aggregate([["yes", "yes", "no"], ["no", "no", "no"]])
    ['yes', 'no']
    >>> aggregate([["yes", "yes", "no"], ["no", "no", "no"]], "weighted", weights=[1, 1, 3])
    ['no', 'no']
    """
    if method not in ("majority", "dawid_skene", "weighted"):
        raise InvalidArgument(f"method {method!r} is not known; use 'majority', 'dawid_skene' or 'weighted'")
    if (weights is not None) != (method == "weighted"):
        raise InvalidArgument(f"weights go with method 'weighted', and it with them; got method {method!r}")
    codes, _, known = encode(labels, classes=classes)
    check_voted(codes)
    if method == "dawid_skene":
        chosen = dawid_skene(codes, len(known)).labels
    else:
        given = None if weights is None else _checked(plain(weights), codes.shape[1])
        chosen, _ = majority(codes, len(known), given)
    return [known[label] for label in chosen]


def majority(codes: Codes, classes: int, weights: Floats | None = None) -> tuple[Codes, Codes]:
    """The label with most votes, or with the largest sum of weights.

    Args:
        codes: [n, k] labels below ``classes``; -1 is no vote.
        classes: how many there are.
        weights: [k] for all items, or [n, k]; None counts each vote once.

    Returns:
        Labels [n], and the indices of the items where the first place was shared. There the SHA-256 of the item's
        index and votes chooses among the first.

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


def dawid_skene(codes: Codes, classes: int, *, iterations: int = 500, tolerance: float = 1e-6) -> DawidSkene:
    r"""Labels, and how reliable each judge is, from votes alone.

    A judge gives label l on an item of class c with probability $\pi^{(j)}_{cl}$, on every item by itself. EM starts
    from the shares of the votes and goes back and forth between classes of items and $\pi$. The model knows no
    difficult items: judges who make the same mistakes are taken for judges who are right.

    Args:
        codes: [n, k] labels below ``classes``; -1 is no vote.
        classes: how many there are.
        iterations: at most.
        tolerance: the largest change of a posterior at which to stop.

    Warns:
        InferenceAtRisk: the tolerance was not met.

    Source: Dawid and Skene, Maximum likelihood estimation of observer error-rates using the EM algorithm, 1979.
    """
    first, inverse, counts = patterns(codes)
    rows, weight = codes[first], counts.astype(np.float64)
    votes = np.stack([(rows == label).sum(1) for label in range(classes)], 1).astype(np.float64)
    posterior = votes / votes.sum(1, keepdims=True)
    likelihoods: list[float] = []
    converged = False
    while not converged and len(likelihoods) < iterations:
        prior, confusion = _reliability(rows, posterior * weight[:, None], classes)
        with np.errstate(divide="ignore"):
            joint = np.log(prior) + _log_votes(rows, np.log(confusion))
        top = joint.max(1, keepdims=True)
        total = top[:, 0] + np.log(np.exp(joint - top).sum(1))
        new = np.exp(joint - total[:, None])
        likelihoods.append(float(weight @ total))
        converged = bool(np.abs(new - posterior).max() <= tolerance)
        posterior = new
    if not converged:
        warnings.warn(
            f"Dawid and Skene's EM still moved after {iterations} iterations; give it more", InferenceAtRisk, 2
        )
    everyone = posterior[inverse]
    return DawidSkene(everyone.argmax(1), everyone, prior, confusion, tuple(likelihoods), converged)


def _reliability(rows: Codes, mass: Floats, classes: int) -> tuple[Floats, Floats]:
    """The M step: shares of the classes, and each judge's rows; a class without items has even rows."""
    prior = mass.sum(0) / mass.sum()
    confusion = np.empty((rows.shape[1], classes, classes))
    for judge, column in enumerate(rows.T):
        for label in range(classes):
            confusion[judge, :, label] = mass[column == label].sum(0)
    totals = confusion.sum(2, keepdims=True)
    return prior, np.where(totals > 0, confusion / np.where(totals > 0, totals, 1), 1 / classes)


def _log_votes(rows: Codes, log_confusion: Floats) -> Floats:
    """Log probability of each row under each class; -inf where a judge never did so."""
    total = np.zeros((len(rows), log_confusion.shape[1]))
    for judge, column in enumerate(rows.T):
        voted = column >= 0
        total[voted] += log_confusion[judge][:, column[voted]].T
    return total


def weighted(
    codes: Codes, gold: Codes, classes: int, by: Weights = "accuracy", *, folds: int = 5, seed: int = 0
) -> Codes:
    """Weighted votes whose weights never saw the item they decide on.

    Args:
        codes: [n, k] labels below ``classes``; -1 is no vote.
        gold: [n] right labels.
        classes: how many there are.
        by: "accuracy" weighs a judge by its accuracy; "decorrelated" by the row sums of the inverse of the error
            correlations, which is best for equal judges and unstable for like ones.
        folds: parts of the items, 2 or more; each is decided on by weights from the others.
        seed: of the parts.

    Raises:
        InvalidArgument: an unknown ``by``, or fewer items than parts.
    """
    if by not in ("accuracy", "decorrelated"):
        raise InvalidArgument(f"weights by {by!r} are not known; use 'accuracy' or 'decorrelated'")
    if not 2 <= folds <= len(codes):
        raise InvalidArgument(f"{folds} parts of {len(codes)} items; give 2 parts or more, and an item for each")
    part = np.random.default_rng(seed).permutation(len(codes)) % folds
    weights = np.empty(codes.shape)
    right = np.where(codes < 0, np.nan, codes == gold[:, None])
    for fold in range(folds):
        learn = right[part != fold]
        weights[part == fold] = _accuracies(learn) if by == "accuracy" else _decorrelated(learn)
    return majority(codes, classes, weights)[0]


def _accuracies(right: Floats) -> Floats:
    voted = ~np.isnan(right)
    found: Floats = np.where(voted, right, 0).sum(0) / np.maximum(voted.sum(0), 1)
    return found


def _decorrelated(right: Floats) -> Floats:
    """Row sums of the inverse correlation matrix; a judge without any spread has the mean weight of the others."""
    filled = np.where(np.isnan(right), _accuracies(right), right)
    varied = filled.std(0) > 0
    if varied.sum() < 2:
        return np.ones(len(varied))
    inverse = np.linalg.pinv(np.corrcoef(filled[:, varied].T), hermitian=True)
    weights = np.full(len(varied), inverse.sum() / varied.sum())
    weights[varied] = inverse.sum(1)
    return weights


def check_voted(codes: Codes) -> None:
    """Refuse items that nobody voted on.

    Raises:
        InvalidInput: there is one.
    """
    silent = (codes < 0).all(1)
    if silent.any():
        raise InvalidInput(f"item {int(silent.argmax())} has no vote at all; leave it out")


def _checked(weights: Any, judges: int) -> Floats:
    if weights.shape != (judges,) or weights.dtype.kind not in "iuf" or missing(weights).any():
        raise InvalidArgument(f"weights must be one number for each of {judges} judges; got {weights.tolist()}")
    if not np.isfinite(weights).all():
        raise InvalidArgument(f"weights must be finite; got {weights.tolist()}")
    found: Floats = weights.astype(np.float64)
    return found
