"""Scores against scikit-learn and scipy, closed forms and loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from jaxtyping import TypeCheckError
from scipy import integrate, stats
from sklearn import metrics as oracle

from pippin.bayes import metrics
from pippin.core.errors import InvalidArgument, InvalidInput


def predictions(seed=0, n=400, classes=4):
    generator = torch.Generator().manual_seed(seed)
    probs = (2 * torch.randn(n, classes, generator=generator, dtype=torch.float64)).softmax(-1)
    return probs, torch.randint(classes, (n,), generator=generator)


def test_proper_scores_are_scikit_learns():
    probs, labels = predictions()
    assert metrics.nll(probs, labels) == pytest.approx(oracle.log_loss(labels, probs.double().numpy()), abs=1e-6)
    assert metrics.accuracy(probs, labels) == oracle.accuracy_score(labels, probs.argmax(-1))
    two, which = predictions(classes=2)
    assert metrics.brier(two, which) == pytest.approx(2 * oracle.brier_score_loss(which, two[:, 1]), abs=1e-6)


def test_a_certainty_that_is_wrong_stays_finite():
    assert metrics.nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1])) == pytest.approx(-np.log(1e-12))


def test_calibration_error_is_that_of_a_loop():
    probs, labels = predictions(n=900)
    confidence, chosen = (part.numpy() for part in probs.double().max(-1))
    right = chosen == labels.numpy()
    expected = 0.0
    for low in range(10):
        inside = (confidence > low / 10) & (confidence <= (low + 1) / 10)
        if inside.any():
            expected += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    found = metrics.reliability(probs, labels, bins=10)
    assert found.error == pytest.approx(expected, abs=1e-9)
    assert int(found.count.sum()) == 900
    assert metrics.ece(probs, labels, bins=10) == found.error <= found.worst


def test_a_calibrated_forecaster_has_an_error_near_the_stated_bias():
    generator = torch.Generator().manual_seed(3)
    p = 0.5 + 0.5 * torch.rand(20_000, generator=generator)
    right = torch.rand(20_000, generator=generator) < p
    error = metrics.ece(torch.stack([p, 1 - p], -1), (~right).long())
    assert error < 2 * np.sqrt(15 / 20_000) / 3


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 1000))
def test_ranking_scores_are_scikit_learns_with_ties(p, n, seed):
    generator = torch.Generator().manual_seed(seed)
    positive = torch.randint(6, (p,), generator=generator) + 1
    negative = torch.randint(6, (n,), generator=generator)
    truth, scores = [1] * p + [0] * n, torch.cat([positive, negative])
    assert metrics.auroc(positive, negative) == pytest.approx(oracle.roc_auc_score(truth, scores))
    assert metrics.auprc(positive, negative) == pytest.approx(oracle.average_precision_score(truth, scores))
    false, true, _ = oracle.roc_curve(truth, scores, drop_intermediate=False)
    assert metrics.fpr_at_tpr(positive, negative, 0.8) == pytest.approx(false[np.argmax(true >= 0.8 - 1e-12)])


def test_selective_risk_counts_from_the_surest_and_averages_over_ties():
    curve = metrics.selective(torch.tensor([0.9, 0.5, 0.5, 0.1]), torch.tensor([True, False, True, False]))
    assert curve.risk.tolist() == pytest.approx([0, 0.25, 1 / 3, 0.5])
    assert curve.coverage.tolist() == [0.25, 0.5, 0.75, 1]
    assert (curve.at(0.5), curve.at(1)) == (pytest.approx(0.25), 0.5)
    assert curve.area == pytest.approx(np.mean([0, 0.25, 1 / 3, 0.5]))


def test_gaussian_scores_are_scipys():
    generator = torch.Generator().manual_seed(1)
    mean, y = torch.randn(50, generator=generator), torch.randn(50, generator=generator)
    variance = 0.1 + torch.rand(50, generator=generator)
    normal = stats.norm(mean.double().numpy(), variance.double().sqrt().numpy())
    assert metrics.gaussian_nll(mean, variance, y) == pytest.approx(-normal.logpdf(y.double().numpy()).mean())
    inside = np.abs(normal.cdf(y.double().numpy()) - 0.5) <= 0.45
    assert metrics.interval_coverage(mean, variance, y, 0.9) == pytest.approx(inside.mean())

    def crps(m, v, truth):  # its definition: the squared distance of two distribution functions
        cdf = stats.norm(m, np.sqrt(v)).cdf
        below = integrate.quad(lambda x: cdf(x) ** 2, truth - 12, truth)[0]
        return below + integrate.quad(lambda x: (1 - cdf(x)) ** 2, truth, truth + 12)[0]

    rows = zip(mean.tolist()[:5], variance.tolist()[:5], y.tolist()[:5], strict=True)
    expected = np.mean([crps(*row) for row in rows])
    assert metrics.gaussian_crps(mean[:5], variance[:5], y[:5]) == pytest.approx(expected, abs=1e-6)


def test_entropy_of_certainty_and_of_ignorance():
    assert metrics.entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).tolist() == pytest.approx([0, np.log(2)])


def test_what_is_no_prediction_is_refused_by_its_row():
    probs, labels = predictions(n=5)
    with pytest.raises(InvalidInput, match=r"row 3 is no distribution .*softmax"):
        metrics.nll(torch.cat([probs[:3], 3 * probs[3:]]), labels)
    with pytest.raises(InvalidInput, match="row 0"):
        metrics.nll(probs * torch.nan, labels)
    with pytest.raises(InvalidInput, match="labels from 4 to 4"):
        metrics.ece(probs, torch.full((5,), 4))
    with pytest.raises((InvalidInput, TypeCheckError), match=r"whole numbers|Type-check"):
        metrics.brier(probs, labels.float())
    with pytest.raises((InvalidInput, TypeCheckError), match=r"5 rows|Type-check"):
        metrics.brier(probs, labels[:4])
    with pytest.raises((InvalidInput, TypeCheckError), match=r"n >= 1|Type-check"):
        metrics.accuracy(probs[:0], labels[:0])
    with pytest.raises(InvalidArgument, match="bins"):
        metrics.ece(probs, labels, bins=0)
    with pytest.raises(InvalidInput, match="score 1 is NaN"):
        metrics.auroc(torch.tensor([0.0, torch.nan]), torch.zeros(2))
    with pytest.raises(InvalidInput, match="at least one"):
        metrics.auprc(torch.zeros(0), torch.zeros(2))
    with pytest.raises(InvalidArgument, match="tpr"):
        metrics.fpr_at_tpr(torch.zeros(2), torch.zeros(2), 0)
    with pytest.raises((InvalidInput, TypeCheckError), match=r"outcomes|Type-check"):
        metrics.selective(torch.zeros(3), torch.zeros(2))
    with pytest.raises(InvalidArgument, match="coverage"):
        metrics.selective(torch.zeros(3), torch.zeros(3)).at(0)
    with pytest.raises(InvalidInput, match="variances"):
        metrics.gaussian_nll(torch.zeros(2), torch.zeros(2), torch.zeros(2))
    with pytest.raises((InvalidInput, TypeCheckError), match=r"one shape|Type-check"):
        metrics.gaussian_crps(torch.zeros(2), torch.ones(3), torch.zeros(2))
    with pytest.raises(InvalidArgument, match="level"):
        metrics.interval_coverage(torch.zeros(2), torch.ones(2), torch.zeros(2), 1.0)


def test_plots_are_pictures(tmp_path):
    probs, labels = predictions()
    metrics.reliability(probs, labels).plot(tmp_path / "reliability.png")
    confidence, chosen = probs.max(-1)
    metrics.selective(confidence, chosen == labels).plot(tmp_path / "selective.svg")
    assert (tmp_path / "reliability.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "selective.svg").read_bytes()
