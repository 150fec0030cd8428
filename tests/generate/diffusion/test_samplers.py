"""Samplers on densities whose exact estimates are known: orders of convergence, identities, and single steps."""

import math
from itertools import pairwise

import pytest
import torch
from jaxtyping import TypeCheckError

from pippin.core.errors import InvalidArgument, NonFiniteSample
from pippin.generate.diffusion.gaussian_mixture import GaussianMixture, exact_denoiser
from pippin.generate.diffusion.prediction import Estimate, estimate, target
from pippin.generate.diffusion.samplers import Langevin, guided, inpainting, integrate
from pippin.generate.diffusion.schedules import NoiseSchedule
from pippin.generate.noise import Noise

MIXTURE = GaussianMixture([0.35, 0.65], [[-1.2], [0.8]], [0.15**2, 0.3**2])
COSINE, FLOW = NoiseSchedule.vp_cosine(), NoiseSchedule.flow()
N = 1000
SHARES = (torch.arange(N, dtype=torch.float64) + 0.5) / N
Z = torch.special.ndtri(SHARES)[:, None]
"""Quantiles of the normal density: in one dimension an exact flow takes them to the quantiles of the mixture."""


def quantiles() -> torch.Tensor:
    """Of the mixture, by bisection."""
    low, high = torch.full((N,), -5.0, dtype=torch.float64), torch.full((N,), 5.0, dtype=torch.float64)
    spread = MIXTURE.covariances[:, 0, 0].sqrt()
    for _ in range(60):
        middle = (low + high) / 2
        below = torch.special.ndtr((middle[:, None] - MIXTURE.means[:, 0]) / spread) @ MIXTURE.weights < SHARES
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low[:, None]


EXACT = quantiles()


def error(schedule: NoiseSchedule, method: str, steps: int, **options) -> float:
    """Wasserstein distance of the samples to the mixture: both are sorted."""
    x = schedule.s(schedule.max_time) * Z
    x = integrate(exact_denoiser(MIXTURE, schedule), schedule, x, schedule.grid(steps), method=method, **options)
    return float((x.sort(0).values - EXACT).abs().mean())


def flat(schedule: NoiseSchedule, mixture: GaussianMixture = MIXTURE):
    """The exact denoiser for many numbers that are one sample, so that one source of noise serves all of them."""
    exact = exact_denoiser(mixture, schedule)

    def denoiser(x: torch.Tensor, t: float) -> Estimate:
        found = exact(x.view(-1, 1), t)
        return Estimate(found.x0.view(x.shape), found.eps.view(x.shape))

    return denoiser


@pytest.mark.parametrize(
    ("schedule", "method", "published"),
    [
        (COSINE, "ddim", (0.114, 0.056, 0.030, 0.015, 0.009)),
        (FLOW, "euler", (0.129, 0.063, 0.032, 0.016, 0.008)),
        (FLOW, "heun", (0.055, 0.013, 0.004, 0.004, 0.003)),
    ],
)
def test_errors_are_those_of_an_independent_run(schedule, method, published):
    """The figures have a floor of about 0.003 of their own: they were measured with random samples."""
    errors = [error(schedule, method, steps) for steps in (5, 10, 20, 40, 80)]
    assert errors == pytest.approx(published, abs=0.005)


def test_methods_of_first_order_halve_their_error_with_twice_the_steps():
    for schedule, method in ((COSINE, "ddim"), (FLOW, "euler"), (COSINE, "euler"), (FLOW, "ddim")):
        errors = [error(schedule, method, steps) for steps in (5, 10, 20, 40)]
        ratios = [before / after for before, after in pairwise(errors)]
        assert all(1.6 <= ratio <= 2.4 for ratio in ratios), (method, ratios)


def test_heun_is_of_second_order():
    errors = [error(FLOW, "heun", steps) for steps in (5, 10, 20)]
    assert all(before / after >= 3 for before, after in pairwise(errors)), errors


