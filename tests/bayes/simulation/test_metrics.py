"""Oracles for the scores: intervals counted by hand, scipy's distributions, Gaussians told apart by Bayes' rule."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from jaxtyping import TypeCheckError

from pippin.bayes.simulation.metrics import (
    acauc,
    c2st,
    detect_misspecification,
    ks_uniform,
    lpp,
    mmd_test,
    posterior_ranks,
    simulation_based_calibration,
)
from pippin.bayes.simulation.npe import NPE, DensityEstimatorConfig
from pippin.bayes.simulation.priors import BoxPrior
from pippin.core.errors import InvalidArgument, InvalidInput, Misspecified


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_lpp_is_a_mean_that_an_excluded_truth_makes_infinite():
    assert lpp(torch.tensor([-1.0, -2.0, -6.0])) == -3.0
    assert lpp(torch.tensor([-1.0, -math.inf])) == -math.inf
    with pytest.raises(InvalidInput, match="no log densities"):
        lpp(torch.zeros(0))
    with pytest.raises(InvalidInput, match=r"NaN or infinite in 1 of 2 rows \(1\)"):
        lpp(torch.tensor([0.0, math.nan]))


def test_acauc_is_the_area_between_coverage_and_level():
    """The integral, level by level, from intervals between quantiles of the draws."""
    draws, theta = normal(2000, 30, 2), normal(30, 2, seed=1) * 1.7
    levels = torch.linspace(0.0025, 0.9975, 200)
    lows, highs = draws.quantile((1 - levels) / 2, dim=0), draws.quantile((1 + levels) / 2, dim=0)
    areas = []
    for level, low, high in zip(levels, lows, highs, strict=True):
        areas.append(level - ((theta >= low) & (theta <= high)).float().mean())
    assert acauc(posterior_ranks(draws, theta)) == pytest.approx(float(torch.stack(areas).mean()), abs=5e-3)


@pytest.mark.parametrize(("spread", "sign"), [(0.3, 1), (3.0, -1)])
def test_narrow_posteriors_are_over_confident_and_wide_ones_under_confident(spread, sign):
    draws, theta = spread * normal(500, 400, 1), normal(400, 1, seed=1)
    assert sign * acauc(posterior_ranks(draws, theta)) > 0.15
    assert abs(acauc(posterior_ranks(normal(500, 400, 1, seed=2), theta))) < 0.05


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30))
def test_acauc_lies_in_its_range_and_does_not_know_left_from_right(values):
    given_ranks = torch.tensor(values)[:, None]
    score = acauc(given_ranks)
    assert -0.5 <= score <= 0.5
    assert acauc(1 - given_ranks) == pytest.approx(score, abs=1e-6)


def test_bad_ranks():
    with pytest.raises(InvalidInput, match="between 0 and 1"):
        acauc(torch.tensor([[1.5]]))
    with pytest.raises(InvalidInput, match="between 0 and 1"):
        acauc(torch.tensor([[math.nan]]))
    with pytest.raises(InvalidInput, match="at least one"):
        acauc(torch.zeros(0, 2))
    with pytest.raises((InvalidInput, TypeCheckError)):
        posterior_ranks(normal(10, 3, 2), normal(4, 2))
    with pytest.raises(InvalidInput, match="not finite"):
        posterior_ranks(normal(10, 3, 2) / 0, normal(3, 2))


@pytest.mark.parametrize("shift", [0.0, 1.0, 6.0])
def test_c2st_comes_to_the_accuracy_of_bayes_rule(shift):
    first, second = normal(700, 2), normal(900, 2, seed=1)
    second[:, 0] += shift
    best = 0.5 * (1 + math.erf(shift / 2 / math.sqrt(2)))  # two unit Gaussians, the border half way between
    assert c2st(first, second) == pytest.approx(best, abs=0.035)
    assert c2st(first[:60], second[:60]) == c2st(first[:60], second[:60])


def test_bad_samples_for_c2st():
    with pytest.raises(InvalidInput, match="in 5 folds"):
        c2st(normal(3, 2), normal(10, 2))
    with pytest.raises((InvalidInput, TypeCheckError)):
        c2st(normal(10, 3), normal(10, 2))
    with pytest.raises(InvalidInput, match="second sample is not finite"):
        c2st(normal(10, 2), normal(10, 2) / 0)
    with pytest.raises(InvalidArgument, match="folds must be"):
        c2st(normal(10, 2), normal(10, 2), folds=1)


@pytest.mark.parametrize(("n", "power"), [(20, 1.0), (200, 1.0), (200, 1.2), (1000, 1.1)])
def test_the_p_value_of_uniformity_is_scipys(n, power):
    stats = pytest.importorskip("scipy.stats")
    values = torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64) ** power
    assert ks_uniform(values) == pytest.approx(stats.kstest(values.numpy(), "uniform").pvalue, abs=0.01)


@pytest.mark.parametrize("draws", [9, 99])
def test_a_right_posterior_is_calibrated_and_a_narrow_one_is_not(draws):
    # theta ~ N(0, 1), x = theta + N(0, 1): the posterior is N(x / 2, 1 / 2)
    theta = normal(400, 2)
    mean = (theta + normal(400, 2, seed=1)) / 2
    right = simulation_based_calibration(theta, mean + 0.5**0.5 * normal(draws, 400, 2, seed=2))
    narrow = simulation_based_calibration(theta, mean + 0.3 * normal(draws, 400, 2, seed=2))
    assert min(right.p_values) > 0.02
    assert max(narrow.p_values) < 1e-6
    assert narrow.acauc > 0.1
    with pytest.raises(InvalidInput, match="5 observations are too few"):
        simulation_based_calibration(theta[:5], normal(9, 5, 2))


def test_mmd_is_the_double_sum_over_the_kernel():
    first, second = normal(7, 2).double(), normal(5, 2, seed=1).double() + 1
    pooled = torch.cat([first, second])
    distances = torch.pdist(pooled).square()
    width = torch.cat([distances, distances]).median()

    def kernel(a, b):
        return sum(math.exp(-float((p - q).square().sum() / (2 * width))) for p in a for q in b) / (len(a) * len(b))

    squared = kernel(first, first) + kernel(second, second) - 2 * kernel(first, second)
    assert mmd_test(first, second).mmd == pytest.approx(math.sqrt(squared), rel=1e-9)


def test_p_values_are_uniform_under_equal_distributions_and_small_under_others():
    p_values = torch.tensor(
        [mmd_test(normal(20, 2, seed=s), normal(30, 2, seed=500 + s), permutations=99).p_value for s in range(100)]
    )
    assert ks_uniform(p_values) > 0.01
    assert mmd_test(normal(50, 2), normal(50, 2, seed=1) + 1).p_value == pytest.approx(1 / 501)
    # one observation has as many places as there are observations: far outside it is the farthest of 201
    assert mmd_test(torch.full((1, 2), 9.0), normal(200, 2)).p_value < 0.03


def test_bad_samples_for_mmd():
    with pytest.raises(InvalidArgument, match="permutations must be"):
        mmd_test(normal(5, 2), normal(5, 2), permutations=5)
    for first, second in ((normal(0, 2), normal(5, 2)), (normal(5, 3), normal(5, 2))):
        with pytest.raises((InvalidInput, TypeCheckError)):
            mmd_test(first, second)
    with pytest.raises(InvalidInput, match="first sample is not finite"):
        mmd_test(normal(5, 2) / 0, normal(5, 2))


def test_reality_unlike_the_simulator_is_warned_of(recwarn):
    def simulator(theta, generator):
        return theta + 0.3 * torch.randn(theta.shape, generator=generator)

    npe = NPE(
        BoxPrior([0.0, 0.0], [1.0, 1.0]), flow=DensityEstimatorConfig("affine", num_transforms=1, hidden_sizes=(8,))
    )
    npe.fit(simulator, steps=2, batch_size=32)
    theta = npe.prior.sample(100, torch.Generator().manual_seed(5))
    alike = simulator(theta, torch.Generator().manual_seed(6))
    assert detect_misspecification(npe, alike).p_value > 0.01
    assert not recwarn.list
    with pytest.warns(Misspecified, match=r"100 observations differ .*RobustPosteriorEstimation"):
        found = detect_misspecification(npe, alike + 1)
    assert found.mmd > 3 * found.null
    with pytest.raises(InvalidArgument, match="level"):
        detect_misspecification(npe, alike, level=0.0)
    with pytest.raises(InvalidInput, match="not finite"):
        detect_misspecification(npe, alike / 0)
