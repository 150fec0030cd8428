"""What every generator of pictures and clips offers, and what all of them check before they begin.

Notable here:
- guidance means the same everywhere: 1 is none, and above 1 a sample moves away from what it would be unconditionally;
  papers on flows count from 0 (their w is our guidance - 1)
- a step's callback ends the sampling by raising: nothing is computed after it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core import progress
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.generate.condition import Condition, ConditionSpec


@dataclass(frozen=True)
class Step:
    """One step of a sampling that is over.

    Attributes:
        done: steps made.
        total: steps in all.
        estimate: what the samples look like by now; computed when it is called.
    """

    done: int
    total: int
    estimate: Callable[[], Tensor]


OnStep = Callable[[Step], None]
"""Called after each step; an exception that it raises ends the sampling there."""


@runtime_checkable
class Generator(Protocol):
    """A model that draws samples.

    Attributes:
        shape: of one sample: (channels, height, width) of a picture, (frames, channels, height, width) of a clip.
        condition: what it reads.
        facts: what is to be known of the model beside its configuration, as JSON values: "classes" (names), "data",
            "text_encoder"; saved with it.
    """

    facts: dict[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""

    @property
    def condition(self) -> ConditionSpec:
        """What it reads."""

    def sample(
        self,
        condition: Condition | None = None,
        n: int | None = None,
        *,
        steps: int | None = None,
        guidance: float = 1.0,
        seed: int = 0,
        on_step: OnStep | None = None,
    ) -> Float[Tensor, "n ..."]:
        """Draw samples in the documented range (pictures: about -1 to 1, not clipped).

        Args:
            condition: what each is to show; None for nothing.
            n: samples; None for as many as the condition has, or 1.
            steps: a budget that means what the model says; None for its default.
            guidance: 1 for none.
            seed: sample i depends on ``seed + i`` alone.
            on_step: see `OnStep`.
        """


@runtime_checkable
class HasLikelihood(Protocol):
    """A generator that tells how likely a sample is."""

    def log_prob(self, x: Float[Tensor, "n ..."], condition: Condition | None = None) -> Float[Tensor, n]:
        """In nats, of each whole sample."""


def prepare(
    spec: ConditionSpec, condition: Condition | None, n: int | None, guidance: float, device: torch.device | str
) -> tuple[Condition | None, int]:
    """Check what a sampling was asked for; the condition on the device, and the number of samples.

    Raises:
        InvalidArgument: numbers out of range, a condition that the model does not read or of another length, or
            guidance without a null condition.
    """
    if not 0 <= guidance < math.inf:
        raise InvalidArgument(f"guidance is {guidance}; give a number of 0 or more, 1 for none")
    if n is None:
        n = 1 if condition is None else len(condition)
    if n < 1:
        raise InvalidArgument(f"n is {n}; give at least 1 sample")
    if condition is not None:
        spec.check(condition)
        if len(condition) not in (1, n):
            raise InvalidArgument(
                f"a condition of {len(condition)} samples for n={n}; give one for each, or one for all"
            )
        if len(condition) != n:
            condition = condition.rows(torch.zeros(n, dtype=torch.long))
        condition = condition.to(device)
    if guidance != 1.0 and (condition is None or not spec.null):
        raise InvalidArgument(
            f"guidance={guidance} compares a condition with none, and "
            + ("no condition was given" if condition is None else "the model was not trained without its condition")
            + "; leave guidance at 1"
        )
    return condition, n


def check_samples(x: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse samples of another shape or kind.

    Raises:
        InvalidArgument: another shape; both are named.
        InvalidInput: not floating point, or not finite.
    """
    if tuple(x.shape[1:]) != tuple(shape):
        raise InvalidArgument(f"samples of shape {tuple(x.shape[1:])}; the model's are {tuple(shape)}")
    if not x.is_floating_point():
        raise InvalidInput(f"samples of type {x.dtype}; give floating point from -1 to 1 (levels / 127.5 - 1)")
    if not bool(x.isfinite().all()):
        raise InvalidInput("samples hold NaN or infinite values")


@contextmanager
def shown(title: str, *, unit: str = "steps", show: bool = True) -> Iterator[OnStep]:
    """A callback that draws a bar with rate and time left, where there is a terminal.

    >>> with shown("drawing", show=False) as on_step:
    ...     on_step(Step(1, 2, lambda: torch.zeros(1)))
    """
    with progress.bar(None, title, unit=unit, show=show) as bar:
        before = 0

        def on_step(step: Step) -> None:
            nonlocal before
            bar.advance(step.done - before)
            bar.say(f"of {step.total}")
            before = step.done

        yield on_step
