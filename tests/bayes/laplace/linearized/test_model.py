"""The linear model's optimum: against ridge regression and autograd, with and without a Jacobian."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from pippin.bayes.laplace.linearized.model import LinearizedModel, solve
from pippin.bayes.likelihood import Classification, Regression
from pippin.bayes.weight_subset import All, LastLayer
from pippin.core.errors import InvalidArgument, InvalidInput, NotConverged


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(inputs=2, outputs=1, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def jacobian(model, x):
    """J [n, C, P] by reverse mode on the whole batch."""
    own = {name: p.detach() for name, p in model.named_parameters()}
    parts = jacrev(lambda parameters: functional_call(model, parameters, (x,)))(own)
    return torch.cat([part.flatten(2) for part in parts.values()], -1)


def batches(x, y, size=5):
    return list(zip(x.split(size), y.split(size), strict=True))


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("n", [6, 25])
def test_the_mode_of_a_regression_is_the_ridge_solution(dense, n):
    model, x, y, sigma = network(), normal(n, 2), normal(n, 1, seed=1), 0.3
    selection = All().resolve(model)
    prior = torch.linspace(0.1, 3.0, selection.size, dtype=torch.float64)
    linear = LinearizedModel(model, Regression(sigma), selection, batches(x, y), scale=1 / sigma**2, dense=dense)
    j, w = jacobian(model, x)[:, 0], selection.vector(model)
    target = y[:, 0] - model(x).detach()[:, 0] + j @ w
    expected = torch.linalg.solve(j.T @ j / sigma**2 + prior.diag(), j.T @ target / sigma**2)
    torch.testing.assert_close(linear.mode(prior), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("n", [5, 20])
def test_the_mode_of_a_classifier_has_no_gradient_by_autograd(dense, n):
    model, x = network(outputs=3), normal(n, 2)
    y = torch.arange(n) % 3
    selection = All().resolve(model)
    prior = torch.full((selection.size,), 0.5, dtype=torch.float64)
    linear = LinearizedModel(model, Classification(), selection, batches(x, y, size=20), dense=dense)
    found = linear.mode(prior, 3 * normal(selection.size, seed=4)).requires_grad_()
    h = model(x).detach() + jacobian(model, x) @ (found - selection.vector(model))
    loss = nn.functional.cross_entropy(h, y, reduction="sum") + 0.5 * (prior * found.square()).sum()
    (gradient,) = torch.autograd.grad(loss, found)
    assert gradient.abs().max() < 1e-5
    assert float(linear.loss(found.detach(), prior)) == pytest.approx(float(loss.detach()), rel=1e-10)


def test_at_the_networks_weights_the_linear_model_is_the_network():
    model, x = network(outputs=2), normal(7, 2)
    selection = LastLayer().resolve(model)
    for dense in (True, False):
        linear = LinearizedModel(model, Regression(), selection, batches(x, normal(7, 2)), dense=dense)
        torch.testing.assert_close(linear.outputs(linear.weights), model(x).detach())


def test_in_its_last_layer_a_network_is_its_own_linear_model():
    model, x = network(outputs=2), normal(7, 2)
    selection = LastLayer().resolve(model)
    v = normal(selection.size, seed=3)
    linear = LinearizedModel(model, Regression(), selection, batches(x, normal(7, 2)))
    with selection.at(model, v), torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(linear.outputs(v), expected)


def test_solving_in_weights_and_in_outputs_agrees():
    rows, prior, right = normal(9, 6), torch.linspace(0.5, 2, 6, dtype=torch.float64), normal(6, seed=2)
    in_weights = solve(rows, prior, right)
    in_outputs = solve(torch.linalg.qr(rows)[1], prior, right)
    padded = solve(rows[:4], prior, right)
    torch.testing.assert_close(in_weights, in_outputs)
    torch.testing.assert_close((rows[:4].T @ rows[:4] + prior.diag()) @ padded, right)


def test_a_model_in_float32_without_a_jacobian_comes_near_the_exact_mode():
    model, x, y = network(), normal(30, 2), normal(30, 1, seed=1)
    selection = All().resolve(model)
    prior = torch.ones(selection.size, dtype=torch.float64)
    exact = LinearizedModel(model, Regression(), selection, batches(x, y)).mode(prior)
    model.float()
    single = LinearizedModel(model, Regression(), selection, batches(x.float(), y.float()), dense=False)
    torch.testing.assert_close(single.mode(prior.float()).double(), exact, rtol=1e-2, atol=2e-3)


def test_too_few_steps_say_so():
    model, x = network(outputs=3), normal(12, 2)
    linear = LinearizedModel(model, Classification(), All().resolve(model), batches(x, torch.arange(12) % 3))
    with pytest.raises(NotConverged, match="did not converge in 1 steps") as caught:
        linear.mode(torch.full((33,), 1e-3, dtype=torch.float64), max_iterations=1)
    assert caught.value.iterations == 1
    assert caught.value.residual > 0


def test_bad_input_is_named():
    model, x, y = network(), normal(6, 2), normal(6, 1)
    selection = All().resolve(model)
    with pytest.raises(InvalidArgument, match="scale must be"):
        LinearizedModel(model, Regression(), selection, batches(x, y), scale=-1.0)
    with pytest.raises(InvalidArgument, match="read once"):
        LinearizedModel(model, Regression(), selection, iter(batches(x, y)))
    with pytest.raises(InvalidInput, match="no batch"):
        LinearizedModel(model, Regression(), selection, [])
    with pytest.raises(InvalidInput, match="nan"):
        LinearizedModel(model, Regression(), selection, batches(x, y * torch.nan))
