"""Oracles for robust posteriors: self-calibration as an identity, brute-force mixtures, both modes, errors."""

import math

import pytest
import torch
from beartype.roar import BeartypeException
from jaxtyping import TypeCheckError
from torch import nn

from pippin.bayes.simulation.npe import NPE, DensityEstimatorConfig
from pippin.bayes.simulation.priors import BoxPrior
from pippin.bayes.simulation.rope import RobustPosteriorEstimation
from pippin.core.errors import (
    CorruptedFile,
    InferenceAtRisk,
    InvalidArgument,
    InvalidInput,
    ModelNotFound,
    NotConverged,
    NotFitted,
    UnsupportedModel,
)

WRONG_TYPE = (InvalidArgument, TypeCheckError, BeartypeException)
PRIOR = BoxPrior([0.0, -1.0], [2.0, 1.0])


def simulator(theta, generator):
    """Four readings of two parameters."""
    mixed = torch.cat([theta, theta[:, :1] * theta[:, 1:], theta.sum(1, keepdim=True)], 1)
    return mixed + 0.1 * torch.randn(len(theta), 4, generator=generator)


def reality(theta, generator):
    """The same on a scale that is off: what the simulator does not know."""
    return 1.4 * simulator(theta, generator) + 0.5


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def encoder():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 4))


@pytest.fixture(scope="module")
def npe():
    made = NPE(PRIOR, encoder(), DensityEstimatorConfig("affine", num_transforms=2, hidden_sizes=(32, 32)))
    made.fit(simulator, steps=400, batch_size=128, lr=3e-3)
    return made


@pytest.fixture(scope="module")
def real():
    theta = PRIOR.sample(120, seeded(10))
    return theta, reality(theta, seeded(11))


@pytest.fixture(scope="module")
def rope(npe, real):
    made = RobustPosteriorEstimation(npe)
    theta = PRIOR.sample(60, seeded(12))
    made.calibrate(theta, reality(theta, seeded(13)), steps=300, lr=1e-3)
    return made


def test_it_is_better_than_the_network_alone_and_than_the_prior(rope, npe, real):
    theta, x = real
    with torch.no_grad():
        alone = npe.log_prob(theta, x).mean()
    robust = rope.posterior(x, simulations=500).log_prob(theta).mean()
    assert robust > alone + 3
    assert robust > PRIOR.log_prob(theta).mean() + 0.3


@pytest.mark.parametrize("gamma", [0.2, 1.0])
def test_a_balanced_mixture_of_posteriors_is_the_mean_posterior_of_the_simulations(rope, real, gamma):
    rope = copied(rope, gamma)
    posterior = rope.posterior(real[1], simulations=200, tolerance=1e-9)
    theta = PRIOR.sample(5, seeded(20))
    for row in theta:
        each = posterior.log_prob(row.expand(len(real[1]), -1))
        components = rope.npe.log_prob_pairs(row[None], posterior.features)[0]
        assert float(each.exp().mean()) == pytest.approx(float(components.exp().mean()), rel=1e-4)
    torch.testing.assert_close(posterior.coupling.sum(1), torch.full((120,), 1 / 120, dtype=torch.float64))
    torch.testing.assert_close(posterior.coupling.sum(0), torch.full((200,), 1 / 200, dtype=torch.float64))


def copied(rope, gamma, tau=1.0):
    made = RobustPosteriorEstimation(rope.npe, gamma, tau)
    made.tuned = rope.tuned
    return made


def test_log_prob_is_the_weighted_sum_of_components(rope, real):
    theta, x = real[0][:6], real[1][:6]
    posterior = rope.posterior(x, simulations=15)
    found = posterior.log_prob(theta)
    alpha = 6 * posterior.coupling
    with torch.no_grad():
        for i in range(6):
            brute = sum(
                float(alpha[i, j])
                * float(rope.npe.log_prob_from_features(theta[i][None], posterior.features[j][None]).exp())
                for j in range(15)
            )
            assert math.exp(found[i]) == pytest.approx(brute, rel=1e-4)


