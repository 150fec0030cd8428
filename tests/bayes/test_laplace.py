"""What a posterior answers: predictives, draws, tuning, files, and every input that it refuses."""

import json
import math
import warnings
from unittest.mock import patch

import pytest
import torch
from torch import nn

from pippin.bayes import memory
from pippin.bayes.curvature import EF, GGN, curvature
from pippin.bayes.functional import Functional
from pippin.bayes.laplace import Laplace
from pippin.bayes.likelihood import Classification, MultiLabel, Regression
from pippin.bayes.lowrank import LowRank
from pippin.bayes.predictive import Prediction, draws, link, semidefinite_root
from pippin.bayes.structure import Diag, Full, structure
from pippin.bayes.subset import Subnetwork
from pippin.core.errors import (
    CheckpointError,
    CorruptedFile,
    InvalidArgument,
    InvalidInput,
    NonFiniteEvidence,
    NotEnoughMemory,
    NotFitted,
    SingularPosterior,
)

STRUCTURES = ["full", "diag", "kron", LowRank(5), Functional(10)]


def net(outputs=3, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype).eval()


def classes(n=40, k=3, dtype=torch.float64):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return [(x[: n // 2], (torch.arange(n) % k)[: n // 2]), (x[n // 2 :], (torch.arange(n) % k)[n // 2 :])]


def line(n=40, sigma=0.3):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    w = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    y = x @ w + sigma * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return x, y


def ridge(x, y, precision, sigma):
    """The mode of a linear model without bias."""
    model = nn.Linear(x.shape[1], 1, bias=False).double()
    gram = x.T @ x / sigma**2 + precision * torch.eye(x.shape[1], dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(gram, x.T @ y / sigma**2).T)
    return model


# --- predictives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Classification(), MultiLabel()])
def test_monte_carlo_link_is_the_integral(kind):
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    half = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
    covariance = half @ half.mT
    found = link(kind, mean, covariance, "mc", samples=200_000, generator=generator)
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
    found = link(MultiLabel(), mean[:, None], covariance, "probit")
    torch.testing.assert_close(found[:, 0], integral, rtol=0, atol=0.01)


@pytest.mark.parametrize("how", ["probit", "mc", "bridge", "bridge_norm"])
def test_probabilities_add_up_to_one(how):
    mean = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    covariance = torch.eye(4, dtype=torch.float64).expand(5, 4, 4) * 0.5
    probs = link(Classification(), mean, covariance, how)
    torch.testing.assert_close(probs.sum(-1), torch.ones(5, dtype=torch.float64))
    assert (probs > 0).all()
    assert torch.equal(probs.argmax(-1), mean.argmax(-1)) or how == "mc"


def test_draws_are_independent_between_examples_and_repeatable():
    mean = torch.zeros(2, 2, dtype=torch.float64)
    covariance = torch.eye(2, dtype=torch.float64).expand(2, 2, 2)
    f = draws(mean, covariance, 20_000, torch.Generator().manual_seed(3))
    assert torch.equal(f, draws(mean, covariance, 20_000, torch.Generator().manual_seed(3)))
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
    glm, mc = laplace(x[:4]), laplace(x[:4], predictive="mc", samples=4_000)
    torch.testing.assert_close(mc.mean, glm.mean, rtol=0, atol=0.01)
    torch.testing.assert_close(mc.covariance, glm.covariance, rtol=0.1, atol=1e-3)
    assert mc.noise == glm.noise == pytest.approx(0.09)
    assert mc.probs is None


def test_randomness_comes_from_the_generator_and_the_global_one_is_untouched():
    laplace = Laplace(net(), "classification", "all", "diag", "mc").fit(classes())
    x = torch.randn(4, 2).double()
    before = torch.get_rng_state()
    for predictive in ("glm", "mc"):

        def ask(seed, predictive=predictive):
            return laplace(x, predictive, "mc", generator=torch.Generator().manual_seed(seed), samples=7).probs

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
    laplace(torch.randn(3, 2).double(), "mc", samples=3)
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
    twice = Laplace(net(), "classification", "all", structure).fit([first]).fit([second], accumulate=True)
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
    laplace.tune("evidence")
    here = float(laplace.log_marginal_likelihood())
    for factor in (0.9, 1.1):
        assert float(laplace.log_marginal_likelihood(laplace.prior_precision * factor)) < here
        assert float(laplace.log_marginal_likelihood(None, laplace.sigma_noise * factor)) < here
    assert laplace.sigma_noise == pytest.approx(0.3, rel=0.3)


def test_precisions_for_each_weight_find_the_one_that_is_not_needed():
    x, y = line(200)
    y = y - 0.5 * x[:, 2:] * 1.0  # the third weight is 0
    laplace = Laplace(ridge(x, y, 1e-6, 0.3), Regression(0.3), "all", "full").fit([(x, y)])
    laplace.tune("evidence", per="weight", noise=False)
    prior = laplace.prior_precision
    assert prior[2] > 100 * prior[:2].max()
    weights = laplace.mean.double()
    gamma = 1 - prior * laplace.posterior.variances()
    torch.testing.assert_close(gamma[:2] / weights[:2] ** 2, prior[:2], rtol=1e-3, atol=0)  # MacKay's fixed point


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_gains_by_tuning_and_finer_priors_gain_more(structure):
    laplace = Laplace(net(), "classification", "all", structure).fit(classes())
    values = [float(laplace.log_marginal_likelihood())]
    for per in ("all", "layer") if structure == "kron" else ("all", "layer", "weight"):
        laplace.tune("evidence", per=per)
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
    from pippin.bayes import tuning

    # fitted at another precision than any of the grid: the step away from the weights makes up for it
    laplace = Laplace(ridge(x, y, 7.0, sigma), Regression(sigma), "all", "full").fit(data)
    found = tuning.by_folds(laplace, data, grid, folds, "probit")
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-8, atol=1e-8)
    laplace.tune("cross_validation", validation=data, folds=folds, grid=grid)
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
    laplace.tune("grid", validation=[(x[20:25], y[20:25]), (x[25:], y[25:])], grid=grid)
    assert float(laplace.prior_precision) == grid[int(torch.stack(scores).argmax())]


def test_tuning_a_full_last_layer_computes_eigenvalues_once():
    laplace = Laplace(net(), "classification", "last_layer", "full").fit(classes())
    with patch("torch.linalg.eigvalsh", wraps=torch.linalg.eigvalsh) as counted:
        laplace.tune("evidence")
    assert counted.call_count <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "magic"}, "method is 'magic'"),
        ({"per": "tensor"}, "per is 'tensor'"),
        ({"method": "evidence", "validation": []}, "needs no validation"),
        ({"method": "grid"}, "needs validation"),
        ({"method": "grid", "per": "layer", "validation": []}, "one precision for all"),
        ({"method": "grid", "validation": classes(), "grid": [0.0]}, "precisions above 0"),
        ({"method": "grid", "validation": classes(), "link": "magic"}, "link is 'magic'"),
        ({"method": "cross_validation", "validation": classes(), "folds": 1}, "folds is 1"),
    ],
)
def test_tuning_refuses(arguments, message):
    laplace = Laplace(net(), "classification", "all", "diag").fit(classes())
    with pytest.raises(InvalidArgument, match=message):
        laplace.tune(**arguments)


