"""Oracles for neural posterior estimation: a Gaussian posterior in closed form, densities that integrate, errors."""

import math

import pytest
import torch
from beartype.roar import BeartypeException
from jaxtyping import TypeCheckError
from torch import nn

from pippin.bayes.simulation.npe import NPE, DensityEstimatorConfig, SeriesEncoder
from pippin.bayes.simulation.priors import BoxPrior, GaussianPrior
from pippin.core.errors import CorruptedFile, InvalidArgument, InvalidInput, ModelNotFound, NotFitted

WRONG_TYPE = (InvalidArgument, TypeCheckError, BeartypeException)
SMALL = {"num_transforms": 2, "hidden_sizes": (32, 32)}


def noisy(theta, generator):
    """x = theta + noise of standard deviation 0.5."""
    return theta + 0.5 * torch.randn(theta.shape, generator=generator)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def gaussian():
    npe = NPE(GaussianPrior([0.0, 0.0], [1.0, 1.0]), flow=DensityEstimatorConfig("affine", **SMALL))
    npe.fit(noisy, steps=500, batch_size=256, lr=3e-3)
    return npe


@pytest.fixture(scope="module", params=["spline", "affine", "mixture"])
def boxed(request):
    """A parameter in a box, seen with noise; few steps, as every density must integrate, fitted or not."""
    npe = NPE(BoxPrior([0.0], [2.0]), flow=DensityEstimatorConfig(request.param, **SMALL, num_components=3))
    npe.fit(noisy, steps=60, batch_size=128, lr=3e-3)
    return npe


def test_a_gaussian_posterior_is_found(gaussian):
    theta, x = gaussian.simulate(2000, noisy, seeded(1))
    # prior N(0, 1), noise variance 1/4: posterior N(0.8 x, 0.2)
    exact = torch.distributions.Normal(0.8 * x, 0.2**0.5).log_prob(theta).sum(-1)
    with torch.no_grad():
        found = gaussian.log_prob(theta, x)
    assert float((exact - found).mean()) < 0.03  # the expected divergence of the two posteriors, in nats
    draws = gaussian.sample(4000, torch.tensor([[1.0, -0.5]]), seeded(2))[:, 0]
    torch.testing.assert_close(draws.mean(0), torch.tensor([0.8, -0.4]), rtol=0, atol=0.05)
    torch.testing.assert_close(draws.var(0), torch.tensor([0.2, 0.2]), rtol=0, atol=0.03)


def test_density_integrates_to_one_within_the_bounds_and_is_nothing_outside(boxed):
    grid = torch.linspace(0, 2, 20_001)[:, None]
    x = torch.tensor([[0.3]])
    with torch.no_grad():
        density = boxed.log_prob(grid, x.expand(len(grid), 1)).exp()
        outside = boxed.log_prob(torch.tensor([[-0.01], [2.01]]), x.expand(2, 1))
    assert float(torch.trapezoid(density, grid[:, 0])) == pytest.approx(1, abs=5e-3)
    assert outside.tolist() == [-math.inf, -math.inf]


def test_draws_follow_the_density(boxed):
    x = torch.tensor([[0.3], [1.5]])
    draws = boxed.sample(8000, x, seeded(3))
    assert bool(((draws >= 0) & (draws <= 2)).all())
    grid = torch.linspace(0, 2, 4001)[:, None]
    for index in range(2):
        with torch.no_grad():
            density = boxed.log_prob(grid, x[index : index + 1].expand(len(grid), 1)).exp()
        for edge in (0.5, 1.0, 1.5):
            part = grid[:, 0] <= edge
            mass = float(torch.trapezoid(density[part], grid[part, 0]))
            assert float((draws[:, index] <= edge).float().mean()) == pytest.approx(mass, abs=0.03)


def test_pairs_are_the_densities_one_by_one(boxed):
    theta, x = boxed.simulate(7, noisy, seeded(4))
    features = boxed.encode(x[:5])
    pairs = boxed.log_prob_pairs(theta, features)
    with torch.no_grad():
        single = torch.stack([boxed.log_prob_from_features(theta, row.expand(7, -1)) for row in features], 1)
    torch.testing.assert_close(pairs, single, rtol=1e-4, atol=1e-4)


