r"""Independent noisy views of a sample: the forward process of a diffusion that is not a Markov chain.

Notable here:
- each level has noise of its own, so what is known of a sample grows with every view, and the best guess reads them all
- one average of the views holds all that they tell (`statistic`): the views are worth a Markov diffusion whose
  signal-to-noise ratio is the sum of theirs, and either schedule follows from the other
- `draw_views` samples with any guess from all views: the exact mean of a known density, or a network
- levels count from 1, the clearest, to T; tables hold level t at place t - 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.generate.contract import OnStep, Step
from pippin.generate.noise import Noise


@dataclass(frozen=True)
class NomadSchedule:
    r"""The views $x_t = \sqrt{\gamma_t}\, x_0 + \sqrt{1 - \gamma_t}\, e_t$ with independent $e_t$, for t = 1 to T.

    Attributes:
        gammas: $\gamma_1 > \dots > \gamma_T$, between 0 and 1.

    Raises:
        InvalidArgument: none, not falling, or not between 0 and 1.

    Source: Gu et al. 2025, arXiv:2410.08159, section 3.1.

    >>> NomadSchedule((0.75, 0.5)).total_snr
    (4.0, 1.0)
    """

    gammas: tuple[float, ...]

    def __post_init__(self) -> None:
        outside = [gamma for gamma in self.gammas if not 0 < gamma < 1]
        if not self.gammas or outside:
            raise InvalidArgument(f"gammas must be between 0 and 1, got {outside[0] if outside else 'none'}")
        for t, (nearer, farther) in enumerate(pairwise(self.gammas), 1):
            if nearer <= farther:
                raise InvalidArgument(
                    f"gammas must fall from the clearest view to the noisiest; number {t} is {nearer:.6g} and the next "
                    f"{farther:.6g}"
                )

    @classmethod
    def cosine(cls, steps: int, *, first: float = 0.05, last: float = 0.97) -> NomadSchedule:
        r"""$\gamma_t = \cos^2(\tfrac\pi2 u_t)$ with ``u`` spread evenly from ``first`` to ``last``.

        Raises:
            InvalidArgument: fewer than 2 steps, or ends outside 0 to 1 or out of order.
        """
        if steps < 2 or not 0 < first < last < 1:
            raise InvalidArgument(
                f"a cosine of {steps} steps from {first} to {last}; give 2 or more, 0 < first < last < 1"
            )
        u = (first + (last - first) * i / (steps - 1) for i in range(steps))
        return cls(tuple(math.cos(math.pi / 2 * place) ** 2 for place in u))

    @classmethod
    def from_alphas_bar(cls, alphas_bar: Sequence[float]) -> NomadSchedule:
        r"""The views that together know as much as a Markov diffusion with these $\bar\alpha_1 > \dots > \bar\alpha_T$.

        $\gamma_t / (1 - \gamma_t) = S_t - S_{t+1}$ with $S_t = \bar\alpha_t / (1 - \bar\alpha_t)$.

        Raises:
            InvalidArgument: values that do not fall or are not between 0 and 1, or whose steps are such that a later
                view would be as clear as an earlier one.

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
        r"""$\gamma_t / (1 - \gamma_t)$: what each view tells by itself."""
        return tuple(gamma / (1 - gamma) for gamma in self.gammas)

    @property
    def total_snr(self) -> tuple[float, ...]:
        r"""$S_t = \sum_{\tau \ge t} \gamma_\tau / (1 - \gamma_\tau)$: what the views from t on tell together."""
        return tuple(accumulate(reversed(self.snr)))[::-1]

    @property
    def alphas_bar(self) -> tuple[float, ...]:
        """Of the Markov diffusion that knows as much: $S_t / (1 + S_t)$."""
        return tuple(total / (1 + total) for total in self.total_snr)

    @property
    def omega(self) -> tuple[float, ...]:
        """Weight of each level's squared error in the bound of the likelihood: $S_t$."""
        return self.total_snr

    def weights(self, weighting: str = "clipped", *, floor: float = 0.05) -> tuple[float, ...]:
        """Weights of the levels' errors with a mean of 1.

        Args:
            weighting: "snr" for `omega`, of which a few clear levels take nearly all where there are few; "clipped" for
                `omega` of at least ``floor`` of its largest value; "uniform" for ones.
            floor: see there.

        Raises:
            InvalidArgument: another name, or a floor outside 0 to 1.
        """
        if weighting not in ("snr", "uniform", "clipped") or not 0 <= floor <= 1:
            raise InvalidArgument(
                f"weighting is {weighting!r} with floor {floor}; choose snr, uniform or clipped, 0 to 1"
            )
        weights = {"snr": self.omega, "uniform": (1.0,) * self.steps}.get(weighting)
        weights = weights or tuple(max(weight, floor * self.omega[0]) for weight in self.omega)
        return tuple(weight * self.steps / sum(weights) for weight in weights)

    def view(self, x: Tensor, noise: Tensor, t: int) -> Tensor:
        """The view of level t, from 1 to T; of level 0 the sample itself."""
        gamma = 1.0 if t == 0 else self.gammas[t - 1]
        return math.sqrt(gamma) * x + math.sqrt(1 - gamma) * noise

    def views(self, x: Float[Tensor, "n ..."], noise: Float[Tensor, "n steps ..."]) -> Float[Tensor, "n steps ..."]:
        """All views, the noisiest first, as a network reads them; ``noise`` in the same order."""
        gammas = torch.tensor(self.gammas[::-1], dtype=x.dtype, device=x.device).view(1, -1, *[1] * (x.ndim - 1))
        return gammas.sqrt() * x[:, None] + (1 - gammas).sqrt() * noise

    def statistic(self, views: Float[Tensor, "n seen ..."]) -> Float[Tensor, "n seen ..."]:
        r"""All that the views up to each one tell, as a noisy sample of unit variance.

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


def draw_views(
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
    """Draw samples view by view, each around the guess from all views before it, with noise of its own.

    With the exact mean this is the ancestral sampler of the Markov diffusion of `NomadSchedule.alphas_bar`.

    Args:
        schedule: of the views.
        guess: is asked once in each step.
        noise: of the samples.
        shape: of one sample.
        steps: guesses, at most one for each view that is not given; with fewer, several views share a guess, which
            is the same diffusion with longer strides. None for one each.
        given: views that stand already, the noisiest first; None draws the noisiest from the normal distribution.
        settle: what each guess passes through, as to put in what is known of the samples.
        on_step: see `pippin.generate.contract`.

    Returns:
        The last guess.
    """
    kept = (lambda x: x) if settle is None else settle
    if given is None:
        start = noise.normal(shape)
        # what is known of a sample shows in the noisiest view, too
        given = (schedule.view(kept(torch.zeros_like(start)), start, schedule.steps) if settle else start)[:, None]
    strides = split(schedule.steps - given.shape[1], steps)
    x, t = given, schedule.steps - given.shape[1]
    for done, stride in enumerate([*strides, 0], 1):
        best = kept(guess(x))
        if on_step is not None:
            on_step(Step(done, len(strides) + 1, lambda best=best: best))  # type: ignore[misc]
        if stride:
            x = torch.stack([schedule.view(best, noise.normal(shape), t - i) for i in range(stride)], 1)
            t -= stride
    return best


def split(views: int, steps: int | None) -> list[int]:
    """Into how many views each step goes on, for ``views`` that follow the first guess; the last guess goes into none.

    >>> split(7, 3), split(3, None)
    ([4, 3], [1, 1, 1])
    """
    count = views if steps is None else steps - 1
    return [views // count + (i < views % count) for i in range(count)] if count else []
