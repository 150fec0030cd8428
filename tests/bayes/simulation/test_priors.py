"""Oracles for priors and their supports: torch's distributions, a Jacobian by autograd, round trips, errors."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pippin.bayes.simulation.priors import BoxPrior, GaussianPrior, Support
from pippin.core.errors import InvalidArgument, InvalidInput


class HalfLine:
    """Two parameters bounded on one side each: above 1, and below -2."""

    low, high = torch.tensor([1.0, -math.inf]), torch.tensor([math.inf, -2.0])

    def sample(self, n, generator=None):
        away = torch.randn(n, 2, generator=generator).exp()
        return torch.stack([1 + away[:, 0], -2 - away[:, 1]], -1)

    def log_prob(self, theta):
        raise NotImplementedError


PRIORS = {
    "box": BoxPrior([-1.0, 0.5], [3.0, 10.0]),
    "gaussian": GaussianPrior([1.0, -4.0], [2.0, 0.1]),
    "half": HalfLine(),
}


def test_densities_are_those_of_torch():
    theta = torch.tensor([[0.0, 1.0], [2.5, 9.0], [0.1, -4.0]])
    box = torch.distributions.Uniform(PRIORS["box"].low, PRIORS["box"].high, validate_args=False)
    torch.testing.assert_close(PRIORS["box"].log_prob(theta), box.log_prob(theta).sum(-1))
    normal = torch.distributions.Normal(PRIORS["gaussian"].mean, PRIORS["gaussian"].sd)
    torch.testing.assert_close(PRIORS["gaussian"].log_prob(theta), normal.log_prob(theta).sum(-1))


@pytest.mark.parametrize("name", ["box", "gaussian"])
def test_draws_follow_the_density_and_the_seed(name):
    prior = PRIORS[name]
    before = torch.random.get_rng_state()
    draws = prior.sample(20_000, torch.Generator().manual_seed(0))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(draws, prior.sample(20_000, torch.Generator().manual_seed(0)))
    mean = (prior.low + prior.high) / 2 if name == "box" else prior.mean
    sd = (prior.high - prior.low) / 12**0.5 if name == "box" else prior.sd
    torch.testing.assert_close((draws.mean(0) - mean) / sd, torch.zeros(2), rtol=0, atol=0.03)
    torch.testing.assert_close(draws.std(0) / sd, torch.ones(2), rtol=0, atol=0.03)


@pytest.mark.parametrize("name", list(PRIORS))
def test_support_inverts_and_its_determinant_is_that_of_autograd(name):
    support = Support(PRIORS[name]).double()
    theta = PRIORS[name].sample(50, torch.Generator().manual_seed(1)).double()
    u, log_det = support.free(theta)
    torch.testing.assert_close(support.bound(u), theta, rtol=1e-6, atol=1e-6)
    for row in range(5):
        jacobian = torch.autograd.functional.jacobian(lambda t: support.free(t[None])[0][0], theta[row])
        torch.testing.assert_close(jacobian.logdet(), log_det[row], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", list(PRIORS))
def test_free_space_is_standardized(name):
    u, _ = Support(PRIORS[name]).free(PRIORS[name].sample(8192, torch.Generator().manual_seed(2)))
    assert u.mean(0).abs().max() < 0.06
    assert (u.std(0) - 1).abs().max() < 0.06


@settings(max_examples=50, deadline=None)
@given(st.floats(-200, 200), st.floats(-200, 200))
def test_no_point_of_free_space_leaves_the_bounds(a, b):
    for prior in PRIORS.values():
        support = Support(prior)
        assert support.inside(support.bound(torch.tensor([[a, b]])).clamp(-1e30, 1e30)).all()


def test_bounds_themselves_are_inside_and_finite():
    support = Support(BoxPrior([0.0], [1.0]))
    edge = torch.tensor([[0.0], [1.0]])
    u, log_det = support.free(edge)
    assert u.isfinite().all()
    assert log_det.isfinite().all()
    assert support.inside(edge).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BoxPrior([0.0], [1.0, 2.0]), "1 lower bounds and 2 upper"),
        (lambda: BoxPrior([1.0], [1.0]), "low must be below high"),
        (lambda: BoxPrior([], []), "list of finite numbers"),
        (lambda: BoxPrior([0.0], [math.inf]), "list of finite numbers"),
        (lambda: GaussianPrior([0.0], [0.0]), "above 0"),
        (lambda: GaussianPrior([0.0, 1.0], [1.0]), "2 means and 1"),
    ],
)
def test_bad_priors(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_bad_parameters_are_named():
    support = Support(BoxPrior([0.0, 0.0], [1.0, 1.0]))
    with pytest.raises(
        InvalidInput, match=r"outside of the prior's bounds in 1 of 2 rows \(1\), for instance \[0.5, 2.0\]"
    ):
        support.check(torch.tensor([[0.5, 0.5], [0.5, 2.0]]))
    with pytest.raises(InvalidInput, match="not finite in 1 of 1 rows"):
        support.check(torch.tensor([[0.5, math.nan]]))
    with pytest.raises(InvalidInput, match="has 2 parameters"):
        support.check(torch.zeros(3, 1))
