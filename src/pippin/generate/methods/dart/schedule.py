r"""Non-Markovian diffusion (NOMAD): independent noisy views of a sample.

Notable here:
- each level has independent noise, so every view adds information, and the best prediction uses all views
- a weighted average of the views is a sufficient statistic (`statistic`): the views are equivalent to a Markov
  diffusion whose signal-to-noise ratio is the sum of theirs, and either schedule determines the other
- `sample_views` samples with any predictor from all views: the exact mean of a known density, or a network
- levels count from 1, the clearest, to T; tables hold level t at index t - 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from jaxtyping import Float
from torch import Tensor

from pippin.core.checks import OpenFraction, Probability, checked
from pippin.core.errors import InvalidArgument
from pippin.generate.contract import OnStep, SamplingStep
from pippin.generate.noise import Noise


@checked
@dataclass(frozen=True)
class NomadSchedule:
    r"""The views $x_t = \sqrt{\gamma_t}\, x_0 + \sqrt{1 - \gamma_t}\, e_t$ with independent $e_t$, for t = 1 to T.

    Attributes:
        gammas: $\gamma_1 > \dots > \gamma_T$, between 0 and 1.

    Raises:
        InvalidArgument: no value, one outside 0 to 1, or values that do not decrease.

    Source: Gu et al. 2025, arXiv:2410.08159, section 3.1.

    >>> NomadSchedule((0.75, 0.5)).total_snr
    (4.0, 1.0)
    """

    gammas: tuple[OpenFraction, ...]

    def __post_init__(self) -> None:
        if not self.gammas:
            raise InvalidArgument("gammas is empty; give at least one view")
        for t, (nearer, farther) in enumerate(pairwise(self.gammas), 1):
            if nearer <= farther:
                raise InvalidArgument(
                    f"gammas must fall from the clearest view to the noisiest; number {t} is {nearer:.6g} and the next "
                    f"{farther:.6g}"
                )

    @classmethod
    @checked
    def cosine(
        cls, steps: Annotated[int, Ge(2)], *, first: OpenFraction = 0.05, last: OpenFraction = 0.97
    ) -> NomadSchedule:
        r"""$\gamma_t = \cos^2(\tfrac\pi2 u_t)$ with ``u`` evenly spaced from ``first`` to ``last``.

        Raises:
            InvalidArgument: ``first`` is not below ``last``.
        """
        if first >= last:
            raise InvalidArgument(f"first must be below last={last}, got {first}")
        u = (first + (last - first) * i / (steps - 1) for i in range(steps))
        return cls(tuple(math.cos(math.pi / 2 * position) ** 2 for position in u))

    @classmethod
    def from_alphas_bar(cls, alphas_bar: Sequence[float]) -> NomadSchedule:
        r"""The schedule that is equivalent to a Markov diffusion with these $\bar\alpha_1 > \dots > \bar\alpha_T$.

        $\gamma_t / (1 - \gamma_t) = S_t - S_{t+1}$ with $S_t = \bar\alpha_t / (1 - \bar\alpha_t)$.

        Raises:
            InvalidArgument: values that do not decrease or are not between 0 and 1, or for which some view would not be
                noisier than the one before.

        >>> NomadSchedule.from_alphas_bar([0.8, 0.5]).gammas
        (0.75, 0.5)
        """
        invalid = [value for value in alphas_bar if not 0 < value < 1]
        if invalid or any(a <= b for a, b in pairwise(alphas_bar)):
            raise InvalidArgument(f"alphas_bar must fall and stay between 0 and 1, got {list(alphas_bar)}")
        totals = [value / (1 - value) for value in alphas_bar] + [0.0]
        return cls(tuple((a - b) / (1 + a - b) for a, b in pairwise(totals)))

    @property
    def steps(self) -> int:
        """T, the number of views."""
        return len(self.gammas)

    @property
    def snr(self) -> tuple[float, ...]:
        r"""Signal-to-noise ratio of each view: $\gamma_t / (1 - \gamma_t)$."""
        return tuple(gamma / (1 - gamma) for gamma in self.gammas)

    @property
    def total_snr(self) -> tuple[float, ...]:
        r"""Signal-to-noise ratio of views t to T: $S_t = \sum_{\tau \ge t} \gamma_\tau / (1 - \gamma_\tau)$."""
        return tuple(accumulate(reversed(self.snr)))[::-1]

    @property
    def alphas_bar(self) -> tuple[float, ...]:
        r"""$\bar\alpha_t$ of the equivalent Markov diffusion: $S_t / (1 + S_t)$."""
        return tuple(total / (1 + total) for total in self.total_snr)

    @property
    def omega(self) -> tuple[float, ...]:
        """Weight $S_t$ of each level's squared error in the bound of the likelihood."""
        return self.total_snr

    @checked
    def weights(
        self, weighting: Literal["snr", "uniform", "clipped"] = "clipped", *, floor: Probability = 0.05
    ) -> tuple[float, ...]:
        """Weights of the levels' errors with a mean of 1.

        Args:
            weighting: "snr" for `omega`, where with few steps the clearest levels dominate; "clipped" for `omega` of at
                least ``floor`` times its largest value; "uniform" for ones.
            floor: minimum of the clipped weights, relative to the largest.
        """
        weights = {"snr": self.omega, "uniform": (1.0,) * self.steps}.get(weighting)
        weights = weights or tuple(max(weight, floor * self.omega[0]) for weight in self.omega)
        return tuple(weight * self.steps / sum(weights) for weight in weights)

    def view(self, x: Tensor, noise: Tensor, t: int) -> Tensor:
        """The view of x at level t, from 1 to T; level 0 is x itself."""
        gamma = 1.0 if t == 0 else self.gammas[t - 1]
        return math.sqrt(gamma) * x + math.sqrt(1 - gamma) * noise

    def views(self, x: Float[Tensor, "n ..."], noise: Float[Tensor, "n steps ..."]) -> Float[Tensor, "n steps ..."]:
        """All views of x, the noisiest first; ``noise`` is in the same order."""
        gammas = torch.tensor(self.gammas[::-1], dtype=x.dtype, device=x.device).view(1, -1, *[1] * (x.ndim - 1))
        return gammas.sqrt() * x[:, None] + (1 - gammas).sqrt() * noise

    def statistic(self, views: Float[Tensor, "n seen ..."]) -> Float[Tensor, "n seen ..."]:
        r"""The sufficient statistic of the views up to each one, scaled like a state of the Markov diffusion.

        $z_t = \sqrt{\bar\alpha_t}\, y_t$ with $y_t = \tfrac{1}{S_t} \sum_{\tau \ge t} \tfrac{\sqrt{\gamma_\tau}}{1 -
        \gamma_\tau} x_\tau = x_0 + \mathcal N(0, 1 / S_t)$.

        Args:
            views: views from level T on, the noisiest first.
        """
        seen = views.shape[1]
        shape = (1, -1, *[1] * (views.ndim - 2))  # one value for each level

        def table(values: Sequence[float]) -> Tensor:
            return torch.tensor(values[::-1][:seen], dtype=views.dtype, device=views.device).view(shape)

        weights = table([gamma**0.5 / (1 - gamma) for gamma in self.gammas])
        scale = table([1 / (total * (1 + total)) ** 0.5 for total in self.total_snr])  # sqrt(alpha_bar) / S
        statistic: Tensor = (weights * views).cumsum(1) * scale
        return statistic


