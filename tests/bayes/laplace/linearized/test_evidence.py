"""The evidence of the linear model: against exact Gaussians, against finite differences, and under rescaling."""

import math

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import nn
from torch.distributions import MultivariateNormal
from torch.func import functional_call, jacrev

from pippin.bayes.laplace.laplace import Laplace
from pippin.bayes.laplace.linearized.evidence import LinearizedEvidence, NetworkEvidence, evidence
from pippin.bayes.laplace.linearized.model import LinearizedModel
from pippin.bayes.laplace.linearized.scale_invariance import ParamGroup, rescaled
from pippin.bayes.likelihood import Regression
from pippin.bayes.weight_subset import Subnetwork
from pippin.core.errors import InferenceAtRisk, InvalidArgument, InvalidInput, NonFiniteEvidence, NotConverged

SIGMA = 0.2


class Norm(nn.Module):
    """A layer norm without its constant and its gains."""

    def forward(self, x):
        centered = x - x.mean(-1, keepdim=True)
        return centered / centered.square().mean(-1, keepdim=True).sqrt()


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(*layers, seed=0):
    model = nn.Sequential(*layers).double().eval()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(0.7 * normal(*parameter.shape, seed=seed + index))
    return model


def normed():
    return made(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 6), Norm(), nn.Tanh(), nn.Linear(6, 1))


def wave(n=24):
    x = normal(n, 1, seed=50)
    return x, torch.sin(3 * x) + SIGMA * normal(n, 1, seed=51)


def jacobian(model, x):
    own = {name: p.detach() for name, p in model.named_parameters()}
    parts = jacrev(lambda parameters: functional_call(model, parameters, (x,)))(own)
    return torch.cat([part.flatten(2) for part in parts.values()], -1)


def exact_evidence(model, x, y, prior):
    """The density of what the linear model is to explain under its exact Gaussian marginal."""
    j = jacobian(model, x)[:, 0]
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    explained = y[:, 0] - model(x).detach()[:, 0] + j @ weights
    covariance = j / prior @ j.T + SIGMA**2 * torch.eye(len(x), dtype=torch.float64)
    return MultivariateNormal(torch.zeros(len(x), dtype=torch.float64), covariance).log_prob(explained)


def test_a_linear_network_has_the_evidence_and_the_posterior_of_bayesian_linear_regression():
    x, y = normal(20, 3), normal(20, 1, seed=1)
    model = made(nn.Linear(3, 1))
    posterior = LinearizedEvidence(model, Regression(SIGMA)).fit([(x[:8], y[:8]), (x[8:], y[8:])], max_iterations=500)
    prior = torch.full((4,), posterior.prior_precision["other"], dtype=torch.float64)
    assert posterior.log_evidence == pytest.approx(float(exact_evidence(model, x, y, prior)), abs=1e-8)
    design = torch.cat([x, torch.ones(20, 1, dtype=torch.float64)], 1)
    precision = design.T @ design / SIGMA**2 + prior.diag()
    torch.testing.assert_close(posterior.weights, torch.linalg.solve(precision, design.T @ y[:, 0] / SIGMA**2))
    expected = (design @ torch.linalg.inv(precision) * design).sum(1, keepdim=True)
    torch.testing.assert_close(posterior(x).function_variance, expected)