def test_draws_have_the_density_and_ranks_count_them(rope, real):
    theta, x = real
    posterior = rope.posterior(x, simulations=300)
    draws = posterior.sample(2000, seeded(1))
    assert draws.shape == (2000, 120, 2)
    assert bool(((draws >= PRIOR.low) & (draws <= PRIOR.high)).all())
    counted = (draws < theta).float().mean(0)
    torch.testing.assert_close(
        posterior.ranks(theta, posterior.component_samples(200, seeded(2))), counted, rtol=0, atol=0.06
    )
    assert torch.equal(draws, posterior.sample(2000, seeded(1)))


def test_inductive_gives_an_observation_of_the_stored_batch_its_posterior(rope, real):
    theta, x = real
    batch = rope.posterior(x, simulations=200)
    torch.testing.assert_close(batch.transport.plan, batch.coupling, rtol=1e-6, atol=1e-12)
    one = rope.inductive_posterior(x[7:8])
    torch.testing.assert_close(one.log_weights[0], batch.log_weights[7], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(one.log_prob(theta[7:8]), batch.log_prob(theta)[7:8], rtol=1e-5, atol=1e-5)


def test_much_entropy_gives_the_prior_back(rope, real):
    x = real[1]
    loose = copied(rope, 1e4).posterior(x, simulations=300)
    torch.testing.assert_close(
        loose.effective_simulations, torch.full((120,), 300.0, dtype=torch.float64), rtol=1e-3, atol=0
    )
    spread = loose.sample(200, seeded(3)).flatten(0, 1)
    torch.testing.assert_close(spread.mean(0), torch.tensor([1.0, 0.0]), rtol=0, atol=0.1)


def test_little_entropy_is_warned_of(rope, real):
    with pytest.warns(InferenceAtRisk, match=r"rests on .* raise gamma"):
        copied(rope, 0.005, 0.5).posterior(real[1], simulations=50)


def test_tuning_keeps_the_start_where_nothing_is_to_be_learned(npe):
    """On simulations themselves the encoder is right but for noise, so a few steps must not spoil it."""
    rope = RobustPosteriorEstimation(npe)
    theta = PRIOR.sample(100, seeded(30))
    x = simulator(theta, seeded(31))
    rope.calibrate(theta, x, steps=40, lr=1e-4)
    fresh = simulator(PRIOR.sample(200, seeded(32)), seeded(33))
    with torch.no_grad():
        apart = (rope.encode(fresh) - npe.encode(fresh)).norm(dim=-1).mean()
        scale = npe.encode(fresh).norm(dim=-1).mean()
    assert apart < 0.1 * scale
    assert all(torch.equal(a, b) for a, b in zip(npe.encoder.state_dict().values(), encoder_state(npe), strict=True))


def encoder_state(npe):
    return list(npe.encoder.state_dict().values())


def test_the_best_weights_are_kept_not_the_last(npe, real):
    """At a rate that only spoils them, the best are those of the start."""
    made = RobustPosteriorEstimation(npe)
    theta = PRIOR.sample(60, seeded(30))
    made.calibrate(theta, simulator(theta, seeded(31)), steps=40, lr=3.0)
    assert torch.equal(made.encode(real[1]), npe.encode(real[1]))


def test_the_target_is_the_mean_of_all_simulations(npe, real):
    """Its error against many simulations falls with the root of their number; one simulation would stay where it is."""
    made, theta = RobustPosteriorEstimation(npe), real[0][:20]
    exact = made._targets(theta, simulator, 4000, seeded(1))
    one, many = ((made._targets(theta, simulator, n, seeded(2)) - exact).square().mean().sqrt() for n in (1, 64))
    assert 4 < one / many < 16
    given = []

    def counting(theta, generator):
        given.append(theta)
        return simulator(theta, generator)

    made.calibrate(theta, real[1][:20], simulator=counting, num_simulations=3, steps=1)
    assert torch.equal(given[0], theta.repeat_interleave(3, 0))


def test_a_plan_of_the_old_encoder_is_forgotten(npe, real):
    made = RobustPosteriorEstimation(npe)
    made.posterior(real[1], simulations=80)
    made.inductive_posterior(real[1][:2])
    made.calibrate(*real, steps=1)
    with pytest.raises(NotFitted, match=r"call posterior\(batch\) first"):
        made.inductive_posterior(real[1][:2])


def test_seeds_say_which_simulations_are_taken(npe, real):
    made = RobustPosteriorEstimation(npe)
    first, again, other = (made.posterior(real[1], simulations=80, seed=seed).log_prob(real[0]) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_each_random_part_of_a_calibration_follows_its_seed(npe, real, monkeypatch):
    theta, x, tune = real[0][:30], real[1][:30], RobustPosteriorEstimation._tune

    def parts(seed):
        """Targets and the rows that are held out."""
        found = []
        with monkeypatch.context() as patch:
            patch.setattr(RobustPosteriorEstimation, "_tune", lambda *given: found.extend(given) or tune(*given))
            RobustPosteriorEstimation(npe).calibrate(theta, x, steps=1, seed=seed)
        assert found[-1] == seed
        return found[2], found[3]

    assert all(torch.equal(first, again) for first, again in zip(parts(1), parts(1), strict=True))
    assert not any(torch.equal(first, other) for first, other in zip(parts(1), parts(2), strict=True))

    def tuned(seed):
        """By the same targets and rows, in another order."""
        made = RobustPosteriorEstimation(npe)
        made._tune(x, 0.5 * npe.encode(x).detach(), torch.arange(6), list(range(6, 30)), 20, 8, 1e-3, seed)
        return made.encode(x)

    assert torch.equal(tuned(1), tuned(1))
    assert not torch.equal(tuned(1), tuned(2))


def test_tuning_does_not_touch_the_network(npe, real):
    before = [value.clone() for value in encoder_state(npe)]
    made = RobustPosteriorEstimation(npe)
    state = torch.random.get_rng_state()
    made.calibrate(real[0], real[1], steps=5, lr=1e-2)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, encoder_state(npe), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, made.tuned.state_dict().values(), strict=True))