def test_the_two_step_solver_is_of_second_order_where_the_ratio_of_signal_to_noise_is_cut_evenly():
    schedule, first, last = COSINE, 0.97, 0.03
    spaced = schedule.log_ratio(first), schedule.log_ratio(last)

    def at(steps: int, method: str) -> torch.Tensor:
        levels = torch.linspace(*spaced, steps + 1, dtype=torch.float64)
        grid = [2 / math.pi * math.atan(math.exp(-level)) for level in levels.tolist()]
        return integrate(exact_denoiser(MIXTURE, schedule), schedule, Z, grid, method=method)

    exact = at(1000, "heun")
    errors = [float((at(steps, "dpm++2m") - exact).abs().mean()) for steps in (20, 40, 80, 160)]
    ratios = [before / after for before, after in pairwise(errors)]
    assert all(3.0 <= ratio <= 5.0 for ratio in ratios), ratios
    assert errors[2] < 0.2 * float((at(80, "ddim") - exact).abs().mean())


def test_all_schedules_take_a_quantile_to_the_same_place():
    for schedule in (COSINE, FLOW, NoiseSchedule.vp_linear(), NoiseSchedule.karras(80.0)):
        assert error(schedule, "heun", 100) < 0.012, schedule.kind


def test_drawing_noise_on_the_way_costs_accuracy_at_equal_steps():
    noise = Noise(1, seed=1)
    for steps, published in ((5, 0.155), (10, 0.081), (20, 0.050), (40, 0.031), (80, 0.017)):
        z = noise.normal((20_000,))
        x = integrate(flat(COSINE), COSINE, z, COSINE.grid(steps), method="ddpm", noise=noise)
        exact = EXACT.repeat_interleave(20).view(1, -1)
        drawn = float((x.double().sort().values - exact).abs().mean())
        assert drawn == pytest.approx(published, abs=0.02)
        assert error(COSINE, "ddim", steps) < drawn


def test_a_reverse_step_becomes_gaussian_as_its_length_goes_to_zero():
    """The divergence from the normal density of the same mean and variance, by quadrature, given x_t = 0."""
    t, y = 0.5, torch.linspace(-6, 6, 48_001, dtype=torch.float64)
    divergences = []
    for length in (0.4, 0.2, 0.1, 0.05, 0.025):
        r = t - length
        a = COSINE.a(t) / COSINE.a(r)
        fresh = COSINE.s(t) ** 2 - a * a * COSINE.s(r) ** 2
        log = MIXTURE.log_prob(y[:, None], COSINE.a(r), COSINE.s(r)) - (a * y) ** 2 / (2 * fresh)
        density = (log - log.max()).exp()
        density = density / torch.trapezoid(density, y)
        mean = torch.trapezoid(density * y, y)
        variance = torch.trapezoid(density * (y - mean) ** 2, y)
        normal = -((y - mean) ** 2) / (2 * variance) - 0.5 * (2 * math.pi * variance).log()
        apart = torch.where(density > 0, density * (density.log() - normal), 0.0)
        divergences.append(float(torch.trapezoid(apart, y)))
    assert all(after < before for before, after in pairwise(divergences))
    assert divergences[0] > 0.05
    assert divergences[-1] < 1e-3


@pytest.mark.parametrize("eta", [0.25, 0.5, 1.0])
def test_a_step_with_an_eta_keeps_the_noise_of_its_time_and_draws_that_share_of_it(eta):
    t, r = 0.8, 0.5
    x, x0, eps = (torch.tensor([[value]], dtype=torch.float64) for value in (1.3, 0.4, -0.7))
    y = integrate(lambda x, t: Estimate(x0, eps), COSINE, x, [t, r], method="ddim", eta=eta, noise=Noise(1, seed=3))
    a_t, s_t, a_r, s_r = COSINE.a(t), COSINE.s(t), COSINE.a(r), COSINE.s(r)
    variance = eta**2 * (s_t**2 - (a_t / a_r) ** 2 * s_r**2) * s_r**2 / s_t**2  # arXiv:2010.02502, eq. 16
    drawn = math.sqrt(variance) * Noise(1, seed=3).normal((1,)).double()
    torch.testing.assert_close(y, a_r * x0 + math.sqrt(s_r**2 - variance) * eps + drawn)