def test_the_fixed_point_is_where_gradient_ascent_on_the_exact_evidence_ends():
    x, y = wave()
    model = normed()
    posterior = LinearizedEvidence(model, Regression(SIGMA)).fit([(x, y)], max_iterations=500, tolerance=1e-9)
    sizes = [42, 19]  # the layer before the norm lies in the middle: 12 weights, 42, then 7
    log_precision = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([log_precision], max_iter=200, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def value():
        own, other = log_precision.exp()
        return exact_evidence(model, x, y, torch.cat([other.expand(12), own.expand(42), other.expand(7)]))

    def step():
        optimizer.zero_grad()
        loss = -value()
        loss.backward()
        return loss

    optimizer.step(step)
    own, other = log_precision.exp().tolist()
    assert posterior.prior_precision == pytest.approx({"2": own, "other": other}, rel=1e-4)
    with torch.no_grad():
        log_precision.copy_(
            torch.tensor(
                [posterior.prior_precision["2"], posterior.prior_precision["other"]], dtype=torch.float64
            ).log()
        )
    step()
    assert log_precision.grad.abs().max() < 1e-6
    assert posterior.log_evidence == pytest.approx(float(value().detach()), abs=1e-9)
    assert all(0 < posterior.effective_dim[name] < size for name, size in zip(("2", "other"), sizes, strict=True))


def test_for_classes_the_fixed_point_is_a_stationary_point_by_finite_differences():
    x = normal(60, 2)
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 0] > 1).long()
    model = made(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    posterior = LinearizedEvidence(model, "classification", groups="layerwise").fit([(x, y)], 2000, tolerance=1e-8)
    laplace = posterior.laplace
    linear = LinearizedModel(model, laplace.likelihood, laplace.selection, [(x, y)])

    def at(a, b):
        laplace.prior_precision = torch.tensor([a] * 12 + [b] * 15, dtype=torch.float64)
        return evidence(laplace, linear, linear.mode(laplace.prior_precision))

    a, b = posterior.prior_precision.values()
    best = at(a, b)
    assert best == pytest.approx(posterior.log_evidence, abs=1e-9)
    for step in ((1.01, 1.0), (1.0, 1.01)):
        up, down = at(a * step[0], b * step[1]), at(a / step[0], b / step[1])
        assert abs(up - down) / 0.02 < 1e-3
        assert up < best
        assert down < best


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_with_its_own_precision_the_scale_before_a_norm_means_nothing(factor):
    x, y = wave()
    model, grid = normed(), torch.linspace(-3, 3, 30, dtype=torch.float64)[:, None]

    def fitted(groups):
        return LinearizedEvidence(model, Regression(SIGMA), groups=groups).fit(
            [(x, y)], max_iterations=300, tolerance=1e-8
        )

    def compare(groups):
        before = fitted(groups)
        sd = before(grid).function_variance.sqrt()
        with rescaled([model[2].weight, model[2].bias], None, factor):
            after = fitted(groups)
            change = (after(grid).function_variance.sqrt() / sd - 1).abs().max()
        return before, after, float(change)

    before, after, change = compare("auto")
    assert change < 1e-5
    assert after.log_evidence == pytest.approx(before.log_evidence, abs=1e-8)
    assert after.prior_precision["2"] * factor**2 == pytest.approx(before.prior_precision["2"], rel=1e-5)
    torch.testing.assert_close(after.weights[12:54], factor * before.weights[12:54], rtol=1e-4, atol=1e-6 * factor)
    _, _, shared = compare("scalar")
    assert shared > 0.02


def test_every_step_to_the_fixed_point_follows_the_scale_not_only_its_end():
    model, data = normed(), [wave()]
    runs = []
    for factor in (1.0, 10.0):
        with rescaled([model[2].weight, model[2].bias], None, factor), pytest.warns(InferenceAtRisk, match="rounds"):
            runs.append(LinearizedEvidence(model, Regression(SIGMA)).fit(data, max_iterations=2))
    before, after = runs
    assert after.log_evidence == pytest.approx(before.log_evidence, abs=1e-6)
    assert before.prior_precision["2"] / after.prior_precision["2"] == pytest.approx(100, rel=1e-6)
    assert after.prior_precision["other"] == pytest.approx(before.prior_precision["other"], rel=1e-6)


def test_at_the_networks_own_weights_the_evidence_is_that_of_laplace():
    x, y = wave()
    model = made(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1))
    posterior = NetworkEvidence(model, Regression(SIGMA)).fit([(x, y)], max_iterations=300)
    laplace = Laplace(model, Regression(SIGMA), "all", "full", prior_precision=posterior.prior_precision["other"])
    expected = float(laplace.fit([(x, y)]).log_marginal_likelihood())
    assert posterior.log_evidence == pytest.approx(expected, abs=1e-9)
    linear = LinearizedEvidence(model, Regression(SIGMA)).fit([(x, y)], max_iterations=300)
    assert linear.log_evidence > posterior.log_evidence


