"""Quantiles of the mixture against its distribution function, and a trained denoiser against the exact one."""

import torch

from pippin.claims.worlds.distributions.one_dimensional_mixture import POINTS, mixture, perceptron, quantiles
from pippin.generate.diffusion.gaussian_mixture import exact_denoiser
from pippin.generate.diffusion.schedules import NoiseSchedule


def test_quantiles_are_where_the_distribution_function_says():
    z, x = quantiles()
    shares = (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS
    of = mixture()
    spread = of.covariances[:, 0, 0].sqrt()
    reached = torch.special.ndtr((x[0].double()[:, None] - of.means[:, 0]) / spread) @ of.weights
    torch.testing.assert_close(reached, shares, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.special.ndtr(z[0].double()), shares, rtol=0, atol=1e-6)


def test_training_comes_near_the_least_error_that_there_is():
    schedule, generator = NoiseSchedule.flow(), torch.Generator().manual_seed(0)
    x0 = mixture().sample(2000, seed=5).double()
    errors = []
    for t in torch.linspace(0.0025, 0.9975, 200).tolist():
        eps = torch.randn(x0.shape, generator=generator, dtype=torch.float64)
        found = exact_denoiser(mixture(), schedule)((1 - t) * x0 + t * eps, t)
        errors.append(float((found.eps - found.x0 - eps + x0).square().mean()))
    least = sum(errors) / len(errors)
    untrained, trained = (perceptron("flow", schedule, steps, 1e-2, seed=0)[1] for steps in (1, 400))
    assert 0.97 * least < trained < 1.05 * least < 0.8 * untrained
