"""Image backends for diffusion models and their compositions.

Notable here:
- a given image is noised to the time of the strength, and the sampler continues from there
- inpainting replaces the known pixels after each step by the same image, noised to that time
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.generate.composition.compose import ComponentModel, Composed, compose
from pippin.generate.conditions import Conditioning
from pippin.generate.contract import OnStep
from pippin.generate.diffusion.diffusion import Diffusion
from pippin.generate.diffusion.prediction import add_noise
from pippin.generate.diffusion.samplers import Denoiser, Method, inpainting, integrate
from pippin.generate.diffusion.schedules import NoiseSchedule
from pippin.generate.noise import Noise
from pippin.kits.image.job import ImageJob, Quality, Task


def _diffuse(
    denoiser: Denoiser,
    schedule: NoiseSchedule,
    shape: Sequence[int],
    job: ImageJob,
    on_step: OnStep,
    *,
    steps: int,
    method: Method,
    device: torch.device,
) -> Tensor:
    """Denoise from noise, or from a noised image, along the last part of the schedule; known pixels are replaced."""
    noise = Noise(job.n, seed=job.seed, device=device)
    first = noise.normal(shape)
    steps_made = steps if job.start is None else max(1, round(steps * job.strength))
    grid = schedule.grid(steps)[steps - steps_made :]
    x = schedule.s(grid[0]) * first
    project = None
    if job.start is not None:
        known = job.start.to(device).expand(job.n, *shape)
        if job.strength < 1:
            x = add_noise(known, first, grid[0], schedule)
        if job.redraw is not None:
            # the same noise again: the known part stays on its own noising path
            again = Noise(job.n, seed=job.seed, device=device)
            project = inpainting(known, ~job.redraw.to(device), schedule, again)
            x = project(x, grid[0])
    return integrate(denoiser, schedule, x, grid, method=method, noise=noise, on_step=on_step, project=project)


@dataclass(frozen=True)
class DiffusionBackend:
    """Backend of a diffusion model: images are noised and denoised again; inpainting replaces known pixels at each
    step."""

    model: Diffusion
    family: str = "diffusion"
    tasks: frozenset[Task] = frozenset({"draw", "restyle", "fill"})

    @torch.no_grad()
    def run(self, job: ImageJob, on_step: OnStep) -> Float[Tensor, "n ..."]:
        """Run a job."""
        config, device = self.model.config, self.model.device
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
        """Half the model's own number of steps, the same, or twice."""
        own = self.model.config.steps
        return {"draft": max(1, own // 2), "normal": own, "best": 2 * own}[quality]


@dataclass(frozen=True)
class ComposedBackend:
    """Backend of one diffusion model evaluated for each concept; the scores are added over a background."""

    model: Diffusion
    background: Conditioning | Literal["null"] = "null"
    family: str = "composed diffusion"
    tasks: frozenset[Task] = frozenset({"draw", "restyle", "fill"})

    def run(self, job: ImageJob, on_step: OnStep) -> Float[Tensor, "n ..."]:
        """Run a job; guidance is that of each part by itself, and all weights are 1."""
        if not job.conditions:
            return DiffusionBackend(self.model).run(job, on_step)
        model = self.model
        parts = [self._part(one.expand(job.n), job.guidance) for one in job.conditions]
        composed = compose(parts, self.background, of=model)
        return _compose(composed, job, on_step, self.steps("normal") if job.steps is None else job.steps)

    def _part(self, condition: Conditioning, guidance: float) -> ComponentModel:
        """The component of one concept; unguided ones share a pass."""
        model, device = self.model, self.model.device
        if guidance == 1:
            return ComponentModel.of(model, condition)
        guided = model.denoiser(condition.to(device), guidance)
        return ComponentModel(guided, model.config.schedule, tuple(model.shape), device)

    def steps(self, quality: Quality) -> int:
        """As `DiffusionBackend.steps`."""
        return DiffusionBackend(self.model).steps(quality)


@dataclass(frozen=True)
class FixedCompositionBackend:
    """Backend of an existing composition, which reads no description."""

    model: Composed
    family: str = "composed diffusion"
    tasks: frozenset[Task] = frozenset({"draw", "restyle", "fill"})

    def run(self, job: ImageJob, on_step: OnStep) -> Float[Tensor, "n ..."]:
        """Run a job."""
        return _compose(self.model, job, on_step, 50 if job.steps is None else job.steps)

    def steps(self, quality: Quality) -> int:
        """Twenty, fifty or a hundred."""
        return {"draft": 20, "normal": 50, "best": 100}[quality]


@torch.no_grad()
def _compose(composed: Composed, job: ImageJob, on_step: OnStep, steps: int) -> Tensor:
    first = composed.parts[0]
    models = [part.model for part in composed.parts if part.model is not None]
    method: Method = models[0].config.method if models else "heun"
    return _diffuse(
        composed, composed.schedule, composed.shape, job, on_step, steps=steps, method=method, device=first.device
    )