def test_a_diagonal_curvature_uses_the_diagonal_alone():
    x, y = wave()
    model = normed()
    posterior = LinearizedEvidence(model, Regression(SIGMA), hessian_structure="diag", groups="scalar").fit(
        [(x, y)], max_iterations=500
    )
    curvature = jacobian(model, x)[:, 0].square().sum(0) / SIGMA**2
    prior = torch.full((61,), posterior.prior_precision["all"], dtype=torch.float64)
    share = curvature / (curvature + prior)
    assert posterior.effective_dim["all"] == pytest.approx(float(share.sum()), rel=1e-8)
    j = jacobian(model, x)[:, 0]
    target = y[:, 0] - model(x).detach()[:, 0] + j @ torch.cat([p.detach().flatten() for p in model.parameters()])
    loss = 0.5 * (target - j @ posterior.weights).square().sum() / SIGMA**2
    scatter = loss + 0.5 * (prior * posterior.weights.square()).sum()
    constant = -len(x) * math.log(SIGMA * math.sqrt(2 * math.pi))
    volume = ((curvature + prior).log() - prior.log()).sum()
    assert posterior.log_evidence == pytest.approx(float(constant - scatter - 0.5 * volume), abs=1e-8)


def test_a_kronecker_curvature_of_one_example_is_the_full_one_layer_by_layer():
    model, x, y = made(nn.Linear(2, 1)), normal(9, 2), normal(9, 1, seed=1)
    kron = LinearizedEvidence(model, Regression(SIGMA), hessian_structure="kron").fit([(x, y)], max_iterations=300)
    curvature = torch.block_diag(x.T @ x, torch.full((1, 1), 9.0, dtype=torch.float64)) / SIGMA**2
    prior = kron.prior_precision["other"]
    eye = torch.eye(3, dtype=torch.float64)
    share = 3 - prior * torch.linalg.inv(curvature + prior * eye).trace()
    assert kron.effective_dim["other"] == pytest.approx(float(share), rel=1e-6)
    assert prior == pytest.approx(float(share / kron.weights.square().sum()), rel=2e-3)


def test_a_batch_norm_in_evaluation_mode_goes_along_with_its_layer():
    x, y = wave()
    model = made(nn.Linear(1, 5), nn.BatchNorm1d(5, eps=1e-12), nn.Tanh(), nn.Linear(5, 1))
    model[1].running_var.fill_(0.8)
    before = LinearizedEvidence(model, Regression(SIGMA)).fit([(x, y)], max_iterations=1000, tolerance=1e-6)
    assert [group.name for group in before.groups] == ["0", "other"]
    with rescaled([model[0].weight, model[0].bias], model[1], 5.0):
        after = LinearizedEvidence(model, Regression(SIGMA)).fit([(x, y)], max_iterations=1000, tolerance=1e-6)
        sd = after(x).function_variance
    torch.testing.assert_close(sd, before(x).function_variance, rtol=1e-3, atol=0.0)
    assert after.log_evidence == pytest.approx(before.log_evidence, abs=1e-4)


def test_a_subnetwork_has_groups_too():
    x, y = wave()
    model = normed()
    subset = Subnetwork(torch.arange(10, 58))
    posterior = LinearizedEvidence(model, Regression(SIGMA), subset_of_weights=subset, groups="layerwise").fit(
        [(x, y)], max_iterations=2000
    )
    assert list(posterior.prior_precision) == ["0", "2", "5"]
    assert posterior.weights.shape == (48,)
    assert sum(posterior.effective_dim.values()) < len(x)


