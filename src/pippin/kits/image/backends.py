"""What each family of generators does for an image creator: draw, begin from a picture, fill in, animate.

Notable here:
- one backend per family, one method: a job in, samples out; what a family cannot do is missing from its tasks
- strength means the same everywhere: 0 gives the picture back, 1 keeps nothing of it; the creator handles 0 itself
- filling in ends by putting the known pixels back, so they are exact whatever the family does on the way
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pippin.core.errors import InvalidArgument, UnsupportedModel
from pippin.generate.composition import Composed, Part, compose
from pippin.generate.condition import Condition
from pippin.generate.contract import Generator, OnStep
from pippin.generate.diffusion import Diffusion
from pippin.generate.folder import device_of
from pippin.generate.noise import Noise
from pippin.generate.prediction import noised
from pippin.generate.samplers import Denoiser, Method, integrate, keeping
from pippin.generate.schedules import NoiseSchedule

Task = Literal["draw", "restyle", "fill", "animate"]
"""From nothing; from a picture; inside a mask; a clip from its first frame."""
Quality = Literal["draft", "normal", "best"]
QUALITIES: Final = ("draft", "normal", "best")


@dataclass(frozen=True)
class Job:
    """One call of a backend.

    Attributes:
        n: samples.
        seed: sample i depends on ``seed + i`` alone.
        conditions: what each sample shows, one condition of a single row for each part of a composition; else one.
        steps: None for the model's own.
        guidance: 1 for none.
        start: a picture to begin from.
        strength: how far to go from it, above 0 to 1.
        redraw: where to draw; None everywhere.
        frames: of a clip; None for the model's own.
    """

    n: int
    seed: int
    conditions: Sequence[Condition] = ()
    steps: int | None = None
    guidance: float = 1.0
    start: Float[Tensor, "channels height width"] | None = None
    strength: float = 1.0
    redraw: Bool[Tensor, "1 height width"] | None = None
    frames: int | None = None

    @property
    def condition(self) -> Condition | None:
        """The only condition, for every sample; None where there is none."""
        if not self.conditions:
            return None
        return self.conditions[0].rows(torch.zeros(self.n, dtype=torch.long))


@runtime_checkable
class Backend(Protocol):
    """One family of generators."""

    @property
    def family(self) -> str:
        """Its name."""

    @property
    def tasks(self) -> frozenset[Task]:
        """What it can do."""

    @property
    def model(self) -> Any:
        """The generator."""

    def run(self, job: Job, on_step: OnStep) -> Float[Tensor, "n ..."]:
        """Do a job; samples from about -1 to 1."""

    def steps(self, quality: Quality) -> int | None:
        """Steps of a quality; None for the model's own."""


@runtime_checkable
class Closing(Protocol):
    """A backend that does more after the last sample is drawn, which costs another amount."""

    def close(self, job: Job, on_step: OnStep) -> None:
        """Do it for as many samples of nothing; it is measured and thrown away."""

    def closings(self, job: Job) -> int:
        """How often a job does it."""


def backend_of(model: Generator, *, background: Condition | Literal["null"] | None = None) -> Backend:
    """The backend of a model.

    Args:
        model: one of the library's generators.
        background: given, concepts are composed over it instead of joined to one text; of a `Diffusion`.

    Raises:
        UnsupportedModel: another kind of model.
        InvalidArgument: a background for a model that does not compose.
    """
    name = type(model).__name__
    if background is not None:
        if not isinstance(model, Diffusion) or model.condition.empty:
            raise InvalidArgument(f"only a Diffusion with a condition composes its concepts, and no {name}")
        return ComposedBackend(model, background)
    from pippin.kits.image.flow_backends import DartBackend, StarFlowBackend, TarFlowBackend

    kinds: dict[str, type[Any]] = {
        "Diffusion": DiffusionBackend,
        "Composed": FixedCompositionBackend,
        "TarFlow": TarFlowBackend,
        "StarFlow": StarFlowBackend,
        "DART": DartBackend,
    }
    if name not in kinds:
        raise UnsupportedModel(f"no backend draws with a {name}; there are those for {', '.join(kinds)}")
    backend: Backend = kinds[name](model)
    return backend


# --- diffusion, and compositions of it --------------------------------------------------------------------------------


