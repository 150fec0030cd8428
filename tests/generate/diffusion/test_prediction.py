"""Kinds of prediction against the sample that they were made from, and against each other."""

import itertools

import pytest
import torch

from pippin.core.errors import InvalidArgument
from pippin.generate.diffusion.prediction import add_noise, check_prediction, estimate, target
from pippin.generate.diffusion.schedules import NoiseSchedule

SCHEDULES = (
    NoiseSchedule.vp_cosine(),
    NoiseSchedule.vp_linear(),
    NoiseSchedule.flow(),
    NoiseSchedule.ve(3.0),
    NoiseSchedule.karras(),
)
PAIRS = [
    (schedule, kind)
    for schedule, kind in itertools.product(SCHEDULES, ("x0", "eps", "v", "flow"))
    if kind != "v" or schedule.preserves_variance
]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("schedule", "kind"), PAIRS, ids=lambda p: getattr(p, "kind", p))
def test_the_target_gives_back_data_and_noise_at_one_time_and_at_many(schedule, kind):
    x0, eps = normal(5, 2, 3), normal(5, 2, 3, seed=1)
    many = torch.linspace(0.1, 0.9, 5, dtype=torch.float64) * schedule.max_time
    for t in (0.4 * schedule.max_time, many):
        found = estimate(target(x0, eps, t, kind, schedule), add_noise(x0, eps, t, schedule), t, kind, schedule)
        torch.testing.assert_close(found.x0, x0, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.eps, eps, rtol=1e-9, atol=1e-9)
    alone = add_noise(x0, eps, many, schedule)[3]
    torch.testing.assert_close(alone, add_noise(x0[3:4], eps[3:4], float(many[3]), schedule)[0])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
def test_the_velocity_is_the_slope_of_the_path(schedule):
    x0, eps, t, h = normal(4), normal(4, seed=1), 0.3 * schedule.max_time, 1e-6
    slope = (add_noise(x0, eps, t + h, schedule) - add_noise(x0, eps, t - h, schedule)) / (2 * h)
    torch.testing.assert_close(target(x0, eps, t, "flow", schedule), slope, rtol=1e-5, atol=1e-6)


def test_on_the_cosine_schedule_velocity_and_v_are_the_same_up_to_a_factor():
    x0, eps, schedule = normal(4), normal(4, seed=1), NoiseSchedule.vp_cosine()
    torch.testing.assert_close(
        target(x0, eps, 0.3, "flow", schedule), torch.pi / 2 * target(x0, eps, 0.3, "v", schedule)
    )


def test_the_score_of_a_normal_density_is_its_gradient():
    schedule, t = NoiseSchedule.flow(), 0.6
    x = normal(7).requires_grad_()
    a, s = schedule.a(t), schedule.s(t)
    variance = 0.25 * a * a + s * s  # of data with variance 0.25
    density = torch.distributions.Normal(0.0, variance**0.5).log_prob(x).sum()
    gradient = torch.autograd.grad(density, x)[0]
    found = estimate(s * x.detach() / variance, x.detach(), t, "eps", schedule)
    torch.testing.assert_close(found.score(s), gradient)


def test_half_precision_of_a_network_does_not_reach_the_estimates():
    x = normal(3, 4).float()
    found = estimate(torch.ones(3, 4, dtype=torch.bfloat16), x, 0.3, "flow", NoiseSchedule.flow())
    assert found.x0.dtype == found.eps.dtype == torch.float32
    torch.testing.assert_close(found.x0, x - 0.3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: estimate(x, x, 0.5, "v", NoiseSchedule.flow()), "'v' needs a² \\+ s² = 1, which flow has not"),
        (lambda x: check_prediction("velocity", NoiseSchedule.flow()), "kind must be"),
        (
            lambda x: estimate(x[:, :1], x, 0.5, "x0", NoiseSchedule.flow()),
            r"output has shape \(2, 1\), its samples \(2, 3\)",
        ),
        (lambda x: estimate(x, x, 1.0, "eps", NoiseSchedule.flow()), "no signal is left"),
        (lambda x: estimate(x, x, 0.0, "x0", NoiseSchedule.flow()), "there is no noise"),
        (lambda x: estimate(x, x, torch.ones(3), "x0", NoiseSchedule.flow()), "times of shape"),
    ],
)
def test_what_has_no_meaning_is_refused(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call(normal(2, 3))