ViewPredictor = Callable[[Float[Tensor, "n new ..."]], Float[Tensor, "n ..."]]
"""Predicts the sample from all views so far; called with the new ones only, the noisiest first."""


def sample_views(
    schedule: NomadSchedule,
    predict: ViewPredictor,
    noise: Noise,
    shape: Sequence[int],
    *,
    steps: int | None = None,
    given: Float[Tensor, "n given ..."] | None = None,
    project: Callable[[Tensor], Tensor] | None = None,
    on_step: OnStep | None = None,
) -> Float[Tensor, "n ..."]:
    """Sample view by view: each is a view of the prediction from all views before it, with independent noise.

    With the exact mean this is the ancestral sampler of the Markov diffusion of `NomadSchedule.alphas_bar`.

    Args:
        schedule: schedule of the views.
        predict: the predictor, called once in each step.
        noise: source of the samples' noise.
        shape: shape of one sample.
        steps: number of predictions, at most one more than the views that are not given; with fewer, several views
            share a prediction, which is the same diffusion with larger steps. None for one prediction for each view.
        given: existing views, the noisiest first; None to sample the noisiest from the standard normal distribution.
        project: applied to each prediction, for example to insert known pixels.
        on_step: called after each prediction; see `pippin.generate.contract.SamplingStep`.

    Returns:
        The last prediction.
    """
    project_or_identity = (lambda x: x) if project is None else project
    if given is None:
        start = noise.normal(shape)
        # known pixels are in the noisiest view, too
        known = project_or_identity(torch.zeros_like(start))
        given = (schedule.view(known, start, schedule.steps) if project else start)[:, None]
    strides = split(schedule.steps - given.shape[1], steps)
    x, t = given, schedule.steps - given.shape[1]
    for done, stride in enumerate([*strides, 0], 1):
        predicted = project_or_identity(predict(x))
        if on_step is not None:
            on_step(SamplingStep(done, len(strides) + 1, lambda x=predicted: x))  # type: ignore[misc]
        if stride:
            x = torch.stack([schedule.view(predicted, noise.normal(shape), t - i) for i in range(stride)], 1)
            t -= stride
    return predicted


def split(views: int, steps: int | None) -> list[int]:
    """Number of views after each step but the last, for ``views`` views in all; one after each for None.

    >>> split(7, 3), split(3, None)
    ([4, 3], [1, 1, 1])
    """
    count = views if steps is None else steps - 1
    return [views // count + (i < views % count) for i in range(count)] if count else []
