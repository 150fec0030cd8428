"""Scaling laws against scipy's L-BFGS, closed forms, brute force and published coefficients; what they refuse."""

import json
import math
import warnings

import numpy as np
import pytest
from scipy.optimize import minimize, minimize_scalar
from scipy.spatial import ConvexHull

from pippin.core.errors import CorruptedFile, Extrapolation, InvalidArgument, NotPrepared
from pippin.train.laws import fitting
from pippin.train.laws.compute_budget import late_fusion_flops, loss_hull
from pippin.train.laws.io import load_law
from pippin.train.laws.scaling import ScalingLaw

PUBLISHED = {"E": 1.904, "A": math.exp(5.5), "B": math.exp(6.2), "alpha": 0.301, "beta": 0.335}


def runs(noise=0.0, seed=0, sizes=6, budgets=12):
    N, D = (x.ravel() for x in np.meshgrid(np.geomspace(2e8, 4e9, sizes), np.geomspace(3e9, 6e11, budgets)))
    loss = PUBLISHED["E"] + PUBLISHED["A"] / N ** PUBLISHED["alpha"] + PUBLISHED["B"] / D ** PUBLISHED["beta"]
    return N, D, loss * np.exp(noise * np.random.default_rng(seed).standard_normal(len(N)))


@pytest.fixture(scope="module")
def law():
    return ScalingLaw().fit(*runs(0.002), num_resamples=60)


def test_without_noise_every_coefficient_is_recovered():
    found = ScalingLaw().fit(*runs(), num_resamples=0)
    for name, value in PUBLISHED.items():
        assert found.coefficients[name] == pytest.approx(value, rel=1e-6), name
    assert found.r2 == pytest.approx(1.0)
    assert found.exponents.a == pytest.approx(0.335 / 0.636, abs=1e-7)


@pytest.mark.parametrize("noise", [0.002, 0.02])
def test_the_minimum_is_that_of_lbfgs_from_many_starts(noise):
    N, D, loss = runs(noise, seed=3)
    n, d = np.log(N) - np.log(N).mean(), np.log(D) - np.log(D).mean()

    def huber(theta):
        a, b, e, alpha, beta = theta
        off = np.log(np.exp(a - alpha * n) + np.exp(b - beta * d) + np.exp(e)) - np.log(loss)
        size = np.abs(off)
        return 1e4 * np.where(size <= 1e-3, 0.5 * off**2, 1e-3 * (size - 0.5e-3)).sum()

    starts = [(-1, -1, 0.6, 0.2, 0.3), (-1, -2, 0.6, 0.4, 0.3)]
    best = min((minimize(huber, start, method="L-BFGS-B", options={"maxiter": 2000}) for start in starts), key=_fun)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Extrapolation)
        found = ScalingLaw().fit(N, D, loss, num_resamples=0)
    known = found.coefficients
    ours = huber(
        (
            math.log(known["A"]) - known["alpha"] * np.log(N).mean(),
            math.log(known["B"]) - known["beta"] * np.log(D).mean(),
            math.log(known["E"]),
            known["alpha"],
            known["beta"],
        )
    )
    assert ours <= best.fun * (1 + 1e-6)
    if noise < 0.01:
        assert known["alpha"] == pytest.approx(best.x[3], abs=2e-3)


def _fun(result):
    return result.fun


def test_slopes_are_those_of_finite_differences():
    N, D, loss = runs(0.01, sizes=3, budgets=4)
    runs_ = {"N": N, "D": D, "S": np.tile([0.0, 0.5, 0.75], 4)}
    matrix = ScalingLaw._matrix(runs_, {"N": np.log(N).mean(), "D": np.log(D).mean()})

    def terms(theta):
        return np.einsum("trp,sp->str", matrix, theta), matrix[None]

    theta = np.random.default_rng(0).normal(size=(1, 10)) * 0.3
    _, off, slope = fitting._evaluate(terms, np.log(loss), theta, np.ones((1, len(loss))), 1e-3)
    for place in range(10):
        moved = theta.copy()
        moved[0, place] += 1e-6
        other = fitting._evaluate(terms, np.log(loss), moved, np.ones((1, len(loss))), 1e-3)[1]
        np.testing.assert_allclose(slope[0, :, place], (other - off)[0] / 1e-6, atol=1e-5)


def test_units_of_size_and_data_do_not_matter(law):
    N, D, loss = runs(0.002)
    scaled = ScalingLaw().fit(N / 1e6, D / 1e9, loss, num_resamples=0)
    assert scaled.exponents.a == pytest.approx(law.exponents.a, rel=1e-6)
    np.testing.assert_allclose(scaled.predict(N / 1e6, D / 1e9), law.predict(N, D), rtol=1e-8)


