"""Agreement with laplace-torch wherever both offer the same, and its known defects where they do not agree.

docs/laplace_torch.md lists the defects that are provoked here; a test that fails because one was mended there is a
reason to shorten that page.
"""

import copy
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pippin.bayes.laplace.functional import Functional
from pippin.bayes.laplace.jacobians.backend import JacobianPass
from pippin.bayes.laplace.kron import Kron
from pippin.bayes.laplace.laplace import Laplace
from pippin.bayes.likelihood import Classification
from pippin.bayes.prediction import apply_link
from pippin.bayes.weight_subset import Subnetwork

pytestmark = pytest.mark.filterwarnings("ignore")
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
SIGMA = 0.8


@pytest.fixture(scope="module")
def peer():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("laplace")
        from laplace.curvature import BackPackGGN, CurvlinopsEF, CurvlinopsGGN
    return SimpleNamespace(module=module, ggn=CurvlinopsGGN, ef=CurvlinopsEF, backpack=BackPackGGN)


def problem(kind, dtype=torch.float64, outputs=None):
    torch.manual_seed(0)
    outputs = outputs or (3 if kind == "classification" else 2)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, outputs))
    x = torch.randn(30, 4, dtype=dtype)
    y = torch.arange(30) % 3 if kind == "classification" else torch.randn(30, outputs, dtype=dtype)
    return model.to(dtype).eval(), x, y


