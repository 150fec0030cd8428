r"""Non-Markovian diffusion (NOMAD): independent noisy views of a sample.

Notable here:
- each level has independent noise, so the information grows with every view, and the best prediction uses them all
- one average of the views is a sufficient statistic (`statistic`): the views are equivalent to a Markov diffusion whose
  signal-to-noise ratio is the sum of theirs, and either schedule determines the other
- `sample_views` samples with any prediction from all views: the exact mean of a known density, or a network
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
        InvalidArgument: none, or not decreasing.

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
            InvalidArgument: ends out of order.
        """
        if first >= last:
            raise InvalidArgument(f"first must be below last={last}, got {first}")
        u = (first + (last - first) * i / (steps - 1) for i in range(steps))
        return cls(tuple(math.cos(math.pi / 2 * position) ** 2 for position in u))

    @classmethod
    def from_alphas_bar(cls, alphas_bar: Sequence[float]) -> NomadSchedule:
        r"""The views that are equivalent to a Markov diffusion with these $\bar\alpha_1 > \dots > \bar\alpha_T$.

        $\gamma_t / (1 - \gamma_t) = S_t - S_{t+1}$ with $S_t = \bar\alpha_t / (1 - \bar\alpha_t)$.

        Raises:
            InvalidArgument: values that are not decreasing or not between 0 and 1, or for which a later view would be
                as clear as an earlier one.

        >>> NomadSchedule.from_alphas_bar([0.8, 0.5]).gammas
        (0.75, 0.5)
        """
        wrong = [value for value in alphas_bar if not 0 < value < 1]
        if wrong or any(a <= b for a, b in pairwise(alphas_bar)):
            raise InvalidArgument(f"alphas_bar must fall and stay between 0 and 1, got {list(alphas_bar)}")
        totals = [value / (1 - value) for value in alphas_bar] + [0.0]
        return cls(tuple((a - b) / (1 + a - b) for a, b in pairwise(totals)))

    @property
    def steps(self) -> int:
        """T, the number of views."""
        return len(self.gammas)

    @property
    def snr(self) -> tuple[float, ...]:
        r"""$\gamma_t / (1 - \gamma_t)$: signal-to-noise ratio of each view."""
        return tuple(gamma / (1 - gamma) for gamma in self.gammas)

    @property
    def total_snr(self) -> tuple[float, ...]:
        r"""$S_t = \sum_{\tau \ge t} \gamma_\tau / (1 - \gamma_\tau)$: signal-to-noise ratio of the views from t on
        together."""
        return tuple(accumulate(reversed(self.snr)))[::-1]

    @property
    def alphas_bar(self) -> tuple[float, ...]:
        r"""$\bar\alpha_t$ of the equivalent Markov diffusion: $S_t / (1 + S_t)$."""
        return tuple(total / (1 + total) for total in self.total_snr)

    @property
    def omega(self) -> tuple[float, ...]:
        """Weight of each level's squared error in the bound of the likelihood: $S_t$."""
        return self.total_snr

    @checked
    def weights(
        self, weighting: Literal["snr", "uniform", "clipped"] = "clipped", *, floor: Probability = 0.05
    ) -> tuple[float, ...]:
        """Weights of the levels' errors with a mean of 1.

        Args:
            weighting: "snr" for `omega`, of which a few clear levels take nearly all with few steps; "clipped" for
                `omega` of at least ``floor`` times its largest value; "uniform" for ones.
            floor: minimum of the clipped weights.
        """
        weights = {"snr": self.omega, "uniform": (1.0,) * self.steps}.get(weighting)
        weights = weights or tuple(max(weight, floor * self.omega[0]) for weight in self.omega)
        return tuple(weight * self.steps / sum(weights) for weight in weights)

    def view(self, x: Tensor, noise: Tensor, t: int) -> Tensor:
        """The view of level t, from 1 to T; of level 0 the sample itself."""
        gamma = 1.0 if t == 0 else self.gammas[t - 1]
        return math.sqrt(gamma) * x + math.sqrt(1 - gamma) * noise

    def views(self, x: Float[Tensor, "n ..."], noise: Float[Tensor, "n steps ..."]) -> Float[Tensor, "n steps ..."]:
        """All views, the noisiest first, as input of a network; ``noise`` in the same order."""
        gammas = torch.tensor(self.gammas[::-1], dtype=x.dtype, device=x.device).view(1, -1, *[1] * (x.ndim - 1))
        return gammas.sqrt() * x[:, None] + (1 - gammas).sqrt() * noise

    def statistic(self, views: Float[Tensor, "n seen ..."]) -> Float[Tensor, "n seen ..."]:
        r"""The sufficient statistic of the views up to each one, as a noisy sample of unit variance.

        $z_t = \sqrt{\bar\alpha_t}\, y_t$ with $y_t = \tfrac{1}{S_t} \sum_{\tau \ge t} \tfrac{\sqrt{\gamma_\tau}}{1 -
        \gamma_\tau} x_\tau$, which is $x_0 + \mathcal N(0, 1 / S_t)$ and sufficient: the Markov diffusion's state.

        Args:
            views: the noisiest first, beginning with level T.
        """
        seen = views.shape[1]
        shape = (1, -1, *[1] * (views.ndim - 2))

        def table(values: Sequence[float]) -> Tensor:
            return torch.tensor(values[::-1][:seen], dtype=views.dtype, device=views.device).view(shape)

        shares = table([gamma**0.5 / (1 - gamma) for gamma in self.gammas])
        known: Tensor = (shares * views).cumsum(1) * table(
            [1 / (total * (1 + total)) ** 0.5 for total in self.total_snr]
        )
        return known


