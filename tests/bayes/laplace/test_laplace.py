"""What a posterior answers: predictives, draws, tuning, files."""

import json
import math
from unittest.mock import patch

import pytest
import torch
from jaxtyping import TypeCheckError
from tests.bayes.posteriors import STRUCTURES, classes, line, net, ridge
from torch import nn

from pippin.bayes.laplace.curvature import EF, GGN
from pippin.bayes.laplace.functional import Functional
from pippin.bayes.laplace.laplace import Laplace
from pippin.bayes.laplace.low_rank import LowRank
from pippin.bayes.laplace.structure import Diag
from pippin.bayes.likelihood import Classification, MultiLabel, Regression
from pippin.bayes.prediction import Prediction, apply_link, sample_outputs, semidefinite_root
from pippin.bayes.weight_subset import Subnetwork
from pippin.core.errors import (
    CheckpointError,
    CorruptedFile,
    InvalidArgument,
    InvalidInput,
    ModelNotFound,
    SingularPosterior,
)

# --- predictives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Classification(), MultiLabel()])
def test_monte_carlo_link_is_the_integral(kind):
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    half = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
    covariance = half @ half.mT
    found = apply_link(kind, mean, covariance, "mc", num_samples=200_000, generator=generator)
    root = torch.linalg.cholesky(covariance)
    f = mean[:, None] + torch.randn(2, 200_000, 3, generator=generator, dtype=torch.float64) @ root.mT
    other = (f.softmax(-1) if isinstance(kind, Classification) else f.sigmoid()).mean(1)
    torch.testing.assert_close(found, other, rtol=0, atol=4e-3)


def test_probit_is_close_to_the_integral_for_one_logit():
    mean, variance = torch.linspace(-3, 3, 7, dtype=torch.float64), 2.0
    grid = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    weight = torch.exp(-0.5 * grid**2)
    weight = weight / weight.sum()
    integral = ((mean[:, None] + math.sqrt(variance) * grid).sigmoid() * weight).sum(1)
    covariance = torch.full((7, 1, 1), variance, dtype=torch.float64)
    found = apply_link(MultiLabel(), mean[:, None], covariance, "probit")
    torch.testing.assert_close(found[:, 0], integral, rtol=0, atol=0.01)


@pytest.mark.parametrize("how", ["probit", "mc", "bridge", "bridge_norm"])
def test_probabilities_add_up_to_one(how):
    mean = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    covariance = torch.eye(4, dtype=torch.float64).expand(5, 4, 4) * 0.5
    probs = apply_link(Classification(), mean, covariance, how)
    torch.testing.assert_close(probs.sum(-1), torch.ones(5, dtype=torch.float64))
    assert (probs > 0).all()
    assert torch.equal(probs.argmax(-1), mean.argmax(-1)) or how == "mc"


def test_draws_are_independent_between_examples_and_repeatable():
    mean = torch.zeros(2, 2, dtype=torch.float64)
    covariance = torch.eye(2, dtype=torch.float64).expand(2, 2, 2)
    f = sample_outputs(mean, covariance, 20_000, torch.Generator().manual_seed(3))
    assert torch.equal(f, sample_outputs(mean, covariance, 20_000, torch.Generator().manual_seed(3)))
    flat = f.flatten(1)
    assert (flat.T @ flat / len(flat) - torch.eye(4)).abs().max() < 0.03


def test_root_of_a_singular_covariance():
    flat = torch.ones(2, 3, 3, dtype=torch.float64)
    root = semidefinite_root(flat)
    torch.testing.assert_close(root @ root.mT, flat)
    with pytest.raises(SingularPosterior, match="eigenvalue"):
        semidefinite_root(-flat)
    with pytest.raises(SingularPosterior, match="not finite"):
        semidefinite_root(flat * math.nan)


