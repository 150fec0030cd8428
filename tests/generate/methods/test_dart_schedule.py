"""Oracles for noisy views: Gaussian algebra, a mixture with a known mean, and the Markov diffusion they equal."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from pippin.core.errors import InvalidArgument
from pippin.generate.methods.dart.schedule import NomadSchedule, sample_views, split
from pippin.generate.noise import Noise

MODES, WEIGHT, WIDTH = (1.0, -1.0), 0.5, 0.25


def mixture_mean(y, snr):
    """E[x | x + N(0, 1 / snr) = y] for two normal distributions, by Bayes' rule."""
    variance = WIDTH**2 + 1 / snr
    logits = [math.log(w) - (y - m) ** 2 / (2 * variance) for m, w in zip(MODES, (WEIGHT, 1 - WEIGHT), strict=True)]
    shares = torch.stack(logits).softmax(0)
    return sum(p * (m + WIDTH**2 / variance * (y - m)) for p, m in zip(shares, MODES, strict=True))


def mixture(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sign = torch.where(torch.rand(n, generator=generator, dtype=torch.float64) < WEIGHT, 1.0, -1.0)
    return sign + WIDTH * torch.randn(n, generator=generator, dtype=torch.float64)


def exact(schedule):
    """The mean given all views so far, and how often it was asked."""
    seen, calls = [], []

    def guess(new):
        seen.append(new)
        calls.append(new.shape[1])
        z = schedule.statistic(torch.cat(seen, 1).double())[:, -1]
        level = schedule.steps - sum(calls)
        return mixture_mean(z / schedule.alphas_bar[level] ** 0.5, schedule.total_snr[level]).float()

    return guess, calls


@given(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=12))
def test_a_schedule_comes_back_from_the_diffusion_it_equals(odds):
    steps = torch.tensor(odds, dtype=torch.float64).cumsum(0).flip(0)  # falling
    schedule = NomadSchedule(tuple((steps / (1 + steps)).tolist()))
    again = NomadSchedule.from_alphas_bar(schedule.alphas_bar)
    assert again.gammas == pytest.approx(schedule.gammas, rel=1e-9)
    assert schedule.total_snr == pytest.approx([float(steps[t:].sum()) for t in range(len(odds))], rel=1e-12)
    assert schedule.omega == schedule.total_snr
    assert again.total_snr == pytest.approx([a / (1 - a) for a in schedule.alphas_bar], rel=1e-9)


def test_the_statistic_tells_all_that_the_views_tell():
    # the best linear guess from the views, by their covariance, against the one from the statistic alone
    schedule = NomadSchedule.cosine(5)
    prior = 0.7
    gammas = torch.tensor(schedule.gammas, dtype=torch.float64)
    for t in range(5):
        seen = gammas[t:]
        covariance = prior * torch.outer(seen.sqrt(), seen.sqrt()) + torch.diag(1 - seen)
        left = prior - prior**2 * seen.sqrt() @ torch.linalg.solve(covariance, seen.sqrt())
        assert float(left) == pytest.approx(1 / (1 / prior + schedule.total_snr[t]), rel=1e-9)
    # it is a sample with noise of the promised size: its answer to the sample, and to each view's noise
    still = schedule.views(torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 5, 1, dtype=torch.float64))
    answers = schedule.statistic(still)[0, :, 0].flip(0)
    torch.testing.assert_close(answers, torch.tensor(schedule.alphas_bar, dtype=torch.float64).sqrt())
    noises = schedule.views(torch.zeros(5, 1, dtype=torch.float64), torch.eye(5, dtype=torch.float64)[..., None])
    sizes = schedule.statistic(noises)[..., 0].square().sum(0).flip(0)
    torch.testing.assert_close(sizes, 1 - torch.tensor(schedule.alphas_bar, dtype=torch.float64))


def test_all_views_tell_more_than_the_last_one():
    schedule, x = NomadSchedule.cosine(8), mixture(100_000)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(len(x), 8, generator=generator, dtype=torch.float64)
    views = schedule.views(x, noise)
    z = schedule.statistic(views)

    def error(t, of, snr, scale):
        return float((mixture_mean(of[:, 8 - t] / scale**0.5, snr) - x).square().mean())

    for t, together, alone in ((4, 0.226, 0.365), (1, 0.0051, 0.0057), (7, 0.996, 0.998)):
        all_of_them = error(t, z, schedule.total_snr[t - 1], schedule.alphas_bar[t - 1])
        the_last = error(t, views, schedule.snr[t - 1], schedule.gammas[t - 1])
        assert all_of_them == pytest.approx(together, rel=0.03)
        assert the_last == pytest.approx(alone, rel=0.03)


