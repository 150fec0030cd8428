"""Split conformal intervals: coverage is Beta distributed over calibration sets, whatever the model and the noise."""

import math

import pytest
import torch
from scipy import stats

from pippin.bayes import ConformalPredictor, Prediction
from pippin.core.errors import InvalidArgument, InvalidInput, NotFitted


def wrong_model(x):
    """Predicts 0, with a variance that is too small by a factor and depends on x."""
    return Prediction(torch.zeros(len(x), 1), covariance=(0.1 + x[:, :1] ** 2)[:, :, None])


def heavy(n, seed):
    """Cauchy noise whose scale depends on x: no Gaussian interval covers it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, generator=generator, dtype=torch.float64)
    u = torch.rand(n, 1, generator=generator, dtype=torch.float64)
    return x, (1 + x.abs()) * torch.tan(math.pi * (u - 0.5))


@pytest.mark.parametrize("score", ["normalized", "absolute"])
@pytest.mark.parametrize(("n", "level"), [(19, 0.9), (60, 0.8)])
def test_coverage_over_calibration_sets_is_beta(score, n, level):
    x, y = heavy(20_000, 0)
    found = []
    for seed in range(300):
        conformal = ConformalPredictor(wrong_model, score=score).fit([heavy(n, seed + 1)])
        low, high = conformal.interval(x, level)
        found.append(float(((low <= y) & (y <= high)).double().mean()))
    rank = math.ceil((n + 1) * level)
    beta = stats.beta(rank, n + 1 - rank)
    assert stats.kstest(found, beta.cdf).pvalue > 1e-3
    assert sum(found) / len(found) == pytest.approx(rank / (n + 1), abs=4 * beta.std() / math.sqrt(len(found)))


def test_the_width_is_the_score_of_that_rank():
    x, y = (part.float() for part in heavy(99, 7))
    low, high = ConformalPredictor(wrong_model, score="absolute").fit([(x[:50], y[:50]), (x[50:], y[50:])]).interval(x)
    torch.testing.assert_close(high, y.abs().sort(0).values[94].expand(99, 1), rtol=1e-12, atol=0)
    assert torch.equal(low, -high)


def test_gaussian_intervals_are_those_of_scipy():
    prediction = Prediction(torch.tensor([[1.0, -2.0]]), torch.tensor([[[3.0, 0.0], [0.0, 8.0]]]), noise=1.0)
    low, high = prediction.interval(0.9)
    for output, (mean, deviation) in enumerate([(1.0, 2.0), (-2.0, 3.0)]):
        assert (low[0, output].item(), high[0, output].item()) == pytest.approx(
            stats.norm(mean, deviation).interval(0.9), rel=1e-6
        )


def test_bad_input_names_the_value():
    conformal = ConformalPredictor(wrong_model)
    x, y = heavy(18, 0)
    with pytest.raises(NotFitted, match="call fit"):
        conformal.interval(x)
    with pytest.raises(InvalidInput, match=r"an interval of level 0\.9 needs 9 calibration examples, got 8"):
        conformal.fit([(x[:8], y[:8])]).interval(x, 0.9)
    conformal.fit([(x[:9], y[:9])]).interval(x, 0.9)
    with pytest.raises(InvalidArgument, match="level must be above 0 and below 1, got 1"):
        conformal.interval(x, 1)
    with pytest.raises(InvalidInput, match="not finite"):
        conformal.fit([(x, y * torch.nan)])
    with pytest.raises(InvalidInput, match="not finite, or has no variance"):
        ConformalPredictor(lambda x: Prediction(torch.zeros(len(x), 1))).fit([(x, y)])
    with pytest.raises(InvalidArgument, match="score must be"):
        ConformalPredictor(wrong_model, score="relative")
    classes = Prediction(torch.zeros(18, 2), probs=torch.full((18, 2), 0.5))
    with pytest.raises(InvalidInput, match="are for regressions"):
        ConformalPredictor(lambda x: classes).fit([(x, y)])
    with pytest.raises(InvalidArgument, match="intervals are for regressions"):
        classes.interval()
