r"""Samplers of diffusion models: one function that integrates from noise to samples along a grid of times.

Notable here:
- a sampler knows a denoiser, ``(x, t) -> Estimate``, and a schedule: networks, closed forms, guidance and composition
  are all denoisers
- DDIM and DDPM are one formula, which holds for every schedule; Euler and Heun integrate the velocity in the schedule's
  own time
- arithmetic is in the precision of the samples, whatever the network's; what is not finite ends in an error that names
  the step
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
"""What samples at a time consist of."""
Project = Callable[[Tensor, float], Tensor]
"""Replaces the known part of samples at a time, for inpainting."""
Method = Literal["ddpm", "ddim", "euler", "heun", "dpm++2m"]


@checked
@dataclass(frozen=True)
class Langevin:
    r"""Steps $x \leftarrow x + h \nabla \log p_t(x) + \sqrt{2h}\,z$ at one time, which keep that time's density.

    Attributes:
        steps: how many.
        step_size: h, in units of the samples' variance.
        t: the time, above 0; it is visited even where the grid has no such time.

    Raises:
        InvalidArgument: a number out of range.
    """

    steps: NonNegativeInt
    step_size: PositiveFloat
    t: PositiveFloat

    def run(self, denoiser: Denoiser, schedule: NoiseSchedule, x: Tensor, noise: Noise) -> Tensor:
        """Make the steps."""
        s, spread = schedule.s(self.t), math.sqrt(2 * self.step_size)
        for _ in range(self.steps):
            score = denoiser(x, self.t).score(s)
            x = x + self.step_size * score + spread * noise.normal(x.shape[1:]).to(x)
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
    """For inpainting: the known part is replaced in every step, noised to its time.

    Args:
        known: samples; only what the mask marks is read.
        mask: true where a sample is known; of a shape that broadcasts to the samples.
        schedule: of the sampling.
        noise: what the known parts are noised by: drawn once, so that they lie on one path.

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
    r"""Take samples from the grid's first time to its last.

    A step from t to r of "ddim" is $x_r = a_r \hat x_0 + \sqrt{s_r^2 - \varsigma^2}\,\hat\epsilon + \varsigma z$ with
    $\varsigma^2 = \eta^2 \sigma_{t|r}^2 s_r^2 / s_t^2$ and $\sigma_{t|r}^2 = s_t^2 - (a_t/a_r)^2 s_r^2$; "ddpm" is
    the same at $\eta = 1$. "euler" and "heun" follow $u = \dot a \hat x_0 + \dot s \hat\epsilon$; Heun asks the
    denoiser twice for each step, but once for a step to 0. "dpm++2m" extrapolates the data from the last two steps.

    Args:
        denoiser: asked once for each step, twice by Heun.
        schedule: by which the samples were noised.
        x: samples at the grid's first time.
        grid: falling times, as `NoiseSchedule.grid` makes them.
        method: of a step.
        eta: of "ddim": 0 is deterministic, 1 is "ddpm".
        noise: random numbers for "ddpm", ``eta`` above 0 and a corrector.
        on_step: called after each step.
        corrector: Langevin steps at one time on the way.
        project: applied after each step.

    Raises:
        InvalidArgument: a grid that does not fall, an ``eta`` that is given to another method, a corrector before the
            grid's first time, or noise that is needed and missing; before any step.
        NonFiniteSample: NaN or infinity; the first step that ended in it is named.

    Source: Song et al. 2021, arXiv:2010.02502, eq. 12 and 16; Karras et al. 2022, arXiv:2206.00364, algorithm 1; Lu et
    al. 2022, arXiv:2211.01095, algorithm 2.
    """
    times = _checked(schedule, x, grid, method, eta, noise, corrector)
    step = _step(method, 1.0 if method == "ddpm" else eta)
    finite: list[Tensor] = []
    before: tuple[float, Estimate] | None = None
    if corrector is not None and noise is not None and times[0] == corrector.t:
        x = corrector.run(denoiser, schedule, x, noise)
    for done, (t, r) in enumerate(pairwise(times), 1):
        found = denoiser(x, t)
        if found.dtype != x.dtype:
            found = Estimate(found.x0.to(x.dtype), found.eps.to(x.dtype))
        x = step(_Ask(denoiser, schedule, x, found, t, r, before, noise))
        before = (t, found)
        if corrector is not None and noise is not None and r == corrector.t:
            x, before = corrector.run(denoiser, schedule, x, noise), None  # the last step leads elsewhere now
        if project is not None:
            x = project(x, r)
        finite.append(x.sum().isfinite())
        if on_step is not None:
            on_step(SamplingStep(done, len(times) - 1, lambda shown=found: shown.x0))  # type: ignore[misc]
    good = torch.stack(finite)  # looked at once: asking after each step would make a GPU wait
    if not bool(good.all()):
        bad = int((~good).nonzero()[0]) + 1
        raise NonFiniteSample(
            f"samples are not finite after step {bad} of {len(times) - 1}; try less guidance, another prediction or an "
            "earlier start",
            step=bad,
        )
    return x


