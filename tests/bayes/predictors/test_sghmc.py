"""Oracles for the chain: the closed form of its stationary variance, Gaussian targets, what happens without noise."""

import math

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import nn

from pippin.bayes.predictors.sghmc import SGHMC, SGHMCConfig
from pippin.core.errors import ChainDiverged, InvalidArgument


def run(chain, theta, gradient, burn_in, steps, every=1):
    """Second moments over many parallel chains and some of their later states [dimensions, dimensions]."""
    moments, count = torch.zeros(theta.shape[-1], theta.shape[-1], dtype=torch.float64), 0
    for step in range(burn_in + steps):
        if step == burn_in:
            chain.freeze()
        theta.grad = gradient(theta.detach())
        chain.step()
        if step >= burn_in and step % every == 0:
            states = theta.detach().double()
            moments += states.T @ states
            count += len(states)
    return moments / count


@pytest.mark.parametrize("friction", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("lr", [0.01, 0.5])
def test_stationary_variance_is_the_closed_form(friction, lr):
    """A second-order autoregression: 1 / (N a (1 - e a / (2 (2 - friction))))."""
    curvature, n = torch.tensor([0.5, 2.0]), 10
    theta = nn.Parameter(torch.zeros(4000, 2))
    chain = SGHMC([theta], lr=lr, num_data=n, friction=friction, preconditioner=None, seed=3)
    found = run(chain, theta, lambda t: curvature * t, burn_in=int(20 / (friction * lr) ** 0.5), steps=150, every=5)
    wanted = 1 / (n * curvature * (1 - lr * curvature / (2 * (2 - friction))))
    torch.testing.assert_close(found.diagonal().float(), wanted, rtol=0.05, atol=0)


def test_a_correlated_gaussian_of_two_dimensions_with_the_metric_adapted():
    """Variances within 5 % of the truth, and the correlation; the metric is frozen before they are measured."""
    covariance = torch.tensor([[1.0, 0.6], [0.6, 0.5]])
    precision, n = covariance.inverse(), 50
    theta = nn.Parameter(torch.zeros(3000, 2))
    chain = SGHMC([theta], lr=0.02, num_data=n, friction=0.1, seed=5)
    # U = n t' P t / 2 has covariance / n; parallel chains have a metric each, frozen with the same law for all
    found = run(chain, theta, lambda t: t @ precision, burn_in=600, steps=600, every=5) * n
    torch.testing.assert_close(found.float(), covariance, rtol=0.05, atol=0.01)


def test_the_noise_of_the_gradient_is_taken_off():
    """With noisy gradients the variance is right again where their variance is known, and too large where it is not."""
    n, noise, lr = 10, 1.0, 0.02
    generator = torch.Generator().manual_seed(0)

    def gradient(t):
        return t + noise**0.5 * torch.randn(t.shape, generator=generator)

    found = {}
    for estimate in (0.0, noise):
        theta = nn.Parameter(torch.zeros(6000, 1))
        chain = SGHMC(
            [theta], lr=lr, num_data=n, friction=0.2, preconditioner=None, gradient_noise=estimate, temperature=1.0
        )
        found[estimate] = float(run(chain, theta, gradient, burn_in=500, steps=200, every=5)) * n
    assert found[noise] == pytest.approx(1 / (1 - lr / 3.6), rel=0.04)
    assert found[0.0] == pytest.approx(1 + lr * noise * n / (2 * 0.2), rel=0.1)  # 2 a e / N + e^2 B over 2 a e / N


def test_prior_precision_is_the_posterior_of_a_linear_gaussian_model():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + torch.randn(40, generator=generator)
    precision = x.T @ x + 4.0 * torch.eye(3)
    mean = torch.linalg.solve(precision, x.T @ y)
    theta = nn.Parameter(torch.zeros(2000, 3, dtype=torch.float64))
    chain = SGHMC([theta], lr=0.02, num_data=40, friction=0.1, preconditioner=None, prior_precision=4.0, seed=2)
    states = []
    for step in range(900):
        theta.grad = (theta.detach() @ x.T - y) @ x / 40
        chain.step()
        if step >= 500 and step % 20 == 0:
            states.append(theta.detach().clone())
    drawn = torch.cat(states)
    torch.testing.assert_close(drawn.mean(0), mean, rtol=0, atol=0.01)
    torch.testing.assert_close(drawn.T.cov(), precision.inverse(), rtol=0.06, atol=5e-4)


def test_without_temperature_it_descends_to_the_mode():
    theta = nn.Parameter(torch.full((3,), 5.0))
    chain = SGHMC([theta], lr=0.05, num_data=10, friction=0.3, preconditioner=None, temperature=0.0)
    for _ in range(300):
        theta.grad = theta.detach() - 2.0
        chain.step()
    torch.testing.assert_close(theta.detach(), torch.full((3,), 2.0), rtol=0, atol=1e-4)


def test_the_metric_is_the_running_mean_until_it_is_frozen():
    theta = nn.Parameter(torch.zeros(2))
    chain = SGHMC([theta], lr=1e-3, num_data=10, decay=0.9)
    gradients = [torch.tensor([1.0, -3.0]), torch.tensor([2.0, 0.5])]
    for gradient in gradients:
        theta.grad = gradient
        chain.step()
    wanted = (0.9 * 0.1 * gradients[0] ** 2) + 0.1 * gradients[1] ** 2
    torch.testing.assert_close(chain.state[theta]["square"], wanted)
    chain.freeze()
    theta.grad = torch.full((2,), 100.0)
    chain.step()
    torch.testing.assert_close(chain.state[theta]["square"], wanted)


def test_the_seed_fixes_the_chain_and_the_global_generator_is_untouched():
    states = []
    before = torch.random.get_rng_state()
    for seed in (0, 0, 1):
        theta = nn.Parameter(torch.zeros(5))
        chain = SGHMC([theta], num_data=10, seed=seed)
        for _ in range(3):
            theta.grad = theta.detach() + 1
            chain.step()
        states.append(theta.detach().clone())
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_metric_that_saw_nothing_cannot_be_frozen():
    chain = SGHMC([nn.Parameter(torch.zeros(2))], num_data=10)
    with pytest.raises(InvalidArgument, match="no gradients yet"):
        chain.freeze()


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e9])
def test_a_chain_that_leaves_names_its_step(bad):
    theta = nn.Parameter(torch.zeros(2))
    chain = SGHMC([theta], lr=1.0, num_data=10, preconditioner=None)
    theta.grad = torch.zeros(2)
    chain.step()
    theta.grad = torch.tensor([0.0, bad])
    with pytest.raises(ChainDiverged, match="step 2") as caught:
        chain.step()
    assert caught.value.step == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_data": 0}, "num_data must be at least 1, got 0"),
        ({"friction": 1.0}, "friction must be above 0 and below 1, got 1.0"),
        ({"lr": math.nan}, "lr must be above 0 and finite, got nan"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"preconditioner": "adam"}, "preconditioner must be"),
    ],
)
def test_bad_arguments_name_the_value(arguments, message):
    with pytest.raises((InvalidArgument, TypeCheckError), match=f"{message}|type"):
        SGHMC([nn.Parameter(torch.zeros(1))], **{"num_data": 10, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 1}, "num_samples must be at least 2"),
        ({"thinning": 0}, "thinning"),
    ],
)
def test_a_chain_needs_two_samples(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        SGHMCConfig(**arguments)
