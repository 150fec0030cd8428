"""Mixtures against torch's distributions, quadrature and automatic differentiation."""

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

from pippin.core.errors import InvalidArgument
from pippin.generate.diffusion.gaussian_mixture import GaussianMixture, exact_denoiser
from pippin.generate.diffusion.schedules import NoiseSchedule

COVARIANCES = torch.tensor([[[0.5, 0.3], [0.3, 0.4]], [[0.2, -0.1], [-0.1, 0.3]]], dtype=torch.float64)
MIXTURE = GaussianMixture([1.0, 3.0], [[-1.0, 0.5], [1.0, 0.0]], COVARIANCES)
X = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def noised(a: float, s: float) -> MixtureSameFamily:
    covariances = a * a * COVARIANCES + s * s * torch.eye(2, dtype=torch.float64)
    return MixtureSameFamily(Categorical(MIXTURE.weights), MultivariateNormal(a * MIXTURE.means, covariances))


@pytest.mark.parametrize(("a", "s"), [(1.0, 0.0), (0.8, 0.6), (0.1, 0.99), (1.0, 5.0)])
def test_densities_are_those_of_torch(a, s):
    torch.testing.assert_close(MIXTURE.log_prob(X, a, s), noised(a, s).log_prob(X))


@pytest.mark.parametrize(("a", "s"), [(0.8, 0.6), (0.1, 0.99), (1.0, 5.0)])
def test_the_score_is_the_gradient_of_the_density_and_the_parts_add_up(a, s):
    x = X.clone().requires_grad_()
    gradient = torch.autograd.grad(noised(a, s).log_prob(x).sum(), x)[0]
    found = MIXTURE.estimate(X, a, s)
    torch.testing.assert_close(found.score(s), gradient)
    torch.testing.assert_close(a * found.x0 + s * found.eps, X)


def test_the_mean_of_the_data_is_that_of_an_integral():
    mixture = GaussianMixture([0.35, 0.65], [[-1.2], [0.8]], [0.15**2, 0.3**2])
    x0 = torch.linspace(-4, 4, 20_001, dtype=torch.float64)
    for x, t in ((-0.5, 0.3), (0.4, 0.8)):
        schedule = NoiseSchedule.flow()
        weight = (mixture.log_prob(x0[:, None]) - 0.5 * ((x - schedule.a(t) * x0) / schedule.s(t)) ** 2).exp()
        wanted = torch.trapezoid(weight * x0, x0) / torch.trapezoid(weight, x0)
        found = exact_denoiser(mixture, schedule)(torch.tensor([[x]], dtype=torch.float64), t)
        assert float(found.x0) == pytest.approx(float(wanted), abs=1e-8)


def test_samples_have_the_moments_and_the_seed_decides_them():
    x = MIXTURE.sample(200_000, seed=3).double()
    mean = MIXTURE.weights @ MIXTURE.means
    spread = MIXTURE.means - mean
    within = (MIXTURE.weights[:, None, None] * COVARIANCES).sum(0)
    covariance = within + torch.einsum("k,ki,kj->ij", MIXTURE.weights, spread, spread)
    torch.testing.assert_close(x.mean(0), mean, rtol=0, atol=0.01)
    torch.testing.assert_close(x.T.cov(), covariance, rtol=0, atol=0.01)
    assert torch.equal(MIXTURE.sample(5, seed=3), MIXTURE.sample(5, seed=3))
    assert not torch.equal(MIXTURE.sample(5, seed=3), MIXTURE.sample(5, seed=4))


def test_pictures_are_flattened_and_points_have_no_spread():
    points = GaussianMixture([1.0, 1.0], torch.tensor([[0.0] * 4, [1.0] * 4]), [0.0, 0.0])
    x = torch.full((3, 1, 2, 2), 0.9)
    found = points.estimate(x, 1.0, 0.1)
    assert found.x0.shape == x.shape
    torch.testing.assert_close(found.x0, torch.ones(3, 1, 2, 2))


@pytest.mark.parametrize(
    ("weights", "means", "covariances", "message"),
    [
        ([1.0], [[0.0], [1.0]], [1.0, 1.0], r"\(1,\) weights"),
        ([1.0, 0.0], [[0.0], [1.0]], [1.0, 1.0], "a positive weight for each"),
        ([1.0], [[0.0]], [-1.0], "negative eigenvalue -1"),
        ([1.0], [[0.0, 0.0]], torch.tensor([[[1.0, 0.5], [0.0, 1.0]]]), "not symmetric"),
    ],
)
def test_what_is_no_mixture_is_refused(weights, means, covariances, message):
    with pytest.raises(InvalidArgument, match=message):
        GaussianMixture(weights, means, covariances)


def test_samples_of_other_dimensions_are_refused():
    with pytest.raises(InvalidArgument, match="the mixture has 2 dimensions"):
        MIXTURE.estimate(torch.zeros(3, 1), 1.0, 1.0)