def test_the_spread_covers_the_truth_and_two_tenths_of_a_percent_of_noise_move_alpha_by_little(law):
    assert 0.28 < law.coefficients["alpha"] < 0.33
    for name, truth in PUBLISHED.items():
        low, high = law.intervals[name]
        assert low <= truth <= high, name
    assert 0.003 < law.se["alpha"] < 0.03
    again = ScalingLaw().fit(*runs(0.002), num_resamples=60)
    assert again.intervals == law.intervals
    low, high = law.exponents_interval
    assert low < law.exponents.a < high


def test_the_closed_optimum_is_that_of_brute_force_and_of_the_search(law):
    compute = 1e21
    best = law.optimal(compute)
    found = minimize_scalar(
        lambda log_n: float(law.predict(math.exp(log_n), compute / 6 / math.exp(log_n))),
        bounds=(math.log(1e7), math.log(1e11)),
        method="bounded",
        options={"xatol": 1e-10},
    )
    assert pytest.approx(math.exp(found.x), rel=1e-4) == best.N
    assert pytest.approx(compute) == 6 * best.N * best.D
    searched = law.optimal(compute, flops=lambda N, D: 6 * N * D)
    assert pytest.approx(best.N, rel=1e-4) == searched.N
    assert searched.loss == pytest.approx(best.loss, rel=1e-9)
    for name in ("N", "D", "loss"):
        low, high = best.intervals[name]
        assert low <= getattr(best, name) <= high
        np.testing.assert_allclose(searched.intervals[name], best.intervals[name], rtol=1e-3)


@pytest.mark.parametrize(
    ("alpha", "beta", "a"), [(0.3084, 0.3375, 0.5246), (0.301, 0.335, 0.5262), (0.2971, 0.3380, 0.5315)]
)
def test_published_exponents_follow_from_the_published_powers(alpha, beta, a):
    N, D = (x.ravel() for x in np.meshgrid(np.geomspace(2e8, 4e9, 4), np.geomspace(3e9, 6e11, 4)))
    found = ScalingLaw().fit(N, D, 1.9 + 245 * N**-alpha + 490 * D**-beta, num_resamples=0)
    assert found.exponents.a == pytest.approx(a, abs=2.5e-3)
    grown = found.growth(np.geomspace(1e19, 1e22, 4))
    assert grown.a == pytest.approx(found.exponents.a, abs=1e-6)
    assert grown.d == pytest.approx(alpha / beta, abs=1e-5)


def test_late_fusion_has_the_published_size_along_a_budget(law):
    encoder = 3e8
    best = law.optimal(1e21, late_fusion_flops(lambda N: np.minimum(encoder, 0.9 * N)))
    # 6 (N_v D_v + N_t D) = C with D_v = 0.544 D is N = C / 6 D + 0.456 N_v
    assert pytest.approx(1e21 / 6 / best.D + (1 - 0.544) * encoder, rel=1e-6) == best.N
    by_hand = min(
        (float(law.predict(1e21 / 6 / D + 0.456 * encoder, D)), D) for D in np.geomspace(best.D / 10, best.D * 10, 4001)
    )
    assert best.loss == pytest.approx(by_hand[0], rel=1e-8)
    assert pytest.approx(by_hand[1], rel=3e-2) == best.D


def test_the_sparse_law_foretells_sparsities_between_those_of_the_fit():
    N, D, S = (x.ravel() for x in np.meshgrid([1e8, 4e8, 1.6e9], [1e9, 1e10, 1e11], [0.0, 0.5, 0.75, 0.875]))

    def truth(N, D, S):
        return 1.5 + 200 / N**0.3 + 400 / D**0.33 + 0.3 * (1 - S) ** -0.2 - 0.25 + 30 * (1 - S) ** -0.1 / N**0.25

    found = ScalingLaw("sparse").fit(N, D, truth(N, D, S), sparsity=S, num_resamples=0)
    assert found.mae < 2e-3
    predicted = found.predict(8e8, 5e10, sparsity=0.6)
    assert float(predicted) == pytest.approx(truth(8e8, 5e10, 0.6), rel=5e-3)
    with pytest.raises(InvalidArgument, match="chinchilla"):
        found.optimal(1e20)
    with pytest.raises(InvalidArgument, match="sparsity"):
        found.predict(1e8, 1e9)
    with pytest.raises(InvalidArgument, match="from 0 to below 1"):
        ScalingLaw("sparse").fit(N, D, truth(N, D, S), sparsity=S + 0.2)


def test_held_out_sizes_are_predicted():
    N, D, loss = runs(0.002, seed=1)
    small = N.max() > N
    found = ScalingLaw().fit(N[small], D[small], loss[small], num_resamples=0)
    assert found.score(N[~small], D[~small], loss[~small]).mae < 5e-3


