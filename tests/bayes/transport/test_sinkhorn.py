"""Oracles for the transport: the plain log-domain iteration in float64, POT, the optimality of the plan, errors."""

import math
import re

import pytest
import torch
from beartype.roar import BeartypeException
from hypothesis import given, settings, strategies as st
from jaxtyping import TypeCheckError

from pippin.bayes.transport.sinkhorn import row_weights, semibalanced_sinkhorn
from pippin.core.errors import InvalidArgument, InvalidInput, NotConverged

WRONG_TYPE = (InvalidArgument, TypeCheckError, BeartypeException)


def cost(n, m, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(k, 3, generator=generator, dtype=torch.float64) for k in (n, m))
    return torch.cdist(scale * left, scale * right + 0.5)


def log_domain(c, gamma, tau, iterations):
    """The published updates, nothing else."""
    n, m = c.shape
    f, g = torch.zeros(n, dtype=c.dtype), torch.zeros(m, dtype=c.dtype)
    for _ in range(iterations):
        f = gamma * (-math.log(n) - ((g - c) / gamma).logsumexp(1))
        g = tau * gamma * (-math.log(m) - ((f[:, None] - c) / gamma).logsumexp(0))
    f = gamma * (-math.log(n) - ((g - c) / gamma).logsumexp(1))
    return ((f[:, None] + g - c) / gamma).exp()


