"""Rankings and correlations against scikit-learn and scipy."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats
from sklearn import metrics as oracle

from pippin import metrics
from pippin.core.errors import InvalidArgument, InvalidInput


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 1000))
def test_ranking_scores_are_scikit_learns_with_ties(p, n, seed):
    generator = torch.Generator().manual_seed(seed)
    positive = torch.randint(6, (p,), generator=generator) + 1
    negative = torch.randint(6, (n,), generator=generator)
    truth, scores = [1] * p + [0] * n, torch.cat([positive, negative])
    assert metrics.roc_auc(positive, negative) == pytest.approx(oracle.roc_auc_score(truth, scores))
    assert metrics.average_precision(positive, negative) == pytest.approx(oracle.average_precision_score(truth, scores))
    false, true, _ = oracle.roc_curve(truth, scores, drop_intermediate=False)
    assert metrics.fpr_at_tpr(positive, negative, 0.8) == pytest.approx(false[np.argmax(true >= 0.8 - 1e-12)])


def test_selective_risk_counts_from_the_surest_and_averages_over_ties():
    curve = metrics.risk_coverage_curve(torch.tensor([0.9, 0.5, 0.5, 0.1]), torch.tensor([True, False, True, False]))
    assert curve.risk.tolist() == pytest.approx([0, 0.25, 1 / 3, 0.5])
    assert curve.coverage.tolist() == [0.25, 0.5, 0.75, 1]
    assert (curve.risk_at(0.5), curve.risk_at(1)) == (pytest.approx(0.25), 0.5)
    assert curve.aurc == pytest.approx(np.mean([0, 0.25, 1 / 3, 0.5]))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=40))
def test_correlations_are_scipys_with_ties(pairs):
    first, second = (torch.tensor(part) for part in zip(*pairs, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.ConstantInputWarning)
        expected = stats.pearsonr(first, second).statistic, stats.spearmanr(first, second).statistic
    found = metrics.pearson_correlation(first, second), metrics.spearman_correlation(first, second)
    assert found == pytest.approx(expected, nan_ok=True, abs=1e-9)


def test_a_list_that_varies_by_rounding_alone_has_no_correlation():
    assert np.isnan(metrics.pearson_correlation([0.1 + 0.2, 0.3, 0.3], [1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: metrics.roc_auc([0.0, np.nan], [0.0]), InvalidInput, "positive 1 is NaN"),
        (lambda: metrics.average_precision([], [0.0]), InvalidInput, "at least one"),
        (lambda: metrics.fpr_at_tpr([0.0], [0.0], 0), InvalidArgument, "tpr must be above 0 and at most 1, got 0"),
        (lambda: metrics.risk_coverage_curve([0.0, 1.0], [1]), InvalidInput, "2 values"),
        (lambda: metrics.risk_coverage_curve([0.0], [1]).risk_at(0), InvalidArgument, "coverage"),
        (lambda: metrics.spearman_correlation([0.0, 1.0], [1.0]), InvalidInput, "pairs"),
    ],
)
def test_what_cannot_be_ranked_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_plot_is_an_image(tmp_path):
    metrics.risk_coverage_curve([0.9, 0.1, 0.4], [True, False, True]).plot(tmp_path / "curve.svg")
    assert b"<svg" in (tmp_path / "curve.svg").read_bytes()
