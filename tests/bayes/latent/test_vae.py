"""Oracles for the autoencoder: torch.distributions, the exact evidence of a linear Gaussian model, one loop for all."""

import itertools
import math

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import distributions as D, nn

from pippin.bayes.latent.vae import VAE, Elbo, VAEConfig, moments
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.data.streams import Shuffled
from pippin.train import AdamW, Trainer


def linear_vae(features=5, latent=2, noise=0.3, seed=0):
    """Probabilistic PCA as a VAE: its posterior is Gaussian with a diagonal covariance, and the encoder knows it."""
    generator = torch.Generator().manual_seed(seed)
    axes, _ = torch.linalg.qr(torch.randn(features, latent, generator=generator, dtype=torch.float64))
    weights = axes * torch.tensor([1.5, 0.7], dtype=torch.float64)
    vae = VAE(VAEConfig((features,), latent, likelihood="gaussian", noise_std=noise)).double()
    vae.decoder, vae.encoder = nn.Linear(latent, features), nn.Linear(features, 2 * latent)
    variance = 1 / (1 + weights.square().sum(0) / noise**2)
    offset = torch.randn(features, generator=generator, dtype=torch.float64)
    map_ = (variance[:, None] * weights.T) / noise**2
    with torch.no_grad():
        vae.decoder.weight = nn.Parameter(weights)
        vae.decoder.bias = nn.Parameter(offset)
        vae.encoder.weight = nn.Parameter(torch.cat([map_, torch.zeros_like(map_)]))
        vae.encoder.bias = nn.Parameter(torch.cat([-(map_ @ offset), variance.log()]))
    covariance = weights @ weights.T + noise**2 * torch.eye(features)
    return vae, D.MultivariateNormal(offset, covariance)


@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian", "categorical"])
def test_terms_are_those_of_torch_distributions(likelihood):
    shape = (3, 4)
    vae = VAE(VAEConfig(shape, 2, (8,), likelihood, noise_std=0.7), seed=1)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(6, *shape, generator=generator)
    if likelihood == "bernoulli":
        x = x.round()
    if likelihood == "categorical":
        x = nn.functional.one_hot(x.argmax(-1), 4).float()
    terms = vae.terms(x, generator)
    mean, log_var = vae.encode(x)
    q = D.Normal(mean, (0.5 * log_var).exp())
    torch.testing.assert_close(terms.kl, D.kl_divergence(q, D.Normal(0.0, 1.0)).sum(-1), rtol=1e-4, atol=1e-5)
    logits = vae.logits(terms.z)
    if likelihood == "bernoulli":
        wanted = D.Bernoulli(logits=logits).log_prob(x).sum((1, 2))
    elif likelihood == "gaussian":
        wanted = D.Normal(logits, 0.7).log_prob(x).sum((1, 2))
    else:
        wanted = D.Categorical(logits=logits).log_prob(x.argmax(-1)).sum(-1)
    torch.testing.assert_close(terms.log_likelihood, wanted, rtol=1e-4, atol=1e-4)


def test_with_the_exact_posterior_the_mean_of_the_bound_is_the_evidence():
    vae, evidence = linear_vae()
    x = evidence.mean[None] + 1.0
    terms = vae.terms(x.expand(40_000, -1), torch.Generator().manual_seed(0))
    found = (terms.log_likelihood - terms.kl).detach().mean()
    assert float(found) == pytest.approx(float(evidence.log_prob(x[0])), abs=0.03)


def test_draws_follow_the_likelihood():
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([[-1.0, 0.0, 2.0]]).expand(20_000, -1)
    for likelihood, wanted in (("bernoulli", logits[0].sigmoid()), ("categorical", logits[0].softmax(-1))):
        vae = VAE(VAEConfig((3,), 1, likelihood=likelihood))
        drawn = vae.sample_output(logits, generator)
        torch.testing.assert_close(drawn.mean(0), wanted, rtol=0, atol=0.02)
        assert set(drawn.unique().tolist()) == {0.0, 1.0}
    drawn = VAE(VAEConfig((3,), 1, likelihood="gaussian", noise_std=0.5)).sample_output(logits, generator)
    torch.testing.assert_close(drawn.mean(0), logits[0], rtol=0, atol=0.02)
    torch.testing.assert_close(drawn.std(0), torch.full((3,), 0.5), rtol=0.02, atol=0)


