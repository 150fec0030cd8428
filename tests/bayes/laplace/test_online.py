"""Training by the evidence, and tasks one after the other, against what is known in closed form."""

import pytest
import torch
from torch import nn

from pippin.bayes.laplace.laplace import Laplace
from pippin.bayes.laplace.online import ContinualLaplace, marglik_training
from pippin.bayes.likelihood import Regression
from pippin.core.errors import InvalidArgument, InvalidInput, NotFitted


def line(n=60, sigma=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    w = torch.tensor([[1.0], [-2.0], [0.0]], dtype=torch.float64)
    return x, x @ w + sigma * torch.randn(n, 1, generator=generator, dtype=torch.float64)


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 1, bias=False).double()


def best_evidence(x, y):
    """The maximum over prior and noise of the exact marginal likelihood of a linear model."""
    log = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([log], max_iter=200, line_search_fn="strong_wolfe")

    def value():
        prior, sigma = log.exp()
        marginal = x @ x.T / prior + sigma**2 * torch.eye(len(x), dtype=torch.float64)
        normal = torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=torch.float64), marginal)
        return -normal.log_prob(y[:, 0])

    def closure():
        optimizer.zero_grad()
        loss = value()
        loss.backward()
        return loss

    optimizer.step(closure)
    return -float(value().detach()), log.detach().exp()


def test_training_by_the_evidence_finds_the_maximum_of_the_exact_one():
    x, y = line()
    model = linear()
    result = marglik_training(
        model,
        "regression",
        [(x, y)],
        epochs=300,
        hessian_structure="full",
        prior_structure="scalar",
        lr=0.05,
        burn_in=100,
        fit_every=20,
    )
    best, (prior, sigma) = best_evidence(x, y)
    assert result.log_marginal_likelihoods[-1] == pytest.approx(best, abs=0.01)
    assert result.laplace.sigma_noise == pytest.approx(float(sigma), rel=0.02)
    assert float(result.laplace.prior_precision) == pytest.approx(float(prior), rel=0.05)
    gram = x.T @ x / sigma**2 + prior * torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(model.weight.T, torch.linalg.solve(gram, x.T @ y / sigma**2), rtol=0.01, atol=0.005)
    assert result.epochs[0] == 120
    assert len(result.losses) == 300


def test_the_weights_of_the_best_evidence_are_kept():
    x, y = line()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    result = marglik_training(model, "regression", [(x[:30], y[:30]), (x[30:], y[30:])], epochs=6, lr=0.3, seed=1)
    assert float(result.laplace.log_marginal_likelihood()) == pytest.approx(
        max(result.log_marginal_likelihoods), abs=1e-6
    )
    assert not model.training
    assert len(result.laplace.prior_precision) == 2


def test_tasks_of_a_linear_model_add_up_to_one_fit_of_all():
    x, y = line(60)
    parts = [(x[i : i + 20], y[i : i + 20]) for i in (0, 20, 40)]
    learner = ContinualLaplace(linear(), Regression(1.0), "full", prior_precision=0.5, lr=0.05)
    for part in parts:
        learner.fit([part], epochs=250)
    exact = torch.linalg.solve(x.T @ x + 0.5 * torch.eye(3, dtype=torch.float64), x.T @ y)
    torch.testing.assert_close(learner.model.weight.T, exact, rtol=0, atol=1e-3)
    together = Laplace(learner.model, Regression(1.0), "all", "full", prior_precision=0.5).fit([(x, y)])
    torch.testing.assert_close(learner.laplace.posterior.log_det, together.posterior.log_det)
    assert learner.num_tasks == 3
    assert learner.laplace.examples == 60


def test_what_was_learned_before_is_forgotten_less():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 2, generator=generator)
    first = [(torch.cat([x, torch.zeros(80, 2)], 1), (x[:, 0] > 0).long())]
    second = [(torch.cat([torch.zeros(80, 2), x], 1), (x[:, 0] < 0).long())]

    def accuracy(strength):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        learner = ContinualLaplace(model, "classification", "kron", prior_precision=0.1, strength=strength, lr=0.03)
        learner.fit(first, epochs=60).fit(second, epochs=60)
        with torch.no_grad():
            return [float((model(a).argmax(1) == b).float().mean()) for ((a, b),) in (first, second)]

    kept = accuracy(1.0)
    assert min(kept) > 0.9
    assert accuracy(1e-6)[0] <= kept[0]


def test_training_is_repeatable_and_leaves_the_global_generator_alone():
    x, y = line()
    before = torch.get_rng_state()
    found = []
    for _ in range(2):
        model = nn.Linear(3, 1).double()
        with torch.no_grad():
            model.weight.fill_(0.1)
            model.bias.fill_(0.0)
        torch.set_rng_state(before)
        found.append(marglik_training(model, "regression", [(x, y)], epochs=3, seed=4).log_marginal_likelihoods)
        assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1]


def test_numbers_are_checked():
    x, y = line(6)
    with pytest.raises(InvalidArgument, match="burn_in is 3 of 3 epochs"):
        marglik_training(linear(), "regression", [(x, y)], epochs=3, burn_in=3)
    with pytest.raises(InvalidArgument, match="lr must be above 0"):
        marglik_training(linear(), "regression", [(x, y)], epochs=1, lr=0.0)
    with pytest.raises(InvalidInput, match="no batch"):
        marglik_training(linear(), "regression", [], epochs=1)
    with pytest.raises(InvalidArgument, match="iterator"):
        marglik_training(linear(), "regression", iter([(x, y)]), epochs=1)
    with pytest.raises(InvalidArgument, match="strength must be"):
        ContinualLaplace(linear(), "regression", strength=0.0)
    learner = ContinualLaplace(linear(), "regression")
    with pytest.raises(NotFitted, match="call fit"):
        _ = learner.laplace
    with pytest.raises(InvalidArgument, match="epochs must be"):
        learner.fit([(x, y)], epochs=0)