@pytest.mark.parametrize("schedule", [COSINE, FLOW, NoiseSchedule.vp_linear(), NoiseSchedule.ve(2.0)])
def test_a_drawn_step_has_the_mean_and_variance_of_the_reversed_chain(schedule):
    t, r = 0.8, 0.5
    x, x0 = torch.tensor([[1.3]], dtype=torch.float64), torch.tensor([[0.4]], dtype=torch.float64)

    def denoiser(x: torch.Tensor, t: float) -> Estimate:
        return Estimate(x0, (x - schedule.a(t) * x0) / schedule.s(t))

    drawn = torch.cat(
        [integrate(denoiser, schedule, x, [t, r], method="ddpm", noise=Noise(1, seed=i)) for i in range(40)]
    )
    z = torch.cat([Noise(1, seed=i).normal((1,)) for i in range(40)]).double()
    a_t, s_t, a_r, s_r = schedule.a(t), schedule.s(t), schedule.a(r), schedule.s(r)
    fresh = s_t**2 - (a_t / a_r) ** 2 * s_r**2  # the noise of the step from r to t
    mean = (a_t / a_r) * s_r**2 / s_t**2 * x + a_r * fresh / s_t**2 * x0  # by Bayes' rule, from two normal densities
    torch.testing.assert_close(drawn, mean + math.sqrt(fresh * s_r**2 / s_t**2) * z)


def test_ddim_is_the_tutorials_step_where_only_noise_is_added():
    """x + lambda (mu - x), with mu the mean one step back and lambda = s_t / (s_r + s_t)."""
    schedule = NoiseSchedule.ve(4.0, rho=0.5)
    denoiser = exact_denoiser(MIXTURE, schedule)
    grid = schedule.grid(12)
    x = y = 4.0 * Z
    for t, r in pairwise(grid):
        share = 1 - r**2 / t**2  # of the variance that this step takes away
        mu = y + share * (denoiser(y, t).x0 - y)
        y = y + t / (r + t) * (mu - y)
        x = integrate(denoiser, schedule, x, [t, r], method="ddim")
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_a_straight_path_is_one_thing_by_ddim_and_by_euler():
    once = [integrate(exact_denoiser(MIXTURE, FLOW), FLOW, Z, FLOW.grid(7), method=m) for m in ("ddim", "euler")]
    torch.testing.assert_close(*once)


@pytest.mark.parametrize("method", ["ddim", "ddpm", "dpm++2m"])
def test_a_point_is_reached_in_one_step(method):
    point = exact_denoiser(GaussianMixture([1.0], [[0.7, -0.2]], [0.0]), COSINE)
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    y = integrate(point, COSINE, x, COSINE.grid(1), method=method, noise=Noise(5))
    torch.testing.assert_close(y, torch.tensor([[0.7, -0.2]]).expand(5, 2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["ddim", "ddpm", "euler", "heun", "dpm++2m"])
@pytest.mark.parametrize("schedule", [COSINE, NoiseSchedule.vp_linear(), FLOW, NoiseSchedule.karras(20.0)])
def test_every_kind_of_prediction_goes_the_same_way(schedule, method):
    exact = exact_denoiser(MIXTURE, schedule)
    kinds = ("x0", "eps", "v", "flow") if schedule.preserves_variance else ("x0", "eps", "flow")
    ends = []
    for kind in kinds:

        def network(x: torch.Tensor, t: float, kind=kind) -> Estimate:
            return estimate(target(*exact(x, t), t, kind, schedule), x, t, kind, schedule)

        x = schedule.s(schedule.max_time) * Z[::50]
        ends.append(integrate(network, schedule, x, schedule.grid(9), method=method, noise=Noise(len(x))))
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-5, atol=1e-5)


