"""Scores of Gaussian predictions against scipy and their definitions."""

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError
from scipy import integrate, stats

from pippin import metrics
from pippin.core.errors import InvalidArgument, InvalidInput


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


def test_what_is_no_gaussian_is_refused():
    with pytest.raises(InvalidInput, match="variances"):
        metrics.gaussian_nll(torch.zeros(2), torch.zeros(2), torch.zeros(2))
    with pytest.raises((InvalidInput, TypeCheckError), match=r"same shape|Type-check"):
        metrics.gaussian_crps(torch.zeros(2), torch.ones(3), torch.zeros(2))
    with pytest.raises(InvalidArgument, match="level"):
        metrics.interval_coverage(torch.zeros(2), torch.ones(2), torch.zeros(2), 1.0)
