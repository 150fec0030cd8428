r"""Samplers of diffusion models: DDPM, DDIM, Euler, Heun and DPM-Solver++(2M), by one function `integrate`.

Notable here:
- a sampler needs a denoiser, ``(x, t) -> Estimate``, and a schedule: networks, closed forms, guidance and composition
  are all denoisers
- DDIM and DDPM are one formula, which holds for every schedule; Euler and Heun integrate the velocity in the schedule's
  own time
- arithmetic is in the precision of the samples, whatever the network's; samples that are not finite raise an error that
  names the step
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pippin.core.checks import NonNegativeFloat, NonNegativeInt, PositiveFloat, checked
from pippin.core.errors import InvalidArgument, NonFiniteSample
from pippin.generate.contract import OnStep, SamplingStep
from pippin.generate.diffusion.prediction import Estimate, add_noise
from pippin.generate.diffusion.schedules import NoiseSchedule
from pippin.generate.noise import Noise

Denoiser = Callable[[Tensor, float], Estimate]
"""Estimates data and noise of noised samples at a time."""
Project = Callable[[Tensor, float], Tensor]
"""Replaces the known part of samples at a time, for inpainting."""
Method = Literal["ddpm", "ddim", "euler", "heun", "dpm++2m"]


@checked
@dataclass(frozen=True)
class Langevin:
    r"""Unadjusted Langevin steps at one time, $x \leftarrow x + h \nabla \log p_t(x) + \sqrt{2h}\,z$.

    Attributes:
        steps: number of steps.
        step_size: h, in units of the samples' variance.
        t: the time, above 0; it is added to the grid.

    Raises:
        InvalidArgument: a number out of range.
    """

    steps: NonNegativeInt
    step_size: PositiveFloat
    t: PositiveFloat

    def run(self, denoiser: Denoiser, schedule: NoiseSchedule, x: Tensor, noise: Noise) -> Tensor:
        """Apply the steps to samples x."""
        s, std = schedule.s(self.t), math.sqrt(2 * self.step_size)
        for _ in range(self.steps):
            score = denoiser(x, self.t).score(s)
            x = x + self.step_size * score + std * noise.normal(x.shape[1:]).to(x)
        return x


def guided(conditional: Denoiser, unconditional: Denoiser, g: float) -> Denoiser:
    """Classifier-free guidance: ``u + g (c - u)`` for an unconditional u and a conditional c; 1 is no guidance.

    Source: Ho and Salimans 2022, arXiv:2207.12598, whose w is our g - 1.
    """

    def both(x: Tensor, t: float) -> Estimate:
        c, u = conditional(x, t), unconditional(x, t)
        return Estimate(torch.lerp(u.x0, c.x0, g), torch.lerp(u.eps, c.eps, g))

    return both


def inpainting(
    known: Float[Tensor, "n ..."], mask: Bool[Tensor, "*mask"], schedule: NoiseSchedule, noise: Noise
) -> Project:
    """A function for ``project`` of `integrate` that replaces the known part after every step, noised to its time.

    Args:
        known: samples; only elements where the mask is true are used.
        mask: true where elements are known; its shape broadcasts to the samples.
        schedule: the schedule of the sampling.
        noise: source of the noise of the known part, which is the same in all steps.

    Source: Song et al. 2021, arXiv:2011.13456, appendix I.2.
    """
    eps = noise.normal(known.shape[1:])

    def project(x: Tensor, t: float) -> Tensor:
        return torch.where(mask, add_noise(known.to(x), eps.to(x), t, schedule), x)

    return project


@checked
def integrate(
    denoiser: Denoiser,
    schedule: NoiseSchedule,
    x: Float[Tensor, "n ..."],
    grid: Sequence[float],
    *,
    method: Method = "heun",
    eta: NonNegativeFloat = 0.0,
    noise: Noise | None = None,
    on_step: OnStep | None = None,
    corrector: Langevin | None = None,
    project: Project | None = None,
) -> Float[Tensor, "n ..."]:
    r"""Integrate samples from the grid's first time to its last.

    A step from t to r of "ddim" is $x_r = a_r \hat x_0 + \sqrt{s_r^2 - \varsigma^2}\,\hat\epsilon + \varsigma z$ with
    $\varsigma^2 = \eta^2 \sigma_{t|r}^2 s_r^2 / s_t^2$ and $\sigma_{t|r}^2 = s_t^2 - (a_t/a_r)^2 s_r^2$; "ddpm" is
    the same at $\eta = 1$. "euler" and "heun" integrate $u = \dot a \hat x_0 + \dot s \hat\epsilon$; Heun evaluates the
    denoiser twice for each step, but once for a step to 0. "dpm++2m" extrapolates the data from the last two steps.

    Args:
        denoiser: estimates data and noise; called once for each step, twice by "heun".
        schedule: noise schedule of the samples.
        x: samples at the grid's first time.
        grid: falling times, such as those of `NoiseSchedule.grid`.
        method: the sampler.
        eta: for "ddim": 0 is deterministic, 1 is "ddpm".
        noise: source of random numbers for "ddpm", ``eta`` above 0 and a corrector.
        on_step: called after each step.
        corrector: Langevin steps at one of the times.
        project: applied after each step.

    Raises:
        InvalidArgument: a grid that does not fall, an ``eta`` for a method other than "ddim", a corrector outside the
            grid's times, or missing noise; before any step.
        NonFiniteSample: NaN or infinity; the first step that gave it is named.

    Source: Song et al. 2021, arXiv:2010.02502, eq. 12 and 16; Karras et al. 2022, arXiv:2206.00364, algorithm 1; Lu et
    al. 2022, arXiv:2211.01095, algorithm 2.
    """
    times = _checked(schedule, x, grid, method, eta, noise, corrector)
    step = _step(method, 1.0 if method == "ddpm" else eta)
    finite: list[Tensor] = []
    previous: tuple[float, Estimate] | None = None
    if corrector is not None and noise is not None and times[0] == corrector.t:
        x = corrector.run(denoiser, schedule, x, noise)
    for done, (t, r) in enumerate(pairwise(times), 1):
        estimate = denoiser(x, t)
        if estimate.dtype != x.dtype:
            estimate = Estimate(estimate.x0.to(x.dtype), estimate.eps.to(x.dtype))
        x = step(_State(denoiser, schedule, x, estimate, t, r, previous, noise))
        previous = (t, estimate)
        if corrector is not None and noise is not None and r == corrector.t:
            x, previous = corrector.run(denoiser, schedule, x, noise), None  # the samples left the last step's path
        if project is not None:
            x = project(x, r)
        finite.append(x.sum().isfinite())
        if on_step is not None:
            on_step(SamplingStep(done, len(times) - 1, lambda last=estimate: last.x0))  # type: ignore[misc]
    all_finite = torch.stack(finite)  # read once at the end: reading after each step would synchronize a GPU
    if not bool(all_finite.all()):
        first = int((~all_finite).nonzero()[0]) + 1
        raise NonFiniteSample(
            f"samples are not finite after step {first} of {len(times) - 1}; lower guidance, or use another prediction "
            "type or a lower start time",
            step=first,
        )
    return x


@dataclass(frozen=True)
class _State:
    """State of a step from time t to time r; ``previous`` has time and estimate of the step before."""

    denoiser: Denoiser
    schedule: NoiseSchedule
    x: Tensor
    estimate: Estimate
    t: float
    r: float
    previous: tuple[float, Estimate] | None
    noise: Noise | None


def _step(method: Method, eta: float) -> Callable[[_State], Tensor]:
    """The function that computes a step of a method."""
    if method == "dpm++2m":
        return _multistep
    if method in ("euler", "heun"):
        return _euler if method == "euler" else _heun
    return lambda state: _ddim(state, eta)


def _ddim(state: _State, eta: float) -> Tensor:
    """DDIM with eta; DDPM at eta = 1."""
    a, s = state.schedule.a(state.r), state.schedule.s(state.r)
    if eta == 0 or s == 0:
        return state.estimate.mix(a, s)
    a_t, s_t = state.schedule.a(state.t), state.schedule.s(state.t)
    new = eta * math.sqrt(max(0.0, s_t**2 - (a_t / a) ** 2 * s**2)) * s / s_t  # standard deviation of new noise
    kept = math.sqrt(max(0.0, s**2 - new**2))  # and of estimated noise
    assert state.noise is not None
    return torch.add(state.estimate.mix(a, kept), state.noise.normal(state.x.shape[1:]).to(state.x), alpha=new)


def _velocity(estimate: Estimate, schedule: NoiseSchedule, t: float) -> Tensor:
    """dx/dt of the probability flow."""
    return estimate.mix(schedule.da(t), schedule.ds(t))


def _euler(state: _State) -> Tensor:
    """Euler's method."""
    return torch.add(state.x, _velocity(state.estimate, state.schedule, state.t), alpha=state.r - state.t)