def _diffuse(
    denoiser: Denoiser,
    schedule: NoiseSchedule,
    shape: Sequence[int],
    job: Job,
    on_step: OnStep,
    *,
    steps: int,
    method: Method,
    device: torch.device,
) -> Tensor:
    """From noise, or from a noised picture, along the last part of the schedule; known pixels stay on their path."""
    noise = Noise(job.n, seed=job.seed, device=device)
    first = noise.normal(shape)
    steps_made = steps if job.start is None else max(1, round(steps * job.strength))
    grid = schedule.grid(steps)[steps - steps_made :]
    x = schedule.s(grid[0]) * first
    project = None
    if job.start is not None:
        known = job.start.to(device).expand(job.n, *shape)
        if job.strength < 1:
            x = noised(known, first, grid[0], schedule)
        if job.redraw is not None:
            # the same noise again: the known part lies on the path that it began on
            again = Noise(job.n, seed=job.seed, device=device)
            project = keeping(known, ~job.redraw.to(device), schedule, again)
            x = project(x, grid[0])
    return integrate(denoiser, schedule, x, grid, method=method, noise=noise, on_step=on_step, project=project)


@dataclass(frozen=True)
class DiffusionBackend:
    """A diffusion model: pictures are noised and drawn from there; filling in replaces what is known at each step."""

    model: Diffusion
    family: str = "diffusion"
    tasks: frozenset[Task] = frozenset({"draw", "restyle", "fill"})

    @torch.no_grad()
    def run(self, job: Job, on_step: OnStep) -> Float[Tensor, "n ..."]:
        """Do a job."""
        config, device = self.model.config, device_of(self.model)
        condition = None if job.condition is None else job.condition.to(device)
        return _diffuse(
            self.model.denoiser(condition, job.guidance),
            config.schedule,
            config.shape,
            job,
            on_step,
            steps=job.steps or config.steps,
            method=config.method,
            device=device,
        )

    def steps(self, quality: Quality) -> int:
        """Half, as many as the model's own, or twice."""
        own = self.model.config.steps
        return {"draft": max(1, own // 2), "normal": own, "best": 2 * own}[quality]


@dataclass(frozen=True)
class ComposedBackend:
    """One diffusion model asked once for each concept; what it says is added over a background."""

    model: Diffusion
    background: Condition | Literal["null"] = "null"
    family: str = "composed diffusion"
    tasks: frozenset[Task] = frozenset({"draw", "restyle", "fill"})

    def run(self, job: Job, on_step: OnStep) -> Float[Tensor, "n ..."]:
        """Do a job; guidance is that of each part by itself, and all weigh 1."""
        if not job.conditions:
            return DiffusionBackend(self.model).run(job, on_step)
        model = self.model
        parts = [self._part(one.rows(torch.zeros(job.n, dtype=torch.long)), job.guidance) for one in job.conditions]
        composed = compose(parts, self.background, of=model)
        return _compose(composed, job, on_step, self.steps("normal") if job.steps is None else job.steps)

    def _part(self, condition: Condition, guidance: float) -> Part:
        """What the model says under one concept; unguided ones share a pass."""
        model, device = self.model, device_of(self.model)
        if guidance == 1:
            return Part.of(model, condition)
        guided = model.denoiser(condition.to(device), guidance)
        return Part(guided, model.config.schedule, tuple(model.shape), device)

    def steps(self, quality: Quality) -> int:
        """As `DiffusionBackend.steps`."""
        return DiffusionBackend(self.model).steps(quality)


@dataclass(frozen=True)
class FixedCompositionBackend:
    """A composition that was made before: it reads no description."""

    model: Composed
    family: str = "composed diffusion"
    tasks: frozenset[Task] = frozenset({"draw", "restyle", "fill"})

    def run(self, job: Job, on_step: OnStep) -> Float[Tensor, "n ..."]:
        """Do a job."""
        return _compose(self.model, job, on_step, 50 if job.steps is None else job.steps)

    def steps(self, quality: Quality) -> int:
        """Twenty, fifty or a hundred."""
        return {"draft": 20, "normal": 50, "best": 100}[quality]


@torch.no_grad()
def _compose(composed: Composed, job: Job, on_step: OnStep, steps: int) -> Tensor:
    first = composed.parts[0]
    models = [part.model for part in composed.parts if part.model is not None]
    method: Method = models[0].config.method if models else "heun"
    return _diffuse(
        composed, composed.schedule, composed.shape, job, on_step, steps=steps, method=method, device=first.device
    )
