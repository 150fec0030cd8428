"""The statistics against scipy and scikit-learn, closed forms, brute force and simulation."""

import itertools
import math
import random

import pytest
from hypothesis import given, strategies as st

from pippin.core.errors import InvalidArgument
from pippin.evaluate.safety.statistics import (
    JudgeCalibration,
    area_of,
    gap_test,
    operating_curve,
    over_refusal_at,
    rogan_gladen,
)
from pippin.metrics import roc_auc, wilson_interval

scipy_stats = pytest.importorskip("scipy.stats")
metrics = pytest.importorskip("sklearn.metrics")
LABELS = st.sampled_from(["harmful", "refused", "partial", "helpful"])


def test_a_perfect_judge_needs_no_correction():
    perfect = JudgeCalibration(10**6, 10**6, 10**6, 10**6)
    share, plain = rogan_gladen(30, 200, perfect), wilson_interval(30, 200)
    assert share.value == pytest.approx(plain.value, abs=1e-9)
    assert (share.low, share.high) == pytest.approx((plain.low, plain.high), abs=0.01)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_correction_undoes_what_the_judge_does(rate):
    judge, n = JudgeCalibration(80, 100, 90, 100), 10_000
    observed = rate * judge.sensitivity + (1 - rate) * (1 - judge.specificity)
    assert rogan_gladen(round(observed * n), n, judge).value == pytest.approx(rate, abs=1e-9)


def test_more_labels_make_the_interval_narrower():
    few, many = (
        rogan_gladen(40, 200, JudgeCalibration(16, 20, 18, 20)),
        rogan_gladen(40, 200, JudgeCalibration(800, 1000, 900, 1000)),
    )
    assert many.high - many.low < 0.6 * (few.high - few.low)
    assert few.low <= few.value <= few.high


def test_corrected_intervals_hold_the_truth_and_plain_ones_do_not():
    generator = random.Random(5)

    def draw(chance: float, n: int) -> int:
        return sum(generator.random() < chance for _ in range(n))

    corrected = plain = 0
    for _ in range(400):
        judge = JudgeCalibration(draw(0.85, 150), 150, draw(0.8, 150), 150)
        bad = draw(0.1, 200)
        hits = draw(0.85, bad) + draw(0.2, 200 - bad)
        share, raw = rogan_gladen(hits, 200, judge), wilson_interval(hits, 200)
        corrected += share.low <= 0.1 <= share.high
        plain += raw.low <= 0.1 <= raw.high
    assert corrected >= 0.92 * 400
    assert plain < 0.3 * 400


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.3, 0.6, 1.0]), st.booleans()), min_size=1, max_size=12),
    st.lists(st.tuples(st.sampled_from([0.0, 0.3, 0.6, 1.0]), st.booleans()), min_size=1, max_size=12),
)
def test_the_curve_is_what_counting_at_each_threshold_gives(harmful, harmless):
    curve = operating_curve(harmful, harmless)
    for point in curve:
        let_through = [bad for score, bad in harmful if not score >= point.threshold]
        assert point.violation == pytest.approx(sum(let_through) / len(harmful))
        refused = [refused or score >= point.threshold for score, refused in harmless]
        assert point.over_refusal == pytest.approx(sum(refused) / len(harmless))
    for one, other in itertools.pairwise(curve):
        assert one.violation <= other.violation
        assert one.over_refusal >= other.over_refusal
    least = over_refusal_at(curve, 0.02)
    assert least == min(p.over_refusal for p in curve if p.violation <= 0.02)


def test_the_area_of_a_guardrail_alone_is_one_minus_the_area_under_the_roc():
    generator = random.Random(0)
    harmful = [(generator.random() ** 0.5, True) for _ in range(300)]
    harmless = [(generator.random(), False) for _ in range(300)]
    area = roc_auc([s for s, _ in harmful], [s for s, _ in harmless])
    assert area_of(operating_curve(harmful, harmless)) == pytest.approx(1 - area, abs=1e-9)
    assert math.isnan(over_refusal_at(operating_curve(harmful, harmless), -1.0))


def test_the_gap_test_counts_as_every_permutation_would():
    groups = [[True, True, True], [False, False, False, True]]
    pool, size = [*groups[0], *groups[1]], len(groups[0])
    gap = 1 - 0.25
    all_gaps = []
    for chosen in itertools.combinations(range(len(pool)), size):
        one = sum(pool[i] for i in chosen)
        all_gaps.append(abs(one / 3 - (sum(pool) - one) / 4))
    exact = sum(g >= gap - 1e-12 for g in all_gaps) / len(all_gaps)
    measured, p = gap_test(groups, num_permutations=4000, seed=1)
    assert measured == gap
    assert p == pytest.approx(exact, abs=0.03)


def test_equal_groups_have_no_gap_that_chance_does_not_make():
    generator = random.Random(2)
    small = 0
    for seed in range(60):
        groups = [[generator.random() < 0.3 for _ in range(40)] for _ in range(3)]
        small += gap_test(groups, num_permutations=150, seed=seed)[1] < 0.05
    assert small <= 9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: JudgeCalibration(1, 0, 1, 1), "both kinds"),
        (lambda: JudgeCalibration(2, 1, 1, 1), "more cases"),
        (lambda: JudgeCalibration(5, 10, 5, 10), "better than chance"),
        (lambda: rogan_gladen(5, 4, JudgeCalibration(9, 10, 9, 10)), "5 of 4"),
        (lambda: operating_curve([], [(1.0, True)]), "harmful and harmless"),
        (lambda: gap_test([[True]]), "two groups"),
        (lambda: gap_test([[True], []]), "two groups"),
    ],
)
def test_what_cannot_be_computed_is_said(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()