def test_a_prediction_adds_the_noise_once():
    mean = torch.zeros(1, 2)
    found = Prediction(mean, torch.diag(torch.tensor([1.0, 4.0]))[None], noise=0.25)
    assert found.variance.tolist() == [[1.25, 4.25]]
    assert found.function_variance.tolist() == [[1.0, 4.0]]
    assert Prediction(mean, noise=0.25).variance.tolist() == [[0.25, 0.25]]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_weight_samples_have_the_covariance(structure):
    data = classes()
    laplace = Laplace(net(), "classification", "all", structure).fit(data)
    drawn = laplace.sample(20_000, torch.Generator().manual_seed(0)) - laplace.mean
    found = drawn.T @ drawn / len(drawn)
    size = laplace.selection.size
    exact = laplace.posterior.solve(torch.eye(size, dtype=torch.float64))
    assert (found - exact).abs().max() < 0.06 * exact.diagonal().max()
    torch.testing.assert_close(laplace.posterior.variances(), exact.diagonal(), rtol=1e-6, atol=1e-9)
    assert torch.equal(laplace.sample(3), laplace.sample(3))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_chunked_prediction_is_the_whole_one(structure):
    laplace = Laplace(net(), "classification", "all", structure).fit(classes())
    x = torch.randn(300, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    whole = laplace(x)
    joint = laplace(x[:4], joint=True)
    torch.testing.assert_close(laplace(x[140:150]).covariance, whole.covariance[140:150], rtol=1e-8, atol=1e-10)
    blocks = joint.covariance.view(4, 3, 4, 3)
    for n in range(4):
        torch.testing.assert_close(blocks[n, :, n], whole.covariance[n], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(joint.probs, whole.probs[:4])


def test_function_samples_are_those_of_the_linear_model():
    laplace = Laplace(net(1), "regression", "all", "full").fit(
        [(torch.randn(9, 2).double(), torch.zeros(9, 1).double())]
    )
    x = torch.randn(3, 2, dtype=torch.float64)
    f = laplace.functional_samples(x, 40_000, torch.Generator().manual_seed(0), joint=True)[..., 0]
    found = laplace(x, joint=True)
    torch.testing.assert_close(f.mean(0), found.mean[:, 0], rtol=0, atol=0.05)
    torch.testing.assert_close(torch.cov(f.T), found.covariance, rtol=0.1, atol=0.05)


def test_drawn_weights_agree_with_the_linear_model_where_the_model_is_linear():
    x, y = line()
    laplace = Laplace(ridge(x, y, 1.0, 0.3), Regression(0.3), "all", "full").fit([(x, y)])
    glm, mc = laplace(x[:4]), laplace(x[:4], pred_type="mc", num_samples=4_000)
    torch.testing.assert_close(mc.mean, glm.mean, rtol=0, atol=0.01)
    torch.testing.assert_close(mc.covariance, glm.covariance, rtol=0.1, atol=1e-3)
    assert mc.noise == glm.noise == pytest.approx(0.09)
    assert mc.probs is None


def test_randomness_comes_from_the_generator_and_the_global_one_is_untouched():
    laplace = Laplace(net(), "classification", "all", "diag", "mc").fit(classes())
    x = torch.randn(4, 2).double()
    before = torch.get_rng_state()
    for predictive in ("glm", "mc"):

        def ask(seed, pred_type=predictive):
            return laplace(x, pred_type, "mc", generator=torch.Generator().manual_seed(seed), num_samples=7).probs

        assert torch.equal(ask(0), ask(0))
        assert not torch.equal(ask(0), ask(1))
    laplace.fit(classes()).sample(2)
    Laplace(net(), "classification", "all", LowRank(3))
    assert laplace.model is not None
    torch.manual_seed(0)
    torch.set_rng_state(before)
    laplace(x, "mc")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_model_is_left_as_it_was():
    model = net()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    laplace = Laplace(model, "classification", "all", "kron").fit(classes())
    laplace.tune()
    laplace(torch.randn(3, 2).double(), "mc", num_samples=3)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m._backward_hooks or m._forward_pre_hooks for m in model.modules())


def test_inputs_may_be_a_mapping_and_outputs_have_logits():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)

        def forward(self, input_ids, attention_mask):
            pooled = (self.embed(input_ids) * attention_mask[..., None]).sum(1)
            return {"logits": self.head(pooled)}

    torch.manual_seed(0)
    model = Reader().eval()
    batch = {
        "input_ids": torch.randint(0, 10, (6, 5)),
        "attention_mask": torch.ones(6, 5),
        "labels": torch.tensor([0, 1, 0, 1, 1, 0]),
    }
    for subset in ("last_layer", "all"):
        laplace = Laplace(model, "classification", subset, "kron").fit([batch])
        found = laplace({name: batch[name][:2] for name in ("input_ids", "attention_mask")})
        assert found.probs.shape == (2, 2)
        assert (found.function_variance > 0).all()