def test_guidance_of_normal_densities_moves_their_mean():
    """With equal spread, c + (g - 1)(c - u) in scores is a normal density with its mean moved likewise."""
    one, other = (exact_denoiser(GaussianMixture([1.0], [[m]], [0.3]), COSINE) for m in (0.5, -0.2))
    wanted = exact_denoiser(GaussianMixture([1.0], [[-0.2 + 3.0 * 0.7]], [0.3]), COSINE)
    for found, exact in zip(guided(one, other, 3.0)(Z, 0.4), wanted(Z, 0.4), strict=True):
        torch.testing.assert_close(found, exact)
    for found, exact in zip(guided(one, other, 1.0)(Z, 0.4), one(Z, 0.4), strict=True):
        torch.testing.assert_close(found, exact)


def test_langevin_steps_settle_at_the_spread_that_they_must_have():
    """Of a normal density of variance v, steps h settle at 2h / (1 - (1 - h / v)²), whatever they began from."""
    variance, h, t = 0.25, 0.05, 0.2
    denoiser = flat(NoiseSchedule.ve(1.0), GaussianMixture([1.0], [[0.0]], [variance - t * t]))
    x = Langevin(60, h, t).run(denoiser, NoiseSchedule.ve(1.0), torch.full((1, 20_000), 3.0), Noise(1, seed=2))
    assert float(x.var()) == pytest.approx(2 * h / (1 - (1 - h / variance) ** 2), rel=0.04)
    assert abs(float(x.mean())) < 0.02


def test_a_corrector_mends_the_spread_that_two_steps_leave_wrong():
    sigma, t = 0.3, 0.05
    normal = GaussianMixture([1.0], [[0.8]], [sigma**2])
    z = Noise(1, seed=5).normal((20_000,))

    def spread(corrector: Langevin | None) -> float:
        grid, noise = FLOW.grid(2), Noise(1, seed=6)
        y = integrate(flat(FLOW, normal), FLOW, z, grid, method="euler", noise=noise, corrector=corrector)
        return float(y.std())

    last = (1 - t) * sigma**2 / math.sqrt((1 - t) ** 2 * sigma**2 + t * t)  # one step from t to 0 takes the mean
    assert spread(Langevin(200, 2e-3, t)) == pytest.approx(last, rel=0.03)
    assert abs(spread(None) / last - 1) > 0.2
    assert spread(Langevin(0, 2e-3, FLOW.grid(2)[1])) == spread(None)


def test_a_step_behind_a_corrector_is_the_first_of_a_run_of_its_own():
    """What the two-step solver remembers leads elsewhere once samples were moved."""
    grid = COSINE.grid(6)
    denoiser, z = flat(COSINE), Noise(1, seed=5).normal((100,)).double()
    corrector = Langevin(3, 1e-3, grid[3])
    run = dict(method="dpm++2m")
    whole = integrate(denoiser, COSINE, z, grid, noise=Noise(1, seed=6), corrector=corrector, **run)
    noise = Noise(1, seed=6)
    there = corrector.run(denoiser, COSINE, integrate(denoiser, COSINE, z, grid[:4], **run), noise)
    torch.testing.assert_close(whole, integrate(denoiser, COSINE, there, grid[3:], **run), rtol=0, atol=0)


def test_what_is_known_lies_on_one_path():
    known, eps = torch.full((2, 3), 0.5), Noise(2, seed=9).normal((3,))
    project = inpainting(known, torch.tensor([True, True, False]), COSINE, Noise(2, seed=9))
    for t in (0.9, 0.5, 0.9, 0.0):
        placed = project(torch.zeros(2, 3), t)
        wanted = COSINE.a(t) * known + COSINE.s(t) * eps
        torch.testing.assert_close(placed[:, :2], wanted[:, :2])
        assert not placed[:, 2].any()


