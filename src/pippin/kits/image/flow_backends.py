"""Image backends for normalizing flows and autoregressive diffusion.

Notable here:
- a flow is invertible: an image, noised as in training, is mapped to latent noise, part of that is sampled again, and
  mapped back; the mixture keeps unit variance
- inpainting repeats this with less and less new noise, and restores the known pixels in between, so that the rest fits
  them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.generate.conditions import Conditioning
from pippin.generate.contract import OnStep, SamplingStep
from pippin.generate.flows.block import LinearGuidance
from pippin.generate.flows.itarflow import IterativeDenoise
from pippin.generate.flows.jacobi import Jacobi
from pippin.generate.flows.starflow.model import StarFlow
from pippin.generate.flows.tarflow import TarFlow
from pippin.generate.methods.dart.model import DART
from pippin.generate.noise import Noise
from pippin.kits.image.job import ImageJob, Quality, Task

SETTLING: Final = (0.6, 0.4, 0.25)
"""Shares of new noise in the passes of inpainting."""
Back = Callable[[Tensor, OnStep], Tensor]
"""A function from noise to samples."""


def mixed(z: Float[Tensor, "n ..."], fresh: Float[Tensor, "n ..."], strength: float) -> Float[Tensor, "n ..."]:
    """Latent noise of which a share is new, with unit variance.

    >>> mixed(torch.ones(1), torch.zeros(1), 0.6).item()
    0.800000011920929
    """
    return math.sqrt(1 - strength**2) * z + strength * fresh


def in_passes(on_step: OnStep, index: int, passes: int) -> OnStep:
    """Steps of one pass, counted over all passes."""
    return lambda step: on_step(SamplingStep(index * step.total + step.done, passes * step.total, step.estimate))


def flow(
    job: ImageJob,
    shape: Sequence[int],
    noise: Noise,
    draw: Callable[[OnStep], Tensor],
    change: Callable[[Tensor, float, OnStep], Tensor],
    on_step: OnStep,
) -> Float[Tensor, "n ..."]:
    """Run a job of a flow.

    Args:
        job: the job.
        shape: shape of one sample.
        noise: noise of the job.
        draw: samples from scratch.
        change: samples from samples, with a share of new noise.
        on_step: called with the steps of all passes.
    """
    if job.start is None:
        return draw(on_step)
    device = noise.device
    start = job.start.to(device).expand(job.n, *shape)
    rounds = 1 if job.redraw is None else 1 + len(SETTLING)
    first = in_passes(on_step, 0, rounds)
    x = draw(first) if job.strength == 1 else change(start, job.strength, first)
    if job.redraw is None:
        return x
    redraw = job.redraw.to(device)
    for index, share in enumerate(SETTLING, 1):
        x = torch.where(redraw, x, start).clamp(-1, 1)
        x = change(x, share, in_passes(on_step, index, rounds))
    return torch.where(redraw, x, start)


@dataclass(frozen=True)
class StarFlowBackend:
    """Backend of a deep and shallow flow, for images or videos."""

    model: StarFlow
    family: str = "deep-shallow flow"

    @property
    def tasks(self) -> frozenset[Task]:
        """Animation for videos, editing for images."""
        clips = len(self.model.shape) == 4
        return frozenset({"draw", "animate"}) if clips else frozenset({"draw", "restyle", "fill"})

    @torch.no_grad()
    def run(self, job: ImageJob, on_step: OnStep) -> Float[Tensor, "n ..."]:
        """Run a job."""
        model, condition = self.model, job.condition
        if len(model.shape) == 4:
            given = None if job.start is None else job.start.expand(job.n, 1, *model.shape[1:])
            return self._sample(condition, job, on_step, given)
        noise = Noise(job.n, seed=job.seed, device=model.device)

        def change(x: Tensor, share: float, on_step: OnStep) -> Tensor:
            latents = model.to_latents(x)
            latents = latents + model.config.noise_std * noise.normal(latents.shape[1:])
            moved = None if condition is None else condition.to(noise.device)
            z = model(latents, moved).z
            z = mixed(z, noise.normal(z.shape[1:]), share)
            x, _ = model.invert(z, moved, guidance=job.guidance, on_step=on_step)
            return model.from_latents(model.denoise_latents(x, moved) if model.score_network is not None else x)

        return flow(
            job, model.shape, noise, lambda on_step: self._sample(condition, job, on_step, None), change, on_step
        )

    def _sample(self, condition: Conditioning | None, job: ImageJob, on_step: OnStep, given: Tensor | None) -> Tensor:
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
        """Maximum solver iterations in each window: bounded for a draft, else None."""
        return 8 if quality == "draft" else None


@dataclass(frozen=True)
class TarFlowBackend:
    """Backend of a TarFlow, exact token by token; with a noise range, it samples at the largest noise and denoises in
    steps."""

    model: TarFlow
    family: str = "flow"
    tasks: frozenset[Task] = frozenset({"draw", "restyle", "fill"})

    @torch.no_grad()
    def run(self, job: ImageJob, on_step: OnStep) -> Float[Tensor, "n ..."]:
        """Run a job.

        For a model with a noise range, steps are those of denoising; for others, the maximum Jacobi iterations, and
        None samples token by token.
        """
        model, config = self.model, self.model.config
        noise = Noise(job.n, seed=job.seed, device=model.device)
        condition = None if job.condition is None else job.condition.to(noise.device)
        level = config.noise_std_range[1] if config.noise_std_range else None
        solver = None if job.steps is None or level is not None else Jacobi(max_iterations=job.steps)
        sigma = config.noise_std if level is None else level

        def draw(on_step: OnStep) -> Tensor:
            x = model.sample(
                condition,
                job.n,
                guidance=job.guidance,
                seed=job.seed,
                on_step=self._drawing(job, on_step),
                solver=solver or "sequential",
                denoise=False,
            )
            return self._denoised(x, condition, job, on_step)

        def change(x: Tensor, share: float, on_step: OnStep) -> Tensor:
            noisy = x + (sigma or 1 / config.levels) * noise.normal(config.shape)
            z, _ = model(noisy, condition, level)
            z = mixed(z, noise.normal(z.shape[1:]), share)
            guides = None
            if job.guidance != 1 and condition is not None:
                null = condition.null()
                guides = tuple(
                    LinearGuidance(embedding(null, job.n), job.guidance - 1) for embedding in model.embeddings
                )
            drawing = self._drawing(job, on_step)
            x, _ = model.inverse(z, condition, level, solver=solver, guides=guides, on_step=drawing)
            return self._denoised(x, condition, job, on_step)

        return flow(job, config.shape, noise, draw, change, on_step)

    def closings(self, job: ImageJob) -> int:
        """How often the samples are denoised: once for each pass."""
        return 1 if job.redraw is None else 1 + len(SETTLING)

    def close(self, job: ImageJob, on_step: OnStep) -> None:
        """Denoise dummy samples, as after the last token."""
        device = self.model.device
        condition = None if job.condition is None else job.condition.to(device)
        self._denoised(torch.zeros(job.n, *self.model.shape, device=device), condition, job, on_step)

    def steps(self, quality: Quality) -> int | None:
        """Denoising steps: a third, the usual number, or twice; without a noise range every quality is exact."""
        usual = IterativeDenoise().steps
        each = {"draft": usual // 3, "normal": usual, "best": 2 * usual}
        return each[quality] if self.model.config.noise_std_range else None

    def _denoised(self, x: Tensor, condition: Conditioning | None, job: ImageJob, on_step: OnStep) -> Tensor:
        """Denoise from the training noise; calls ``on_step`` with the steps after those of sampling."""
        config = self.model.config
        if not config.noise_std_range:
            return self.model.denoise(x, config.noise_std, condition) if config.noise_std else x
        steps = job.steps or IterativeDenoise().steps
        tokens = len(self.model.blocks) * config.num_tokens

        def on_denoising_step(step: SamplingStep) -> None:
            on_step(SamplingStep(tokens + step.done, tokens + step.total, step.estimate))

        return IterativeDenoise(steps)(self.model, x, condition, on_step=on_denoising_step)

    def _drawing(self, job: ImageJob, on_step: OnStep) -> OnStep:
        """Steps of sampling that are followed by those of denoising."""
        if not self.model.config.noise_std_range:
            return on_step
        after = job.steps or IterativeDenoise().steps
        return lambda step: on_step(SamplingStep(step.done, step.total + after, step.estimate))


@dataclass(frozen=True)
class DartBackend:
    """Backend of DART, which reads all noisier views of an image; known pixels are known in each view."""

    model: DART
    family: str = "autoregressive diffusion"
    tasks: frozenset[Task] = frozenset({"draw", "restyle", "fill"})

    @torch.no_grad()
    def run(self, job: ImageJob, on_step: OnStep) -> Float[Tensor, "n ..."]:
        """Run a job."""
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
        """Half as many passes as views for a draft of a model that samples whole views; else one for each view."""
        config = self.model.config
        return max(1, config.steps // 2) if quality == "draft" and config.order != "ar" else None