def test_the_weights_kept_are_the_best_on_held_out_simulations():
    npe = NPE(BoxPrior([0.0], [1.0]), flow=DensityEstimatorConfig("affine", **SMALL))
    theta = torch.rand(40, 1, generator=seeded(0))
    training = npe.fit((theta, noisy(theta, seeded(1))), steps=400, batch_size=32, lr=1e-2).result  # overfits
    order = torch.randperm(40, generator=seeded(0))[:8]
    with torch.no_grad():
        kept = -float(npe.log_prob(theta[order], noisy(theta, seeded(1))[order]).mean())
    seen = [measures["loss"] for _, measures in training.evaluations]
    assert kept == pytest.approx(min(seen), abs=1e-5)
    assert kept < seen[-1]


def test_the_same_seed_gives_the_same_weights_and_global_randomness_is_left_alone():
    before = torch.random.get_rng_state()
    made = []
    for _ in range(2):
        npe = NPE(BoxPrior([0.0], [1.0]), flow=DensityEstimatorConfig("spline", **SMALL), seed=3)
        npe.fit(noisy, steps=5, batch_size=32, seed=5)
        made.append(npe.sample(3, torch.zeros(2, 1), seeded(0)))
    assert torch.equal(*made)
    assert torch.equal(before, torch.random.get_rng_state())


def test_it_can_be_fitted_again_to_observations_of_another_shape():
    npe = NPE(BoxPrior([0.0], [1.0]), flow=DensityEstimatorConfig("affine", **SMALL))
    npe.fit(noisy, steps=1, batch_size=8)
    theta = torch.rand(20, 1, generator=seeded(0))
    npe.fit((theta, theta.expand(20, 3)), steps=1, batch_size=8)
    assert npe.shape == (3,)
    assert npe.sample(2, torch.zeros(1, 3)).shape == (2, 1, 1)


def test_an_encoder_of_series_reads_what_matters():
    """Amplitude of a sine with a random phase: a network of the raw series in place of a sufficient statistic."""

    def sines(theta, generator):
        phase = 6.283 * torch.rand(len(theta), 1, generator=generator)
        return theta * torch.sin(torch.linspace(0, 12, 32) + phase)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = SeriesEncoder(32, 4, 16)
    npe = NPE(BoxPrior([1.0], [5.0]), encoder, DensityEstimatorConfig("affine", **SMALL))
    npe.fit(sines, steps=250, batch_size=128, lr=3e-3)
    theta, x = npe.simulate(300, sines, seeded(9))
    error = npe.sample(50, x, seeded(0)).mean(0) - theta
    assert float(error.square().mean().sqrt()) < 0.25  # the prior's standard deviation is 1.15


@pytest.mark.parametrize("encoder", [False, True])
def test_a_saved_posterior_is_the_same(tmp_path, gaussian, encoder):
    npe, prior = gaussian, gaussian.prior
    if encoder:
        prior = BoxPrior([0.0], [1.0])
        npe = NPE(prior, nn.Linear(1, 3), DensityEstimatorConfig("mixture", **SMALL, num_components=2), seed=4)
        npe.fit(noisy, steps=5, batch_size=32)
    npe.save(tmp_path)
    again = NPE.load(tmp_path, prior, nn.Linear(1, 3) if encoder else None)
    theta, x = npe.simulate(10, noisy, seeded(6))
    assert torch.equal(npe.log_prob(theta, x), again.log_prob(theta, x))
    assert torch.equal(npe.sample(3, x, seeded(0)), again.sample(3, x, seeded(0)))
    with pytest.raises(CorruptedFile, match="no posterior of this prior"):
        NPE.load(tmp_path, BoxPrior([0.0] * 5, [1.0] * 5), nn.Linear(1, 3))
    other = BoxPrior([0.0], [9.0]) if encoder else GaussianPrior([50.0], [1.0])
    with pytest.raises(CorruptedFile, match="it was trained with the") as caught:
        NPE.load(tmp_path, other, nn.Linear(1, 3) if encoder else None)
    assert "\n" not in str(caught.value)
    with pytest.raises(InvalidArgument, match="n must be at least 1"):
        npe.sample(0, x)