def test_what_is_known_stays_and_the_rest_follows_it():
    correlated = GaussianMixture([1.0], [[0.0, 0.0]], torch.tensor([[[1.0, 0.95], [0.95, 1.0]]]))
    x = torch.randn(300, 2, generator=torch.Generator().manual_seed(0))
    known = torch.tensor([[1.5, 0.0]]).repeat(300, 1)
    mask = torch.tensor([True, False])
    project = inpainting(known, mask, COSINE, Noise(300, seed=9))
    y = integrate(exact_denoiser(correlated, COSINE), COSINE, x, COSINE.grid(60), method="ddim", project=project)
    assert torch.equal(y[:, 0], known[:, 0])
    assert float(y[:, 1].mean()) > 0.7  # the exact mean is 1.425: replacing what is known only comes near it
    nothing = inpainting(known, torch.tensor([False, False]), COSINE, Noise(300))
    for project in (None, nothing):
        y = integrate(exact_denoiser(correlated, COSINE), COSINE, x, COSINE.grid(5), project=project)
        assert abs(float(y.mean())) < 0.2


def test_a_callback_sees_each_step_and_ends_the_sampling():
    seen = []

    class Enough(Exception):
        pass

    def on_step(step):
        seen.append((step.done, step.total, step.estimate()))
        if step.done == 2:
            raise Enough

    asked = []

    def denoiser(x, t):
        asked.append(t)
        return exact_denoiser(MIXTURE, COSINE)(x, t)

    with pytest.raises(Enough):
        integrate(denoiser, COSINE, Z, COSINE.grid(5), method="ddim", on_step=on_step)
    assert [step[:2] for step in seen] == [(1, 5), (2, 5)]
    assert len(asked) == 2
    torch.testing.assert_close(seen[0][2], exact_denoiser(MIXTURE, COSINE)(Z, COSINE.max_time).x0)


def test_single_precision_ends_where_double_precision_does():
    for method in ("ddim", "heun", "dpm++2m"):
        ends = [
            integrate(exact_denoiser(MIXTURE, COSINE), COSINE, Z.to(kind), COSINE.grid(20), method=method)
            for kind in (torch.float32, torch.float64)
        ]
        torch.testing.assert_close(ends[0].double(), ends[1], rtol=0, atol=2e-3)
        assert ends[0].dtype == torch.float32


def test_the_first_step_that_is_not_finite_is_named():
    def denoiser(x, t):
        found = exact_denoiser(MIXTURE, COSINE)(x, t)
        return found if t > 0.5 else Estimate(found.x0 * math.nan, found.eps)

    with pytest.raises(NonFiniteSample, match=r"after step 4 of 5") as caught:
        integrate(denoiser, COSINE, Z, COSINE.grid(5), method="ddim")
    assert caught.value.step == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "ddim", "eta": -0.5}, "eta must be at least 0"),
        ({"method": "heun", "eta": 0.5}, "only 'ddim' takes eta"),
        ({"method": "ddpm"}, "needs noise; give noise"),
        ({"corrector": Langevin(1, 0.1, 0.5)}, "needs noise; give noise"),
        ({"corrector": Langevin(1, 0.1, 2.0), "noise": Noise(N)}, "the corrector's time 2.0 is not between"),
        ({"method": "ddpm", "noise": Noise(3)}, f"noise for 3 samples, and {N} samples"),
        ({"grid": [0.5]}, "at least two, falling"),
        ({"grid": [0.2, 0.5]}, "falling"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(options, message):
    def denoiser(x, t):
        raise AssertionError("asked")

    with pytest.raises(InvalidArgument, match=message):
        integrate(denoiser, COSINE, Z, options.pop("grid", COSINE.grid(3)), **options)


def test_a_corrector_out_of_range_is_refused():
    with pytest.raises(InvalidArgument, match="step_size must be above 0"):
        Langevin(1, 0.0, 0.1)


def test_a_word_that_is_none_of_the_choices_is_refused():
    """By our own check, or before it by that of types, which tests switch on."""
    with pytest.raises((InvalidArgument, TypeCheckError), match="rk4"):
        integrate(exact_denoiser(MIXTURE, COSINE), COSINE, Z, COSINE.grid(3), method="rk4")
