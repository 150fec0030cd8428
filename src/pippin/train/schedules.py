"""Learning-rate schedules, as factors of the optimizer's learning rate.

Notable here:
- a schedule is a frozen dataclass, called with the current step and the total number of steps: it has no state to save
- the factor rises linearly over the warm-up and is never 0, so that no step is wasted
- `warmup_steps` and `decay_steps` are a fraction of all steps below 1, and a number of steps from 1 on
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from pippin.core.checks import NonNegativeFloat, Probability, checked


@runtime_checkable
class Schedule(Protocol):
    """Any function of the current step and the total number of steps."""

    def __call__(self, step: int, steps: int, /) -> float:
        """The factor of the learning rate at ``step``, which counts from 0, of ``steps``."""


@checked
@dataclass(frozen=True)
class ConstantSchedule:
    """Linear warm-up, then the full learning rate.

    >>> [ConstantSchedule(warmup_steps=4)(step, 10) for step in (0, 1, 3, 9)]
    [0.25, 0.5, 1.0, 1.0]
    """

    warmup_steps: NonNegativeFloat = 0.0

    def __call__(self, step: int, steps: int) -> float:
        """The factor at ``step`` of ``steps``."""
        return _warmup_factor(step, _num_steps(self.warmup_steps, steps))


@checked
@dataclass(frozen=True)
class LinearSchedule:
    """Linear warm-up, then linear decay to ``min_lr_ratio`` of the learning rate at ``steps``.

    >>> [LinearSchedule(min_lr_ratio=0.0)(step, 4) for step in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """

    warmup_steps: NonNegativeFloat = 0.0
    min_lr_ratio: Probability = 0.0

    def __call__(self, step: int, steps: int) -> float:
        """The factor at ``step`` of ``steps``."""
        progress, warmup = _progress(step, steps, self.warmup_steps)
        return warmup * (1.0 - (1.0 - self.min_lr_ratio) * progress)


@checked
@dataclass(frozen=True)
class CosineSchedule:
    r"""Linear warm-up, then half a cosine to ``min_lr_ratio``, r: $r + (1 - r) (1 + \cos \pi t) / 2$, t from 0 to 1.

    Source: SGDR, arXiv:1608.03983, eq. 5, without restarts.

    >>> [round(CosineSchedule(warmup_steps=0.0, min_lr_ratio=0.1)(step, 2), 6) for step in range(2)]
    [1.0, 0.55]
    """

    warmup_steps: NonNegativeFloat = 0.02
    min_lr_ratio: Probability = 0.1

    def __call__(self, step: int, steps: int) -> float:
        """The factor at ``step`` of ``steps``."""
        progress, warmup = _progress(step, steps, self.warmup_steps)
        return warmup * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * (1.0 + math.cos(math.pi * progress)) / 2)


@checked
@dataclass(frozen=True)
class WSDSchedule:
    """Warmup-stable-decay: linear warm-up, the full learning rate, and a decay that is linear or 1 - sqrt.

    Where warm-up and decay do not both fit into the run, the decay is shortened.

    A run can be extended from a checkpoint of its stable phase, since nothing before the decay depends on ``steps``
    where ``warmup_steps`` is a number of steps.

    Source: MiniCPM, arXiv:2404.06395, section 4; 1 - sqrt is arXiv:2405.18392, eq. 2.

    >>> [WSDSchedule(warmup_steps=0, decay_steps=0.5)(step, 8) for step in range(8)]
    [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """

    warmup_steps: NonNegativeFloat = 0.02
    decay_steps: NonNegativeFloat = 0.2
    min_lr_ratio: Probability = 0.0
    decay_type: Literal["linear", "sqrt"] = "linear"

    def __call__(self, step: int, steps: int) -> float:
        """The factor at ``step`` of ``steps``."""
        num_warmup = _num_steps(self.warmup_steps, steps)
        num_decay = min(_num_steps(self.decay_steps, steps), steps - num_warmup)
        progress = min(max(step - (steps - num_decay), 0) / num_decay, 1.0) if num_decay else 0.0
        if self.decay_type == "sqrt":
            progress = math.sqrt(progress)
        return _warmup_factor(step, num_warmup) * (1.0 - (1.0 - self.min_lr_ratio) * progress)


def _progress(step: int, steps: int, warmup_steps: float) -> tuple[float, float]:
    """The fraction of the steps after the warm-up that are done, 0 to 1; and the factor of the warm-up."""
    num_warmup = _num_steps(warmup_steps, steps)
    return min(max(step - num_warmup, 0) / max(steps - num_warmup, 1), 1.0), _warmup_factor(step, num_warmup)


def _warmup_factor(step: int, num_warmup: int) -> float:
    return min((step + 1) / num_warmup, 1.0) if num_warmup else 1.0


def _num_steps(length: float, steps: int) -> int:
    """Convert a fraction of all steps, or a number of steps, to a number of steps."""
    return min(round(length * steps) if length < 1 else round(length), steps)
