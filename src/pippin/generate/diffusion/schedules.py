r"""How data turn into noise: $x_t = a(t)\,x_0 + s(t)\,\epsilon$ with standard normal $\epsilon$, in five forms.

Notable here:
- one object holds all that a sampler has to know of a schedule: a, s, their slopes, where to begin and which times
- time 0 is data; times are from 0 to 1 where the signal fades, and the noise level itself where it does not
- a grid is even in the time's root number ``rho``: 1 is even, 7 is Karras's, 1/2 is even in the variance
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
    r"""A forward process; make one by its class methods.

    Attributes:
        kind: "vp_cosine" ($a = \cos\frac{\pi t}2$, $s = \sin\frac{\pi t}2$), "vp_linear" ($a^2 = e^{-\int\beta}$,
            $s^2 = 1 - a^2$), "flow" ($a = 1 - t$, $s = t$), "ve" and "karras" ($a = 1$, $s = t$).
        max_time: the largest time: where sampling begins.
        min_time: the smallest time above 0 that a grid visits; 0 leaves it to the number of steps.
        rho: a grid is even in $t^{1/\rho}$.
        betas: of "vp_linear": $\beta$ at times 0 and 1.

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
        """The variance is preserved along a quarter of a circle."""
        return cls("vp_cosine")

    @classmethod
    def vp_linear(cls, beta_min: float = 0.1, beta_max: float = 20.0) -> NoiseSchedule:
        r"""The variance is preserved, with $\beta$ linear in time.

        Source: Ho et al. 2020, arXiv:2006.11239; in continuous time, Song et al. 2021, arXiv:2011.13456, eq. 32.
        """
        return cls("vp_linear", max_time=1.0, betas=(beta_min, beta_max))

    @classmethod
    def flow(cls) -> NoiseSchedule:
        """A straight line from data to noise.

        Source: Lipman et al. 2023, arXiv:2210.02747; Liu et al. 2023, arXiv:2209.03003.
        """
        return cls("flow")

    @classmethod
    def ve(cls, sigma_max: float, sigma_min: float = 0.0, *, rho: float = 1.0) -> NoiseSchedule:
        """Noise is added and the signal stays; time is the noise level.

        Args:
            sigma_max: where sampling begins; far above the data's spread.
            sigma_min: the last level before 0; 0 for an even grid down to 0.
            rho: of the grid; 1/2 is even in the variance, as the tutorial has it.
        """
        return cls("ve", max_time=sigma_max, min_time=sigma_min, rho=rho)

    @classmethod
    def karras(cls, sigma_max: float = 80.0, sigma_min: float = 0.002, *, rho: float = 7.0) -> NoiseSchedule:
        """As `ve`, with the levels close together where they are small.

        Source: Karras et al. 2022, arXiv:2206.00364, eq. 5 and table 1.
        """
        return cls("karras", max_time=sigma_max, min_time=sigma_min, rho=rho)

    @property
    def signal_fades(self) -> bool:
        """Whether a falls to 0 as s rises, so that times end at 1."""
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
        """The derivative of s; with "vp_linear" infinite at time 0."""
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

    def time(self, share: Time) -> Time:
        """The time at a share of the way from ``least`` (0) to ``start`` (1), as the grid is spaced."""
        if self.rho == 1:
            return self.min_time + share * (self.max_time - self.min_time)
        low, high = self.min_time ** (1 / self.rho), self.max_time ** (1 / self.rho)
        made: Time = (low + share * (high - low)) ** self.rho
        return made

    @checked
    def grid(self, steps: PositiveInt) -> list[float]:
        """The times that ``steps`` steps go through: ``steps + 1`` of them, falling from ``start`` to exactly 0.

        >>> NoiseSchedule.ve(2.0).grid(4)
        [2.0, 1.5, 1.0, 0.5, 0.0]
        """
        inner = steps - 1 if self.min_time else steps  # a smallest time is visited itself, before 0
        shares = [1 - i / inner for i in range(1, steps)]
        return [self.max_time, *(self.time(share) for share in shares), 0.0]

    def check_grid(self, grid: Sequence[float]) -> None:
        """Refuse times that do not fall, or lie outside 0 to ``start``.

        Raises:
            InvalidArgument: such times.
        """
        falls = all(later < earlier for earlier, later in pairwise(grid))
        highest = max(1.0, self.max_time) if self.signal_fades else math.inf
        if len(grid) < 2 or not falls or grid[-1] < 0 or not grid[0] <= highest:
            raise InvalidArgument(
                f"a grid of times {list(grid)[:4]}...; give at least two, falling, from 0 to {highest}"
            )

    def _log_a(self, t: Time) -> Time:
        low, high = self.betas
        return -0.5 * (low * t + 0.5 * (high - low) * t * t)

    def _slope(self, t: Time) -> Time:
        """The derivative of log a."""
        low, high = self.betas
        return -0.5 * (low + (high - low) * t)


def _map(on_float: Callable[[float], float], on_tensor: Callable[[Tensor], Tensor], value: Time) -> Time:
    if isinstance(value, Tensor):
        return on_tensor(value)
    return on_float(value)
