"""Schedules against finite differences, quadrature and published grids."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from jaxtyping import TypeCheckError

from pippin.core.errors import InvalidArgument
from pippin.generate.diffusion.schedules import NoiseSchedule

ALL = (
    NoiseSchedule.vp_cosine(),
    NoiseSchedule.vp_linear(),
    NoiseSchedule.flow(),
    NoiseSchedule.ve(5.0),
    NoiseSchedule.karras(),
)


@pytest.mark.parametrize("schedule", ALL, ids=lambda s: s.kind)
@given(share=st.floats(0.01, 0.99))
def test_slopes_are_those_of_finite_differences_and_tensors_say_what_floats_say(schedule, share):
    t, h = share * schedule.max_time, 1e-6
    for function, slope in ((schedule.a, schedule.da), (schedule.s, schedule.ds)):
        assert slope(t) == pytest.approx((function(t + h) - function(t - h)) / (2 * h), rel=1e-5, abs=1e-7)
        for one in (function, slope):
            assert float(one(torch.tensor(t, dtype=torch.float64))) == pytest.approx(one(t), rel=1e-12)


@pytest.mark.parametrize("schedule", ALL, ids=lambda s: s.kind)
def test_data_are_untouched_at_time_zero_and_next_to_nothing_of_them_is_left_at_the_start(schedule):
    assert (schedule.a(0.0), schedule.s(0.0)) == (1.0, 0.0)
    if schedule.signal_fades:
        assert schedule.a(schedule.max_time) / schedule.s(schedule.max_time) < 7e-3
    if schedule.preserves_variance:
        assert all(schedule.a(t) ** 2 + schedule.s(t) ** 2 == pytest.approx(1.0) for t in (0.1, 0.5, 0.9))


def test_linear_beta_is_its_integral_by_quadrature():
    times = torch.linspace(0, 0.7, 100_001, dtype=torch.float64)
    integral = torch.trapezoid(0.1 + (20 - 0.1) * times, times)
    assert NoiseSchedule.vp_linear().a(0.7) == pytest.approx(float((-0.5 * integral).exp()), rel=1e-9)


def test_karras_levels_are_the_published_formula():
    low, high, n = 0.002 ** (1 / 7), 80 ** (1 / 7), 18
    published = [(high + i / (n - 1) * (low - high)) ** 7 for i in range(n)] + [0.0]  # eq. 5
    assert NoiseSchedule.karras().grid(18) == pytest.approx(published)


def test_grids_are_even_in_the_root_of_the_time():
    assert NoiseSchedule.flow().grid(3) == pytest.approx([0.999, 0.666, 0.333, 0.0])
    variances = [level**2 for level in NoiseSchedule.ve(4.0, rho=0.5).grid(4)]
    assert variances == pytest.approx([16, 12, 8, 4, 0])
    assert NoiseSchedule.ve(4.0, 1.0).grid(3) == pytest.approx([4.0, 2.5, 1.0, 0.0])


@pytest.mark.parametrize("schedule", ALL, ids=lambda s: s.kind)
@given(steps=st.integers(1, 200))
def test_every_grid_falls_from_the_start_to_exactly_zero(schedule, steps):
    grid = schedule.grid(steps)
    schedule.check_grid(grid)
    assert len(grid) == steps + 1
    assert (grid[0], grid[-1]) == (schedule.max_time, 0.0)


def test_the_ratio_of_signal_and_noise_is_its_logarithm_and_infinite_at_the_ends():
    schedule = NoiseSchedule.flow()
    assert schedule.log_ratio(0.25) == pytest.approx(math.log(3))
    assert (schedule.log_ratio(0.0), schedule.log_ratio(1.0)) == (math.inf, -math.inf)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NoiseSchedule("flow", max_time=1.5), "max_time must be at most 1 for flow, got 1.5"),
        (lambda: NoiseSchedule.ve(1.0, 2.0), "min_time must be below max_time=1.0, got 2.0"),
        (lambda: NoiseSchedule.karras(rho=0.0), "rho must be above 0"),
        (lambda: NoiseSchedule.vp_linear(3.0, 1.0), r"betas must rise.*\(3.0, 1.0\)"),
        (lambda: NoiseSchedule.flow().grid(0), "steps must be at least 1"),
        (lambda: NoiseSchedule.flow().check_grid([0.5, 0.5, 0.0]), "falling"),
        (lambda: NoiseSchedule.flow().check_grid([1.5, 0.0]), "from 0 to 1.0"),
    ],
)
def test_bad_numbers_are_named(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_a_word_that_is_none_of_the_choices_is_refused():
    """By our own check, or before it by that of types, which tests switch on."""
    with pytest.raises((InvalidArgument, TypeCheckError), match="cosine"):
        NoiseSchedule("cosine")