def test_tuning_refuses_data_that_is_too_little():
    laplace = Laplace(net(), "classification", "all", "diag").fit(classes())
    with pytest.raises(InvalidInput, match="5 folds need as many batches, the data has 2"):
        laplace.tune("cross_validation", validation=classes())
    with pytest.raises(InvalidInput, match="no batch"):
        laplace.tune("grid", validation=[])
    other = Laplace(net(), "classification", "all", "full", "hessian", 30.0).fit(classes())
    with pytest.raises(InvalidArgument, match="use the curvature ggn"):
        other.tune("cross_validation", validation=classes(), folds=2)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "subset", "structure", "curvature"),
    [
        (Classification(), "last_layer", "full", EF()),
        (Classification(), "all", "kron", GGN()),
        (MultiLabel(), Subnetwork([1, 4, 30]), "diag", GGN(samples=2, seed=3)),
        (Regression(0.4), "all", LowRank(6), GGN()),
        (Regression(0.4), "all", Functional(5), GGN()),
    ],
)
def test_a_posterior_comes_back_from_its_files(tmp_path, kind, subset, structure, curvature):
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    y = {"classification": torch.arange(20) % 3, "multi_label": (x[:, :1] > 0).double().expand(20, 3)}.get(kind.name)
    y = torch.cat([x, x[:, :1]], 1) if y is None else y
    laplace = Laplace(net(), kind, subset, structure, curvature, 2.0, 0.5).fit([(x, y)])
    laplace.tune(per="layer")
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
    with pytest.raises(CheckpointError, match="holds no posterior"):
        Laplace.load(tmp_path / "nowhere", net())
    facts = json.loads((tmp_path / "laplace.json").read_text())
    for wrong in ({"examples": None}, {"examples": -5}, {"outputs": 0}, {"loss": float("nan")}):
        (tmp_path / "laplace.json").write_text(json.dumps({**facts, **wrong}))
        with pytest.raises(CorruptedFile, match="cannot be read"):
            Laplace.load(tmp_path, net())
    (tmp_path / "laplace.json").write_text(json.dumps(facts))
    (tmp_path / "laplace.safetensors").write_bytes(b"damaged")
    with pytest.raises(CorruptedFile, match="cannot be read"):
        Laplace.load(tmp_path, net())


