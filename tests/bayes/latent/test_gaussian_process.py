"""Oracles for Gaussian processes: scikit-learn's, the evidence of a dense normal, quadrature of the improvement."""

import math
import sys

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import distributions as D

from pippin.bayes.latent.gaussian_process import GaussianProcess, Kernel, expected_improvement
from pippin.core.errors import InvalidArgument, InvalidInput, MissingDependency, NotFitted, SingularPosterior


def problem(n=40, d=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    y = 5 + 3 * (x[:, 0].sin() + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64))
    return x, y


def kernel(d=2):
    scale = torch.linspace(0.7, 1.6, d, dtype=torch.float64)
    return Kernel(scale, torch.tensor(1.7, dtype=torch.float64), torch.tensor(0.05, dtype=torch.float64))


def standardized(y):
    return (y - y.mean()) / y.std(correction=0)


def sklearn_process(k, x, y, optimize=False):
    gp = pytest.importorskip("sklearn.gaussian_process")
    kernels = gp.kernels
    made = kernels.ConstantKernel(float(k.variance)) * kernels.RBF(k.lengthscale.numpy()) + kernels.WhiteKernel(
        float(k.noise)
    )
    process = gp.GaussianProcessRegressor(
        made, alpha=0.0, optimizer="fmin_l_bfgs_b" if optimize else None, n_restarts_optimizer=3, random_state=0
    )
    return process.fit(x.numpy(), y.numpy())


def moments(process, x):
    """Mean and variance of the noiseless function, and the noise beside them is the process's own."""
    prediction = process.predict(x)
    assert prediction.noise == process.noise
    return prediction.mean[:, 0], prediction.function_variance[:, 0]