def test_a_shared_precision_at_the_networks_weights_is_warned_of():
    x, y = wave()
    with pytest.warns(InferenceAtRisk, match=r"scale of 2\.weight is arbitrary.*LinearizedEvidence"):
        NetworkEvidence(normed(), Regression(SIGMA), groups="scalar").fit([(x, y)], max_iterations=300)


def test_too_few_rounds_are_warned_of():
    x, y = wave()
    with pytest.warns(InferenceAtRisk, match="round 2 of 2"):
        LinearizedEvidence(normed(), Regression(SIGMA)).fit([(x, y)], max_iterations=2)


def test_an_unused_group_is_named():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = made(nn.Linear(1, 1)), made(nn.Linear(1, 1))

        def forward(self, x):
            return self.used(x) + 0 * self.idle(x)

    with pytest.raises(NotConverged, match=r"group 'idle\.0' grows without bound.*leave them out") as caught:
        LinearizedEvidence(Idle().double(), Regression(SIGMA), groups="layerwise").fit([wave()])
    assert caught.value.iterations == 0


def test_a_group_that_explains_nothing_is_held_at_the_bound():
    x = normal(30, 2)
    y = normal(30, 1, seed=8)  # noise of the sd that is assumed, and nothing else
    model = nn.Sequential(made(nn.Linear(2, 4)), nn.Tanh(), made(nn.Linear(4, 1)))
    with pytest.warns(InferenceAtRisk, match=r"wants no part of the groups 0\.0; their precision is held at 1e\+08"):
        posterior = LinearizedEvidence(model, Regression(1.0), groups="layerwise").fit([(x, y)], max_iterations=3000)
    assert posterior.prior_precision["0.0"] == pytest.approx(1e8)
    assert posterior.effective_dim["0.0"] < 1e-5


def test_an_evidence_that_is_not_finite_is_an_error():
    x, y = wave()
    laplace = Laplace(normed(), Regression(SIGMA), "all", "full").fit([(x, y)])
    linear = LinearizedModel(laplace.model, laplace.likelihood, laplace.selection, [(x, y)])
    with pytest.raises(NonFiniteEvidence, match="scatter inf"):
        evidence(laplace, linear, torch.full((61,), 1e200, dtype=torch.float64))


def test_bad_input_is_named():
    x, y = wave()
    model = normed()
    with pytest.raises((InvalidArgument, TypeCheckError), match="full"):
        LinearizedEvidence(model, "regression", hessian_structure="lowrank")
    with pytest.raises(InvalidArgument, match="sigma_noise must be"):
        LinearizedEvidence(model, Regression(0.0))
    training = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double().train()
    with pytest.raises(InvalidArgument, match="training mode"):
        LinearizedEvidence(training, "regression")
    tuner = LinearizedEvidence(model, Regression(SIGMA))
    with pytest.raises(InvalidArgument, match="max_iterations must be"):
        tuner.fit([(x, y)], max_iterations=0)
    with pytest.raises(InvalidArgument, match="initial_precision must be"):
        tuner.fit([(x, y)], initial_precision=0.0)
    with pytest.raises(InvalidArgument, match="tolerance must be"):
        tuner.fit([(x, y)], tolerance=math.nan)
    with pytest.raises(InvalidArgument, match="once only"):
        tuner.fit(iter([(x, y)]))
    with pytest.raises(InvalidInput, match="no batch"):
        tuner.fit([])
    with pytest.raises(InvalidInput, match="nan"):
        tuner.fit([(x, y * torch.nan)])
    some = [ParamGroup("some", ("2.weight",))]
    with pytest.raises(InvalidArgument, match=r"leave out 0\.weight"):
        LinearizedEvidence(model, Regression(SIGMA), groups=some).fit([(x, y)])