def test_an_object_of_ones_own_is_not_saved(tmp_path):
    class Mine(Diag):
        pass

    laplace = Laplace(net(), "classification", "all", Mine()).fit(classes())
    with pytest.raises(InvalidArgument, match="Mine is not one of Pippin's own"):
        laplace.save(tmp_path)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"likelihood": "poisson"}, "likelihood is 'poisson'"),
        ({"subset": "first"}, "subset is 'first'"),
        ({"structure": "block"}, "structure is 'block'"),
        ({"curvature": "newton"}, "curvature is 'newton'"),
        ({"prior_precision": 0.0}, "prior_precision holds 0"),
        ({"prior_precision": -1.0}, "prior_precision holds -1"),
        ({"prior_precision": math.nan}, "prior_precision holds nan"),
        (
            {"prior_precision": [1.0, 2.0, 3.0, 4.0]},
            "4 numbers; give 1, one for each of 2 layers, or .* 39",
        ),
        ({"temperature": 0.0}, "temperature is 0"),
    ],
)
def test_arguments_are_checked_at_once(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        Laplace(net(), **{"likelihood": "classification", "subset": "all", "structure": "diag", **arguments})


def test_a_model_without_a_linear_last_layer_is_named():
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    with pytest.raises(InvalidArgument, match=r"no linear last layer: the last layer is 1 \(LayerNorm\)"):
        Laplace(model, "classification")


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.Dropout(0.5)])
def test_layers_in_training_mode_are_refused(layer):
    model = nn.Sequential(nn.Linear(2, 4), layer, nn.Linear(4, 3)).double()
    laplace = Laplace(model, "classification", structure="diag")
    with pytest.raises(InvalidArgument, match=r"1 \(.*\) is in training mode.*call model.eval"):
        laplace.fit(classes())
    laplace.model.eval()
    laplace.fit(classes())
    laplace.model.train()
    with pytest.raises(InvalidArgument, match="training mode"):
        laplace(torch.zeros(1, 2).double())


def x_and(y):
    return [(torch.randn(len(y), 2).double(), y)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "no batch"),
        (x_and(torch.zeros(0, dtype=torch.long)), "batch 0 is empty"),
        (x_and(torch.tensor([1, 1, 1])), "all 3 targets are class 1"),
        (x_and(torch.tensor([0, 7])), "class 7 is not among"),
        (x_and(torch.tensor([0.0, 1.0])), "must be integers"),
        ([(torch.tensor([[1.0, math.nan]]).double(), torch.tensor([0]))], "inputs of batch 0 hold nan at \\[0, 1\\]"),
        ([torch.zeros(3, 2)], "must be a pair"),
        ([{"input_ids": torch.zeros(3, 2)}], "has no targets"),
        ([(torch.zeros(3, 2).double(), [0, 1, 2])], "must be a tensor, got list"),
    ],
)
def test_data_that_cannot_be_used_is_named(data, message):
    with pytest.raises(InvalidInput, match=message):
        Laplace(net(), "classification", structure="diag").fit(data)