def test_stored_simulations_stand_in_for_a_simulator(real):
    theta = PRIOR.sample(2000, seeded(40))
    stored = NPE(PRIOR, encoder(), DensityEstimatorConfig("affine", num_transforms=2, hidden_sizes=(32, 32)))
    stored.fit((theta, simulator(theta, seeded(41))), steps=300, batch_size=128, lr=3e-3)
    rope = RobustPosteriorEstimation(stored)
    start = float((rope.encode(real[1]) - rope._targets(real[0], simulator, 64, seeded(0))).norm(dim=-1).mean())
    rope.calibrate(real[0][:60], real[1][:60], steps=300, lr=1e-3)
    end = float((rope.encode(real[1][60:]) - rope._targets(real[0][60:], simulator, 64, seeded(0))).norm(dim=-1).mean())
    assert end < 0.6 * start
    assert rope.posterior(real[1], simulations=100).log_prob(real[0]).isfinite().all()
    first, again, other = (rope.posterior(real[1], simulations=100, seed=seed).features for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    known = stored.encode(stored.stored[1]).detach()
    apart = torch.cdist(first, known, compute_mode="donot_use_mm_for_euclid_dist")
    assert float(apart.min(1).values.max()) < 1e-4
    assert len(apart.argmin(1).unique()) == 100  # none is taken twice


def test_simulations_that_are_given_are_those_that_carry(npe, real):
    made, given = RobustPosteriorEstimation(npe), simulator(PRIOR.sample(50, seeded(50)), seeded(51))
    posterior = made.posterior(real[1], simulations=given)
    assert torch.equal(posterior.features, npe.encode(given))
    assert torch.equal(made.inductive_posterior(real[1][:1]).features, npe.encode(given))


def test_a_network_without_an_encoder_is_tuned_by_a_linear_map(tmp_path, real):
    """A scale and a shift are all that is wrong here, so the map can undo them."""
    plain = NPE(PRIOR, flow=DensityEstimatorConfig("affine", num_transforms=1, hidden_sizes=(16,)))
    plain.fit(simulator, steps=50, batch_size=64, lr=3e-3)
    rope = RobustPosteriorEstimation(plain)
    start = rope.encode(real[1])
    rope.calibrate(*real, steps=400, lr=1e-2)
    wanted = plain.encode((real[1] - 0.5) / 1.4)
    assert (rope.encode(real[1]) - wanted).norm(dim=-1).mean() < 0.25 * (start - wanted).norm(dim=-1).mean()
    rope.save(tmp_path)
    again = RobustPosteriorEstimation.load(tmp_path, PRIOR)
    assert torch.equal(again.encode(real[1]), rope.encode(real[1]))


@pytest.mark.parametrize("calibrated", [True, False])
def test_a_saved_one_is_the_same(tmp_path, rope, npe, real, calibrated):
    made = copied(rope, 0.4, 0.9) if calibrated else RobustPosteriorEstimation(npe, 0.4)
    wanted = made.posterior(real[1], simulations=80).log_prob(real[0])
    made.save(tmp_path)
    again = RobustPosteriorEstimation.load(tmp_path, PRIOR, encoder())
    assert (again.gamma, again.tau) == (made.gamma, made.tau)
    found = again.inductive_posterior(real[1]).log_prob(real[0])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(InvalidArgument, match="nothing to simulate with"):
        again.posterior(real[1])
    torch.testing.assert_close(again.posterior(real[1], simulator=simulator, simulations=80).log_prob(real[0]), wanted)
    with pytest.raises(CorruptedFile):
        RobustPosteriorEstimation.load(tmp_path, PRIOR, nn.Linear(4, 4))
    npe.save(tmp_path / "other")
    with pytest.raises(UnsupportedModel, match="'pippin_npe', not 'pippin_robust_posterior'"):
        RobustPosteriorEstimation.load(tmp_path / "other", PRIOR, encoder())
    with pytest.raises(ModelNotFound):
        RobustPosteriorEstimation.load(tmp_path / "nothing", PRIOR, encoder())


@pytest.mark.parametrize(("gamma", "tau"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (0.5, 0.0), (0.5, 1.5)])
def test_gamma_and_tau_out_of_range(npe, gamma, tau):
    with pytest.raises(InvalidArgument, match="above 0"):
        RobustPosteriorEstimation(npe, gamma, tau)


def test_an_unfitted_network_is_refused():
    with pytest.raises(NotFitted, match=r"npe\.fit"):
        RobustPosteriorEstimation(NPE(PRIOR))


def test_bad_calibration_sets(npe, real):
    rope = RobustPosteriorEstimation(npe)
    theta, x = real
    for bad_theta, bad_x, message in (
        (theta[:1], x[:1], "of 1 rows cannot be split"),
        (theta[:0], x[:0], "of 0 rows cannot be split"),
        (theta + 9, x, "outside of the prior's bounds in 120 of 120"),
        (theta[:, :1], x, "has 2 parameters"),
        (theta, x[:, :3], r"must have the shape \[4\]"),
        (theta, x * math.nan, "not finite in 120 of 120"),
    ):
        with pytest.raises(InvalidInput, match=message):
            rope.calibrate(bad_theta, bad_x)
    with pytest.raises((InvalidInput, TypeCheckError)):
        rope.calibrate(theta, x[:50])
    for change in ({"steps": 0}, {"lr": 0.0}, {"validation": 1.0}):
        with pytest.raises(InvalidArgument, match="must be"):
            rope.calibrate(theta, x, **change)
    assert rope.tuned is None


def test_bad_batches(npe, real):
    rope = RobustPosteriorEstimation(npe)
    x = real[1]
    with pytest.raises(NotFitted, match="no batch is stored"):
        rope.inductive_posterior(x[:1])
    with pytest.raises(InvalidArgument, match="balanced plan of one observation"):
        rope.posterior(x[:1])
    with pytest.raises(InvalidArgument, match="1 simulations"):
        rope.posterior(x, simulations=1)
    spoilt = x.clone()
    spoilt[[3, 50], 0] = math.inf
    with pytest.raises(InvalidInput, match=r"not finite in 2 of 120 rows \(3, 50\)"):
        rope.posterior(spoilt)
    with pytest.raises(NotConverged, match="raise gamma"):
        RobustPosteriorEstimation(npe, 1e-4).posterior(x, simulations=40, tolerance=1e-12)
    posterior = rope.posterior(x, simulations=20)
    with pytest.raises(InvalidInput, match="give finite values of shape"):
        posterior.log_prob(real[0] * math.nan)
    with pytest.raises(InvalidArgument, match="n must be at least 1"):
        posterior.sample(0)
