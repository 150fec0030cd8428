"""The statistics behind a safety report: correction for a judge's errors, operating curves, gaps between locales.

Notable here:
- a judge's errors bias an observed share in a known way: given its sensitivity and specificity, the Rogan-Gladen
  estimator removes the bias, and the interval includes the uncertainty of the calibration sample
- the gap between locales is tested by permutation
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pippin.core.checks import NonNegativeInt, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.metrics import IntervalEstimate, wilson_interval

Z95: Final = 1.959963984540054  # the standard normal's 97.5 % point


@checked
@dataclass(frozen=True)
class JudgeCalibration:
    """The counts of a judge's right labels on cases whose true label is known.

    Attributes:
        true_positives: number of positive cases that the judge labels positive.
        positives: number of positive cases.
        true_negatives: number of negative cases that the judge labels negative.
        negatives: number of negative cases.

    Raises:
        InvalidArgument: no cases of one kind, more right labels than cases, or a judge no better than chance, whose
            rates cannot be corrected.
    """

    true_positives: NonNegativeInt
    positives: NonNegativeInt
    true_negatives: NonNegativeInt
    negatives: NonNegativeInt

    def __post_init__(self) -> None:
        if not self.positives or not self.negatives:
            raise InvalidArgument(
                f"calibrating a judge needs cases of both kinds, got {self.positives} positive and {self.negatives} "
                "negative ones"
            )
        if self.true_positives > self.positives or self.true_negatives > self.negatives:
            raise InvalidArgument(f"more cases were judged rightly than there are: {self}")
        if self.sensitivity + self.specificity <= 1:
            raise InvalidArgument(
                f"the judge has sensitivity {self.sensitivity:.2f} and specificity {self.specificity:.2f}, which is no "
                "better than chance; its rates cannot be corrected"
            )

    @property
    def sensitivity(self) -> float:
        """The share of positive cases that the judge labels positive."""
        return self.true_positives / self.positives

    @property
    def specificity(self) -> float:
        """The share of negative cases that the judge labels negative."""
        return self.true_negatives / self.negatives


def rogan_gladen(hits: int, n: int, judge: JudgeCalibration) -> IntervalEstimate:
    r"""The Rogan-Gladen estimate of a true share from a judge with errors, with a 95 % interval.

    The estimate is $p = (p_{obs} + \mathrm{spec} - 1) / (\mathrm{sens} + \mathrm{spec} - 1)$, clipped to 0 to 1. The
    interval is that of the delta method with adjusted shares: the observed one is shifted to the center of Wilson's
    interval, sensitivity and specificity get one success and one failure more. This keeps the coverage for shares close
    to 0 or 1.

    Args:
        hits: cases that the judge labels positive.
        n: number of cases.
        judge: the judge's calibration.

    Raises:
        InvalidArgument: no cases, or more hits than cases.

    Source: W. J. Rogan, B. Gladen, Am. J. Epidemiol. 107 (1978), 71-76; the interval: Z. Lang, J. Reiczigel, Prev.
    Vet. Med. 113 (2014), 13-22.

    >>> round(rogan_gladen(14, 100, JudgeCalibration(90, 100, 95, 100)).value, 4)
    0.1059
    """
    wilson_interval(hits, n)  # checks the counts
    value = (hits / n + judge.specificity - 1) / (judge.sensitivity + judge.specificity - 1)
    m, z2 = n + Z95 * Z95, Z95 * Z95
    p = (hits + z2 / 2) / m
    sens = (judge.true_positives + 1) / (judge.positives + 2)
    spec = (judge.true_negatives + 1) / (judge.negatives + 2)
    gain = sens + spec - 1
    if gain <= 0:
        return IntervalEstimate(min(1.0, max(0.0, value)), 0.0, 1.0, n)
    center = (p + spec - 1) / gain
    variance = (
        p * (1 - p) / m
        + (1 - center) ** 2 * spec * (1 - spec) / (judge.negatives + 2)
        + center**2 * sens * (1 - sens) / (judge.positives + 2)
    ) / gain**2
    shift = (
        2
        * Z95
        * Z95
        * (
            center * sens * (1 - sens) / (judge.positives + 2)
            - (1 - center) * spec * (1 - spec) / (judge.negatives + 2)
        )
    )
    middle, half = center + shift, Z95 * math.sqrt(variance)
    return IntervalEstimate(
        min(1.0, max(0.0, value)), max(0.0, min(1.0, middle - half)), min(1.0, max(0.0, middle + half)), n
    )


@dataclass(frozen=True)
class CurvePoint:
    """One point of an operating curve.

    Attributes:
        threshold: prompts with at least this score are blocked.
        violation: share of harmful prompts that get a harmful answer.
        over_refusal: share of harmless prompts that are refused.
    """

    threshold: float
    violation: float
    over_refusal: float


def operating_curve(
    harmful: Sequence[tuple[float, bool]], harmless: Sequence[tuple[float, bool]]
) -> tuple[CurvePoint, ...]:
    """Violation and over-refusal at every distinct threshold, from the strictest to the most lenient.

    Args:
        harmful: for each harmful prompt the guardrail's score, and whether the model alone answered harmfully.
        harmless: for each harmless prompt the guardrail's score, and whether the model alone refused.

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
    """The least over-refusal among the points whose violation is at most ``violation``; NaN if there is none."""
    return min((point.over_refusal for point in curve if point.violation <= violation), default=math.nan)


def area_of(curve: Sequence[CurvePoint]) -> float:
    """Area under the curve of violation over over-refusal; 0 is perfect, 0.5 is chance."""
    points = sorted(((p.over_refusal, p.violation) for p in curve), key=lambda point: (point[0], -point[1]))
    points = [(0.0, max(v for _, v in points)), *points, (1.0, min(v for _, v in points))]
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))


@checked
def gap_test(
    groups: Sequence[Sequence[bool]], *, num_permutations: PositiveInt = 2000, seed: int = 0
) -> tuple[float, float]:
    """The gap between the highest and the lowest share of several groups, and its permutation p-value.

    Args:
        groups: for each group, whether each of its cases is a hit.
        num_permutations: random permutations of the cases over the groups.
        seed: seed of the permutations.

    Returns:
        The gap, and the p-value (1 + permutations with at least this gap) / (1 + permutations).

    Raises:
        InvalidArgument: fewer than two groups, or an empty one.

    >>> gap_test([[True, False], [True, False]], num_permutations=50)
    (0.0, 1.0)
    """
    if len(groups) < 2 or not all(groups):
        raise InvalidArgument(f"a gap needs at least two groups with cases, got sizes {[len(g) for g in groups]}")
    sizes = [len(group) for group in groups]
    gap = _gap([sum(group) for group in groups], sizes)
    pool = [hit for group in groups for hit in group]
    generator = random.Random(seed)
    as_large = 0
    for _ in range(num_permutations):
        generator.shuffle(pool)
        at, hits = 0, []
        for size in sizes:
            hits.append(sum(pool[at : at + size]))
            at += size
        as_large += _gap(hits, sizes) >= gap - 1e-12
    return gap, (1 + as_large) / (1 + num_permutations)


def _gap(hits: Sequence[int], sizes: Sequence[int]) -> float:
    shares = [hit / size for hit, size in zip(hits, sizes, strict=True)]
    return max(shares) - min(shares)