def test_targets_of_a_regression_are_checked():
    laplace = Laplace(net(1), "regression", structure="diag")
    with pytest.raises(InvalidInput, match="targets of batch 0 hold nan"):
        laplace.fit(x_and(torch.tensor([0.0, math.nan])))
    with pytest.raises(InvalidInput, match="must be real numbers"):
        laplace.fit(x_and(torch.tensor([0, 1])))


def test_data_that_can_be_read_once_is_refused():
    with pytest.raises(InvalidArgument, match="iterator"):
        Laplace(net(), "classification", structure="diag").fit(iter(classes()))
    with pytest.raises(InvalidArgument, match="iterable of batches"):
        Laplace(net(), "classification", structure="diag").fit(torch.zeros(3))


@pytest.mark.parametrize(
    "ask",
    [
        lambda p: p(torch.zeros(1, 2).double()),
        lambda p: p.log_marginal_likelihood(),
        lambda p: p.sample(1),
        lambda p: p.functional_samples(torch.zeros(1, 2).double(), 1),
        lambda p: p.log_prob(torch.zeros(21).double()),
        lambda p: p.tune(),
        lambda p: p.posterior,
        lambda p: p.save("nowhere"),
    ],
)
@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_nothing_is_answered_before_the_fit(ask, structure):
    with pytest.raises(NotFitted, match="call fit"):
        ask(Laplace(net(), "classification", structure=structure))


def test_a_posterior_notices_that_its_model_moved():
    model = net()
    laplace = Laplace(model, "classification", structure="diag").fit(classes())
    with torch.no_grad():
        model[2].bias += 1
    with pytest.raises(NotFitted, match="changed since the fit"):
        laplace(torch.zeros(1, 2).double())


def test_calls_are_checked():
    laplace = Laplace(net(), "classification", structure="diag").fit(classes())
    x = torch.zeros(1, 2).double()
    cases = [
        (InvalidArgument, "predictive is 'magic'", lambda: laplace(x, "magic")),
        (InvalidArgument, "link is 'magic'", lambda: laplace(x, link="magic")),
        (InvalidArgument, "samples is 0", lambda: laplace(x, link="mc", samples=0)),
        (InvalidArgument, "of the linearised model", lambda: laplace(x, "mc", joint=True)),
        (InvalidArgument, "n is 0", lambda: laplace.sample(0)),
        (InvalidArgument, "3 weights for a posterior over 21", lambda: laplace.log_prob(torch.zeros(3).double())),
        (InvalidArgument, "must stay 1", lambda: setattr(laplace, "sigma_noise", 2.0)),
        (InvalidArgument, "has no noise", lambda: laplace.log_marginal_likelihood(None, 2.0)),
        (InvalidArgument, "holds 0", lambda: laplace.log_marginal_likelihood(0.0)),
        (InvalidInput, "no inputs", lambda: laplace(x[:0])),
        (InvalidInput, "hold nan", lambda: laplace(x * math.nan)),
    ]
    for error, message, ask in cases:
        with pytest.raises(error, match=message):
            ask()
    labels = Laplace(net(), "multi_label", structure="diag").fit(x_and(torch.tensor([[0.0, 1, 0]]).double()))
    with pytest.raises(InvalidArgument, match="for classes, not for labels"):
        labels(x, link="bridge")


def test_a_curvature_that_is_not_positive_is_refused_with_a_way_out():
    laplace = Laplace(net(), "classification", "all", "full", "hessian", 1e-3)
    laplace.fit(classes())
    for ask in (laplace.log_marginal_likelihood, lambda: laplace(torch.zeros(1, 2).double())):
        with pytest.raises(SingularPosterior, match="raise the prior precision"):
            ask()


def test_a_curvature_that_is_not_finite_is_refused():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, x):
            return x * self.w.abs().sqrt()

    for word in ("full", "diag"):
        with pytest.raises(SingularPosterior, match="infinite or NaN"):
            Laplace(Root(), "classification", "all", word).fit(x_and(torch.tensor([0, 1])))


def test_an_evidence_that_is_not_finite_names_its_term():
    model = net(1)
    laplace = Laplace(model, "regression", structure="diag").fit(x_and(torch.tensor([0.0, 1e200], dtype=torch.float64)))
    with pytest.raises(NonFiniteEvidence, match="the log-likelihood is -inf"):
        laplace.log_marginal_likelihood()


