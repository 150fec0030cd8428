"""Gromov-Wasserstein against brute force over permutations and against POT; the gap's laws, gradient and errors."""

import itertools
import math
import sys
import warnings

import pytest
import torch
from hypothesis import given, settings, strategies as st
from jaxtyping import TypeCheckError

from pippin.bayes.transport.gromov import (
    QUICK,
    cost_factors,
    cost_matrix,
    distortion,
    gromov_monge_gap,
    gromov_wasserstein,
)
from pippin.bayes.transport.gromov_solver import GromovSolver, sinkhorn_plans
from pippin.core.errors import InferenceAtRisk, InvalidArgument, InvalidInput, MissingDependency

COSTS = ("l2", "scl2", "cos")


def points(n, d, seed, *, scale=1.0):
    return scale * torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(d, seed):
    return torch.linalg.qr(points(d, d, seed))[0]


def brute(a, b):
    """The smallest cost over all permutations."""
    orders = torch.tensor(list(itertools.permutations(range(len(a)))))
    return float(0.5 * (a - b[orders[:, :, None], orders[:, None, :]]).square().mean((1, 2)).min())


def quadratic(a, b, plan):
    """Q of a plan by its definition: the sum over four indices."""
    return float((0.5 * (a[:, None, :, None] - b[None, :, None, :]) ** 2 * plan[:, :, None, None] * plan).sum())


@pytest.mark.parametrize("cost", COSTS)
def test_costs_are_their_definitions(cost):
    x = points(7, 3, 0)
    if cost == "cos":
        expected = torch.nn.functional.cosine_similarity(x[:, None], x[None], dim=2)
    else:
        expected = (x[:, None] - x[None]).square().sum(2)
        expected = expected / expected.mean() if cost == "scl2" else expected
    torch.testing.assert_close(cost_matrix(x, cost), expected)
    torch.testing.assert_close(cost_factors(x, cost).matrix, expected)


