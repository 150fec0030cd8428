r"""iTARFlow: a flow that was trained over a range of noise draws at much noise, and refines step by step.

A flow at little noise has good texture and poor shape, at much noise good shape and blur. One flow that is told its
noise has both: it draws at the most noise, and its own score then leads back along the diffusion's path,
$\hat x_0 = x + t^2 \nabla \log p_t(x)$, $dx/dt = (x - \hat x_0) / t$.

Notable here:
- the steps are those of the diffusion samplers on the schedule whose noise alone grows; nothing is integrated here
- each step is one pass forward and backward for all tokens at once, so many cost less than drawing did
- one step is TarFlow's own denoising; a picture with noise of a known level can be denoised just as well
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.generate.condition import Condition, ConditionSpec
from pippin.generate.contract import OnStep, Step, check_samples
from pippin.generate.noise import Noise
from pippin.generate.prediction import Estimate
from pippin.generate.samplers import Denoiser, Method, integrate
from pippin.generate.schedules import NoiseSchedule
from pippin.generate.tarflow import TarFlow

_METHODS: Final[dict[str, Method]] = {"ode": "euler", "heun": "heun", "sde": "ddpm"}


@runtime_checkable
class Scored(Protocol):
    """What is denoised with: a density that was learnt at every noise of a range, as a `TarFlow` with one is.

    Attributes:
        config: with ``noise_range``.
    """

    @property
    def config(self) -> Any:
        """Its configuration."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height, width."""

    def score(self, x: Tensor, condition: Condition | None = None, t: Any = None) -> Tensor:
        """The gradient of the log density at noise ``t``."""


@dataclass(frozen=True)
class IterativeDenoise:
    """How noise is taken from samples of a flow with a range of noise.

    Attributes:
        steps: noise levels that are visited, evenly from where it begins to the least of the range, then none; 1 is
            one step of Tweedie's formula. The paper has one for each 0.01 of noise.
        method: "ode" (Euler), "heun" (two scores a step, more exact), or "sde" (fresh noise in every step).
        clip: whether estimates of clean pictures are clipped to -1 to 1.
        rows: samples of which the score is computed at once; its memory is that of a training step.

    Raises:
        InvalidArgument: numbers out of range, or an unknown method.
    """

    steps: int = 30
    method: Literal["ode", "heun", "sde"] = "ode"
    clip: bool = False
    rows: int = 64

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rows < 1:
            raise InvalidArgument(f"steps={self.steps}, rows={self.rows}: give 1 or more")
        if self.method not in _METHODS:
            raise InvalidArgument(f"method {self.method!r}: choose one of {sorted(_METHODS)}")

    def __call__(
        self,
        model: Scored,
        x: Float[Tensor, "n ..."],
        condition: Condition | None = None,
        *,
        t: float | None = None,
        seed: int = 0,
        on_step: OnStep | None = None,
    ) -> Float[Tensor, "n ..."]:
        """Take the noise from samples, or from pictures with Gaussian noise of a known level.

        Args:
            model: a flow with a range of noise.
            x: clean pictures plus noise.
            condition: what they show; there is no guidance here.
            t: standard deviation of the noise; None for the most of the range.
            seed: of the fresh noise of "sde"; sample i depends on ``seed + i`` alone.
            on_step: called after each step.

        Raises:
            InvalidArgument: a model without a range of noise, a level outside of it, or pictures of another shape.
            InvalidInput: values that are not finite.
            NonFiniteSample: a step that ended in infinite values; it is numbered.

        Source: arXiv:2604.20041, iterative denoising.
        """
        low, high = noise_range(model)
        start = high if t is None else t
        if not low <= start <= high * (1 + 1e-6):
            raise InvalidArgument(f"t is {t}; the model was trained with noise from {low} to {high}")
        check_samples(x, model.shape)
        # from the least level there is but one step to make
        many = self.steps if start > low else 1
        schedule = NoiseSchedule.ve(start, low) if start > low else NoiseSchedule.ve(start)
        return integrate(
            flow_denoiser(model, condition, clip=self.clip, rows=self.rows),
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
        noise_range(model)
        self.model, self.denoise = model, denoise or IterativeDenoise()

    @property
    def facts(self) -> dict[str, Any]:
        """Those of the flow."""
        return self.model.facts

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height, width."""
        return self.model.shape

    @property
    def condition(self) -> ConditionSpec:
        """What it reads."""
        return self.model.condition

    def sample(
        self,
        condition: Condition | None = None,
        n: int | None = None,
        *,
        steps: int | None = None,
        guidance: float = 1.0,
        seed: int = 0,
        on_step: OnStep | None = None,
        **drawing: Any,
    ) -> Float[Tensor, "n channels height width"]:
        """Draw pictures, from about -1 to 1.

        Args:
            condition: what each is to show; None for nothing.
            n: pictures; None for as many as the condition has, or 1.
            steps: of denoising; None for those of `IterativeDenoise`.
            guidance: of the drawing, 1 for none; denoising is not guided.
            seed: picture i depends on ``seed + i`` alone.
            on_step: called after each token of the drawing, then after each step of denoising.
            **drawing: ``solver``, ``anneal``, ``temperature`` of `TarFlow.sample`.

        Raises:
            InvalidArgument: as `TarFlow.sample`, or fewer than 1 step.
            NonFiniteSample: a token or a step that is not finite.
        """
        how = self.denoise
        if steps is not None:
            how = IterativeDenoise(steps, how.method, how.clip, how.rows)
        tokens = len(self.model.blocks) * self.model.config.tokens
        whole = tokens + how.steps

        def drawn(step: Step) -> None:
            if on_step is not None:
                on_step(Step(step.done, whole, step.estimate))

        def denoised(step: Step) -> None:
            if on_step is not None:
                on_step(Step(tokens + step.done, whole, step.estimate))

        x = self.model.sample(
            condition, n, guidance=guidance, seed=seed, on_step=drawn if on_step else None, denoise=False, **drawing
        )
        if condition is not None:
            condition = condition.to(x.device)
            if len(condition) != len(x):
                condition = condition.rows(torch.zeros(len(x), dtype=torch.long, device=x.device))
        # other seeds than those that drew the samples
        return how(self.model, x, condition, seed=seed + 2**32, on_step=denoised if on_step else None)


def flow_denoiser(model: Scored, condition: Condition | None = None, *, clip: bool = False, rows: int = 64) -> Denoiser:
    """What samples at a noise level consist of, by the score of a flow with a range of noise.

    Args:
        model: the flow; its parameters get no gradients.
        condition: what the samples show.
        clip: whether clean pictures are clipped to -1 to 1.
        rows: samples at once.
    """

    def denoiser(x: Tensor, t: float) -> Estimate:
        parts = []
        for first in range(0, len(x), rows):
            chosen = slice(first, min(first + rows, len(x)))
            own = None if condition is None else condition.rows(chosen)
            parts.append(model.score(x[chosen], own, t))
        clean = x + t * t * torch.cat(parts)
        if clip:
            clean = clean.clamp(-1, 1)
        return Estimate(clean, (x - clean) / t)

    return denoiser


def noise_range(model: Scored) -> tuple[float, float]:
    """The least and the most noise that a flow was trained with.

    Raises:
        InvalidArgument: it was trained at one level.
    """
    limits: tuple[float, float] | None = model.config.noise_range
    if limits is None:
        raise InvalidArgument(
            "the flow was trained at one noise level, and denoising in steps needs a range; train one with noise_range"
        )
    return limits