def theirs(peer, model, kind, subset, structure, x, y, curvature="ggn", **options):
    options = {"prior_precision": 1.7, **({"sigma_noise": SIGMA} if kind == "regression" else {}), **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = peer.module.Laplace(model, kind, subset, structure, backend=getattr(peer, curvature), **options)
        made.fit(DataLoader(TensorDataset(x, y), 10))
    return made


def ours(model, kind, subset, structure, x, y, curvature="ggn", **options):
    posterior = Laplace(model, kind, subset, structure, curvature, 1.7, **options)
    if kind == "regression":
        posterior.sigma_noise = SIGMA
    return posterior.fit([(x[i : i + 10], y[i : i + 10]) for i in range(0, 30, 10)])


@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_evidence_and_predictive_agree(peer, kind, subset, structure):
    model, x, y = problem(kind)
    a, b = theirs(peer, model, kind, subset, structure, x, y), ours(model, kind, subset, structure, x, y)
    torch.testing.assert_close(b.log_marginal_likelihood(), a.log_marginal_likelihood(), **CLOSE)
    mean, covariance = a._glm_predictive_distribution(x[:4])
    found = b(x[:4])
    torch.testing.assert_close(found.mean, mean, **CLOSE)
    torch.testing.assert_close(found.covariance, covariance, **CLOSE)
    other = torch.tensor(0.2, dtype=torch.float64)
    torch.testing.assert_close(b.log_marginal_likelihood(other), a.log_marginal_likelihood(other), **CLOSE)
    torch.testing.assert_close(b(x[:4]).covariance, covariance, **CLOSE)  # the question changed nothing here
    assert float(a.prior_precision) == pytest.approx(0.2)  # and there it set the prior


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("how", ["probit", "bridge", "bridge_norm"])
def test_links_agree(peer, how, dtype):
    model, x, y = problem("classification", dtype)
    a = theirs(peer, model, "classification", "all", "full", x, y)
    b = ours(model, "classification", "all", "full", x, y)
    torch.testing.assert_close(b(x, link_approx=how).probs, a(x, link_approx=how), rtol=1e-4, atol=1e-4)


def test_joint_predictives_agree(peer):
    model, x, y = problem("regression")
    a = theirs(peer, model, "regression", "all", "full", x, y)
    b = ours(model, "regression", "all", "full", x, y)
    _, covariance = a(x[:4], joint=True)
    torch.testing.assert_close(b(x[:4], joint=True).covariance, covariance, **CLOSE)


def test_temperature_agrees(peer):
    model, x, y = problem("classification")
    a = theirs(peer, model, "classification", "all", "full", x, y, temperature=0.3)
    b = ours(model, "classification", "all", "full", x, y, temperature=0.3)
    torch.testing.assert_close(b.log_marginal_likelihood(), a.log_marginal_likelihood(), **CLOSE)


def test_subnetworks_agree_and_only_ours_has_a_density(peer):
    model, x, y = problem("classification")
    chosen = [0, 7, 41, 90, 112]
    indices = torch.tensor(chosen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a = peer.module.Laplace(model, "classification", "subnetwork", "full", subnetwork_indices=indices)
        a.prior_precision = 1.7
        a.fit(DataLoader(TensorDataset(x, y), 10))
    b = ours(model, "classification", Subnetwork(chosen), "full", x, y)
    torch.testing.assert_close(b.posterior.log_det, torch.logdet(a.posterior_precision), **CLOSE)
    torch.testing.assert_close(b(x[:4]).covariance, a._glm_predictive_distribution(x[:4])[1], **CLOSE)
    density = torch.distributions.MultivariateNormal(b.mean, precision_matrix=a.posterior_precision)
    torch.testing.assert_close(b.log_prob(b.mean + 0.1), density.log_prob(b.mean + 0.1), **CLOSE)
    with pytest.raises((RuntimeError, ValueError)):
        a.log_prob(torch.zeros(len(chosen), dtype=torch.float64))


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_empirical_fisher_agrees_for_classes_and_is_twice_too_large_there_for_a_regression(peer, structure):
    for kind, factor in (("classification", 1), ("regression", 2)):
        model, x, y = problem(kind)
        a = theirs(peer, model, kind, "all", structure, x, y, "ef", **({"sigma_noise": 1.0} if factor == 2 else {}))
        b = ours(model, kind, "all", structure, x, y, "ef")
        b.sigma_noise = 1.0
        eye = torch.eye(b.selection.size, dtype=torch.float64)
        found = factor * (b.posterior.solve(eye).inverse() - 1.7 * eye)
        curvature = a.H.to_matrix() if structure == "kron" else a.H
        torch.testing.assert_close(found.diagonal() if structure == "diag" else found, curvature, **CLOSE)
    a = theirs(peer, model, "regression", "all", "full", x, y, "ef")
    full = ours(model, "regression", "all", "full", x, y, "ef")
    torch.testing.assert_close(a.posterior_precision, a.H / SIGMA**2 + 1.7 * eye, **CLOSE)
    precision = full._state.curvature / SIGMA**4 + 1.7 * eye
    torch.testing.assert_close(full.posterior.log_det, torch.logdet(precision), **CLOSE)
    gradient = []  # of half the squared distance, by autograd
    for one, target in zip(x, y, strict=True):
        loss = 0.5 * (model(one[None])[0] - target).square().sum()
        gradient.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    torch.testing.assert_close(full._state.curvature, torch.stack(gradient).T @ torch.stack(gradient), **CLOSE)


def test_diagonal_empirical_fisher_of_the_last_layer_is_zero_there(peer):
    model, x, y = problem("classification")
    a = theirs(peer, model, "classification", "last_layer", "diag", x, y, "ef")
    b = ours(model, "classification", "last_layer", "diag", x, y, "ef")
    full = ours(model, "classification", "last_layer", "full", x, y, "ef")
    torch.testing.assert_close(b._state.curvature, full._state.curvature.diagonal())
    assert not a.H.any()
    assert (b._state.curvature > 0).any()


def jacobian(model, x):
    """By autograd, one output of one example after the other: [n, C, P]."""
    weights = list(model.parameters())
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(one, weights, retain_graph=True)])
        for f in model(x)
        for one in f
    ]
    return torch.stack(rows).view(len(x), -1, rows[0].numel())


def process(new, seen, curvature, prior, turned=False):
    """Covariance of a Gaussian process at new inputs: Jacobians of both, and the curvature of each seen output."""
    kernel = seen.flatten(0, 1) @ seen.flatten(0, 1).T / prior + torch.diag(1 / curvature.flatten())
    cross = torch.einsum("acp,ndp->acnd", new, seen) / prior
    cross = (cross.transpose(1, 3) if turned else cross).flatten(2)
    return new @ new.mT / prior - cross @ torch.linalg.solve(kernel, cross.mT)


def their_process(peer, kind, points, outputs=None):
    model, x, y = problem(kind, outputs=outputs)
    a = theirs(peer, model, kind, "all", "gp", x, y, n_subset=points)
    chosen = a.train_loader.sampler.indices
    return a, model, x, y, chosen, a._glm_predictive_distribution(x[:4])[1]