Guess = Callable[[Float[Tensor, "n new ..."]], Float[Tensor, "n ..."]]
"""The expected sample, given the views so far; called with those that are new, the noisiest first."""


def sample_views(
    schedule: NomadSchedule,
    guess: Guess,
    noise: Noise,
    shape: Sequence[int],
    *,
    steps: int | None = None,
    given: Float[Tensor, "n given ..."] | None = None,
    settle: Callable[[Tensor], Tensor] | None = None,
    on_step: OnStep | None = None,
) -> Float[Tensor, "n ..."]:
    """Sample view by view, each around the prediction from all views before it, with independent noise.

    With the exact mean this is the ancestral sampler of the Markov diffusion of `NomadSchedule.alphas_bar`.

    Args:
        schedule: schedule of the views.
        guess: the prediction, called once in each step.
        noise: noise of the samples.
        shape: shape of one sample.
        steps: number of predictions, at most one for each view that is not given; with fewer, several views share a
            prediction, which is the same diffusion with larger steps. None for one each.
        given: existing views, the noisiest first; None samples the noisiest from the normal distribution.
        settle: applied to each prediction, for example to insert known pixels.
        on_step: see `pippin.generate.contract`.

    Returns:
        The last prediction.
    """
    kept = (lambda x: x) if settle is None else settle
    if given is None:
        start = noise.normal(shape)
        # known pixels are in the noisiest view, too
        given = (schedule.view(kept(torch.zeros_like(start)), start, schedule.steps) if settle else start)[:, None]
    strides = split(schedule.steps - given.shape[1], steps)
    x, t = given, schedule.steps - given.shape[1]
    for done, stride in enumerate([*strides, 0], 1):
        best = kept(guess(x))
        if on_step is not None:
            on_step(SamplingStep(done, len(strides) + 1, lambda best=best: best))  # type: ignore[misc]
        if stride:
            x = torch.stack([schedule.view(best, noise.normal(shape), t - i) for i in range(stride)], 1)
            t -= stride
    return best


def split(views: int, steps: int | None) -> list[int]:
    """The number of views that each step adds, for ``views`` after the first prediction; the last one adds none.

    >>> split(7, 3), split(3, None)
    ([4, 3], [1, 1, 1])
    """
    count = views if steps is None else steps - 1
    return [views // count + (i < views % count) for i in range(count)] if count else []
