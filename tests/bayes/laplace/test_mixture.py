"""Mixtures against explicit sums over their components, closed forms of linear models, and known weights."""

import json
import math

import pytest
import torch
from torch import nn

from pippin.bayes.laplace.laplace import Laplace
from pippin.bayes.laplace.mixture import LaplaceMixture
from pippin.bayes.likelihood import Regression
from pippin.bayes.predictors.deep_ensemble import DeepEnsemble
from pippin.core.errors import CorruptedFile, InvalidArgument, InvalidInput, ModelNotFound, NotFitted
from pippin.metrics import entropy

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(60, 3, generator=GENERATOR, dtype=torch.float64)
LABELS = (X @ torch.tensor([[1.0, 0, -1], [0, 1.0, 1], [1, -1, 0]], dtype=torch.float64)).argmax(-1)
REAL = (X[:, :1] - 0.5 * X[:, 1:2]) + 0.1 * torch.randn(60, 1, generator=GENERATOR, dtype=torch.float64)
NEW = 2 * torch.randn(7, 3, generator=GENERATOR, dtype=torch.float64)


def network(seed, outputs=3):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)).double().eval()


def fitted(seed, y=LABELS, likelihood="classification", **how):
    model = network(seed, 3 if y is LABELS else y.shape[1])
    return Laplace(model, likelihood, hessian_structure="full", **how).fit([(X[:30], y[:30]), (X[30:], y[30:])])


@pytest.mark.parametrize("link", ["probit", "mc", "bridge"])
def test_probabilities_are_the_weighted_mean_after_the_link(link):
    parts = [fitted(seed) for seed in range(3)]
    weights = [0.6, 0.3, 0.1]
    found = LaplaceMixture(parts, weights)(NEW, link_approx=link)
    expected = sum(w * part(NEW, link_approx=link).probs for w, part in zip(weights, parts, strict=True))
    torch.testing.assert_close(found.probs, expected)


def test_one_component_is_that_component():
    part = fitted(0)
    one, alone = LaplaceMixture([part])(NEW), part(NEW)
    assert torch.equal(one.probs, alone.probs)
    assert torch.equal(one.covariance, alone.covariance)
    assert LaplaceMixture([part]).mutual_information(NEW).abs().max() < 1e-12


def test_without_variance_it_is_the_ensemble():
    models = [network(seed) for seed in range(3)]
    data = [(X, LABELS)]
    sure = LaplaceMixture.from_models(models, data, hessian_structure="full", prior_precision=1e14, tune=False)
    torch.testing.assert_close(sure(NEW).probs, DeepEnsemble(models)(NEW).probs, rtol=0, atol=1e-6)


def test_a_regressions_variance_is_within_plus_between():
    parts = [fitted(seed, REAL, Regression(sigma)) for seed, sigma in ((0, 0.1), (1, 0.3))]
    weights = [0.25, 0.75]
    found = LaplaceMixture(parts, weights)(NEW)
    single = [part(NEW) for part in parts]
    mean = 0.25 * single[0].mean + 0.75 * single[1].mean
    second = sum(w * (one.variance + one.mean.square()) for w, one in zip(weights, single, strict=True))
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.variance, second - mean.square())


def test_the_density_of_a_regression_integrates_to_one_and_has_two_peaks():
    parts = [fitted(seed, REAL, Regression(0.05), prior_precision=100.0) for seed in range(2)]
    mixture = LaplaceMixture(parts)
    x = NEW[:1]
    centers = [float(part(x).mean) for part in parts]
    grid = torch.linspace(min(centers) - 3, max(centers) + 3, 4001, dtype=torch.float64)
    density = mixture.log_likelihood(x.expand(4001, -1), grid).exp()
    assert float(torch.trapezoid(density, grid)) == pytest.approx(1.0, abs=1e-6)
    each = [torch.distributions.Normal(one.mean, one.variance.sqrt()) for one in (part(x) for part in parts)]
    middle = torch.tensor([[0.3]], dtype=torch.float64)
    expected = torch.stack([one.log_prob(middle) for one in each]).logsumexp(0) - math.log(2)
    torch.testing.assert_close(mixture.log_likelihood(x, middle[0]), expected[0])


def test_labels_have_the_log_of_the_mixed_probabilities():
    mixture = LaplaceMixture([fitted(seed) for seed in range(2)])
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    torch.testing.assert_close(mixture.log_likelihood(NEW, labels), mixture(NEW).probs[torch.arange(7), labels].log())


def test_disagreement_is_the_entropy_of_the_mean_less_the_mean_entropy():
    parts = [fitted(seed) for seed in range(3)]
    probs = torch.stack([part(NEW).probs for part in parts])
    expected = entropy(probs.mean(0)) - entropy(probs).mean(0)
    found = LaplaceMixture(parts).mutual_information(NEW)
    torch.testing.assert_close(found, expected)
    assert (found > 0).all()