def test_the_hull_is_that_of_scipy_and_its_slope_that_of_a_power_law():
    rng = np.random.default_rng(0)
    N, compute = np.repeat([1.0, 2.0, 3.0, 4.0], 6), np.tile(np.geomspace(1, 1e4, 6), 4)
    loss = 30 * compute**-0.05 * np.exp(np.abs(rng.normal(0, 0.1, 24)))
    found = loss_hull(N, compute, loss)
    points = np.log(np.stack([compute, loss], 1))
    corners = points[ConvexHull(points).vertices]
    for c, y in zip(np.log(found.compute), np.log(found.loss), strict=True):
        assert np.abs(corners - [c, y]).sum(1).min() < 1e-9
    exact = loss_hull(N, compute, 29.574 * compute**-0.0492)
    assert exact.exponent == pytest.approx(-0.0492, abs=1e-9)
    assert exact.scale == pytest.approx(29.574, rel=1e-6)
    assert min(loss_hull(N, compute, 30 * compute**-0.05, above=50).compute) > 50
    with pytest.raises(InvalidArgument, match="vertices"):
        loss_hull(N, compute, loss, above=1e9)


def test_a_law_is_saved_and_opened_again(law, tmp_path):
    law.save(tmp_path / "law.json")
    again = load_law(tmp_path / "law.json")
    assert again.coefficients == law.coefficients
    assert again.intervals == law.intervals
    assert again.optimal(1e21) == law.optimal(1e21)
    assert str(again.report()) == str(law.report())
    assert "R2" in str(law.report())
    (tmp_path / "none.json").write_text(json.dumps({"form": "other", "settings": {}}))
    for name in ("none.json", "missing.json"):
        with pytest.raises(CorruptedFile, match="pippin laws fit"):
            load_law(tmp_path / name)


def test_a_picture_is_drawn(law, tmp_path):
    law.plot(tmp_path / "law.svg")
    drawn = (tmp_path / "law.svg").read_text()
    assert drawn.count("<use") >= 2 * 72
    with pytest.raises(NotPrepared, match="fit"):
        ScalingLaw().plot(tmp_path / "none.png")


GOOD = runs(sizes=3, budgets=3)


@pytest.mark.parametrize(
    ("N", "D", "loss", "message"),
    [
        (GOOD[0] * 0, GOOD[1], GOOD[2], "N of run 0 is 0"),
        (GOOD[0], -GOOD[1], GOOD[2], "D of run 0"),
        (GOOD[0], GOOD[1], GOOD[2] - 5, "loss of run 0"),
        (GOOD[0], GOOD[1], GOOD[2] * math.nan, "loss of run 0 is nan"),
        (GOOD[0][:7], GOOD[1][:7], GOOD[2][:7], "at least 8 runs, got 7"),
        (GOOD[0], GOOD[1], GOOD[2][:8], "each variable once"),
        (np.where(GOOD[0] > 3e9, 2e8, GOOD[0]), GOOD[1], GOOD[2], "3 different values of N"),
        (GOOD[0], np.where(GOOD[1] > 5e11, 3e9, GOOD[1]), GOOD[2], "3 different values of D"),
        (GOOD[0], GOOD[1], GOOD[2] * 0 + 2, "nothing to fit"),
    ],
)
def test_runs_that_determine_no_law_are_refused(N, D, loss, message):
    with pytest.raises(InvalidArgument, match=message):
        ScalingLaw().fit(N, D, loss)


def test_what_is_asked_is_checked(law):
    with pytest.raises(InvalidArgument, match="chinchilla"):
        ScalingLaw("other")
    with pytest.raises(InvalidArgument, match="compute must be above 0"):
        law.optimal(0)
    with pytest.raises(InvalidArgument, match="no model size costs"):
        law.optimal(1e21, flops=lambda N, D: 1.0 + 0 * N)
    with pytest.raises(InvalidArgument, match="above 0"):
        law.predict(-1, 1e9)
    with pytest.raises(InvalidArgument, match="at least two different budgets"):
        law.growth([1e20])
    with pytest.raises(InvalidArgument, match="delta"):
        ScalingLaw().fit(*GOOD, delta=0)
    with pytest.raises(InvalidArgument, match="num_resamples"):
        ScalingLaw().fit(*GOOD, num_resamples=1)
    with pytest.raises(NotPrepared, match="call fit first"):
        ScalingLaw().predict(1, 1)


def test_far_optima_and_uncertain_exponents_are_warned_about(law):
    with pytest.warns(Extrapolation, match="far outside the runs"):
        law.optimal(1e28)
    with pytest.warns(Extrapolation, match="is uncertain"):
        ScalingLaw().fit(*runs(0.05, seed=2, sizes=3, budgets=4), num_resamples=30)