# --- accumulation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "diag", Functional(40), LowRank(33)])
def test_two_fits_that_accumulate_are_one_fit_of_both(structure):
    first, second = classes()
    once = Laplace(net(), "classification", "all", structure).fit([first, second])
    twice = Laplace(net(), "classification", "all", structure).fit([first])
    twice.log_marginal_likelihood()  # what was computed of the first fit must not stay
    twice = twice.fit([second], accumulate=True)
    torch.testing.assert_close(twice.log_marginal_likelihood(), once.log_marginal_likelihood(), rtol=1e-7, atol=1e-7)
    again = twice.fit([first])
    alone = Laplace(net(), "classification", "all", structure).fit([first])
    torch.testing.assert_close(again.log_marginal_likelihood(), alone.log_marginal_likelihood())
    assert again.examples == 20


@pytest.mark.parametrize("structure", STRUCTURES)
def test_data_that_cannot_be_added_leaves_the_posterior_as_it_was(structure):
    first, second = classes()
    laplace = Laplace(net(), "classification", "all", structure).fit([first])
    before = laplace.log_marginal_likelihood()
    with pytest.raises(InvalidInput, match="class 9"):
        laplace.fit([second, (second[0], torch.full_like(second[1], 9))], accumulate=True)
    assert torch.equal(laplace.log_marginal_likelihood(), before)
    assert laplace.examples == 20


# --- tuning -----------------------------------------------------------------------------------------------------------


def exact_evidence(x, y, prior, sigma):
    marginal = x / prior @ x.T + sigma**2 * torch.eye(len(x), dtype=torch.float64)
    return torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=torch.float64), marginal).log_prob(y[:, 0])


def test_evidence_finds_the_maximum_for_prior_and_noise():
    x, y = line()
    laplace = Laplace(ridge(x, y, 1.0, 0.3), "regression", "all", "full").fit([(x, y)])
    laplace.tune()
    here = float(laplace.log_marginal_likelihood())
    for factor in (0.9, 1.1):
        assert float(laplace.log_marginal_likelihood(laplace.prior_precision * factor)) < here
        assert float(laplace.log_marginal_likelihood(None, laplace.sigma_noise * factor)) < here
    assert laplace.sigma_noise == pytest.approx(0.3, rel=0.3)


def test_precisions_for_each_weight_find_the_one_that_is_not_needed():
    x, y = line(200)
    y = y - 0.5 * x[:, 2:] * 1.0  # the third weight is 0
    laplace = Laplace(ridge(x, y, 1e-6, 0.3), Regression(0.3), "all", "full").fit([(x, y)])
    laplace.tune("diag", noise=False)
    prior = laplace.prior_precision
    assert prior[2] > 100 * prior[:2].max()
    weights = laplace.mean.double()
    gamma = 1 - prior * laplace.posterior.variances()
    torch.testing.assert_close(gamma[:2] / weights[:2] ** 2, prior[:2], rtol=1e-3, atol=0)  # MacKay's fixed point


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_gains_by_tuning_and_finer_priors_gain_more(structure):
    laplace = Laplace(net(), "classification", "all", structure).fit(classes())
    values = [float(laplace.log_marginal_likelihood())]
    for per in ("scalar", "layerwise") if structure == "kron" else ("scalar", "layerwise", "diag"):
        laplace.tune(per)
        values.append(float(laplace.log_marginal_likelihood()))
    assert values == sorted(values)
    assert len(laplace.prior_precision) == (2 if structure == "kron" else 39)


