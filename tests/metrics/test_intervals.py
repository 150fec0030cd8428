"""Intervals against scipy, and what they cover."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

from pippin import metrics
from pippin.core.errors import InvalidArgument, InvalidInput


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 0.99))
def test_wilson_is_scipys(case, level):
    hits, n = case
    expected = stats.binomtest(hits, n).proportion_ci(level, method="wilson")
    share = metrics.wilson_interval(hits, n, level=level)
    assert (share.value, share.n) == (hits / n, n)
    assert (share.low, share.high) == pytest.approx((expected.low, expected.high), abs=1e-9)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 11, 30, 1001, 3000])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_the_interval_of_a_mean_is_students(n, level):
    values = np.random.default_rng(n).normal(3, 2, n)
    wanted = stats.t.interval(level, n - 1, values.mean(), stats.sem(values))
    found = metrics.mean_interval(values, level=level)
    assert (found.low, found.high) == pytest.approx(wanted, rel=1e-6)
    assert metrics.mean_interval([1.5]) == metrics.IntervalEstimate(1.5, 1.5, 1.5, 1)


def test_a_paired_difference_is_the_interval_of_scipys_paired_test():
    generator = np.random.default_rng(0)
    first = generator.normal(0, 5, 8)
    second = first + generator.normal(1, 0.1, 8)
    wanted = stats.ttest_rel(first, second).confidence_interval(0.95)
    found = metrics.paired_difference(first, second)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))


def test_the_bootstrap_agrees_with_scipys():
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=(2, 60))
    y = y + 0.5 * x
    wanted = stats.bootstrap(
        (x, y),
        metrics.spearman_correlation,
        paired=True,
        vectorized=False,
        method="percentile",
        n_resamples=4000,
        rng=0,
    ).confidence_interval
    found = metrics.bootstrap_interval(x, y, statistic=metrics.spearman_correlation, num_resamples=4000)
    assert found.value == metrics.spearman_correlation(x, y)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=0.02)
    again = metrics.bootstrap_interval(x, y, statistic=metrics.spearman_correlation, num_resamples=4000)
    assert found == again


def test_percentiles_are_numpys_and_nan_is_said_or_skipped():
    samples = np.random.default_rng(2).normal(size=(3, 500))
    expected = np.percentile(samples, [2.5, 97.5], axis=1)
    np.testing.assert_allclose(metrics.percentile_interval(samples, axis=1), expected)
    samples[0, 0] = np.nan
    assert np.isnan(metrics.percentile_interval(samples, axis=1)[:, 0]).all()
    assert np.isfinite(metrics.percentile_interval(samples, axis=1, skip_nan=True)).all()
    assert metrics.percentile_interval([1.0, np.inf, np.inf], method="nearest").tolist() == [1.0, np.inf]
    assert metrics.percentile_interval(np.zeros((0, 4))).shape == (2, 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: metrics.wilson_interval(1, 0), InvalidArgument, "n must be at least 1"),
        (lambda: metrics.wilson_interval(3, 2), InvalidArgument, "3 of 2"),
        (lambda: metrics.mean_interval([]), InvalidInput, "at least one"),
        (lambda: metrics.paired_difference([1.0], [1.0, 2.0]), InvalidInput, "pairs"),
        (lambda: metrics.bootstrap_interval([1.0], [1.0, 2.0]), InvalidInput, "same length"),
        (lambda: metrics.bootstrap_interval([1.0], level=1.0), InvalidArgument, "level"),
    ],
)
def test_what_has_no_interval_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_intervals_and_rankings_load_no_torch():
    code = "import sys; from pippin import metrics; metrics.mean_interval([1.0]); metrics.roc_auc([1], [0])"
    assert subprocess.run([sys.executable, "-c", code + "; sys.exit('torch' in sys.modules)"]).returncode == 0