def test_distances_far_from_the_origin_do_not_cancel():
    x = points(7, 3, 0).float()
    torch.testing.assert_close(cost_matrix(x + 1000, "l2"), cost_matrix(x, "l2"), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("n", [5, 6])
def test_polished_plans_with_restarts_are_the_best_permutations(n, cost):
    solver = GromovSolver(eps0=0.1, max_iterations=3, max_sinkhorn_iterations=10, num_restarts=12)
    for seed in range(4):
        a, b = cost_matrix(points(n, 3, seed), cost), cost_matrix(points(n, 2, 100 + seed), cost)
        best = gromov_wasserstein(a, b, solver)
        assert best.value == pytest.approx(brute(a, b), rel=1e-9)
        assert best.value == pytest.approx(quadratic(a, b, best.plan), rel=1e-9)
        assert sorted(best.permutation.tolist()) == list(range(n))


def test_plans_that_are_not_polished_mostly_come_within_two_percent_of_the_best_permutation():
    solver, hits = GromovSolver(eps0=0.005, value="plain"), 0
    for seed in range(12):
        a, b = cost_matrix(points(6, 3, seed), "l2"), cost_matrix(points(6, 2, 100 + seed), "l2")
        hits += gromov_wasserstein(a, b, solver).value <= 1.02 * brute(a, b)
    assert hits >= 9


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("value", ["polished", "plain"])
def test_no_value_is_below_the_minimum(cost, value):
    for seed in range(3):
        a, b = cost_matrix(points(6, 3, seed), cost), cost_matrix(points(6, 4, 50 + seed), cost)
        for solver in (
            GromovSolver(value=value, max_iterations=5, max_sinkhorn_iterations=50),
            GromovSolver(value=value, eps0=0.2, max_iterations=3, max_sinkhorn_iterations=20),
        ):
            found = gromov_wasserstein(a, b, solver)
            assert found.value >= brute(a, b) * (1 - 1e-9)
            assert found.value == pytest.approx(quadratic(a, b, found.plan), rel=1e-6)


def test_plans_have_uniform_marginals_even_where_sinkhorn_stopped_early():
    a, b = cost_matrix(points(9, 3, 0)), cost_matrix(points(9, 3, 1))
    plan = gromov_wasserstein(
        a, b, GromovSolver(eps0=0.003, max_iterations=2, max_sinkhorn_iterations=2, value="plain")
    ).plan
    for axis in (0, 1):
        torch.testing.assert_close(plan.sum(axis), torch.full((9,), 1 / 9, dtype=torch.float64), rtol=1e-9, atol=0)


def test_a_matrix_and_its_factors_give_the_same_plan():
    x, y = points(40, 2, 0), points(40, 3, 1)
    for cost in COSTS:
        solver = GromovSolver(eps0=0.1, value="plain")
        whole = gromov_wasserstein(cost_matrix(x, cost), cost_matrix(y, cost), solver)
        thin = gromov_wasserstein(cost_factors(x, cost), cost_factors(y, cost), solver)
        torch.testing.assert_close(whole.plan, thin.plan, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("eps", [1.0, 0.1, 0.05])
def test_sinkhorn_is_that_of_pot(eps):
    ot = pytest.importorskip("ot")
    cost = cost_matrix(points(12, 3, 0), "scl2") + torch.eye(12)
    uniform = torch.full((12,), 1 / 12, dtype=torch.float64)
    expected = ot.sinkhorn(
        uniform, uniform, cost, eps, method="sinkhorn_log", numItermax=2000, stopThr=1e-9, warn=False
    )
    # two problems at once, of different regularization
    plans, _ = sinkhorn_plans(torch.stack([2 * cost, cost]), torch.tensor([3.0, eps]).double(), max_iterations=5000)
    torch.testing.assert_close(plans[1], expected, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(plans.sum(2), torch.full((2, 12), 1 / 12).double(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("cost", ["l2", "cos"])
def test_the_entropic_plan_is_that_of_pot(cost):
    ot = pytest.importorskip("ot")
    a, b = cost_matrix(points(16, 3, 0), cost), cost_matrix(points(16, 2, 1), cost)
    # eps is set absolutely; POT's loss is not halved, so its eps is twice ours
    eps = 0.3 * float(a.mean() ** 2 + a.var() + b.var())
    ours = gromov_wasserstein(
        a,
        b,
        GromovSolver(
            eps0=eps, relative=False, max_iterations=500, max_sinkhorn_iterations=200, value="plain", init="product"
        ),
    )
    uniform = torch.full((16,), 1 / 16, dtype=torch.float64)
    plan, log = ot.gromov.entropic_gromov_wasserstein(
        a, b, uniform, uniform, "square_loss", epsilon=2 * eps, max_iter=500, tol=1e-10, log=True, verbose=False
    )
    torch.testing.assert_close(ours.plan, plan, rtol=1e-3, atol=1e-6)
    assert ours.value == pytest.approx(float(log["gw_dist"]) / 2, rel=1e-4)
    assert ours.converged


def test_the_polished_value_is_no_worse_than_pots_conditional_gradient():
    ot = pytest.importorskip("ot")
    uniform = torch.full((24,), 1 / 24, dtype=torch.float64)
    for seed in range(2):
        a, b = cost_matrix(points(24, 3, seed), "scl2"), cost_matrix(points(24, 3, 9 + seed), "scl2")
        theirs = float(ot.gromov.gromov_wasserstein2(a, b, uniform, uniform, "square_loss")) / 2
        assert gromov_wasserstein(a, b).value <= theirs * 1.02


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("solver", [QUICK, GromovSolver(max_iterations=5, max_sinkhorn_iterations=50)])
def test_an_isometry_and_a_scaling_have_no_gap_and_no_gradient(cost, solver):
    x = points(24, 3, 0)
    for image in (x @ rotation(3, 1), 2 * x):
        y = image.requires_grad_()
        gap = gromov_monge_gap(x, y, cost, solver=solver)
        assert gap.item() == pytest.approx(0.0, abs=1e-9)
        assert float(torch.autograd.grad(gap, y)[0].abs().max()) < 1e-9
    assert float(distortion(x, 2 * x, "l2")) > 1


def test_unavoidable_distortion_is_no_gap_and_avoidable_distortion_is():
    x = points(24, 2, 0)
    bent = torch.tanh(x)
    assert float(gromov_monge_gap(x, bent, "scl2")) < 0.1 * float(distortion(x, bent, "scl2"))
    clusters = points(10, 2, 0, scale=0.1) + torch.tensor([[9.0, 0.0]] * 5 + [[-3.0, 0.0]] * 5)
    swapped = clusters[[9, *range(1, 9), 0]]
    assert float(gromov_monge_gap(clusters, swapped, "l2")) == pytest.approx(
        float(distortion(clusters, swapped, "l2")), rel=1e-6
    )
    assert float(gromov_monge_gap(clusters, swapped, "l2")) > 1


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 9), st.sampled_from(COSTS))
def test_the_gap_lies_between_zero_and_the_distortion(seed, n, cost):
    x, y = points(n, 3, seed), points(n, 2, seed + 1)
    gap, whole = float(gromov_monge_gap(x, y, cost)), float(distortion(x, y, cost))
    assert -1e-12 <= gap <= whole + 1e-12


def test_the_gap_is_distortion_less_the_value_of_the_plan():
    x, y = points(12, 3, 0), points(12, 5, 1)
    for cost in COSTS:
        for value in ("polished", "plain", "entropic"):
            solver = GromovSolver(value=value, eps0=0.2, max_iterations=60, max_sinkhorn_iterations=100)
            best = gromov_wasserstein(cost_matrix(x, cost), cost_matrix(y, cost), solver)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", InferenceAtRisk)
                gap = gromov_monge_gap(x, y, cost, solver=solver)
            assert float(gap) == pytest.approx(float(distortion(x, y, cost)) - best.value, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("cost", COSTS)
def test_the_gradient_is_that_of_finite_differences(cost):
    x, y = points(8, 3, 3), points(8, 2, 4).requires_grad_()
    solver = GromovSolver(eps0=0.1, max_iterations=3, max_sinkhorn_iterations=10, num_restarts=12)
    (slope,) = torch.autograd.grad(gromov_monge_gap(x, y, cost, solver=solver), y)
    step = 1e-6
    for row, column in ((0, 0), (3, 1), (7, 0)):
        moved = torch.zeros(8, 2, dtype=torch.float64)
        moved[row, column] = step
        with torch.no_grad():
            up = gromov_monge_gap(x, y + moved, cost, solver=solver)
            down = gromov_monge_gap(x, y - moved, cost, solver=solver)
        assert float((up - down) / (2 * step)) == pytest.approx(float(slope[row, column]), rel=1e-4, abs=1e-8)


def test_plain_gaps_of_an_isometry_are_negative_and_say_so():
    x = points(24, 3, 0)
    with pytest.warns(InferenceAtRisk, match="polished"):
        plain = gromov_monge_gap(
            x, x @ rotation(3, 1), "l2", solver=GromovSolver(eps0=0.1, value="plain", max_iterations=60)
        )
    assert float(plain) < -0.1
    entropic = gromov_monge_gap(
        x,
        x @ rotation(3, 1),
        "l2",
        solver=GromovSolver(eps0=0.005, value="entropic", max_iterations=60, max_sinkhorn_iterations=100),
    )
    assert float(entropic) > 0


def test_a_solver_that_still_moves_says_so():
    solver = GromovSolver(value="entropic", max_iterations=1, max_sinkhorn_iterations=1)
    with pytest.warns(InferenceAtRisk, match="had not converged after 1 steps"):
        gromov_monge_gap(points(12, 3, 0), points(12, 3, 1), "l2", solver=solver)


def test_functions_of_the_points_are_costs():
    x, y = points(9, 3, 0), points(9, 2, 1)
    pair = (lambda p: torch.cdist(p, p), lambda p: torch.cdist(p, p))
    expected = 0.5 * (torch.cdist(x, x) - torch.cdist(y, y)).square().mean()
    assert float(distortion(x, y, pair)) == pytest.approx(float(expected))
    assert 0 <= float(gromov_monge_gap(x, y, pair)) <= float(expected)


def test_pictures_half_precision_and_repeated_points_are_welcome():
    x = points(10, 3, 0).to(torch.bfloat16)
    y = points(10, 32, 1).view(10, 2, 4, 4).to(torch.bfloat16)
    assert gromov_monge_gap(x, y).dtype == torch.float32
    same = torch.zeros(6, 3)
    for cost in COSTS:
        assert math.isfinite(float(gromov_monge_gap(same, same, cost)))


BAD = [
    (torch.zeros(3, 2), torch.zeros(4, 2), "cos", (InvalidInput, TypeCheckError), "3 points but 4 images|y"),
    (torch.zeros(1, 2), torch.zeros(1, 2), "cos", InvalidInput, "at least 2 points"),
    (torch.zeros(0, 2), torch.zeros(0, 2), "cos", InvalidInput, "at least 2 points"),
    (torch.zeros(3, 0), torch.zeros(3, 2), "cos", InvalidInput, "no features"),
    (torch.zeros(3), torch.zeros(3, 2), "cos", InvalidInput, r"shape \(3,\); give \[n, features\]"),
    (torch.eye(3), torch.tensor([[0.0], [torch.nan], [1.0]]), "cos", InvalidInput, "row 1"),
]


@pytest.mark.parametrize(("x", "y", "cost", "error", "message"), BAD)
def test_bad_points_are_refused(x, y, cost, error, message):
    for function in (distortion, gromov_monge_gap):
        with pytest.raises(error, match=message):
            function(x, y, cost)


def test_an_unknown_cost_is_refused():
    with pytest.raises((InvalidArgument, TypeCheckError)):
        distortion(torch.eye(3), torch.eye(3), "l1")


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 2), "square matrix"),
        (torch.zeros(1, 1), torch.zeros(1, 1), "at least 2 points"),
        (torch.zeros(2, 2), torch.zeros(3, 3), "equal numbers of points"),
        (torch.tensor([[0.0, 1.0], [torch.nan, 0.0]]), torch.zeros(2, 2), "a holds NaN"),
        (torch.zeros(2, 2), torch.tensor([[0.0, 1.0], [2.0, 0.0]]), "b is not symmetric"),
    ],
)
def test_bad_matrices_are_refused(a, b, message):
    with pytest.raises((InvalidInput, TypeCheckError), match=f"{message}|type"):
        gromov_wasserstein(a, b)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eps0": 0.0}, "eps0 must be above 0"),
        ({"max_iterations": 0}, "must be at least 1"),
        ({"max_sinkhorn_iterations": 0}, "must be at least 1"),
        ({"num_restarts": -1}, "at least 0"),
        ({"init": "zero"}, "init must be"),
        ({"value": "exact"}, "value must be"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises((InvalidArgument, TypeCheckError), match=f"{message}|type"):
        GromovSolver(**settings)


def test_without_scipy_only_the_polish_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    x, y = points(5, 2, 0), points(5, 2, 1)
    with pytest.raises(MissingDependency, match=r"pippin\[bayes\]"):
        gromov_monge_gap(x, y)
    a, b = cost_matrix(x), cost_matrix(y)
    assert gromov_wasserstein(a, b, GromovSolver(value="plain", eps0=0.5)).value > 0


def test_the_callers_generators_are_left_alone():
    before = torch.random.get_rng_state()
    gromov_monge_gap(points(8, 2, 0), points(8, 2, 1), solver=GromovSolver(num_restarts=4))
    assert torch.equal(before, torch.random.get_rng_state())
