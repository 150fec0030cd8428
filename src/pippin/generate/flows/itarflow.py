r"""iTARFlow: a flow trained over a range of noise levels samples at the highest one, then denoises iteratively.

A flow at a low noise level has good texture and poor shape, at a high one good shape and blur. A flow that is
conditioned on the noise level has both: it samples at the highest level, and its score then gives the probability flow
ODE back to the data, $dx/dt = (x - \hat x_0) / t$ with $\hat x_0 = x + t^2 \nabla \log p_t(x)$.

Notable here:
- the steps are those of the diffusion samplers on the variance-exploding schedule
- each step is one forward and one backward pass over all tokens in parallel, so many steps cost less than sampling
- one step is TarFlow's own denoising; images with Gaussian noise of a known level can be denoised, too
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol, Unpack, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.generate.conditions import Conditioning, ConditioningSpec
from pippin.generate.contract import GeneratorOptions, OnStep, SamplingStep, check_samples
from pippin.generate.diffusion.prediction import Estimate
from pippin.generate.diffusion.samplers import Denoiser, Method, integrate
from pippin.generate.diffusion.schedules import NoiseSchedule
from pippin.generate.flows.jacobi import Jacobi
from pippin.generate.flows.tarflow import TarFlow
from pippin.generate.noise import Noise

_METHODS: Final[dict[str, Method]] = {"ode": "euler", "heun": "heun", "sde": "ddpm"}


@runtime_checkable
class ScoredFlow(Protocol):
    """A density that was learned over a range of noise levels, such as a `TarFlow` with ``noise_std_range``.

    Attributes:
        config: a configuration with ``noise_std_range``.
    """

    @property
    def config(self) -> Any:
        """The configuration."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample: (channels, height, width)."""

    def score(self, x: Tensor, condition: Conditioning | None = None, t: Any = None) -> Tensor:
        """The gradient of the log density at noise level ``t``."""


@checked
@dataclass(frozen=True)
class IterativeDenoise:
    """Iterative denoising of samples of a flow with a range of noise levels.

    Attributes:
        steps: number of steps, evenly spaced from the first noise level to the lowest of the range, then to 0; 1 is one
            step of Tweedie's formula. The paper has one step for each 0.01 of noise.
        method: "ode" (Euler), "heun" (more accurate, with two scores for each step), or "sde" (ancestral sampling, with
            new noise in every step).
        clip: whether estimates of clean images are clipped to -1 to 1.
        batch_size: batch size of the score, which needs as much memory as a training step.

    Raises:
        InvalidArgument: numbers out of range, or an unknown method.
    """

    steps: PositiveInt = 30
    method: Literal["ode", "heun", "sde"] = "ode"
    clip: bool = False
    batch_size: PositiveInt = 64

    def __call__(
        self,
        model: ScoredFlow,
        x: Float[Tensor, "n ..."],
        condition: Conditioning | None = None,
        *,
        t: float | None = None,
        seed: int = 0,
        on_step: OnStep | None = None,
    ) -> Float[Tensor, "n ..."]:
        """Denoise samples, or images with Gaussian noise of a known level.

        Args:
            model: a flow with a range of noise levels.
            x: noisy samples or images.
            condition: condition of each sample; None for the null condition. Denoising is not guided.
            t: standard deviation of the noise; None for the highest of the range.
            seed: seed of the new noise of "sde"; sample i depends on ``seed + i`` alone.
            on_step: called after each step.

        Raises:
            InvalidArgument: a model without a range of noise levels, a level outside it, or images of another shape.
            InvalidInput: values that are not finite.
            NonFiniteSample: the result of a step is not finite; the step is named.

        Source: arXiv:2604.20041, iterative denoising.
        """
        low, high = noise_std_range(model)
        start = high if t is None else t
        if not low <= start <= high * (1 + 1e-6):
            raise InvalidArgument(f"t is {t}; the model was trained with noise from {low} to {high}")
        check_samples(x, model.shape)
        # from the lowest level there is one step, to 0
        steps = self.steps if start > low else 1
        schedule = NoiseSchedule.ve(start, low) if start > low else NoiseSchedule.ve(start)
        return integrate(
            flow_denoiser(model, condition, clip=self.clip, batch_size=self.batch_size),
            schedule,
            x,
            schedule.grid(steps),
            method=_METHODS[self.method] if steps > 1 else "euler",
            noise=Noise(len(x), seed=seed, device=x.device) if self.method == "sde" else None,
            on_step=on_step,
        )