@pytest.mark.parametrize("gamma", [0.1, 0.5, 5.0])
@pytest.mark.parametrize("tau", [1.0, 0.9, 0.2])
def test_plan_is_that_of_the_published_updates(gamma, tau):
    c = cost(30, 50)
    solved = semibalanced_sinkhorn(c, gamma, tau, tolerance=1e-12)
    torch.testing.assert_close(solved.plan, log_domain(c, gamma, tau, 2000), rtol=1e-8, atol=1e-13)
    again = ((solved.rows[:, None] + solved.columns - c) / gamma).exp()
    torch.testing.assert_close(again, solved.plan, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(("gamma", "tau"), [(0.5, 0.9), (0.2, 0.5), (0.5, 1.0)])
def test_pot_finds_the_same_plan(gamma, tau):
    ot = pytest.importorskip("ot")
    c = cost(40, 25)
    a, b = (
        torch.full((40,), 1 / 40, dtype=torch.float64).numpy(),
        torch.full((25,), 1 / 25, dtype=torch.float64).numpy(),
    )
    rho = gamma * tau / (1 - tau) if tau < 1 else math.inf
    # POT's regularizer is KL(P | a b'), which differs from <P, log P> by a constant where the total mass is 1
    theirs = ot.unbalanced.sinkhorn_unbalanced(
        a, b, c.numpy(), gamma, reg_m=(math.inf, rho), stopThr=1e-13, numItermax=20_000
    )
    ours = semibalanced_sinkhorn(c, gamma, tau, tolerance=1e-11)
    torch.testing.assert_close(ours.plan, torch.as_tensor(theirs), rtol=0, atol=1e-9)


def plain_iterations(c, gamma, tau, tolerance):
    """How many of the published updates it takes until the columns hold what the optimum demands of them."""
    n, m = c.shape
    g = torch.zeros(m, dtype=c.dtype)
    for made in range(5000):
        f = gamma * (-math.log(n) - ((g - c) / gamma).logsumexp(1))
        if column_error(((f[:, None] + g - c) / gamma).exp(), g, gamma, tau) <= tolerance:
            return made
        g = tau * gamma * (-math.log(m) - ((f[:, None] - c) / gamma).logsumexp(0))
    raise AssertionError("the plain updates do not converge")


def column_error(plan, g, gamma, tau):
    """Total error of a plan's columns: of 1/m where they are hard, of what their price allows where they give way."""
    return float((plan.sum(0) - (-(1 - tau) / tau * g / gamma).exp() / plan.shape[1]).abs().sum())


@pytest.mark.parametrize(("gamma", "tau"), [(0.05, 1.0), (0.05, 0.9), (0.02, 0.99)])
def test_mixing_takes_a_third_of_the_plain_updates_or_fewer(gamma, tau):
    c = cost(30, 50)
    made = semibalanced_sinkhorn(c, gamma, tau, tolerance=1e-8).iterations
    assert 0 < made <= plain_iterations(c, gamma, tau, 1e-8) / 3


def test_columns_that_hardly_give_way_are_nearly_as_fast_as_balanced_ones():
    """Without the shift of the potentials, what is left of a constant fades by tau in each update only."""
    c = cost(30, 50)
    balanced, soft = (semibalanced_sinkhorn(c, 0.05, tau, tolerance=1e-8).iterations for tau in (1.0, 0.99))
    assert soft <= 1.25 * balanced


@pytest.mark.parametrize("tolerance", [0.3, 1e-2, 1e-4])
@pytest.mark.parametrize("tau", [1.0, 0.7])
def test_the_residual_is_the_total_error_of_the_columns(tau, tolerance):
    solved = semibalanced_sinkhorn(cost(30, 50), 0.05, tau, tolerance=tolerance)
    assert solved.residual <= tolerance
    assert solved.residual == pytest.approx(column_error(solved.plan, solved.columns, 0.05, tau), rel=1e-6)


def test_small_gamma_that_overflows_plain_scaling_is_solved():
    c = cost(20, 20, scale=600.0)
    assert (-c / 0.5).exp().sum(0).min() == 0  # the plain kernel has empty columns
    solved = semibalanced_sinkhorn(c, 0.5, 0.9, tolerance=1e-9)
    torch.testing.assert_close(solved.plan, log_domain(c, 0.5, 0.9, 5000), rtol=1e-5, atol=1e-10)
    balanced = semibalanced_sinkhorn(c, 60.0, tolerance=1e-9)
    torch.testing.assert_close(balanced.plan.sum(0), torch.full((20,), 0.05, dtype=torch.float64), rtol=0, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.floats(0.2, 3.0), st.floats(0.1, 1.0), st.integers(0, 99))
def test_rows_are_exact_and_the_plan_is_optimal(n, m, gamma, tau, seed):
    c = cost(n, m, seed=seed)
    plan = semibalanced_sinkhorn(c, gamma, tau, tolerance=1e-10, max_iterations=100_000).plan
    torch.testing.assert_close(plan.sum(1), torch.full((n,), 1 / n, dtype=torch.float64), rtol=1e-12, atol=0)

    def objective(p):
        columns = p.sum(0)
        value = (p * c).sum() + gamma * torch.xlogy(p, p).sum()
        if tau < 1:
            rho = gamma * tau / (1 - tau)
            value = value + rho * (torch.xlogy(columns, columns * m) - columns + 1 / m).sum()
        return value

    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(n, m, generator=generator, dtype=torch.float64)
    direction -= direction.mean(1, keepdim=True)
    if tau == 1:
        direction -= direction.mean(0, keepdim=True)
    for step in (1e-3, -1e-3):
        moved = plan + step * plan.min() * direction / direction.abs().max().clamp_min(1e-9)
        assert objective(moved) >= objective(plan) - 1e-9


def test_gamma_sets_the_limits():
    c = cost(8, 8)
    loose = semibalanced_sinkhorn(c, 1e4).plan
    torch.testing.assert_close(loose, torch.full((8, 8), 1 / 64, dtype=torch.float64), rtol=1e-3, atol=0)
    tight = semibalanced_sinkhorn(c, 0.02, tolerance=1e-8, max_iterations=200_000).plan
    ot = pytest.importorskip("ot")
    exact = ot.emd([], [], c.numpy())
    assert float((tight * c).sum()) == pytest.approx(float((exact * c.numpy()).sum()), abs=5e-3)


def test_float32_rows_hold_to_a_millionth():
    plan = semibalanced_sinkhorn(cost(200, 300).float(), 0.2, tolerance=1e-4).plan
    assert plan.dtype == torch.float32
    torch.testing.assert_close(plan.sum(1), torch.full((200,), 1 / 200), rtol=0, atol=1e-6)


def test_row_weights_give_the_rows_of_a_solved_plan_back():
    c = cost(10, 15)
    solved = semibalanced_sinkhorn(c, 0.3, 0.8)
    torch.testing.assert_close(row_weights(c, solved.columns, 0.3).exp() / 10, solved.plan, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": math.inf}, "gamma must be above 0 and finite, got inf"),
        ({"tau": 1.1}, "tau must be above 0 and at most 1, got 1.1"),
        ({"tolerance": 0.0}, "tolerance must be above 0"),
        ({"max_iterations": 0}, "max_iterations must be at least 1, got 0"),
    ],
)
def test_arguments_out_of_range(change, message):
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        semibalanced_sinkhorn(cost(3, 3), **({"gamma": 0.5} | change))


def test_bad_costs():
    bad = cost(4, 3)
    bad[2, 1] = math.nan
    with pytest.raises(InvalidInput, match=r"not finite in 1 of 4 rows \(2\)"):
        semibalanced_sinkhorn(bad, 0.5)
    with pytest.raises(InvalidInput, match="at least one row"):
        semibalanced_sinkhorn(torch.zeros(0, 3), 0.5)
    with pytest.raises((InvalidInput, *WRONG_TYPE)):
        semibalanced_sinkhorn(torch.zeros(3), 0.5)


def test_too_few_iterations_say_how_far_it_came():
    with pytest.raises(NotConverged, match="raise gamma") as caught:
        semibalanced_sinkhorn(cost(30, 30, scale=10.0), 0.1, max_iterations=3)
    assert caught.value.iterations == 3
    assert 1e-6 < caught.value.residual < 2
