"""Oracles for the Bayesian VAE: loops, exact evidences of linear models, laws of effective sample sizes."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings, strategies as st
from jaxtyping import TypeCheckError
from torch import distributions as D, nn

from pippin.bayes.latent.bayesian_vae import BayesianVAE, ood_score, score_temperature
from pippin.bayes.latent.vae import VAE, VAEConfig
from pippin.bayes.predictors.sghmc import SGHMCConfig
from pippin.core.errors import (
    ChainDiverged,
    CorruptedFile,
    InferenceAtRisk,
    InvalidArgument,
    InvalidInput,
    ModelNotFound,
    NotFitted,
    UnsupportedModel,
)
from pippin.metrics import roc_auc

SHORT = SGHMCConfig(
    warmup_steps=300, warmup_lr=5e-3, burn_in_steps=100, num_samples=6, thinning=20, lr=2e-3, batch_size=32
)


def bars(n, seed=0):
    """Pictures of 4 by 4 with one row on."""
    rows = torch.randint(4, (n,), generator=torch.Generator().manual_seed(seed))
    return nn.functional.one_hot(rows, 4)[:, :, None].expand(-1, -1, 4).flatten(1).float()


@pytest.fixture(scope="module")
def fitted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferenceAtRisk)
        return BayesianVAE(VAE(VAEConfig((16,), 2, (24,)))).fit(bars(256), SHORT)


def by_hand(log_likelihood, kind):
    values = log_likelihood.tolist()
    scores = []
    for column in zip(*values, strict=True):
        top = max(column)
        weights = [math.exp(v - top) for v in column]
        w = [v / sum(weights) for v in weights]
        mean = sum(column) / len(column)
        variance = sum((v - mean) ** 2 for v in column) / len(column)
        scores.append(
            {
                "ess": 1 / sum(v * v for v in w),
                "entropy": math.exp(-sum(v * math.log(v) for v in w if v > 0)),
                "ll": top + math.log(sum(weights) / len(weights)),
                "waic": mean - variance,
                "variance": -variance,
                "typicality": -abs(top + math.log(sum(weights) / len(weights)) + 5.0),
            }[kind]
        )
    return scores


@pytest.mark.parametrize("kind", ["ess", "entropy", "ll", "waic", "variance", "typicality"])
def test_scores_are_those_of_a_loop(kind):
    found = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).double() * 3 - 4
    scores = ood_score(found, kind, training=-5.0)
    assert scores.tolist() == pytest.approx(by_hand(found, kind), rel=1e-9)


@given(
    st.lists(st.lists(st.floats(-500, 0), min_size=3, max_size=3), min_size=2, max_size=8),
    st.floats(-1000, 1000),
)
@settings(deadline=None)
def test_effective_sizes_lie_between_one_and_all_and_ignore_a_common_shift(rows, shift):
    found = torch.tensor(rows, dtype=torch.float64)
    for kind in ("ess", "entropy"):
        scores = ood_score(found, kind)
        assert ((scores >= 1 - 1e-9) & (scores <= len(rows) + 1e-9)).all()
        torch.testing.assert_close(ood_score(found + shift, kind), scores, rtol=1e-6, atol=1e-9)
    assert (ood_score(found, "entropy") >= ood_score(found, "ess") - 1e-9).all()  # Renyi's entropies decrease


def test_equal_samples_and_one_that_explains_alone():
    equal, alone = torch.zeros(10, 1), torch.cat([torch.zeros(1, 1), torch.full((9, 1), -900.0)])
    assert ood_score(equal, "ess").item() == pytest.approx(10)
    assert ood_score(alone, "ess").item() == pytest.approx(1)


def test_likelihoods_of_linear_models_are_the_exact_evidence():
    """With the encoder of sample 0 the estimate of sample 0 is exact for any draws; that of sample 1 converges."""
    from tests.bayes.latent.test_vae import linear_vae

    vae, evidence = linear_vae()
    model = BayesianVAE(vae)
    weight, bias = vae.decoder.weight.detach(), vae.decoder.bias.detach()
    other = weight + 0.05
    model.samples = {
        "decoder.weight": torch.stack([weight, other]),
        "decoder.bias": torch.stack([bias, bias]),
    }
    x = bias + torch.randn(6, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    wanted = evidence.log_prob(x)
    torch.testing.assert_close(model.log_likelihood(x, n_z=1)[0], wanted, rtol=0, atol=1e-5)
    moved = D.MultivariateNormal(bias, other @ other.T + 0.09 * torch.eye(5)).log_prob(x)
    torch.testing.assert_close(model.log_likelihood(x, n_z=20_000)[1], moved, rtol=0, atol=0.05)


def test_the_score_of_an_input_depends_on_nothing_else(fitted, monkeypatch):
    x = bars(9, seed=2)
    together = fitted.log_likelihood(x)
    apart = torch.cat([fitted.log_likelihood(row[None]) for row in x], 1)
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-4)
    monkeypatch.setattr("pippin.bayes.latent.bayesian_vae._MAX_ELEMENTS", 64 * 16 * 2)
    torch.testing.assert_close(fitted.log_likelihood(x), together, rtol=0, atol=1e-4)


def test_foreign_inputs_score_lower(fitted):
    known, foreign = bars(100, seed=5), torch.rand(100, 16, generator=torch.Generator().manual_seed(0)).round()
    for kind in ("ess", "entropy", "ll", "waic", "variance"):
        assert float(roc_auc(fitted.score(known, kind), fitted.score(foreign, kind))) > 0.9
    typical = float(fitted.score(known, "ll").mean())
    assert float(roc_auc(*(fitted.score(x, "typicality", training=typical) for x in (known, foreign)))) > 0.9


def test_latent_score_is_the_mean_over_drawn_outputs(fitted):
    """One code, one output a draw: the mean of the scores of what was drawn from the samples it names."""
    z = torch.zeros(1, 2)
    chosen = torch.randint(len(fitted), (8,), generator=torch.Generator().manual_seed(4)).tolist()
    states = list(fitted._states())
    logits = torch.cat([fitted._logits(states[i], z) for i in chosen])
    drawn = fitted.vae.sample_output(logits, torch.Generator().manual_seed(4))
    wanted = fitted.score(drawn, "ess", seed=4).mean()
    torch.testing.assert_close(fitted.latent_score(z, "ess", n_x=8, seed=4)[0], wanted)
    two = fitted.latent_score(torch.cat([z, z + 1]), "ll", n_x=8, seed=4)
    assert two.shape == (2,)


@pytest.mark.filterwarnings("ignore::pippin.core.errors.InferenceAtRisk")
def test_the_encoder_stands_still_unless_it_is_sampled():
    x = bars(64)
    quick = SGHMCConfig(warmup_steps=5, burn_in_steps=5, num_samples=3, thinning=4, batch_size=16)
    for sampled in (False, True):
        vae = VAE(VAEConfig((16,), 2, (8,)))
        model = BayesianVAE(vae, bayes_encoder=sampled).fit(x, quick)
        names = {name for name in model.samples if name.startswith("encoder.")}
        assert bool(names) is sampled
        assert all(parameter.requires_grad for parameter in vae.parameters())
        decoder = model.samples["decoder.0.weight"]
        assert decoder.shape[0] == len(model) == 3
        assert not torch.equal(decoder[0], decoder[1])
        assert model.log_likelihood(x[:5]).shape == (3, 5)
    trained = VAE(VAEConfig((16,), 2, (8,)))
    only_warm = SGHMCConfig(warmup_steps=5, burn_in_steps=5, num_samples=2, thinning=1, batch_size=16)
    BayesianVAE(trained).fit(x, only_warm)
    longer = VAE(VAEConfig((16,), 2, (8,)))
    BayesianVAE(longer).fit(x, quick)
    pairs = zip(trained.encoder.parameters(), longer.encoder.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)  # however long the chain is


@pytest.mark.filterwarnings("ignore::pippin.core.errors.InferenceAtRisk")
def test_the_seed_fixes_the_samples():
    x, quick = bars(64), SGHMCConfig(warmup_steps=3, burn_in_steps=3, num_samples=2, thinning=2, batch_size=16)
    before = torch.random.get_rng_state()
    runs = [BayesianVAE(VAE(VAEConfig((16,), 2, (8,)))).fit(x, quick, seed=seed).samples for seed in (0, 0, 1)]
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert not torch.equal(runs[0]["decoder.0.weight"], runs[2]["decoder.0.weight"])


def test_a_saved_model_scores_the_same(fitted, tmp_path):
    fitted.save(tmp_path / "model")
    again = BayesianVAE.load(tmp_path / "model")
    x = bars(7, seed=8)
    assert torch.equal(again.log_likelihood(x), fitted.log_likelihood(x))
    assert (again.vae.config, again.prior_precision) == (fitted.vae.config, fitted.prior_precision)


def test_folders_that_hold_something_else(fitted, tmp_path):
    with pytest.raises(ModelNotFound):
        BayesianVAE.load(tmp_path / "nowhere")
    fitted.save(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    text = config.read_text()
    config.write_text(text.replace("pippin_bayesian_vae", "llama"))
    with pytest.raises(UnsupportedModel, match="'llama', not 'pippin_bayesian_vae'"):
        BayesianVAE.load(tmp_path / "model")
    config.write_text(text.replace('"latent_dim": 2', '"latent_dim": 3'))
    with pytest.raises(CorruptedFile, match="do not describe"):
        BayesianVAE.load(tmp_path / "model")


def test_an_ensemble_scores_with_its_own_encoders():
    models = [VAE(VAEConfig((16,), 2, (8,)), seed=seed) for seed in range(3)]
    ensemble, x = BayesianVAE.from_models(models), bars(5)
    found = ensemble.log_likelihood(x, n_z=16)
    for index, vae in enumerate(models):
        alone = BayesianVAE(vae)
        alone.samples = {
            name: torch.stack([p.detach(), p.detach()]) for name, p in vae.named_parameters() if "decoder" in name
        }
        torch.testing.assert_close(alone.log_likelihood(x, n_z=16)[0], found[index], rtol=0, atol=1e-5)


def test_a_temperature_brings_the_effective_share_where_it_is_wanted():
    found = 30 * torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    temperature = score_temperature(found, share=0.6)
    assert float(ood_score(found / temperature, "ess").mean()) / 20 == pytest.approx(0.6, abs=0.01)
    assert score_temperature(found / 1e4, share=0.6) == 1.0
    with pytest.raises(InvalidArgument, match=r"share is 0\.01"):
        score_temperature(found, share=0.01)


def test_a_chain_that_diverges_names_the_step():
    wild = SGHMCConfig(warmup_steps=0, burn_in_steps=20, num_samples=2, thinning=1, lr=1e9)
    with pytest.raises(ChainDiverged, match="smaller lr") as caught:
        BayesianVAE(VAE(VAEConfig((16,), 2, (8,)))).fit(bars(64), wild)
    assert caught.value.step >= 1


def test_samples_that_agree_too_much_are_warned_about():
    still = SGHMCConfig(warmup_steps=50, burn_in_steps=1, num_samples=2, thinning=1, lr=1e-9)
    with pytest.warns(InferenceAtRisk, match="nearly equal"):
        BayesianVAE(VAE(VAEConfig((16,), 2, (8,)))).fit(bars(64), still)
    wide = SGHMCConfig(warmup_steps=50, burn_in_steps=10, num_samples=20, thinning=10, lr=1e-2, temperature=300.0)
    with pytest.warns(InferenceAtRisk, match="score_temperature"):
        BayesianVAE(VAE(VAEConfig((16,), 2, (8,)))).fit(bars(64), wide)


def test_bad_input_is_named(fitted):
    fresh, x = BayesianVAE(VAE(VAEConfig((16,), 2))), bars(4)
    for call in (lambda: fresh.score(x, "ess"), lambda: fresh.latent_score(torch.zeros(1, 2), "ess")):
        with pytest.raises(NotFitted, match="call fit first"):
            call()
    with pytest.raises(NotFitted):
        fresh.save("nowhere")
    with pytest.raises(InvalidInput, match="outside 0 to 1"):
        fresh.fit(x * 2)
    with pytest.raises(InvalidInput, match="row 0 holds values that are not finite"):
        fitted.score(x * math.nan, "ess")
    with pytest.raises(InvalidInput, match="no examples"):
        fresh.fit(x[:0])
    with pytest.raises(InvalidArgument, match="n_z must be"):
        fitted.score(x, "ess", n_z=0)
    with pytest.raises(InvalidArgument, match="prior_precision must be"):
        BayesianVAE(fresh.vae, prior_precision=-1.0)
    with pytest.raises(InvalidInput, match="codes are finite rows of 2"):
        fitted.latent_score(torch.zeros(1, 3), "ess")
    with pytest.raises(InvalidArgument, match="typicality"):
        fitted.latent_score(torch.zeros(1, 2), "typicality")
    with pytest.raises(InvalidArgument, match="1 models"):
        BayesianVAE.from_models([fresh.vae])
    with pytest.raises(InvalidArgument, match="different configs"):
        BayesianVAE.from_models([fresh.vae, VAE(VAEConfig((16,), 3))])


def test_scores_refuse_what_they_cannot_compare():
    with pytest.raises(InvalidInput, match="at least 2"):
        ood_score(torch.zeros(1, 3), "ess")
    with pytest.raises((InvalidArgument, TypeCheckError)):
        ood_score(torch.zeros(2, 3), "typicality", training=torch.zeros(2, 3))
    with pytest.raises(InvalidInput, match="input 1 under sample 0 is nan"):
        ood_score(torch.tensor([[0.0, math.nan], [0.0, 0.0]]), "ess")
    with pytest.raises(InvalidArgument, match="training="):
        ood_score(torch.zeros(2, 3), "typicality")