def test_asked_before_it_was_fitted(tmp_path):
    npe = NPE(BoxPrior([0.0], [1.0]))
    for ask in (
        lambda: npe.sample(1, torch.zeros(1, 1)),
        lambda: npe.log_prob(torch.zeros(1, 1), torch.zeros(1, 1)),
        lambda: npe.log_prob_from_features(torch.zeros(1, 1), torch.zeros(1, 1)),
        lambda: npe.save(tmp_path),
    ):
        with pytest.raises(NotFitted, match="call fit"):
            ask()
    with pytest.raises(ModelNotFound):
        NPE.load(tmp_path / "nothing", npe.prior)


THETA, X = torch.rand(30, 1), torch.rand(30, 2)


@pytest.mark.parametrize(
    ("theta", "x", "error", "message"),
    [
        (THETA[:9], X[:9], InvalidArgument, "9 simulations are too few"),
        (THETA + 5, X, InvalidInput, "outside of the prior's bounds in 30 of 30"),
        (THETA, X.log() - math.inf, InvalidInput, "not finite"),
        (THETA, X[:20], InvalidInput, "for 30 rows"),
        (THETA.expand(30, 2), X, InvalidInput, "has 1 parameters"),
        (THETA, X[:, 0], InvalidInput, r"give \[n, ...\]"),
    ],
)
def test_bad_simulations(theta, x, error, message):
    with pytest.raises(error, match=message):
        NPE(BoxPrior([0.0], [1.0])).fit((theta, x), steps=1)


def test_bad_arguments():
    npe = NPE(BoxPrior([0.0], [1.0]))
    for change in ({"steps": 0}, {"lr": 0.0}, {"num_held_out": 0}):
        with pytest.raises(InvalidArgument, match="must be"):
            npe.fit(noisy, **change)
    with pytest.raises(WRONG_TYPE):
        npe.fit([1, 2])
    with pytest.raises(InvalidInput, match="not finite"):
        npe.fit(lambda theta, generator: theta * math.nan, steps=1)
    with pytest.raises(WRONG_TYPE):
        npe.fit(lambda theta, generator: theta.tolist(), steps=1)
    with pytest.raises(WRONG_TYPE):
        NPE("a prior")
    with pytest.raises(WRONG_TYPE):
        NPE(BoxPrior([0.0], [1.0]), encoder=lambda x: x)
    with pytest.raises(InvalidArgument, match="output has shape"):
        NPE(BoxPrior([0.0], [1.0]), nn.Unflatten(1, (1, 1))).fit(noisy, steps=1)
    with pytest.raises(WRONG_TYPE):
        DensityEstimatorConfig("splines")
    with pytest.raises(InvalidArgument, match="at least 1"):
        DensityEstimatorConfig(num_transforms=0)
    with pytest.raises(InvalidArgument, match="at least 16"):
        SeriesEncoder(4)


def test_a_refused_fit_leaves_the_network_as_it_was(gaussian):
    x = torch.zeros(1, 2)
    before = gaussian.sample(2, x)
    with pytest.raises(InvalidArgument, match="too few"):
        gaussian.fit((torch.zeros(3, 2), torch.zeros(3, 5)))
    assert torch.equal(gaussian.sample(2, x), before)


def test_bad_observations(gaussian):
    with pytest.raises(InvalidInput, match=r"not finite in 1 of 3 rows \(1\)"):
        gaussian.sample(1, torch.tensor([[0.0, 0.0], [math.nan, 0.0], [0.0, 0.0]]))
    with pytest.raises(InvalidInput, match=r"must have the shape \[2\]"):
        gaussian.sample(1, torch.zeros(3, 4))
    with pytest.raises((InvalidInput, TypeCheckError)):
        gaussian.log_prob(torch.zeros(2, 1), torch.zeros(2, 2))
    with pytest.raises((InvalidInput, TypeCheckError)):
        gaussian.log_prob(torch.zeros(2, 2), torch.zeros(3, 2))
