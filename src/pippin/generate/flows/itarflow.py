r"""iTARFlow: a flow trained over a range of noise levels samples at the highest one, then denoises iteratively.

A flow at little noise has good texture and poor shape, at much noise good shape and blur. One flow that is conditioned
on its noise has both: it samples at the most noise, and its own score then leads back along the diffusion's path,
$\hat x_0 = x + t^2 \nabla \log p_t(x)$, $dx/dt = (x - \hat x_0) / t$.

Notable here:
- the steps are those of the diffusion samplers on the schedule whose noise alone grows; nothing is integrated here
- each step is one pass forward and backward for all tokens at once, so many cost less than drawing did
- one step is TarFlow's own denoising; an image with noise of a known level can be denoised just as well
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
    """What is denoised with: a density that was learned at every noise of a range, as a `TarFlow` with one is.

    Attributes:
        config: with ``noise_std_range``.
    """

    @property
    def config(self) -> Any:
        """Its configuration."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height, width."""

    def score(self, x: Tensor, condition: Conditioning | None = None, t: Any = None) -> Tensor:
        """The gradient of the log density at noise ``t``."""


@checked
@dataclass(frozen=True)
class IterativeDenoise:
    """How noise is taken from samples of a flow with a range of noise.

    Attributes:
        steps: noise levels that are visited, evenly from where it begins to the least of the range, then none; 1 is
            one step of Tweedie's formula. The paper has one for each 0.01 of noise.
        method: "ode" (Euler), "heun" (two scores a step, more exact), or "sde" (fresh noise in every step).
        clip: whether estimates of clean images are clipped to -1 to 1.
        batch_size: samples of which the score is computed at once; its memory is that of a training step.

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
        """Take the noise from samples, or from images with Gaussian noise of a known level.

        Args:
            model: a flow with a range of noise.
            x: clean images plus noise.
            condition: what they show; there is no guidance here.
            t: standard deviation of the noise; None for the most of the range.
            seed: of the fresh noise of "sde"; sample i depends on ``seed + i`` alone.
            on_step: called after each step.

        Raises:
            InvalidArgument: a model without a range of noise, a level outside of it, or images of another shape.
            InvalidInput: values that are not finite.
            NonFiniteSample: a step that ended in infinite values; it is numbered.

        Source: arXiv:2604.20041, iterative denoising.
        """
        low, high = noise_std_range(model)
        start = high if t is None else t
        if not low <= start <= high * (1 + 1e-6):
            raise InvalidArgument(f"t is {t}; the model was trained with noise from {low} to {high}")
        check_samples(x, model.shape)
        # from the least level there is but one step to make
        many = self.steps if start > low else 1
        schedule = NoiseSchedule.ve(start, low) if start > low else NoiseSchedule.ve(start)
        return integrate(
            flow_denoiser(model, condition, clip=self.clip, batch_size=self.batch_size),
            schedule,
            x,
            schedule.grid(many),
            method=_METHODS[self.method] if many > 1 else "euler",
            noise=Noise(len(x), seed=seed, device=x.device) if self.method == "sde" else None,
            on_step=on_step,
        )


class IterativeTarFlow:
    """A flow with a range of noise, as a generator that draws and then denoises in steps.

    Args:
        model: the flow.
        denoise: how noise is taken away.

    Raises:
        InvalidArgument: a model that was trained at one noise level.
    """

    def __init__(self, model: TarFlow, denoise: IterativeDenoise | None = None) -> None:
        noise_std_range(model)
        self.model, self.denoise = model, denoise or IterativeDenoise()

    @property
    def metadata(self) -> dict[str, Any]:
        """Those of the flow."""
        return self.model.metadata

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height, width."""
        return self.model.shape

    @property
    def condition(self) -> ConditioningSpec:
        """The conditions that it reads."""
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
            **options: see `GeneratorOptions`; ``steps`` are those of denoising, None for the configured ones;
                ``guidance`` is that of the flow's sampling, while denoising is not guided; ``on_step`` is called after
                each token of the flow, then after each denoising step.

        Raises:
            InvalidArgument: as `TarFlow.sample`.
            NonFiniteSample: a token or a step that is not finite.
        """
        call = self.model.prepare(condition, n, unconditional_guidance=temperature != 1, **options)
        denoise = self.denoise if call.steps is None else replace(self.denoise, steps=call.steps)
        tokens = len(self.model.blocks) * self.model.config.num_tokens
        total, report = tokens + denoise.steps, call.on_step
        after_token: OnStep | None = None
        after_denoising: OnStep | None = None
        if report is not None:
            after_token = lambda step: report(SamplingStep(step.done, total, step.estimate))  # noqa: E731
            after_denoising = lambda step: report(SamplingStep(tokens + step.done, total, step.estimate))  # noqa: E731
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
        # seeds apart from those of the flow's samples
        return denoise(self.model, x, call.condition, seed=call.seed + 2**32, on_step=after_denoising)


def flow_denoiser(
    model: ScoredFlow, condition: Conditioning | None = None, *, clip: bool = False, batch_size: int = 64
) -> Denoiser:
    """What samples at a noise level consist of, by the score of a flow with a range of noise.

    Args:
        model: the flow; its parameters get no gradients.
        condition: of each sample.
        clip: whether clean images are clipped to -1 to 1.
        batch_size: samples at once.
    """

    def denoiser(x: Tensor, t: float) -> Estimate:
        parts = []
        for first in range(0, len(x), batch_size):
            chosen = slice(first, min(first + batch_size, len(x)))
            own = None if condition is None else condition.select(chosen)
            parts.append(model.score(x[chosen], own, t))
        clean = x + t * t * torch.cat(parts)
        if clip:
            clean = clean.clamp(-1, 1)
        return Estimate(clean, (x - clean) / t)

    return denoiser


def noise_std_range(model: ScoredFlow) -> tuple[float, float]:
    """The least and the most noise that a flow was trained with.

    Raises:
        InvalidArgument: it was trained at one level.
    """
    limits: tuple[float, float] | None = model.config.noise_std_range
    if limits is None:
        raise InvalidArgument(
            "the flow was trained at one noise level, and denoising in steps needs a range; train one with noise_range"
        )
    return limits
