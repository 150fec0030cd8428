"""Agreement between annotators or judges: Cohen's kappa for two, Krippendorff's alpha for any number and with gaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from pippin.core.errors import InvalidInput


def cohen_kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> float:
    """Cohen's kappa: agreement of two annotators beyond chance, 1 for perfect, 0 for what chance alone would give.

    Where both give every case the same single label, agreement is perfect and kappa is 1.

    Args:
        first: labels by one annotator.
        second: labels of the same cases by the other.

    Raises:
        InvalidInput: no labels, or lists of different lengths.

    Source: J. Cohen, Educ. Psychol. Meas. 20 (1960), 37-46.

    >>> cohen_kappa("aabb", "aabb"), cohen_kappa("aabb", "abab")
    (1.0, 0.0)
    """
    if len(first) != len(second) or not first:
        raise InvalidInput(f"both must label the same cases, got {len(first)} and {len(second)} labels")
    n = len(first)
    agreed = sum(a == b for a, b in zip(first, second, strict=True)) / n
    one, other = Counter(first), Counter(second)
    chance = sum(one[label] * other[label] for label in one) / (n * n)
    return 1.0 if chance == 1 else (agreed - chance) / (1 - chance)


def krippendorff_alpha(labels: Sequence[Sequence[Hashable | None]]) -> float:
    r"""Krippendorff's alpha for nominal labels: agreement beyond chance of any number of annotators.

    $\alpha = 1 - D_o / D_e$: the share of pairs of labels within a case that differ, over that of pairs of labels drawn
    from all cases. 1 for perfect agreement, 0 for what chance alone would give, below 0 for systematic disagreement.
    Cases with fewer than two labels do not count. Where all labels are the same, agreement is perfect and alpha is 1.

    Args:
        labels: for each case the labels of its annotators; None where an annotator gave none.

    Raises:
        InvalidInput: no case has two labels.

    Source: K. Krippendorff, Computing Krippendorff's Alpha-Reliability, 2011.

    >>> round(krippendorff_alpha(["aaa", "aab", "bbb", ["b", "b", None]]), 3)
    0.667
    """
    counts = [Counter(label for label in case if label is not None) for case in labels]
    paired = [case for case in counts if case.total() > 1]
    if not paired:
        raise InvalidInput("agreement needs a case with two labels or more")
    total = sum(paired, Counter[Hashable]())
    n = total.total()
    observed = sum((c.total() ** 2 - sum(k * k for k in c.values())) / (c.total() - 1) for c in paired) / n
    expected = (n * n - sum(k * k for k in total.values())) / (n * (n - 1))
    return 1.0 if expected == 0 else 1 - observed / expected