def test_functional_posterior_on_all_points_is_the_full_one_there(peer):
    model, x, y = problem("regression")
    a = theirs(peer, model, "regression", "all", "full", x, y)
    b = ours(model, "regression", "all", Functional(30), x, y)
    torch.testing.assert_close(b(x[:4]).covariance, a._glm_predictive_distribution(x[:4])[1], **CLOSE)
    torch.testing.assert_close(b.log_marginal_likelihood(), a.log_marginal_likelihood(), **CLOSE)


@pytest.mark.parametrize("points", [12, 30])
def test_processes_of_one_output_agree_but_for_a_prior_that_theirs_scales_with_the_points(peer, points):
    _, model, x, y, chosen, covariance = their_process(peer, "regression", points, outputs=1)
    b = Laplace(model, "regression", "all", Functional(points), prior_precision=1.7 * 30 / points)
    b.sigma_noise = SIGMA
    b.fit([(x[chosen], y[chosen])])
    torch.testing.assert_close(b(x[:4]).covariance, covariance, rtol=1e-8, atol=1e-10)
    if points < 30:
        b.prior_precision = 1.7
        assert ((b(x[:4]).covariance / covariance).flatten() > 1.3).all()


def test_a_process_of_several_outputs_has_turned_blocks_between_seen_and_new_inputs_there(peer):
    _, model, x, y, chosen, covariance = their_process(peer, "regression", 30)
    new, seen = jacobian(model, x[:4]), jacobian(model, x[chosen])
    curvature = torch.full((30, 2), SIGMA**-2, dtype=torch.float64)
    right, turned = (process(new, seen, curvature, 1.7, turned) for turned in (False, True))
    torch.testing.assert_close(covariance, turned, rtol=1e-8, atol=1e-10)
    b = ours(model, "regression", "all", Functional(30), x, y)
    torch.testing.assert_close(b(x[:4]).covariance, right, rtol=1e-8, atol=1e-10)
    assert (covariance - right).abs().max() / right.abs().max() > 5e-3


def test_a_process_of_classes_keeps_only_the_diagonal_of_the_curvature_there(peer):
    _, model, x, y, chosen, covariance = their_process(peer, "classification", 30)
    new, seen = jacobian(model, x[:4]), jacobian(model, x[chosen])
    p = model(x[chosen]).softmax(-1).detach()
    torch.testing.assert_close(covariance, process(new, seen, p * (1 - p), 1.7, True), rtol=1e-8, atol=1e-10)
    b = ours(model, "classification", "all", Functional(30), x, y)
    full = theirs(peer, model, "classification", "all", "full", x, y)
    torch.testing.assert_close(b(x[:4]).covariance, full._glm_predictive_distribution(x[:4])[1], **CLOSE)
    assert (covariance - b(x[:4]).covariance).abs().max() / covariance.abs().max() > 0.1


def test_the_evidence_of_a_process_counts_the_likelihood_twice_there(peer):
    torch.manual_seed(0)
    x, y = torch.randn(30, 3, dtype=torch.float64), torch.randn(30, 1, dtype=torch.float64)
    precision = x.T @ x / SIGMA**2 + 1.7 * torch.eye(3, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(3, 1, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.linalg.solve(precision, x.T @ y / SIGMA**2).T)
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(30, dtype=torch.float64), x @ x.T / 1.7 + SIGMA**2 * torch.eye(30, dtype=torch.float64)
    )
    exact = marginal.log_prob(y[:, 0])
    a = theirs(peer, model, "regression", "all", "gp", x, y, n_subset=30)
    b = ours(model, "regression", "all", Functional(30), x, y)
    torch.testing.assert_close(b.log_marginal_likelihood(), exact, rtol=1e-8, atol=1e-8)
    twice = exact + a.log_likelihood + 15 * math.log(2 * math.pi)
    torch.testing.assert_close(a.log_marginal_likelihood(), twice, rtol=1e-6, atol=1e-6)