def test_outputs_that_are_not_finite_are_refused():
    model = net()
    with torch.no_grad():
        model[2].bias[0] = math.inf
    with pytest.raises(InvalidInput, match=r"outputs .* not finite"):
        Laplace(model, "classification", structure="diag").fit(classes())
    with pytest.raises(InvalidInput, match="outputs are infinite or NaN"):
        Laplace(model, "classification", "all", "full", "hessian").fit(classes())


def test_a_full_structure_that_does_not_fit_says_how_much_it_needs():
    model = nn.Linear(20_000, 100)
    laplace = Laplace(model, "classification", structure="full")
    data = [(torch.zeros(2, 20_000), torch.tensor([0, 1]))]
    with pytest.raises(NotEnoughMemory, match=r"2,000,100 weights needs .*96,009,600,240,000 bytes.*structure='kron'"):
        laplace.fit(data)
    with patch.object(memory, "available", return_value=1000):
        for chosen in (LowRank(5), Functional(2)):
            with pytest.raises(NotEnoughMemory):
                Laplace(net(), "classification", "all", chosen).fit(classes())


@pytest.mark.parametrize(
    "make",
    [
        lambda: LowRank(0),
        lambda: LowRank(3, oversample=-1),
        lambda: LowRank(3, passes=1),
        lambda: Functional(0),
        lambda: GGN(samples=0),
        lambda: structure("block"),
        lambda: curvature("newton"),
    ],
)
def test_objects_check_their_numbers(make):
    with pytest.raises(InvalidArgument):
        make()


def test_words_are_objects():
    assert structure("full") == Full()
    assert structure("lowrank") == LowRank(50)
    assert curvature("mc") == GGN(samples=1)


def test_a_model_of_another_form_is_refused():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 3)

        def forward(self, x):
            return self.head(x)[:, None]

    with pytest.raises(InvalidInput, match=r"must return \(batch, outputs\)"):
        Laplace(Sequence().double(), "classification", "all", "full", "hessian").fit(classes())
    with warnings.catch_warnings(), pytest.raises(InvalidInput, match="one number per example"):
        Laplace(net(2), "reward_model", "all", "full", "hessian").fit(
            [((torch.zeros(2, 2).double(), torch.zeros(2, 2).double()), torch.tensor([0, 1]))]
        )


def test_rounding_in_float32_does_not_make_a_curvature_negative():
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))
    x = 30 * torch.randn(40, 1, generator=generator)
    laplace = Laplace(model, Regression(1e-3), "all", "full", prior_precision=1e-3).fit([(x, x.sin())])
    exact = Laplace(model.double(), Regression(1e-3), "all", "full", prior_precision=1e-3)
    exact.fit([(x.double(), x.double().sin())])
    found = float(laplace.posterior.log_det)
    assert math.isfinite(found)
    assert laplace.posterior.variances().min() > 0
    assert found == pytest.approx(float(exact.posterior.log_det), rel=1e-2)


def test_tuning_with_the_hessian_turns_back_where_there_is_no_posterior():
    laplace = Laplace(net(), "classification", "all", "full", "hessian", 100.0).fit(classes())
    laplace.tune("evidence")
    assert math.isfinite(float(laplace.log_marginal_likelihood()))


@pytest.mark.parametrize("kind", ["full", "diag", "kron"])
def test_a_prediction_goes_by_parts_that_fit_and_is_that_of_the_whole(kind, monkeypatch):
    model = net()
    posterior = Laplace(model, "classification", subset="all", structure=kind).fit(classes())
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    width = posterior.selection.size if kind == "full" else 6 + 3  # what comes back to both layers of one example
    monkeypatch.setattr("pippin.bayes.laplace._NUMBERS", 5 * 3 * width)
    sizes = []
    forward = posterior.rows.forward
    monkeypatch.setattr(posterior.rows, "forward", lambda part: (sizes.append(len(part)), forward(part))[1])
    found, covariance = posterior.outputs_at(x)
    assert max(sizes[1:]) == 5
    assert sum(sizes) == 40
    mean, whole = posterior.outputs_at(x, joint=True)
    torch.testing.assert_close(found, mean)
    blocks = whole.view(40, 3, 40, 3)[range(40), :, range(40)]
    torch.testing.assert_close(covariance, blocks)
