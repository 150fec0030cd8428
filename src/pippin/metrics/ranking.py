"""Scores of rankings: ROC AUC, average precision, FPR at a TPR, selective risk, rank correlation.

Notable here:
- two-sample metrics take the scores of positives and negatives separately; higher scores mean positive
- ties count half in the ROC AUC, as in the Mann-Whitney test, and get their mean rank in a correlation
- tensors, arrays and lists are accepted; everything is computed in float64 by NumPy
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from annotated_types import Gt, Le

from pippin.core import plotting
from pippin.core.checks import checked
from pippin.core.errors import InvalidInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = npt.NDArray[np.float64]
Share = Annotated[float, Gt(0), Le(1)]


def roc_auc(positive: npt.ArrayLike, negative: npt.ArrayLike) -> float:
    """Area under the ROC curve: the probability that a positive scores above a negative, ties counting half.

    Args:
        positive: scores of the positives [p]; any scale.
        negative: scores of the negatives [n].

    Raises:
        InvalidInput: one of them is empty or holds NaN.

    >>> roc_auc([0.9, 0.5], [0.1, 0.5])
    0.875
    """
    above, ranked = _scores(positive, "positive"), np.sort(_scores(negative, "negative"))
    below = np.searchsorted(ranked, above, side="left") + np.searchsorted(ranked, above, side="right")
    return float(below.mean() / (2 * len(ranked)))


def average_precision(positive: npt.ArrayLike, negative: npt.ArrayLike) -> float:
    """Average precision: precision at each threshold, weighted by the step in recall; in 0..1.

    Args:
        positive: scores of the positives [p]; any scale.
        negative: scores of the negatives [n].

    Raises:
        InvalidInput: one of them is empty or holds NaN.
    """
    found, others = _scores(positive, "positive"), _scores(negative, "negative")
    scores = np.concatenate([found, others])
    order = np.argsort(-scores, kind="stable")
    scores, hits = scores[order], np.cumsum(order < len(found))
    last = np.append(scores[1:] != scores[:-1], True)  # equal scores are one threshold
    hits, taken = hits[last], np.arange(1, len(scores) + 1)[last]
    return float((hits / taken * np.diff(hits / len(found), prepend=0.0)).sum())


@checked
def fpr_at_tpr(positive: npt.ArrayLike, negative: npt.ArrayLike, tpr: Share = 0.95) -> float:
    """False-positive rate at the highest threshold that at least ``tpr`` of the positives reach; in 0..1.

    Args:
        positive: scores of the positives [p]; any scale.
        negative: scores of the negatives [n].
        tpr: true-positive rate, above 0 up to 1.

    Raises:
        InvalidArgument: a rate out of range.
        InvalidInput: one of the two is empty or holds NaN.
    """
    found, others = _scores(positive, "positive"), _scores(negative, "negative")
    accepted = math.ceil(tpr * len(found) - 1e-9)
    return float((others >= np.sort(found)[-accepted]).mean())


def pearson_correlation(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    """Pearson's correlation of two lists of the same length; NaN where one of them does not vary.

    Raises:
        InvalidInput: different lengths, no values, or NaN.

    >>> round(pearson_correlation([1, 2, 3], [1, 2, 4]), 4)
    0.982
    """
    a, b = _pair(first, second)
    a, b = a - a.mean(), b - b.mean()
    variances = float((a * a).sum() * (b * b).sum())
    # below this, the variation is rounding error
    if variances <= 1e-24 * len(a) ** 2:
        return math.nan
    return float((a * b).sum()) / math.sqrt(variances)


def spearman_correlation(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    """Spearman's rank correlation; equal values share their mean rank. NaN where a list does not vary.

    Raises:
        InvalidInput: different lengths, no values, or NaN.

    >>> spearman_correlation([1, 2, 3], [10, 100, 1000])
    1.0
    """
    a, b = _pair(first, second)
    return pearson_correlation(_ranks(a), _ranks(b))


@dataclass(frozen=True)
class RiskCoverageCurve:
    """The error that remains when the least confident predictions are withheld.

    Attributes:
        coverage: share of predictions that are not withheld [n], rising to 1.
        risk: share of wrong predictions among those [n].
    """

    coverage: Floats
    risk: Floats

    @property
    def aurc(self) -> float:
        """Area under the curve (AURC): mean risk over all coverages, in 0..1; lower is better."""
        return float(self.risk.mean())

    @checked
    def risk_at(self, coverage: Share) -> float:
        """Selective error: the risk at the smallest coverage of at least ``coverage``."""
        return float(self.risk[math.ceil(coverage * len(self.risk) - 1e-9) - 1])

    def draw(self, axes: Axes) -> None:
        """Draw the curve on matplotlib axes."""
        axes.plot(self.coverage, self.risk, color="tab:green")
        axes.set(xlim=(0, 1), xlabel="coverage", ylabel="risk: share of wrong predictions")
        axes.set_ylim(bottom=0)
        axes.set_title(f"selective prediction, AURC {self.aurc:.3f}")

    def plot(self, path: Path) -> None:
        """Write the curve to a file, whose suffix chooses the format (.png, .svg, .pdf).

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        figure = plotting.new(4.5, 4.5)
        self.draw(figure.subplots())
        plotting.save(figure, path)


def risk_coverage_curve(confidence: npt.ArrayLike, correct: npt.ArrayLike) -> RiskCoverageCurve:
    """Risk against coverage, from the most confident prediction down; ties share their mean risk.

    Args:
        confidence: confidence of each prediction [n], higher is more confident; any scale.
        correct: whether each prediction was right [n].

    Raises:
        InvalidInput: no predictions, NaN, or different lengths.

    Source: Geifman and El-Yaniv, arXiv:1705.08500, section 2.
    """
    scores, right = _scores(confidence, "confidence"), _array(correct)
    if right.shape != scores.shape:
        raise InvalidInput(f"confidence has {len(scores)} values and correct the shape {right.shape}")
    order = np.argsort(-scores, kind="stable")
    _, group = np.unique(-scores[order], return_inverse=True)
    wrong = np.bincount(group, weights=1 - right[order]) / np.bincount(group)
    given = np.arange(1, len(scores) + 1)
    return RiskCoverageCurve(given / len(scores), np.cumsum(wrong[group]) / given)


def _ranks(values: Floats) -> Floats:
    """Ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    ranks: Floats = mean_rank[inverse]
    return ranks


def _array(values: Any) -> Floats:
    """A tensor, an array or a list as float64."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    return np.asarray(values, dtype=np.float64)


def _scores(values: npt.ArrayLike, name: str) -> Floats:
    found = _array(values)
    if found.ndim != 1 or not len(found):
        raise InvalidInput(f"{name} must be one score for each example, at least one; got the shape {found.shape}")
    if np.isnan(found).any():
        raise InvalidInput(f"{name} {int(np.isnan(found).argmax())} is NaN")
    return found


def _pair(first: npt.ArrayLike, second: npt.ArrayLike) -> tuple[Floats, Floats]:
    a, b = _scores(first, "first"), _scores(second, "second")
    if len(a) != len(b):
        raise InvalidInput(f"first has {len(a)} values and second {len(b)}; a correlation needs pairs")
    return a, b