def test_draws_come_from_the_generator_and_are_independent_here(peer):
    model, x, y = problem("classification")
    a = theirs(peer, model, "classification", "all", "full", x, y)
    b = ours(model, "classification", "all", "full", x, y)
    twice = x[:1].repeat(2, 1)
    seeded = [torch.Generator().manual_seed(3) for _ in range(4)]
    pair = [a(twice, link_approx="mc", n_samples=20, generator=generator) for generator in seeded[:2]]
    assert not torch.equal(*pair)
    assert torch.equal(pair[0][0], pair[0][1])  # the same draws for both examples
    pair = [b(twice, link_approx="mc", num_samples=20, generator=generator).probs for generator in seeded[2:]]
    assert torch.equal(*pair)
    assert not torch.equal(pair[0][0], pair[0][1])


def test_layers_that_normalize_have_factors_only_here(peer):
    _, x, y = problem("classification")
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    with pytest.raises(NotImplementedError):
        theirs(peer, model, "classification", "all", "kron", x, y)
    assert ours(model, "classification", "all", "kron", x, y).log_marginal_likelihood().isfinite()


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_backpack_stays_on_the_model_there_and_nothing_here(peer, structure):
    model, x, y = problem("classification")
    used = copy.deepcopy(model)
    theirs(peer, used, "classification", "all", structure, x, y, "backpack")
    assert all(part._forward_hooks or part._backward_hooks for part in used)
    assert any(word in vars(used[0].weight) for word in ("diag_ggn_exact", "kflr"))
    call = lambda weights: torch.func.functional_call(used, weights, (x,))  # noqa: E731
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.jacrev(call)(dict(used.named_parameters()))

    before = {name: set(vars(part)) for name, part in model.named_modules()}
    ours(model, "classification", "all", structure, x, y)(x)
    assert {name: set(vars(part)) for name, part in model.named_modules()} == before
    assert not any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in model)
    assert not any(vars(weight) for weight in model.parameters())


def test_low_rank_needs_a_package_that_is_not_installed_there(peer):
    model, _, _ = problem("classification")
    with pytest.raises(ImportError, match="asdfghjkl"):
        peer.module.Laplace(model, "classification", "all", "lowrank")


def test_diagonal_curvature_makes_the_jacobian_of_a_batch_only_there(peer, monkeypatch):
    model, x, y = problem("classification")
    seen = []
    real = peer.ggn.jacobians
    monkeypatch.setattr(peer.ggn, "jacobians", lambda *args, **kw: (seen.append(len(args[1])), real(*args, **kw))[1])
    theirs(peer, model, "classification", "all", "diag", x, y)
    assert seen == [10, 10, 10]

    def refused(*args):
        raise AssertionError("the Jacobian was made")

    monkeypatch.setattr(JacobianPass, "jacobian", refused)
    monkeypatch.setattr(JacobianPass, "rows", refused)
    ours(model, "classification", "all", "diag", x, y)


def test_the_normalized_bridge_is_far_from_the_integral_in_both(peer, monkeypatch):
    mean = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    covariance = 0.05 * torch.eye(2, dtype=torch.float64)[None]
    z = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    weight = torch.exp(-0.5 * z.square())
    exact = (weight * (1 + math.sqrt(0.1) * z).sigmoid()).sum() / weight.sum()  # the difference of both outputs
    model, x, y = problem("classification", outputs=2)
    a = theirs(peer, model, "classification", "all", "diag", x, y % 2)
    monkeypatch.setattr(a, "_glm_predictive_distribution", lambda *_, **__: (mean.clone(), covariance.clone()))
    for how, low, high in (("probit", 0, 0.01), ("bridge", 0, 0.01), ("bridge_norm", 0.2, 1)):
        for found in (apply_link(Classification(), mean, covariance, how), a(x[:1], link_approx=how)):
            assert low <= abs(float(found[0, 0] - exact)) <= high


def test_damping_has_an_effect_here_and_none_there(peer):
    model, x, y = problem("classification")
    plain, damped = (ours(model, "classification", "all", Kron(damping), x, y) for damping in (False, True))
    assert abs(float(plain.posterior.log_det - damped.posterior.log_det)) > 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = DataLoader(TensorDataset(x, y), 10)
        pair = [peer.module.KronLaplace(model, "classification", damping=d) for d in (False, True)]
        for one in pair:
            one.fit(loader)
    assert float(pair[0].log_det_posterior_precision - pair[1].log_det_posterior_precision) == 0


def test_prediction_before_the_fit_is_an_answer_there(peer):
    model, x, _ = problem("regression")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a = peer.module.FullLaplace(model, "regression")
        _, covariance = a(x[:2])
    assert covariance.isfinite().all()
