"""Interface of image backends: a job as input, samples as output.

Notable here:
- one backend per family, one method; a task that a family does not support is missing from its tasks
- strength means the same everywhere: 0 returns the given image, 1 uses nothing of it; the creator handles 0 itself
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from pippin.generate.conditions import Conditioning
from pippin.generate.contract import OnStep

Task = Literal["draw", "restyle", "fill", "animate"]
"""Generation from scratch; from an image; inside a mask; a video from its first frame."""
Quality = Literal["draft", "normal", "best"]


@dataclass(frozen=True)
class ImageJob:
    """One call of a backend.

    Attributes:
        n: number of samples.
        seed: sample i depends on ``seed + i`` alone.
        conditions: one condition of a single row, or one for each part of a composition.
        steps: None for the model's own.
        guidance: 1 for none.
        start: an image to start from.
        strength: how far to move from it, above 0 to 1.
        redraw: the region to sample; None for everywhere.
        frames: number of frames of a video; None for the model's own.
    """

    n: int
    seed: int
    conditions: Sequence[Conditioning] = ()
    steps: int | None = None
    guidance: float = 1.0
    start: Float[Tensor, "channels height width"] | None = None
    strength: float = 1.0
    redraw: Bool[Tensor, "1 height width"] | None = None
    frames: int | None = None

    @property
    def condition(self) -> Conditioning | None:
        """The only condition, for every sample; None where there is none."""
        if not self.conditions:
            return None
        return self.conditions[0].expand(self.n)


@runtime_checkable
class ImageBackend(Protocol):
    """Backend of one family of generators."""

    @property
    def family(self) -> str:
        """Name of the family."""

    @property
    def tasks(self) -> frozenset[Task]:
        """Supported tasks."""

    @property
    def model(self) -> Any:
        """The generator."""

    def run(self, job: ImageJob, on_step: OnStep) -> Float[Tensor, "n ..."]:
        """Run a job; samples are from about -1 to 1."""

    def steps(self, quality: Quality) -> int | None:
        """Steps of a quality; None for the model's own."""


@runtime_checkable
class Closing(Protocol):
    """A backend with a final phase after the last sampling step, which has another cost per step."""

    def close(self, job: ImageJob, on_step: OnStep) -> None:
        """Run the final phase on dummy samples; it is measured and discarded."""

    def closings(self, job: ImageJob) -> int:
        """How often a job runs it."""