class IterativeTarFlow:
    """A generator that samples from a flow with a range of noise levels, and then denoises iteratively.

    Args:
        model: the flow.
        denoise: settings of denoising; None for the defaults of `IterativeDenoise`.

    Raises:
        InvalidArgument: a model that was trained at one noise level.
    """

    def __init__(self, model: TarFlow, denoise: IterativeDenoise | None = None) -> None:
        noise_std_range(model)
        self.model, self.denoise = model, denoise or IterativeDenoise()

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the flow."""
        return self.model.metadata

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample: (channels, height, width)."""
        return self.model.shape

    @property
    def condition(self) -> ConditioningSpec:
        """The conditions that the flow reads."""
        return self.model.condition

    def sample(
        self,
        condition: Conditioning | None = None,
        n: int | None = None,
        *,
        solver: Jacobi | Literal["sequential", "jacobi"] = "sequential",
        anneal: bool = True,
        temperature: float = 1.0,
        **options: Unpack[GeneratorOptions],
    ) -> Float[Tensor, "n channels height width"]:
        """Sample images at the highest noise level and denoise them iteratively; from about -1 to 1.

        Args:
            condition: see `TarFlow.sample`.
            n: see `TarFlow.sample`.
            solver: see `TarFlow.sample`.
            anneal: see `TarFlow.sample`.
            temperature: see `TarFlow.sample`.
            **options: see `GeneratorOptions`; ``steps`` are those of denoising, None for the configured number;
                ``guidance`` applies to sampling from the flow, not to denoising; ``on_step`` is called after each token
                of the flow, then after each denoising step.

        Raises:
            InvalidArgument: as `TarFlow.sample`.
            NonFiniteSample: a token, or the result of a step, is not finite.
        """
        call = self.model.prepare(condition, n, unconditional_guidance=temperature != 1, **options)
        denoise = self.denoise if call.steps is None else replace(self.denoise, steps=call.steps)
        tokens = len(self.model.blocks) * self.model.config.num_tokens
        total, on_step = tokens + denoise.steps, call.on_step
        after_token: OnStep | None = None
        after_denoising: OnStep | None = None
        if on_step is not None:
            after_token = lambda step: on_step(SamplingStep(step.done, total, step.estimate))  # noqa: E731
            after_denoising = lambda step: on_step(SamplingStep(tokens + step.done, total, step.estimate))  # noqa: E731
        x = self.model.sample(
            call.condition,
            call.n,
            solver=solver,
            anneal=anneal,
            temperature=temperature,
            guidance=call.guidance,
            seed=call.seed,
            on_step=after_token,
            denoise=False,
        )
        # seeds that differ from those of the flow's samples
        return denoise(self.model, x, call.condition, seed=call.seed + 2**32, on_step=after_denoising)


def flow_denoiser(
    model: ScoredFlow, condition: Conditioning | None = None, *, clip: bool = False, batch_size: int = 64
) -> Denoiser:
    r"""A denoiser from the score of a flow: $\hat x_0 = x + t^2 \nabla \log p_t(x)$, $\hat\epsilon = (x - \hat x_0)/t$.

    Args:
        model: the flow; its parameters get no gradients.
        condition: condition of each sample; None for the null condition.
        clip: whether clean images are clipped to -1 to 1.
        batch_size: batch size of the score.
    """

    def denoiser(x: Tensor, t: float) -> Estimate:
        scores = []
        for first in range(0, len(x), batch_size):
            rows = slice(first, min(first + batch_size, len(x)))
            selected = None if condition is None else condition.select(rows)
            scores.append(model.score(x[rows], selected, t))
        clean = x + t * t * torch.cat(scores)
        if clip:
            clean = clean.clamp(-1, 1)
        return Estimate(clean, (x - clean) / t)

    return denoiser


def noise_std_range(model: ScoredFlow) -> tuple[float, float]:
    """The lowest and the highest noise level that a flow was trained with.

    Raises:
        InvalidArgument: a flow that was trained at one noise level.
    """
    limits: tuple[float, float] | None = model.config.noise_std_range
    if limits is None:
        raise InvalidArgument(
            "the flow was trained at one noise level, but iterative denoising needs a range; train one with "
            "noise_std_range"
        )
    return limits