def _heun(state: _State) -> Tensor:
    """Heun's method; Euler's for the step to time 0."""
    first = _velocity(state.estimate, state.schedule, state.t)
    x = torch.add(state.x, first, alpha=state.r - state.t)
    if state.r == 0:
        return x
    second = _velocity(state.denoiser(x, state.r), state.schedule, state.r).to(x.dtype)
    return torch.add(state.x, first + second, alpha=(state.r - state.t) / 2)


def _multistep(state: _State) -> Tensor:
    """DPM-Solver++(2M)."""
    schedule, t, r = state.schedule, state.t, state.r
    a, s, a_t, s_t = schedule.a(r), schedule.s(r), schedule.a(t), schedule.s(t)
    if s == 0:  # the last step is of first order, since the log of a noise of 0 is infinite
        return state.estimate.mix(a, 0.0)
    if state.previous is None:
        return state.estimate.mix(a, s)
    lambda_t = schedule.log_ratio(t)
    h, h_previous = schedule.log_ratio(r) - lambda_t, lambda_t - schedule.log_ratio(state.previous[0])
    factor = (a - a_t * s / s_t) * h / (2 * h_previous)  # on the change of the data since the step before
    return torch.sub(state.estimate.mix(a + factor, s), state.previous[1].x0, alpha=factor)


def _checked(
    schedule: NoiseSchedule,
    x: Tensor,
    grid: Sequence[float],
    method: str,
    eta: float,
    noise: Noise | None,
    corrector: Langevin | None,
) -> list[float]:
    """The grid's times, including the corrector's; checks the arguments of `integrate`."""
    schedule.check_grid(grid)
    if eta and method != "ddim":
        raise InvalidArgument(f"eta={eta} with method {method!r}; only 'ddim' takes eta")
    if noise is None and (eta or method == "ddpm" or corrector is not None):
        raise InvalidArgument(
            f"method {method!r} with eta={eta} and corrector={corrector} needs noise; give noise=Noise(n)"
        )
    if noise is not None and len(noise) != len(x):
        raise InvalidArgument(f"noise for {len(noise)} samples, and {len(x)} samples; the numbers must agree")
    times = list(grid)
    if corrector is not None:
        if not times[-1] < corrector.t <= times[0]:
            raise InvalidArgument(
                f"the corrector's time {corrector.t} is not between the grid's {times[0]} and {times[-1]}"
            )
        times = sorted({*times, corrector.t}, reverse=True)
    return times