@pytest.mark.parametrize(("steps", "bound"), [(8, 0.09), (16, 0.05)])
def test_exact_guesses_draw_the_mixture(steps, bound):
    schedule = NomadSchedule.cosine(steps)
    guess, calls = exact(schedule)
    drawn = sample_views(schedule, guess, Noise(1, seed=3), (50_000,))[0]
    distance = (drawn.double().sort().values - mixture(50_000, 5).sort().values).abs().mean()
    assert float(distance) < bound
    assert calls == [1] * steps


def test_it_is_the_ancestral_sampler_of_the_diffusion_it_equals():
    # for a normal prior the guess is linear: the variance of each Markov state follows by hand
    schedule, prior = NomadSchedule.cosine(6), 0.5
    totals = schedule.total_snr
    seen = []

    def guess(new):
        seen.append(new)
        total = totals[6 - len(seen)]
        y = schedule.statistic(torch.cat(seen, 1))[:, -1] / (total / (1 + total)) ** 0.5
        return total / (total + 1 / prior) * y

    drawn = sample_views(schedule, guess, Noise(1, seed=0), (50_000,))
    # Markov: y' = (S y + (S' - S) (mean + noise / sqrt(S' - S))) / S', from y = x_T / sqrt(gamma_T)
    variance = 1 / schedule.gammas[-1]
    for total, following in zip(totals[:0:-1], totals[-2::-1], strict=True):
        more = following - total
        through = (total + more * total / (total + 1 / prior)) / following
        variance = through**2 * variance + more / following**2
    variance *= (totals[0] / (totals[0] + 1 / prior)) ** 2
    assert float(drawn.var()) == pytest.approx(variance, rel=0.04)


def test_fewer_steps_share_a_guess_and_the_rest_stays():
    schedule = NomadSchedule.cosine(8)
    guess, calls = exact(schedule)
    done = []
    sample_views(schedule, guess, Noise(4), (), steps=3, on_step=lambda step: done.append((step.done, step.total)))
    assert calls == [1, 4, 3]
    assert done == [(1, 3), (2, 3), (3, 3)]
    assert [split(7, 1), split(0, None), split(2, 3)] == [[], [], [1, 1]]
    guess, calls = exact(schedule)
    known = schedule.views(torch.ones(4), Noise(4).normal((8,)))
    result = sample_views(schedule, guess, Noise(4), (), given=known, project=lambda x: x.clamp(max=0.5))
    assert calls == [8]
    assert result.tolist() == [0.5] * 4


def test_weights():
    share = [weight / 8 for weight in NomadSchedule.cosine(8).weights("snr")]
    assert share[0] == pytest.approx(0.87, abs=0.04)  # the clear end takes nearly all
    clipped = NomadSchedule.cosine(8).weights("clipped")
    assert min(clipped) / max(clipped) == pytest.approx(0.05)
    assert sum(clipped) == pytest.approx(8)
    assert NomadSchedule.cosine(3).weights("uniform") == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NomadSchedule(()), "gammas is empty"),
        (lambda: NomadSchedule((1.0, 0.5)), r"gammas\[0\] must be above 0 and below 1, got 1\.0"),
        (lambda: NomadSchedule((0.5, 0.5)), "number 1 is 0.5 and the next 0.5"),
        (lambda: NomadSchedule.cosine(1), "steps must be at least 2"),
        (lambda: NomadSchedule.cosine(4, first=0.5, last=0.2), "first must be below last=0.2, got 0.5"),
        (lambda: NomadSchedule.from_alphas_bar([0.5, 0.6]), "alphas_bar must fall"),
        (lambda: NomadSchedule.from_alphas_bar([0.51, 0.5]), "gammas must fall"),
        (lambda: NomadSchedule.cosine(4).weights("elbo"), "weighting must be"),
    ],
)
def test_bad_schedules_are_refused(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()
