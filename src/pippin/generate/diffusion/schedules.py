r"""Noise schedules: $x_t = a(t)\,x_0 + s(t)\,\epsilon$ with standard normal $\epsilon$.

Notable here:
- one object has all that a sampler needs: a, s, their derivatives, and the grid of times
- time 0 is data; times are from 0 to 1 for variance-preserving schedules and flow matching, and are the noise level
  itself for variance-exploding ones
- a grid is evenly spaced in $t^{1/\rho}$: 1 is even in time, 7 is that of Karras et al., 1/2 is even in the variance
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar

import torch
from torch import Tensor

from pippin.core.checks import NonNegativeFloat, PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument

Time = TypeVar("Time", float, Tensor)
ScheduleKind = Literal["vp_cosine", "vp_linear", "flow", "ve", "karras"]


@checked
@dataclass(frozen=True)
class NoiseSchedule:
    r"""A noise schedule; use the class methods to make one.

    Attributes:
        kind: "vp_cosine" ($a = \cos\frac{\pi t}2$, $s = \sin\frac{\pi t}2$), "vp_linear" ($a^2 = e^{-\int\beta}$,
            $s^2 = 1 - a^2$), "flow" ($a = 1 - t$, $s = t$), "ve" and "karras" ($a = 1$, $s = t$).
        max_time: the largest time, where sampling starts.
        min_time: the smallest time of a grid above 0; 0 for a grid that is evenly spaced down to 0.
        rho: a grid is evenly spaced in $t^{1/\rho}$.
        betas: for "vp_linear", $\beta$ at times 0 and 1.

    Raises:
        InvalidArgument: a number out of range.
    """

    kind: ScheduleKind
    max_time: PositiveFloat = 0.999
    min_time: NonNegativeFloat = 0.0
    rho: PositiveFloat = 1.0
    betas: tuple[NonNegativeFloat, NonNegativeFloat] = (0.1, 20.0)

    def __post_init__(self) -> None:
        if self.signal_fades and self.max_time > 1:
            raise InvalidArgument(f"max_time must be at most 1 for {self.kind}, got {self.max_time}")
        if self.min_time >= self.max_time:
            raise InvalidArgument(f"min_time must be below max_time={self.max_time}, got {self.min_time}")
        if self.betas[0] > self.betas[1] or self.betas[1] == 0:
            raise InvalidArgument(f"betas must rise, and end above 0, got {self.betas}")

    @classmethod
    def vp_cosine(cls) -> NoiseSchedule:
        r"""Variance-preserving, with $a = \cos\frac{\pi t}2$ and $s = \sin\frac{\pi t}2$."""
        return cls("vp_cosine")

    @classmethod
    def vp_linear(cls, beta_min: float = 0.1, beta_max: float = 20.0) -> NoiseSchedule:
        r"""Variance-preserving, with $\beta$ linear in time.

        Source: Ho et al. 2020, arXiv:2006.11239; in continuous time, Song et al. 2021, arXiv:2011.13456, eq. 32.
        """
        return cls("vp_linear", max_time=1.0, betas=(beta_min, beta_max))

    @classmethod
    def flow(cls) -> NoiseSchedule:
        """Flow matching: a straight line from data to noise.

        Source: Lipman et al. 2023, arXiv:2210.02747; Liu et al. 2023, arXiv:2209.03003.
        """
        return cls("flow")

    @classmethod
    def ve(cls, sigma_max: float, sigma_min: float = 0.0, *, rho: float = 1.0) -> NoiseSchedule:
        """Variance-exploding: noise is added to the data; time is the noise level.

        Args:
            sigma_max: noise level where sampling starts; far above the data's standard deviation.
            sigma_min: the last noise level before 0; 0 for an evenly spaced grid down to 0.
            rho: spacing of the grid; 1/2 is even in the variance.
        """
        return cls("ve", max_time=sigma_max, min_time=sigma_min, rho=rho)

    @classmethod
    def karras(cls, sigma_max: float = 80.0, sigma_min: float = 0.002, *, rho: float = 7.0) -> NoiseSchedule:
        """Variance-exploding, with a grid that is denser at low noise levels.

        Source: Karras et al. 2022, arXiv:2206.00364, eq. 5 and table 1.
        """
        return cls("karras", max_time=sigma_max, min_time=sigma_min, rho=rho)

    @property
    def signal_fades(self) -> bool:
        """Whether a falls to 0, so that times end at 1; false for variance-exploding schedules."""
        return self.kind not in ("ve", "karras")

    @property
    def preserves_variance(self) -> bool:
        """Whether a² + s² = 1."""
        return self.kind in ("vp_cosine", "vp_linear")

    def a(self, t: Time) -> Time:
        """The factor on the data."""
        match self.kind:
            case "vp_cosine":
                return _map(math.cos, torch.cos, t * (math.pi / 2))
            case "vp_linear":
                return _map(math.exp, torch.exp, self._log_a(t))
            case "flow":
                return 1 - t
        return t * 0 + 1.0

    def s(self, t: Time) -> Time:
        """The factor on the noise."""
        match self.kind:
            case "vp_cosine":
                return _map(math.sin, torch.sin, t * (math.pi / 2))
            case "vp_linear":
                return _map(math.sqrt, torch.sqrt, -_map(math.expm1, torch.expm1, 2 * self._log_a(t)))
        return t * 1.0

    def da(self, t: Time) -> Time:
        """The derivative of a."""
        match self.kind:
            case "vp_cosine":
                return -math.pi / 2 * self.s(t)
            case "vp_linear":
                return self.a(t) * self._slope(t)
            case "flow":
                return t * 0 - 1.0
        return t * 0

    def ds(self, t: Time) -> Time:
        """The derivative of s; infinite at time 0 for "vp_linear"."""
        match self.kind:
            case "vp_cosine":
                return math.pi / 2 * self.a(t)
            case "vp_linear":
                a = self.a(t)
                return -a * a * self._slope(t) / self.s(t)
        return t * 0 + 1.0

    def log_ratio(self, t: float) -> float:
        """log(a / s), half the log signal-to-noise ratio; infinite where either is 0."""
        a, s = self.a(t), self.s(t)
        if a <= 0 or s <= 0:
            return -math.inf if a <= 0 else math.inf
        return math.log(a) - math.log(s)

    def time(self, fraction: Time) -> Time:
        """The time at a fraction of the grid's spacing, from ``min_time`` at 0 to ``max_time`` at 1."""
        if self.rho == 1:
            return self.min_time + fraction * (self.max_time - self.min_time)
        low, high = self.min_time ** (1 / self.rho), self.max_time ** (1 / self.rho)
        time: Time = (low + fraction * (high - low)) ** self.rho
        return time

    @checked
    def grid(self, steps: PositiveInt) -> list[float]:
        """The ``steps + 1`` times of ``steps`` steps, falling from ``max_time`` to exactly 0.

        >>> NoiseSchedule.ve(2.0).grid(4)
        [2.0, 1.5, 1.0, 0.5, 0.0]
        """
        intervals = steps - 1 if self.min_time else steps  # min_time itself is a time of the grid, before 0
        fractions = [1 - i / intervals for i in range(1, steps)]
        return [self.max_time, *(self.time(fraction) for fraction in fractions), 0.0]

    def check_grid(self, grid: Sequence[float]) -> None:
        """Refuse an invalid grid.

        Raises:
            InvalidArgument: fewer than two times, times that do not fall, or times outside the schedule.
        """
        falls = all(later < earlier for earlier, later in pairwise(grid))
        highest = max(1.0, self.max_time) if self.signal_fades else math.inf
        if len(grid) < 2 or not falls or grid[-1] < 0 or not grid[0] <= highest:
            raise InvalidArgument(
                f"a grid of times {list(grid)[:4]}...; give at least two, falling, from 0 to {highest}"
            )

    def _log_a(self, t: Time) -> Time:
        """log a of "vp_linear": minus half of the integral of beta."""
        low, high = self.betas
        return -0.5 * (low * t + 0.5 * (high - low) * t * t)

    def _slope(self, t: Time) -> Time:
        """The derivative of log a of "vp_linear"."""
        low, high = self.betas
        return -0.5 * (low + (high - low) * t)


def _map(on_float: Callable[[float], float], on_tensor: Callable[[Tensor], Tensor], value: Time) -> Time:
    """Apply a function to a number or a tensor."""
    if isinstance(value, Tensor):
        return on_tensor(value)
    return on_float(value)