def test_training_raises_the_bound_and_reconstructs():
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(256, 1, generator=generator) < 0.5).float().expand(-1, 6).contiguous()  # all on, or all off
    vae = VAE(VAEConfig((6,), 1, (16,)))
    data = Shuffled(range(256), 32, collate=lambda rows: x[torch.tensor(rows)])
    training = Trainer(
        vae, Elbo(), data, steps=250, optimizer=AdamW(lr=1e-2, weight_decay=0.0), show_progress=False
    ).fit()
    ended = sum(training.losses[-20:]) / 20
    assert math.log(2) < ended < 2.0  # one bit is all there is to know, and six are told without a code
    assert (vae(x) - x).abs().max() < 0.1
    last = training.steps[-1]
    assert last.loss == pytest.approx(last.metrics["reconstruction"] + last.metrics["kl"], rel=1e-5)


def test_weights_and_beta_enter_as_they_say():
    vae = VAE(VAEConfig((4,), 2))
    x, weights = torch.rand(5, 4), torch.tensor([0.0, 1.0, 2.0, 0.5, 3.0])
    terms = vae.terms(x, torch.Generator().manual_seed(7))
    loss = Elbo(beta=0.3, weighted=True)(vae, (x, weights), torch.Generator().manual_seed(7))
    torch.testing.assert_close(loss.total, (weights * (0.3 * terms.kl - terms.log_likelihood)).sum())
    assert loss.count == 5
    annealed = Elbo(beta=lambda step: 0.1 * step)
    annealed.after_step(vae, 4)
    again = Elbo(beta=lambda step: 0.1 * step)
    again.load_state_dict(annealed.state_dict())
    loss = again(vae, (x, weights), torch.Generator().manual_seed(7))
    torch.testing.assert_close(loss.total, (0.4 * terms.kl - terms.log_likelihood).sum())


def test_pictures_go_through_convolutions_and_come_back_in_size():
    vae = VAE(VAEConfig((2, 8, 12), 3, (4, 6, 10), architecture="conv"))
    x = torch.rand(5, 2, 8, 12)
    mean, _ = vae.encode(x)
    assert vae.decode(mean).shape == x.shape
    # what one corner of the input changes reaches the code, and the code reaches every corner
    x.requires_grad_()
    vae.encode(x)[0].sum().backward()
    assert (x.grad[..., [0, 0, -1, -1], [0, -1, 0, -1]].abs().sum((0, 1)) > 0).all()


def test_the_seed_fixes_the_weights_and_leaves_the_global_generator():
    before = torch.random.get_rng_state()
    first, same, other = (VAE(VAEConfig((4,), 2), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    pairs = list(zip(first.parameters(), same.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)


def test_variances_stay_within_their_bound():
    _, log_var = moments(torch.tensor([[0.0, 1e9], [0.0, -1e9]]))
    assert log_var.flatten().tolist() == [10.0, -10.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": ()}, "at least one size"),
        ({"hidden_sizes": ()}, "at least one size"),
        ({"latent_dim": 0}, "latent_dim must be at least 1, got 0"),
        ({"noise_std": 0.0}, "noise_std must be above 0"),
        ({"architecture": "conv"}, "need images"),
        ({"architecture": "conv", "shape": (1, 7, 8), "hidden_sizes": (4, 8)}, "multiples of 2"),
    ],
)
def test_bad_configs_name_the_value(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        VAEConfig(**{"shape": (4,), "latent_dim": 2, **arguments})


def test_bad_beta():
    with pytest.raises(InvalidArgument, match="beta must be"):
        Elbo(beta=-1.0)


@pytest.mark.parametrize(
    ("likelihood", "row", "message"),
    [
        ("bernoulli", [0.1, math.nan, 0.0], "row 1 holds values that are not finite"),
        ("bernoulli", [0.1, 1.5, 0.0], "row 1 has values outside 0 to 1"),
        ("gaussian", [0.1, math.inf, 0.0], "row 1 holds values that are not finite"),
        ("categorical", [1.0, 1.0, 0.0], "row 1 is not one-hot"),
    ],
)
def test_data_that_the_model_cannot_have_made(likelihood, row, message):
    vae = VAE(VAEConfig((3,), 1, likelihood=likelihood))
    good = [1.0, 0.0, 0.0]
    vae.check(torch.tensor([good, good]))
    with pytest.raises(InvalidInput, match=message):
        vae.check(torch.tensor([good, row]))


def test_data_of_another_shape_or_none():
    vae = VAE(VAEConfig((3,), 1))
    for call, x in itertools.product((vae.check, vae.encode), (torch.zeros(2, 4),)):
        with pytest.raises(InvalidInput, match=r"shape \(4,\); the model takes \(3,\)"):
            call(x)
    with pytest.raises(InvalidInput, match=r"examples are torch\.float64, the weights torch\.float32"):
        vae.check(torch.zeros(2, 3, dtype=torch.float64))
    for other in (torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3).numpy()):
        with pytest.raises((InvalidInput, TypeCheckError)):
            vae.check(other)
    with pytest.raises(InvalidInput, match="no examples"):
        vae.check(torch.zeros(0, 3))