def test_exact_predictions_and_evidence_are_those_of_scikit_learn():
    x, y = problem()
    ours = GaussianProcess().fit(x, y, kernel=kernel(), tune=False)
    theirs = sklearn_process(kernel(), x, standardized(y))
    assert ours.evidence == pytest.approx(theirs.log_marginal_likelihood_value_, rel=1e-9)
    at = torch.randn(15, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mean, variance = moments(ours, at)
    wanted, spread = theirs.predict(at.numpy(), return_std=True)
    unit = y.std(correction=0)
    torch.testing.assert_close(mean, torch.from_numpy(wanted) * unit + y.mean())
    noiseless = torch.from_numpy(spread).square() - 0.05  # theirs is of a new observation
    torch.testing.assert_close(variance, noiseless * unit**2, rtol=1e-6, atol=1e-8)
    assert ours.noise == pytest.approx(0.05 * float(unit) ** 2)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_hyper_parameters_have_as_much_evidence_as_scikit_learn_finds():
    x, y = problem(60)
    ours = GaussianProcess().fit(x, y)
    theirs = sklearn_process(kernel(), x, standardized(y), optimize=True)
    assert ours.evidence >= theirs.log_marginal_likelihood_value_ - 0.5
    assert float(ours.kernel.lengthscale[1]) > 3 * float(ours.kernel.lengthscale[0])  # the second input says nothing
    assert ours.noise == pytest.approx(0.09, rel=0.5)


def test_with_all_points_inducing_the_bound_is_the_exact_evidence():
    x, y = problem(30)
    exact = GaussianProcess().fit(x, y, kernel=kernel(), tune=False)
    sparse = GaussianProcess(30).fit(x, y, kernel=kernel(), tune=False)
    assert sparse.evidence == pytest.approx(exact.evidence, abs=1e-4)
    at = torch.randn(9, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for a, b in zip(moments(exact, at), moments(sparse, at), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_sparse_bound_is_the_formula_by_dense_matrices():
    """log N(y; 0, Q + noise I) - tr(K - Q) / (2 noise), and the predictive through Q with dense matrices."""
    pytest.importorskip("sklearn")
    x, y = problem(35)
    k = kernel()
    sparse = GaussianProcess(6).fit(x, y, kernel=k, tune=False)
    points = sparse._points
    assert len(points) == 6
    inner, cross = k(points, points), k(points, x)
    q = cross.T @ torch.linalg.solve(inner, cross)
    normal = D.MultivariateNormal(torch.zeros(35, dtype=torch.float64), q + k.noise * torch.eye(35))
    wanted = normal.log_prob(standardized(y)) - 0.5 * (35 * k.variance - q.trace()) / k.noise
    assert sparse.evidence == pytest.approx(float(wanted), abs=1e-6)
    at = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    mean, variance = moments(sparse, at)
    there = k(points, at)
    precision = torch.linalg.inv(inner + cross @ cross.T / k.noise)
    expected = there.T @ precision @ cross @ standardized(y) / k.noise
    torch.testing.assert_close(mean, expected * y.std(correction=0) + y.mean(), rtol=1e-6, atol=1e-6)
    spread = k.variance - (there * torch.linalg.solve(inner, there)).sum(0) + (there * (precision @ there)).sum(0)
    torch.testing.assert_close(variance, spread * y.var(correction=0), rtol=1e-6, atol=1e-8)


def test_sparse_fits_come_close_to_the_exact_one_and_never_above():
    pytest.importorskip("sklearn")
    x, y = problem(120, d=1)
    exact, sparse = GaussianProcess().fit(x, y), GaussianProcess(12).fit(x, y)
    assert exact.evidence - 2.0 < sparse.evidence <= exact.evidence + 1e-3
    at = torch.linspace(-1.5, 1.5, 20, dtype=torch.float64)[:, None]
    torch.testing.assert_close(sparse.predict(at).mean, exact.predict(at).mean, rtol=0, atol=0.1)


@pytest.mark.parametrize("inducing", [None, 40])
def test_conditioning_is_fitting_on_all_with_the_same_hyper_parameters(inducing):
    x, y = problem(40)
    first = GaussianProcess(inducing).fit(x[:30], y[:30], kernel=kernel(), tune=False)
    more = first.condition_on_observations(x[30:], y[30:])
    at = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    k, unit, shift = kernel(), y[:30].std(correction=0), y[:30].mean()
    if inducing is None:
        dense = k(x, x) + k.noise * torch.eye(40)
        wanted = k(at, x) @ torch.linalg.solve(dense, (y - shift) / unit) * unit + shift
        torch.testing.assert_close(more.predict(at).mean[:, 0], wanted)
    assert (more.predict(at).variance <= first.predict(at).variance + 1e-9).all()
    assert len(first.x) == 30  # and the first is as it was


def test_predictions_have_gradients_in_the_inputs():
    x, y = problem(20)
    process = GaussianProcess().fit(x, y, kernel=kernel(), tune=False)
    at = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: expected_improvement(*moments(process, z), 5.0), at)


def test_expected_improvement_is_the_integral():
    mean, spread, best = torch.tensor([0.3, -1.0, 4.0]), torch.tensor([0.5, 2.0, 0.1]), 0.7
    u = torch.linspace(-9, 9, 200_001, dtype=torch.float64)
    values = mean.double()[:, None] + spread.double()[:, None] * u
    density = (-0.5 * u**2).exp() / math.sqrt(2 * math.pi)
    wanted = torch.trapezoid((values - best).clamp(min=0) * density, u)
    found = expected_improvement(mean.double(), spread.double().square(), best)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


def test_constant_targets_and_duplicates_are_fitted():
    x = torch.zeros(5, 2, dtype=torch.float64)
    mean, variance = moments(GaussianProcess().fit(x, torch.full((5,), 3.0, dtype=torch.float64)), x[:1])
    assert float(mean) == pytest.approx(3.0)
    assert math.isfinite(float(variance))


def test_bad_input_is_named(monkeypatch):
    x, y = problem(10)
    with pytest.raises(InvalidArgument, match="num_inducing must be"):
        GaussianProcess(0)
    with pytest.raises(NotFitted):
        GaussianProcess().predict(x)
    with pytest.raises(NotFitted):
        GaussianProcess().condition_on_observations(x, y)
    with pytest.raises(NotFitted):
        _ = GaussianProcess().noise
    with pytest.raises(InvalidInput, match="0 inputs for 0 targets"):
        GaussianProcess().fit(x[:0], y[:0])
    with pytest.raises((InvalidInput, TypeCheckError)):
        GaussianProcess().fit(x, y[:9])
    broken = y.clone()
    broken[4] = math.nan
    with pytest.raises(InvalidInput, match="row 4"):
        GaussianProcess().fit(x, broken)
    fitted = GaussianProcess().fit(x, y, tune=False)
    with pytest.raises(InvalidInput, match="inputs of 3 dimensions"):
        fitted.predict(torch.zeros(1, 3))
    negative = Kernel(torch.ones(2).double(), torch.tensor(-1.0).double(), torch.tensor(0.1).double())
    with pytest.raises(SingularPosterior, match="not positive definite"):
        GaussianProcess().fit(x, y, kernel=negative, tune=False)
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(MissingDependency, match=r"pippin\[bayes\]"):
        GaussianProcess(3).fit(x, y)
