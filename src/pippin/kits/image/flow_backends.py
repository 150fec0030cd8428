"""Flows and autoregressive diffusion as backends of an image creator.

Notable here:
- a flow runs both ways: a picture, noised as in training, becomes its noise, part of that is drawn anew, and back; the
  mix keeps unit variance
- filling in repeats this with less and less new noise, and puts the known pixels back in between, so that the rest
  comes to fit them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.generate.condition import Condition
from pippin.generate.contract import OnStep, Step
from pippin.generate.dart import DART
from pippin.generate.flow_block import Guide
from pippin.generate.folder import device_of
from pippin.generate.iterative import IterativeDenoise
from pippin.generate.jacobi import Jacobi
from pippin.generate.noise import Noise
from pippin.generate.starflow import StarFlow
from pippin.generate.tarflow import TarFlow
from pippin.kits.image.backends import Job, Quality, Task

SETTLING: Final = (0.6, 0.4, 0.25)
"""Shares of new noise in the rounds by which a filled-in part settles."""
Back = Callable[[Tensor, OnStep], Tensor]
"""From noise to samples."""


def mixed(z: Float[Tensor, "n ..."], fresh: Float[Tensor, "n ..."], strength: float) -> Float[Tensor, "n ..."]:
    """Noise of which a share is new: of unit variance again.

    >>> mixed(torch.ones(1), torch.zeros(1), 0.6).item()
    0.800000011920929
    """
    return math.sqrt(1 - strength**2) * z + strength * fresh


def in_rounds(on_step: OnStep, index: int, rounds: int) -> OnStep:
    """Steps of one round, as steps of all."""
    return lambda step: on_step(Step(index * step.total + step.done, rounds * step.total, step.estimate))


def flow(
    job: Job,
    shape: Sequence[int],
    noise: Noise,
    draw: Callable[[OnStep], Tensor],
    change: Callable[[Tensor, float, OnStep], Tensor],
    on_step: OnStep,
) -> Float[Tensor, "n ..."]:
    """A job of a flow.

    Args:
        job: what is to be done.
        shape: of one sample.
        noise: of the job.
        draw: samples from nothing.
        change: samples from samples, with a share of new noise.
        on_step: told of the steps of all rounds.
    """
    if job.start is None:
        return draw(on_step)
    device = noise.device
    start = job.start.to(device).expand(job.n, *shape)
    rounds = 1 if job.redraw is None else 1 + len(SETTLING)
    first = in_rounds(on_step, 0, rounds)
    x = draw(first) if job.strength == 1 else change(start, job.strength, first)
    if job.redraw is None:
        return x
    redraw = job.redraw.to(device)
    for index, share in enumerate(SETTLING, 1):
        x = torch.where(redraw, x, start).clamp(-1, 1)
        x = change(x, share, in_rounds(on_step, index, rounds))
    return torch.where(redraw, x, start)


@dataclass(frozen=True)
class StarFlowBackend:
    """A deep and shallow flow, of pictures or of clips."""

    model: StarFlow
    family: str = "deep-shallow flow"

    @property
    def tasks(self) -> frozenset[Task]:
        """Clips are animated, pictures changed."""
        clips = len(self.model.shape) == 4
        return frozenset({"draw", "animate"}) if clips else frozenset({"draw", "restyle", "fill"})

    @torch.no_grad()
    def run(self, job: Job, on_step: OnStep) -> Float[Tensor, "n ..."]:
        """Do a job."""
        model, condition = self.model, job.condition
        if len(model.shape) == 4:
            given = None if job.start is None else job.start.expand(job.n, 1, *model.shape[1:])
            return self._sample(condition, job, on_step, given)
        noise = Noise(job.n, seed=job.seed, device=device_of(model))

        def change(x: Tensor, share: float, told: OnStep) -> Tensor:
            latents = model.to_latents(x)
            latents = latents + model.config.noise * noise.normal(latents.shape[1:])
            moved = None if condition is None else condition.to(noise.device)
            z = model(latents, moved).z
            z = mixed(z, noise.normal(z.shape[1:]), share)
            made, _ = model.invert(z, moved, guidance=job.guidance, on_step=told)
            return model.from_latents(model.denoise_latents(made, moved) if model.score_network is not None else made)

        return flow(job, model.shape, noise, lambda told: self._sample(condition, job, told, None), change, on_step)

    def _sample(self, condition: Condition | None, job: Job, on_step: OnStep, given: Tensor | None) -> Tensor:
        return self.model.sample(
            condition,
            job.n,
            steps=job.steps,
            guidance=job.guidance,
            seed=job.seed,
            on_step=on_step,
            frames=job.frames,
            given=given,
        )

    def steps(self, quality: Quality) -> int | None:
        """Rounds of the solver in each window: bounded for a draft, else as many as it takes."""
        return 8 if quality == "draft" else None


@dataclass(frozen=True)
class TarFlowBackend:
    """A flow of blocks, exact token by token; of a range of noise, it draws at the most and denoises in steps."""

    model: TarFlow
    family: str = "flow"
    tasks: frozenset[Task] = frozenset({"draw", "restyle", "fill"})

    @torch.no_grad()
    def run(self, job: Job, on_step: OnStep) -> Float[Tensor, "n ..."]:
        """Do a job.

        Steps are those of the denoising of a model with a range of noise; of others the most rounds of Jacobi's
        iteration, None goes token by token.
        """
        model, config = self.model, self.model.config
        noise = Noise(job.n, seed=job.seed, device=device_of(model))
        condition = None if job.condition is None else job.condition.to(noise.device)
        level = config.noise_range[1] if config.noise_range else None
        solver = None if job.steps is None or level is not None else Jacobi(most=job.steps)
        sigma = config.noise if level is None else level

        def draw(told: OnStep) -> Tensor:
            x = model.sample(
                condition,
                job.n,
                guidance=job.guidance,
                seed=job.seed,
                on_step=self._drawing(job, told),
                solver=solver or "sequential",
                denoise=False,
            )
            return self._denoised(x, condition, job, told)

        def change(x: Tensor, share: float, told: OnStep) -> Tensor:
            noisy = x + (sigma or 1 / config.levels) * noise.normal(config.shape)
            z, _ = model(noisy, condition, level)
            z = mixed(z, noise.normal(z.shape[1:]), share)
            guides = None
            if job.guidance != 1 and condition is not None:
                null = condition.null()
                guides = tuple(Guide(embedding(null, job.n), job.guidance - 1) for embedding in model.embeddings)
            drawing = self._drawing(job, told)
            made, _ = model.inverse(z, condition, level, solver=solver, guides=guides, on_step=drawing)
            return self._denoised(made, condition, job, told)

        return flow(job, config.shape, noise, draw, change, on_step)

    def closings(self, job: Job) -> int:
        """How often the noise is taken away: once for each round."""
        return 1 if job.redraw is None else 1 + len(SETTLING)

    def close(self, job: Job, on_step: OnStep) -> None:
        """Take the noise from samples of nothing, as follows the last token."""
        device = device_of(self.model)
        condition = None if job.condition is None else job.condition.to(device)
        self._denoised(torch.zeros(job.n, *self.model.shape, device=device), condition, job, on_step)

    def steps(self, quality: Quality) -> int | None:
        """Of denoising in steps: a third, as many as usual, or twice; without a range every quality is exact."""
        usual = IterativeDenoise().steps
        each = {"draft": usual // 3, "normal": usual, "best": 2 * usual}
        return each[quality] if self.model.config.noise_range else None

    def _denoised(self, x: Tensor, condition: Condition | None, job: Job, told: OnStep) -> Tensor:
        """Without the noise that the model was trained with; told of the steps after those of the drawing."""
        config = self.model.config
        if not config.noise_range:
            return self.model.denoise(x, config.noise, condition) if config.noise else x
        steps = job.steps or IterativeDenoise().steps
        tokens = len(self.model.blocks) * config.tokens

        def on_step(step: Step) -> None:
            told(Step(tokens + step.done, tokens + step.total, step.estimate))

        return IterativeDenoise(steps)(self.model, x, condition, on_step=on_step)

    def _drawing(self, job: Job, told: OnStep) -> OnStep:
        """Steps of a drawing that is followed by those of the denoising."""
        if not self.model.config.noise_range:
            return told
        after = job.steps or IterativeDenoise().steps
        return lambda step: told(Step(step.done, step.total + after, step.estimate))


@dataclass(frozen=True)
class DartBackend:
    """A denoiser that reads all the noisier views of a picture that it has drawn; known pixels are known in each."""

    model: DART
    family: str = "autoregressive diffusion"
    tasks: frozenset[Task] = frozenset({"draw", "restyle", "fill"})

    @torch.no_grad()
    def run(self, job: Job, on_step: OnStep) -> Float[Tensor, "n ..."]:
        """Do a job."""
        start = None if job.start is None else job.start[None]
        begun = start is not None and job.strength < 1
        return self.model.sample(
            job.condition,
            job.n,
            steps=None if begun else job.steps,
            guidance=job.guidance,
            seed=job.seed,
            on_step=on_step,
            x_init=start.expand(job.n, *self.model.shape) if begun and start is not None else None,
            strength=job.strength if begun else 1.0,
            known=None if job.redraw is None or start is None else (start, ~job.redraw[None]),
        )

    def steps(self, quality: Quality) -> int | None:
        """Half as many passes as views for a draft of a model that draws whole views; else one for each."""
        config = self.model.config
        return max(1, config.steps // 2) if quality == "draft" and config.order != "ar" else None