@dataclass(frozen=True)
class _Ask:
    """One step: what it begins from, and the time and the data of the step before."""

    denoiser: Denoiser
    schedule: NoiseSchedule
    x: Tensor
    found: Estimate
    t: float
    r: float
    before: tuple[float, Estimate] | None
    noise: Noise | None


def _step(method: Method, eta: float) -> Callable[[_Ask], Tensor]:
    if method == "dpm++2m":
        return _multistep
    if method in ("euler", "heun"):
        return _euler if method == "euler" else _heun
    return lambda ask: _ddim(ask, eta)


def _ddim(ask: _Ask, eta: float) -> Tensor:
    a, s = ask.schedule.a(ask.r), ask.schedule.s(ask.r)
    if eta == 0 or s == 0:
        return ask.found.mix(a, s)
    a_t, s_t = ask.schedule.a(ask.t), ask.schedule.s(ask.t)
    drawn = eta * math.sqrt(max(0.0, s_t**2 - (a_t / a) ** 2 * s**2)) * s / s_t
    kept = math.sqrt(max(0.0, s**2 - drawn**2))
    assert ask.noise is not None
    return torch.add(ask.found.mix(a, kept), ask.noise.normal(ask.x.shape[1:]).to(ask.x), alpha=drawn)


def _velocity(found: Estimate, schedule: NoiseSchedule, t: float) -> Tensor:
    return found.mix(schedule.da(t), schedule.ds(t))


def _euler(ask: _Ask) -> Tensor:
    return torch.add(ask.x, _velocity(ask.found, ask.schedule, ask.t), alpha=ask.r - ask.t)


def _heun(ask: _Ask) -> Tensor:
    first = _velocity(ask.found, ask.schedule, ask.t)
    x = torch.add(ask.x, first, alpha=ask.r - ask.t)
    if ask.r == 0:
        return x
    second = _velocity(ask.denoiser(x, ask.r), ask.schedule, ask.r).to(x.dtype)
    return torch.add(ask.x, first + second, alpha=(ask.r - ask.t) / 2)


def _multistep(ask: _Ask) -> Tensor:
    schedule, t, r = ask.schedule, ask.t, ask.r
    a, s, a_t, s_t = schedule.a(r), schedule.s(r), schedule.a(t), schedule.s(t)
    if s == 0:  # the last step is of first order: there is no logarithm of a noise of 0
        return ask.found.mix(a, 0.0)
    if ask.before is None:
        return ask.found.mix(a, s)
    middle = schedule.log_ratio(t)
    now, then = schedule.log_ratio(r) - middle, middle - schedule.log_ratio(ask.before[0])
    ahead = (a - a_t * s / s_t) * now / (2 * then)  # the factor on how the data changed since the step before
    return torch.sub(ask.found.mix(a + ahead, s), ask.before[1].x0, alpha=ahead)


def _checked(
    schedule: NoiseSchedule,
    x: Tensor,
    grid: Sequence[float],
    method: str,
    eta: float,
    noise: Noise | None,
    corrector: Langevin | None,
) -> list[float]:
    """The grid's times, and the corrector's among them."""
    schedule.check_grid(grid)
    if eta and method != "ddim":
        raise InvalidArgument(f"eta={eta} with method {method!r}; only 'ddim' draws noise by an eta")
    if noise is None and (eta or method == "ddpm" or corrector is not None):
        raise InvalidArgument(
            f"method {method!r} with eta={eta} and corrector={corrector} draws noise; give noise=Noise(n)"
        )
    if noise is not None and len(noise) != len(x):
        raise InvalidArgument(f"noise for {len(noise)} samples, and {len(x)} samples")
    times = list(grid)
    if corrector is not None:
        if not times[-1] < corrector.t <= times[0]:
            raise InvalidArgument(
                f"the corrector's time {corrector.t} is not between the grid's {times[0]} and {times[-1]}"
            )
        times = sorted({*times, corrector.t}, reverse=True)
    return times
