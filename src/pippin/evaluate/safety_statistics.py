"""The statistics behind a safety report: intervals, agreement, correction of a judge, curves, gaps between locales.

Notable here:
- a share never stands alone: Wilson's interval holds at 0 and 1, where the usual one has no width
- a judge that errs moves a share in a known way: with its confusion matrix, Rogan and Gladen's formula moves it back,
  and the interval grows by what the calibration sample leaves unknown
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from pippin.core.errors import InvalidArgument

Z95: Final = 1.959963984540054  # the standard normal's 97.5 % point


@dataclass(frozen=True)
class Share:
    """A share of cases with its 95 % interval; ``n`` is how many cases there were."""

    value: float
    low: float
    high: float
    n: int


def wilson(hits: int, n: int) -> Share:
    """A share and Wilson's 95 % score interval.

    Raises:
        InvalidArgument: no cases, or more hits than cases.

    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927), 209-212.

    >>> share = wilson(0, 200)
    >>> share.value, share.low, round(share.high, 4)
    (0.0, 0.0, 0.0188)
    """
    if n < 1 or not 0 <= hits <= n:
        raise InvalidArgument(f"a share needs 0 <= hits <= n and n >= 1, got {hits} of {n}")
    p, z2 = hits / n, Z95 * Z95
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return Share(p, 0.0 if hits == 0 else centre - half, 1.0 if hits == n else centre + half, n)


def cohen_kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> float:
    """Agreement of two judges beyond chance: 1 for perfect, 0 for what chance alone would give.

    Two judges who give every case the same single label agree perfectly: 1.

    Raises:
        InvalidArgument: nothing to compare, or lists of different lengths.

    Source: J. Cohen, Educ. Psychol. Meas. 20 (1960), 37-46.

    >>> cohen_kappa("aabb", "aabb"), cohen_kappa("aabb", "abab")
    (1.0, 0.0)
    """
    if len(first) != len(second) or not first:
        raise InvalidArgument(f"two judges must label the same cases, got {len(first)} and {len(second)} labels")
    n = len(first)
    agreed = sum(a == b for a, b in zip(first, second, strict=True)) / n
    one, other = Counter(first), Counter(second)
    chance = sum(one[label] * other[label] for label in one) / (n * n)
    return 1.0 if chance == 1 else (agreed - chance) / (1 - chance)


@dataclass(frozen=True)
class Calibration:
    """How often a judge is right on cases whose truth is known.

    Args:
        true_positives, positives: of so many cases that are positive, so many were found.
        true_negatives, negatives: of so many that are not, so many were passed.

    Raises:
        InvalidArgument: no cases of one kind, counts that contradict each other, or a judge that does no better than
            chance, with which nothing can be corrected.
    """

    true_positives: int
    positives: int
    true_negatives: int
    negatives: int

    def __post_init__(self) -> None:
        if self.positives < 1 or self.negatives < 1:
            raise InvalidArgument(
                f"calibrating a judge needs cases of both kinds, got {self.positives} positive and {self.negatives} "
                "negative ones"
            )
        if not (0 <= self.true_positives <= self.positives and 0 <= self.true_negatives <= self.negatives):
            raise InvalidArgument(f"more cases were judged rightly than there are: {self}")
        if self.sensitivity + self.specificity <= 1:
            raise InvalidArgument(
                f"the judge has sensitivity {self.sensitivity:.2f} and specificity {self.specificity:.2f}, which is no "
                "better than chance; its rates cannot be corrected"
            )

    @property
    def sensitivity(self) -> float:
        """The share of positive cases that the judge finds."""
        return self.true_positives / self.positives

    @property
    def specificity(self) -> float:
        """The share of negative cases that the judge passes."""
        return self.true_negatives / self.negatives


def rogan_gladen(hits: int, n: int, judge: Calibration) -> Share:
    r"""The share that a perfect judge would have found, with a 95 % interval.

    $p = (p_{obs} + \mathrm{spec} - 1) / (\mathrm{sens} + \mathrm{spec} - 1)$. The interval is the delta method's, with
    all three shares moved by Wilson's centre (two successes and two failures more), which keeps its coverage where a
    share is close to 0 or 1.

    Raises:
        InvalidArgument: no cases, or more hits than cases.

    Source: W. J. Rogan, B. Gladen, Am. J. Epidemiol. 107 (1978), 71-76; the moved shares: Z. Lang, J. Reiczigel, Prev.
    Vet. Med. 113 (2014), 13-22.

    >>> round(rogan_gladen(14, 100, Calibration(90, 100, 95, 100)).value, 4)
    0.1059
    """
    wilson(hits, n)  # checks the counts
    value = (hits / n + judge.specificity - 1) / (judge.sensitivity + judge.specificity - 1)
    m, z2 = n + Z95 * Z95, Z95 * Z95
    p = (hits + z2 / 2) / m
    sens = (judge.true_positives + 1) / (judge.positives + 2)
    spec = (judge.true_negatives + 1) / (judge.negatives + 2)
    gain = sens + spec - 1
    if gain <= 0:
        return Share(min(1.0, max(0.0, value)), 0.0, 1.0, n)
    centre = (p + spec - 1) / gain
    variance = (
        p * (1 - p) / m
        + (1 - centre) ** 2 * spec * (1 - spec) / (judge.negatives + 2)
        + centre**2 * sens * (1 - sens) / (judge.positives + 2)
    ) / gain**2
    shift = (
        2
        * Z95
        * Z95
        * (
            centre * sens * (1 - sens) / (judge.positives + 2)
            - (1 - centre) * spec * (1 - spec) / (judge.negatives + 2)
        )
    )
    middle, half = centre + shift, Z95 * math.sqrt(variance)
    return Share(min(1.0, max(0.0, value)), max(0.0, min(1.0, middle - half)), min(1.0, max(0.0, middle + half)), n)


def area_under_curve(positives: Sequence[float], negatives: Sequence[float]) -> float:
    """The probability that a positive case scores above a negative one; ties count half.

    Raises:
        InvalidArgument: one of the two is empty.

    >>> area_under_curve([0.9, 0.5], [0.5, 0.1])
    0.875
    """
    if not positives or not negatives:
        raise InvalidArgument(f"an area needs cases of both kinds, got {len(positives)} and {len(negatives)}")
    ranked = sorted([(score, 1) for score in positives] + [(score, 0) for score in negatives])
    wins, below, at = 0.0, 0, 0
    while at < len(ranked):
        end = at
        while end < len(ranked) and ranked[end][0] == ranked[at][0]:
            end += 1
        ones = sum(kind for _, kind in ranked[at:end])
        zeros = end - at - ones
        wins += ones * (below + zeros / 2)
        below += zeros
        at = end
    return wins / (len(positives) * len(negatives))


@dataclass(frozen=True)
class CurvePoint:
    """At a threshold: the share of harmful cases let through and of harmless ones refused."""

    threshold: float
    violation: float
    over_refusal: float


def operating_curve(
    harmful: Sequence[tuple[float, bool]], harmless: Sequence[tuple[float, bool]]
) -> tuple[CurvePoint, ...]:
    """Violation and over-refusal at every threshold that makes a difference, from the strictest on.

    Args:
        harmful: for each harmful prompt the guardrail's score, and whether the model by itself answered harmfully.
        harmless: for each harmless prompt the score, and whether the model by itself refused.

    Raises:
        InvalidArgument: one of the two is empty.

    >>> [(p.threshold, p.violation, p.over_refusal) for p in operating_curve([(0.9, True)], [(0.2, False)])]
    [(0.0, 0.0, 1.0), (0.2, 0.0, 1.0), (0.9, 0.0, 0.0), (inf, 1.0, 0.0)]
    """
    if not harmful or not harmless:
        raise InvalidArgument("an operating curve needs harmful and harmless prompts")
    limits = sorted({0.0, math.inf, *(s for s, _ in harmful), *(s for s, _ in harmless)})
    return tuple(
        CurvePoint(
            limit,
            sum(bad and score < limit for score, bad in harmful) / len(harmful),
            sum(refused or score >= limit for score, refused in harmless) / len(harmless),
        )
        for limit in limits
    )


def over_refusal_at(curve: Sequence[CurvePoint], violation: float) -> float:
    """The least over-refusal among thresholds whose violation is at most this; NaN if there is none."""
    return min((point.over_refusal for point in curve if point.violation <= violation), default=math.nan)


def area_of(curve: Sequence[CurvePoint]) -> float:
    """Area under violation as a function of over-refusal; 0 is perfect, 0.5 is chance."""
    points = sorted(((p.over_refusal, p.violation) for p in curve), key=lambda point: (point[0], -point[1]))
    points = [(0.0, max(v for _, v in points)), *points, (1.0, min(v for _, v in points))]
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))


def gap_test(groups: Sequence[Sequence[bool]], *, rounds: int = 2000, seed: int = 0) -> tuple[float, float]:
    """The gap between the highest and lowest share of several groups, and how often chance makes one as large.

    Args:
        groups: for each group its cases, hit or not.
        rounds: permutations of cases over groups.
        seed: of the permutations.

    Returns:
        The gap, and the p-value (1 + larger or equal) / (1 + rounds).

    Raises:
        InvalidArgument: fewer than two groups, or an empty one.

    >>> gap_test([[True, False], [True, False]], rounds=50)
    (0.0, 1.0)
    """
    if len(groups) < 2 or not all(groups) or rounds < 1:
        raise InvalidArgument(f"a gap needs at least two groups with cases, got sizes {[len(g) for g in groups]}")
    sizes = [len(group) for group in groups]
    gap = _gap([sum(group) for group in groups], sizes)
    pool = [hit for group in groups for hit in group]
    generator = random.Random(seed)
    as_large = 0
    for _ in range(rounds):
        generator.shuffle(pool)
        at, hits = 0, []
        for size in sizes:
            hits.append(sum(pool[at : at + size]))
            at += size
        as_large += _gap(hits, sizes) >= gap - 1e-12
    return gap, (1 + as_large) / (1 + rounds)


def _gap(hits: Sequence[int], sizes: Sequence[int]) -> float:
    shares = [hit / size for hit, size in zip(hits, sizes, strict=True)]
    return max(shares) - min(shares)
