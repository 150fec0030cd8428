"""The learning rate over a run, as a factor of the optimizer's own.

Notable here:
- a schedule is a frozen value that is called with the number of updates made and of updates in all: nothing to save
- warm-up ends with the full rate, and its first update already has a share of it: no update is wasted at rate 0
- `warmup` and `decay` are a share of the run below 1, and a number of steps from 1 on
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from pippin.core.checks import NonNegativeFloat, Probability, checked


@runtime_checkable
class Schedule(Protocol):
    """Any function of the updates made so far and the updates in all."""

    def __call__(self, step: int, steps: int, /) -> float:
        """The factor of the learning rate for update ``step``, counted from 0."""


@checked
@dataclass(frozen=True)
class ConstantSchedule:
    """The full rate after a linear warm-up.

    >>> [ConstantSchedule(warmup=4)(step, 10) for step in (0, 1, 3, 9)]
    [0.25, 0.5, 1.0, 1.0]
    """

    warmup: NonNegativeFloat = 0.0

    def __call__(self, step: int, steps: int) -> float:
        """The factor for update ``step`` of ``steps``."""
        return _warm(step, _steps(self.warmup, steps))


@checked
@dataclass(frozen=True)
class LinearSchedule:
    """Warm-up, then a straight line down to ``final``, which it would reach after the last update.

    >>> [LinearSchedule(final=0.0)(step, 4) for step in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """

    warmup: NonNegativeFloat = 0.0
    final: Probability = 0.0

    def __call__(self, step: int, steps: int) -> float:
        """The factor for update ``step`` of ``steps``."""
        done, warm = _progress(step, steps, self.warmup)
        return warm * (1.0 - (1.0 - self.final) * done)


@checked
@dataclass(frozen=True)
class CosineSchedule:
    r"""Warm-up, then half a cosine down to ``final``: $f + (1 - f) (1 + \cos \pi t) / 2$.

    Source: SGDR, arXiv:1608.03983, eq. 5, without restarts.

    >>> [round(CosineSchedule(warmup=0.0, final=0.1)(step, 2), 6) for step in range(2)]
    [1.0, 0.55]
    """

    warmup: NonNegativeFloat = 0.02
    final: Probability = 0.1

    def __call__(self, step: int, steps: int) -> float:
        """The factor for update ``step`` of ``steps``."""
        done, warm = _progress(step, steps, self.warmup)
        return warm * (self.final + (1.0 - self.final) * (1.0 + math.cos(math.pi * done)) / 2)


@checked
@dataclass(frozen=True)
class WSDSchedule:
    """Warm-up, a stable part at the full rate, and a decay at the end: linear, or one minus a square root.

    Where the two don't both fit into the run, the decay is the shorter.

    A run can be made longer from a checkpoint of its stable part, since nothing before the decay depends on ``steps``
    where ``warmup`` is given in steps.

    Source: MiniCPM, arXiv:2404.06395, section 4; the square root is arXiv:2405.18392, eq. 2.

    >>> [WSDSchedule(warmup=0, decay=0.5)(step, 8) for step in range(8)]
    [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """

    warmup: NonNegativeFloat = 0.02
    decay: NonNegativeFloat = 0.2
    final: Probability = 0.0
    shape: Literal["linear", "sqrt"] = "linear"

    def __call__(self, step: int, steps: int) -> float:
        """The factor for update ``step`` of ``steps``."""
        warmup = _steps(self.warmup, steps)
        length = min(_steps(self.decay, steps), steps - warmup)
        done = min(max(step - (steps - length), 0) / length, 1.0) if length else 0.0
        fallen = math.sqrt(done) if self.shape == "sqrt" else done
        return _warm(step, warmup) * (1.0 - (1.0 - self.final) * fallen)


def _progress(step: int, steps: int, warmup: float) -> tuple[float, float]:
    """How much of the part after the warm-up is done, 0 to 1; and the factor of the warm-up."""
    length = _steps(warmup, steps)
    return min(max(step - length, 0) / max(steps - length, 1), 1.0), _warm(step, length)


def _warm(step: int, length: int) -> float:
    return min((step + 1) / length, 1.0) if length else 1.0


def _steps(length: float, steps: int) -> int:
    """A share of the run or a number of steps, as steps."""
    return min(round(length * steps) if length < 1 else round(length), steps)