def test_samples_come_from_the_components_in_their_shares():
    parts = [fitted(seed, prior_precision=1e3) for seed in range(2)]
    mixture = LaplaceMixture(parts, [0.8, 0.2])
    which, drawn = mixture.sample(2000, torch.Generator().manual_seed(1))
    assert float((which == 0).double().mean()) == pytest.approx(0.8, abs=0.03)
    for number, part in enumerate(parts):
        rows = torch.stack([drawn[i] for i in (which == number).nonzero()[:, 0].tolist()])
        torch.testing.assert_close(rows.mean(0), part.mean, atol=0.02, rtol=0)
    again = mixture.sample(2000, torch.Generator().manual_seed(1))
    assert torch.equal(again[0], which)
    assert torch.equal(again[1][-1], drawn[-1])


def test_weights_of_the_highest_likelihood_are_those_of_a_search():
    parts = [fitted(seed) for seed in range(2)]
    mixture = LaplaceMixture(parts)
    chance = [part(X).probs[torch.arange(60), LABELS] for part in parts]
    grid = torch.linspace(0, 1, 100_001, dtype=torch.float64)[:, None]
    total = (grid * chance[0] + (1 - grid) * chance[1]).log().sum(1)
    mixture.fit_weights([(X, LABELS)])
    assert float(mixture.weights.sum()) == pytest.approx(1.0)
    assert float(mixture.log_likelihood(X, LABELS).sum()) == pytest.approx(float(total.max()), abs=1e-3)


def test_a_temperature_never_raises_the_held_out_loss():
    mixture = LaplaceMixture([fitted(seed) for seed in range(2)])
    before = float(mixture.log_likelihood(X, LABELS).mean())
    answers = mixture(NEW).probs.argmax(-1)
    mixture.fit_temperature([(X, LABELS)])
    assert mixture.temperature != 1.0
    assert float(mixture.log_likelihood(X, LABELS).mean()) >= before
    assert torch.equal(mixture(NEW).probs.argmax(-1), answers)


def test_saved_and_loaded_it_predicts_the_same(tmp_path):
    models = [network(seed) for seed in range(2)]
    mixture = LaplaceMixture.from_models(
        models, [(X, LABELS)], hessian_structure="full", weights=[0.4, 0.6], tune=False
    )
    mixture.temperature = 1.3
    mixture.save(tmp_path / "mixture")
    again = LaplaceMixture.load(tmp_path / "mixture", models)
    torch.testing.assert_close(again(NEW).probs, mixture(NEW).probs)
    with pytest.raises(InvalidArgument, match="2 components; 1 models"):
        LaplaceMixture.load(tmp_path / "mixture", models[:1])
    with pytest.raises(ModelNotFound):
        LaplaceMixture.load(tmp_path, models)
    config = json.loads((tmp_path / "mixture" / "config.json").read_text())
    for wrong, message in (({"temperature": -1.0}, "temperature"), ({"weights": [0.4, 0.7]}, "contradicts itself")):
        (tmp_path / "mixture" / "config.json").write_text(json.dumps(config | wrong))
        with pytest.raises(CorruptedFile, match=message):
            LaplaceMixture.load(tmp_path / "mixture", models)


def test_components_that_make_no_mixture():
    part = fitted(0)
    with pytest.raises(InvalidArgument, match="at least one component"):
        LaplaceMixture([])
    with pytest.raises(InvalidArgument, match="components must share one likelihood"):
        LaplaceMixture([part, fitted(1, REAL, "regression")])
    with pytest.raises(NotFitted, match="component 1 is not fitted"):
        LaplaceMixture([part, Laplace(network(1), "classification", hessian_structure="full")])
    for weights in ([0.5, 0.6], [-0.5, 1.5], [1.0]):
        with pytest.raises(InvalidArgument, match="weights"):
            LaplaceMixture([part, part], weights)
    narrow = Laplace(network(2, 2), "classification", hessian_structure="full").fit([(X, LABELS % 2)])
    with pytest.raises(InvalidArgument, match="same outputs"):
        LaplaceMixture([part, narrow])(NEW)


def test_models_and_data_that_make_no_mixture():
    data = [(X, LABELS)]
    with pytest.raises(InvalidArgument, match="at least one model"):
        LaplaceMixture.from_models([], data)
    with pytest.raises(InvalidArgument, match="read once"):
        LaplaceMixture.from_models([network(0)], iter(data))
    with pytest.raises(InvalidInput, match="no batch"):
        LaplaceMixture.from_models([network(0)], [], hessian_structure="full")
    with pytest.raises(InvalidInput, match="nan"):
        LaplaceMixture.from_models([network(0)], [(X * torch.nan, LABELS)], hessian_structure="full")


def test_what_cannot_be_asked():
    mixture = LaplaceMixture([fitted(0)])
    with pytest.raises(InvalidArgument, match="n must be at least 1"):
        mixture.sample(0)
    with pytest.raises(InvalidInput, match="no batches"):
        mixture.fit_temperature([])
    with pytest.raises(InvalidInput, match="3 targets for 7"):
        mixture.log_likelihood(NEW, LABELS[:3])
    with pytest.raises(InvalidArgument, match="see the covariance"):
        LaplaceMixture([fitted(0, REAL, "regression")]).mutual_information(NEW)