def test_cross_validation_is_exact_for_a_linear_model():
    x, y = line(24)
    data = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 24, 4)]
    grid, sigma, folds = torch.logspace(-2, 3, 6, dtype=torch.float64), 0.3, 3
    expected = []
    for precision in grid.tolist():
        total = 0.0
        for fold in range(folds):
            kept = [i for i in range(6) if i % folds != fold]
            held = [i for i in range(6) if i % folds == fold]
            xs, ys = torch.cat([data[i][0] for i in kept]), torch.cat([data[i][1] for i in kept])
            xt, yt = torch.cat([data[i][0] for i in held]), torch.cat([data[i][1] for i in held])
            gram = xs.T @ xs / sigma**2 + precision * torch.eye(3, dtype=torch.float64)
            mean = xt @ torch.linalg.solve(gram, xs.T @ ys / sigma**2)
            sd = ((xt @ gram.inverse()) * xt).sum(-1, keepdim=True).add(sigma**2).sqrt()
            total += torch.distributions.Normal(mean, sd).log_prob(yt).sum()
        expected.append(total / 24)
    from pippin.bayes.laplace import tuning

    # fitted at another precision than any of the grid: the step away from the weights makes up for it
    laplace = Laplace(ridge(x, y, 7.0, sigma), Regression(sigma), "all", "full").fit(data)
    found = tuning._fold_scores(laplace, data, grid, folds, "probit")
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-8, atol=1e-8)
    laplace.tune_by_cross_validation(data, folds=folds, grid=grid)
    assert float(laplace.prior_precision) == pytest.approx(float(grid[found.argmax()]))


@pytest.mark.parametrize("kind", ["classification", "multi_label", "regression"])
def test_grid_takes_the_best_likelihood_of_held_out_data(kind):
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    y = {"classification": torch.arange(30) % 3, "multi_label": (x[:, :1] > 0).double().expand(30, 3)}.get(kind)
    y = torch.cat([x, x[:, :1]], 1) if y is None else y
    laplace = Laplace(net(), kind, "all", "full").fit([(x[:20], y[:20])])
    grid = [0.01, 0.1, 1.0, 10.0, 100.0]
    scores = []
    for precision in grid:
        laplace.prior_precision = precision
        found = laplace(x[20:])
        if kind == "regression":
            spread = found.covariance + torch.eye(3, dtype=torch.float64)
            scores.append(torch.distributions.MultivariateNormal(found.mean, spread).log_prob(y[20:]).sum())
        elif kind == "multi_label":
            scores.append(torch.distributions.Bernoulli(found.probs).log_prob(y[20:]).sum())
        else:
            scores.append(torch.distributions.Categorical(found.probs).log_prob(y[20:]).sum())
    laplace.tune_on_validation([(x[20:25], y[20:25]), (x[25:], y[25:])], grid=grid)
    assert float(laplace.prior_precision) == grid[int(torch.stack(scores).argmax())]


def test_tuning_a_full_last_layer_computes_eigenvalues_once():
    laplace = Laplace(net(), "classification", "last_layer", "full").fit(classes())
    with patch("torch.linalg.eigvalsh", wraps=torch.linalg.eigvalsh) as counted:
        laplace.tune()
    assert counted.call_count <= 1


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        (lambda p: p.tune("tensor"), "prior_structure must be"),
        (lambda p: p.tune_on_validation(classes(), grid=[0.0]), "above 0"),
        (lambda p: p.tune_on_validation(classes(), link_approx="magic"), "link_approx must be"),
        (lambda p: p.tune_by_cross_validation(classes(), folds=1), "folds must be at least 2"),
    ],
)
def test_tuning_refuses(tune, message):
    laplace = Laplace(net(), "classification", "all", "diag").fit(classes())
    with pytest.raises((InvalidArgument, TypeCheckError), match=f"{message}|type"):
        tune(laplace)


