"""Agreement between annotators or judges."""

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
