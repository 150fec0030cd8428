"""Objectives for disentangled codes: their limits, the split of the divergence by brute force, gradients, errors."""

import math

import pytest
import torch
from jaxtyping import TypeCheckError

from pippin.bayes.latent.disentanglement import DisentanglingElbo, GeometricRegularizer, divergence_parts
from pippin.bayes.latent.vae import VAE, Elbo, VAEConfig
from pippin.bayes.transport.gromov import distortion, gromov_monge_gap
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.train import AdamW, Trainer


@pytest.fixture
def vae():
    return VAE(VAEConfig((12,), latent_dim=3, hidden_sizes=(16,)), seed=0)


@pytest.fixture
def x():
    return torch.rand(9, 12, generator=torch.Generator().manual_seed(1))


def generator():
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize("beta", [0.0, 1.0, 4.0])
def test_without_geometry_it_is_the_bound(vae, x, beta):
    ours = DisentanglingElbo(beta=beta)(vae, (x, torch.zeros(9)), generator())
    plain = Elbo(beta)(vae, x, generator())
    torch.testing.assert_close(ours.total, plain.total)
    assert ours.count == plain.count
    for name, value in plain.metrics.items():
        torch.testing.assert_close(ours.metrics[name], value)


def test_the_parts_of_the_divergence_are_those_of_a_loop():
    g = generator()
    n, d, examples = 5, 3, 50
    mean, log_var = torch.randn(n, d, generator=g).double(), torch.randn(n, d, generator=g).double()
    z = torch.randn(n, d, generator=g).double()
    found = divergence_parts(z, mean, log_var, examples)

    def density(i, j, k):
        return math.exp(torch.distributions.Normal(mean[j, k], (0.5 * log_var[j, k]).exp()).log_prob(z[i, k]).item())

    for i in range(n):
        own = math.log(math.prod(density(i, i, k) for k in range(d)))
        joint = math.log(sum(math.prod(density(i, j, k) for k in range(d)) for j in range(n)) / (n * examples))
        product = sum(math.log(sum(density(i, j, k) for j in range(n)) / (n * examples)) for k in range(d))
        prior = torch.distributions.Normal(0.0, 1.0).log_prob(z[i]).sum().item()
        expected = (own - joint, joint - product, product - prior)
        assert [float(part[i]) for part in found] == pytest.approx(expected, rel=1e-9)


def test_total_correlation_at_beta_one_is_the_sampled_divergence(vae, x):
    mean, log_var = vae.encode(x)
    z = mean + (0.5 * log_var).exp() * torch.randn(mean.shape, generator=generator())
    own = torch.distributions.Normal(mean, (0.5 * log_var).exp()).log_prob(z).sum(1)
    prior = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(1)
    expected = (own - prior - vae.log_likelihood(x, vae.logits(z))).sum()
    loss = DisentanglingElbo("tc", beta=1.0, num_examples=1000)(vae, x, generator())
    torch.testing.assert_close(loss.total, expected)


def test_total_correlation_of_dependent_codes_is_larger():
    g = generator()
    one = torch.randn(400, 1, generator=g)
    tied, free = one.expand(400, 2), torch.randn(400, 2, generator=g)
    log_var = torch.full((400, 2), -4.0)

    def correlation(z):
        noisy = z + math.exp(-2) * torch.randn(400, 2, generator=g)
        return float(divergence_parts(noisy, z, log_var, 400)[1].mean())

    assert correlation(tied) > correlation(free) + 0.5


@pytest.mark.parametrize("kind", ["gap", "distortion"])
@pytest.mark.parametrize("apply", ["decoder", "encoder"])
@pytest.mark.parametrize("cost", ["cos", "scl2"])
def test_geometry_adds_its_weight_times_the_term(vae, x, kind, apply, cost):
    loss = DisentanglingElbo(geometry=GeometricRegularizer(7.0, kind, apply, cost))(vae, x, generator())
    base = DisentanglingElbo()(vae, x, generator())
    mean, log_var = vae.encode(x)
    z = mean + (0.5 * log_var).exp() * torch.randn(mean.shape, generator=generator())
    pair = (z, vae.decode(z)) if apply == "decoder" else (x, mean)
    term = (gromov_monge_gap if kind == "gap" else distortion)(*pair, cost)
    torch.testing.assert_close((loss.total - base.total) / 9, 7 * term, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(loss.metrics["geometry"] / 9, term.detach())


def test_a_term_on_the_encoder_leaves_the_decoder_alone_and_one_on_the_decoder_reaches_both(vae, x):
    for apply, reached in (("encoder", False), ("decoder", True)):
        geometry = GeometricRegularizer(1.0, "distortion", apply)
        mean, log_var = vae.encode(x)
        z = mean + (0.5 * log_var).exp() * torch.randn(mean.shape, generator=generator())
        term = geometry(z, vae.decode(z)) if apply == "decoder" else geometry(x, mean)
        vae.zero_grad()
        term.backward()
        assert any(p.grad is not None and bool(p.grad.any()) for p in vae.encoder.parameters())
        assert any(p.grad is not None and bool(p.grad.any()) for p in vae.decoder.parameters()) is reached


@pytest.mark.parametrize("base", ["beta", "tc"])
def test_training_lowers_the_loss_and_the_geometric_term(base):
    g = torch.Generator().manual_seed(0)
    codes = torch.randn(256, 2, generator=g)
    data = (codes @ torch.randn(2, 12, generator=g)).sigmoid()
    vae = VAE(VAEConfig((12,), latent_dim=2, hidden_sizes=(32,)), seed=0)
    objective = DisentanglingElbo(base, beta=1.0, num_examples=256, geometry=GeometricRegularizer(50.0, "distortion"))
    batches = [data[64 * i : 64 * i + 64] for i in range(4)] * 30
    steps = Trainer(
        vae, objective, batches, steps=120, optimizer=AdamW(lr=1e-2, weight_decay=0.0), seed=0, show_progress=False
    ).fit().steps  # fmt: skip
    assert steps[-1].loss < steps[0].loss
    assert steps[-1].metrics["geometry"] < 0.7 * steps[0].metrics["geometry"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GeometricRegularizer(-1.0), "weight must be at least 0"),
        (lambda: GeometricRegularizer(1.0, "angle"), "kind must be"),
        (lambda: GeometricRegularizer(1.0, apply="both"), "apply must be"),
        (lambda: GeometricRegularizer(1.0, cost="l1"), "cost must be"),
        (lambda: DisentanglingElbo("factor"), "base must be"),
        (lambda: DisentanglingElbo(beta=-1.0), "beta must be"),
        (lambda: DisentanglingElbo("tc"), "num_examples is None"),
        (lambda: DisentanglingElbo("tc", num_examples=0), "num_examples is 0"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises((InvalidArgument, TypeCheckError), match=f"{message}|type"):
        make()


def test_a_single_example_is_refused_where_it_says_nothing(vae, x):
    for objective in (DisentanglingElbo("tc", num_examples=9), DisentanglingElbo(geometry=GeometricRegularizer(1.0))):
        with pytest.raises(InvalidInput, match="at least 2 examples"):
            objective(vae, x[:1], generator())
    assert math.isfinite(DisentanglingElbo()(vae, x[:1], generator()).total.item())