def test_tuning_refuses_data_that_is_too_little():
    laplace = Laplace(net(), "classification", "all", "diag").fit(classes())
    with pytest.raises(InvalidInput, match="5 folds need as many batches, the data has 2"):
        laplace.tune_by_cross_validation(classes())
    with pytest.raises(InvalidInput, match="no batch"):
        laplace.tune_on_validation([])
    other = Laplace(net(), "classification", "all", "full", "hessian", 30.0).fit(classes())
    with pytest.raises(InvalidArgument, match="use the curvature ggn"):
        other.tune_by_cross_validation(classes(), folds=2)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "subset", "structure", "curvature"),
    [
        (Classification(), "last_layer", "full", EF()),
        (Classification(), "all", "kron", GGN()),
        (MultiLabel(), Subnetwork([1, 4, 30]), "diag", GGN(num_samples=2, seed=3)),
        (Regression(0.4), "all", LowRank(6), GGN()),
        (Regression(0.4), "all", Functional(5), GGN()),
    ],
)
def test_a_posterior_comes_back_from_its_files(tmp_path, kind, subset, structure, curvature):
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    y = {"classification": torch.arange(20) % 3, "multi_label": (x[:, :1] > 0).double().expand(20, 3)}.get(kind.name)
    y = torch.cat([x, x[:, :1]], 1) if y is None else y
    laplace = Laplace(net(), kind, subset, structure, curvature, 2.0, 0.5).fit([(x, y)])
    laplace.tune("layerwise")
    laplace.save(tmp_path / "posterior")
    again = Laplace.load(tmp_path / "posterior", net())
    torch.testing.assert_close(again(x).covariance, laplace(x).covariance, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(again.sample(2), laplace.sample(2), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(again.log_marginal_likelihood(), laplace.log_marginal_likelihood(), rtol=0, atol=1e-10)
    assert (again.likelihood, again.structure, again.curvature) == (kind, laplace.structure, curvature)
    assert (again.temperature, again.sigma_noise) == (0.5, laplace.sigma_noise)


def test_a_posterior_is_not_put_on_another_model(tmp_path):
    Laplace(net(), "classification", "all", "diag").fit(classes()).save(tmp_path)
    with pytest.raises(CheckpointError, match="weights are not those"):
        Laplace.load(tmp_path, net(seed=1))
    with pytest.raises(CheckpointError, match="made for another model"):
        Laplace.load(tmp_path, net(outputs=4))
    with pytest.raises(ModelNotFound):
        Laplace.load(tmp_path / "nowhere", net())
    config = json.loads((tmp_path / "config.json").read_text())
    for name, wrong in (("examples", None), ("examples", -5), ("outputs", 0), ("loss", float("nan"))):
        (tmp_path / "config.json").write_text(json.dumps({**config, name: wrong}))
        with pytest.raises(CorruptedFile, match=name):
            Laplace.load(tmp_path, net())
    for name, wrong in (("curvature", {"kind": "none"}), ("likelihood", {"kind": "classification", "extra": 1})):
        (tmp_path / "config.json").write_text(json.dumps({**config, name: wrong}))
        with pytest.raises(CorruptedFile, match="cannot be read"):
            Laplace.load(tmp_path, net())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CorruptedFile, match="damaged"):
        Laplace.load(tmp_path, net())


def test_an_object_of_ones_own_is_not_saved(tmp_path):
    class Mine(Diag):
        pass

    laplace = Laplace(net(), "classification", "all", Mine()).fit(classes())
    with pytest.raises(InvalidArgument, match="Mine is not one of Pippin's own"):
        laplace.save(tmp_path)
