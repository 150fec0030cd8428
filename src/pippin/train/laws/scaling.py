r"""Scaling laws: the loss of a run predicted from its size and data, and what a budget of compute should buy.

Notable here:
- $L(N, D) = E + A / N^\alpha + B / D^\beta$, and the variant that also knows how sparse a mixture of experts is
- the best division of $6 N D$ is a closed form; of any other cost, as of a model with an encoder beside it, a search
- whatever is predicted comes with the interval of the bootstrap, and with a warning far outside the runs

Source: Shukor et al., arXiv:2504.07951, sections 2 and A (laws, fit, optimum, hull); Hoffmann et al., arXiv:2203.15556.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike

from pippin.core.checks import PositiveFloat, checked
from pippin.core.errors import Extrapolation, InvalidArgument
from pippin.metrics import percentile_interval
from pippin.train.laws import compute_budget as budgets, fitting, plots
from pippin.train.laws.compute_budget import ComputeOptimum, Flops, ScalingExponents
from pippin.train.laws.fitting import Array
from pippin.train.laws.law import Law

FAR = 10.0
"""Beyond so many times the largest run, or below such a part of the smallest, an optimum is warned about."""


class ScalingLaw(Law):
    r"""The loss of a run from its size and data.

    "chinchilla" is $E + A N^{-\alpha} + B D^{-\beta}$. "sparse", for mixtures of experts with a share S of parameters
    that are not active, adds $C (1 - S)^{-\lambda} + d\,(1 - S)^{-\delta} N^{-\gamma}$. N are the parameters (active
    ones) and D the tokens, all of them, whatever the loss is taken on; in any unit, as long as it is one.

    Args:
        form: which.

    >>> N, D = np.meshgrid([1e6, 3e6, 1e7, 3e7], [1e8, 1e9, 1e10])
    >>> law = ScalingLaw().fit(N.ravel(), D.ravel(), (1.9 + 245 * N**-0.3 + 490 * D**-0.33).ravel(), num_resamples=0)
    >>> round(law.coefficients["alpha"], 4), round(law.exponents.a, 4)
    (0.3, 0.5238)
    """

    form: Literal["chinchilla", "sparse"]

    @checked
    def __init__(self, form: Literal["chinchilla", "sparse"] = "chinchilla") -> None:
        super().__init__()
        self.form = form

    def fit(
        self,
        N: ArrayLike,
        D: ArrayLike,
        loss: ArrayLike,
        *,
        sparsity: ArrayLike | None = None,
        delta: float = 1e-3,
        num_resamples: int = 100,
        seed: int = 0,
    ) -> Self:
        r"""Find the coefficients of these runs.

        Args:
            N: parameters of each run.
            D: tokens of each.
            loss: that each came to.
            sparsity: for "sparse", the share of parameters that are not active, from 0 to below 1.
            delta: Huber's, on differences of logarithms.
            num_resamples: how often the runs are resampled; 0 for no intervals.
            seed: of the resamples.

        Raises:
            InvalidArgument: a number that is not positive and finite, lengths that differ, fewer than 8 runs (13 for
                "sparse"), fewer than 3 different sizes or amounts of data, a loss that is the same everywhere.

        Warns:
            Extrapolation: an exponent is uncertain by over 30 %, or the starts disagree.
        """
        if (sparsity is not None) != (self.form == "sparse"):
            raise InvalidArgument("sparsity is for form='sparse', and that form needs it")
        runs = fitting.columns(N=N, D=D, loss=loss, **({} if sparsity is None else {"S": sparsity}))
        fitting.check_positive(N=runs["N"], D=runs["D"], loss=runs["loss"])
        distinct = {"N": 3, "D": 3} | ({"S": 3} if "S" in runs else {})
        fitting.check_runs(runs, 8 if self.form == "chinchilla" else 13, **distinct)
        if "S" in runs and ((runs["S"] < 0) | (runs["S"] >= 1)).any():
            raise InvalidArgument("sparsity is a share of parameters; give numbers from 0 to below 1")
        if np.ptp(runs["loss"]) == 0:
            raise InvalidArgument(f"the loss is {runs['loss'][0]:g} in every run; there is nothing to fit")
        center = {name: float(np.log(runs[name]).mean()) for name in ("N", "D")}
        matrix = self._matrix(runs, center)

        def terms(theta: Array) -> tuple[Array, Array]:
            return np.einsum("trp,sp->str", matrix, theta), matrix[None]

        found = fitting.fit(
            terms,
            runs["loss"],
            self._starts(float(np.log(runs["loss"]).mean())),
            delta=delta,
            num_resamples=num_resamples,
            seed=seed,
            distinct=[(runs[name], least) for name, least in distinct.items()],
        )
        self._take(self._named(found.theta[None], center), self._named(found.samples, center), runs)
        self.goodness = self.score(N, D, loss, sparsity=sparsity)
        exponents = ("alpha", "beta")
        fitting.warn_if_uncertain(found, {name: (self.coefficients[name], self.samples[name]) for name in exponents})
        return self

    def predict(self, N: ArrayLike, D: ArrayLike, *, sparsity: ArrayLike | None = None) -> Array:
        """The loss that runs of these sizes and data would come to, in the shape of the arguments.

        Raises:
            NotPrepared: the law was not fitted.
            InvalidArgument: a number that is not above 0, or a sparsity without the form for it.
        """
        return np.asarray(self._losses(self._known(), N, D, sparsity))

    def band(self, N: ArrayLike, D: ArrayLike, *, sparsity: ArrayLike | None = None) -> Array:
        """From 2.5 % to 97.5 % of the resamples' predictions, as the first dimension; NaN without resamples."""
        shape = np.broadcast(np.asarray(N), np.asarray(D)).shape
        samples = {name: values.reshape(-1, *[1] * len(shape)) for name, values in self.samples.items()}
        return percentile_interval(
            np.broadcast_to(self._losses(samples, N, D, sparsity), (self._resamples, *shape)), skip_nan=True
        )

    def score(
        self, N: ArrayLike, D: ArrayLike, loss: ArrayLike, *, sparsity: ArrayLike | None = None
    ) -> fitting.Goodness:
        """How well the law predicts runs, of the fit or others."""
        return fitting.goodness(self.predict(N, D, sparsity=sparsity), loss)

    @property
    def exponents(self) -> ScalingExponents:
        r"""How the best N and D grow with $C = 6 N D$: $a = \beta / (\alpha + \beta)$ and $b = 1 - a$."""
        alpha, beta = self._powers()
        return ScalingExponents(beta / (alpha + beta), alpha / (alpha + beta))

    @property
    def exponents_interval(self) -> tuple[float, float]:
        """Of `exponents.a`, from 2.5 % to 97.5 % of the resamples; b is 1 - a."""
        self._powers()
        alpha, beta = self.samples["alpha"], self.samples["beta"]
        low, high = percentile_interval(beta / (alpha + beta), skip_nan=True)
        return float(low), float(high)

    @checked
    def optimal(self, compute: PositiveFloat, flops: Flops | None = None) -> ComputeOptimum:
        r"""The size and data of least loss within a budget.

        For $C = 6 N D$: $N^* = G (C / 6)^a$ with $G = (\alpha A / \beta B)^{1 / (\alpha + \beta)}$ and `exponents`.
        For another cost, the least loss along the line on which it equals the budget.

        Args:
            compute: floating-point operations, in the units of N times those of D.
            flops: the cost of a run; None for 6 N D.

        Raises:
            InvalidArgument: a cost that no N meets, or exponents without an optimum.

        Warns:
            Extrapolation: the optimum lies more than 10 times outside the runs.

        Source: arXiv:2504.07951, section A.
        """
        if self.form != "chinchilla":
            raise InvalidArgument("the optimum is that of form='chinchilla'; fit the runs of one sparsity by it")
        self._powers()
        search = (
            budgets.optimum_in_closed_form
            if flops is None
            else budgets.optimum_by_search(flops, self._middle(compute), self._losses)
        )
        with np.errstate(all="ignore"):
            N, D = (float(value) for value in search(compute, self._known()))
            many = search(compute, {name: values[:, None] for name, values in self.samples.items()})
            losses = self._losses({name: values[:, None] for name, values in self.samples.items()}, *many)
        found = {"N": many[0], "D": many[1], "loss": losses}
        intervals = {
            name: tuple(percentile_interval(np.ravel(values), skip_nan=True).tolist()) for name, values in found.items()
        }
        for name, value in (("N", N), ("D", D)):
            low, high = self.runs[name].min(), self.runs[name].max()
            if not low / FAR <= value <= high * FAR:
                warnings.warn(
                    f"the best {name} is {value:.3g}, far outside the runs of the fit ({low:.3g} to {high:.3g})",
                    Extrapolation,
                    stacklevel=2,
                )
        return ComputeOptimum(compute, N, D, float(self.predict(N, D)), intervals)

    def growth(self, compute: ArrayLike, flops: Flops | None = None) -> ScalingExponents:
        """How the best N and D grow over these budgets: slopes of their logarithms over that of the compute."""
        budgets = np.asarray(compute, dtype=float)
        if len(np.unique(budgets)) < 2:
            raise InvalidArgument("growth is a slope; give at least two different budgets")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Extrapolation)
            found = [self.optimal(float(budget), flops) for budget in budgets]
        slopes = [np.polyfit(np.log(budgets), np.log([getattr(best, name) for best in found]), 1)[0] for name in "ND"]
        return ScalingExponents(*map(float, slopes))

    def plot(self, path: str | Path) -> None:
        """Draw loss over data, a curve for each size, and loss over compute with the line of the best division."""
        self._known()
        plots.scaling(self, Path(path))

    @property
    def _resamples(self) -> int:
        return len(next(iter(self.samples.values())))

    def _powers(self) -> tuple[float, float]:
        """Alpha and beta, both above 0.

        Raises:
            InvalidArgument: one is not, so that there is no best division.
        """
        known = self._known()
        alpha, beta = known["alpha"], known["beta"]
        if alpha <= 0 or beta <= 0:
            raise InvalidArgument(f"alpha is {alpha:.3g} and beta {beta:.3g}; only positive ones have an optimum")
        return alpha, beta

    def _middle(self, compute: float) -> float:
        """About where the best D is."""
        return float(budgets.optimum_in_closed_form(compute, self._known())[1])

    @staticmethod
    def _losses(known: Mapping[str, Any], N: ArrayLike, D: ArrayLike, sparsity: ArrayLike | None = None) -> Array:
        size, data = np.asarray(N, dtype=float), np.asarray(D, dtype=float)
        if not ((size > 0).all() and (data > 0).all()):
            raise InvalidArgument("N and D must be above 0")
        if (sparsity is None) != ("lambda" not in known):
            raise InvalidArgument("sparsity is for laws of form='sparse', and those need it")
        total = known["E"] + known["A"] * size ** -known["alpha"] + known["B"] * data ** -known["beta"]
        if sparsity is not None:
            active = 1 - np.asarray(sparsity, dtype=float)
            total = total + known["C"] * active ** -known["lambda"]
            total = total + known["d"] * active ** -known["delta"] * size ** -known["gamma"]
        return np.asarray(total)

    @staticmethod
    def _matrix(runs: Mapping[str, Array], center: Mapping[str, float]) -> Array:
        """What the coefficients are multiplied with in each term's logarithm [T, runs, P]."""
        n, d = (np.log(runs[name]) - center[name] for name in ("N", "D"))
        one, zero = np.ones_like(n), np.zeros_like(n)
        rows = [[one, zero, zero, -n, zero], [zero, one, zero, zero, -d], [zero, zero, one, zero, zero]]
        if "S" in runs:
            s = np.log(1 - runs["S"])
            rows = [row + [zero] * 5 for row in rows]
            rows += [[zero] * 5 + [one, -s, zero, zero, zero], [zero] * 5 + [zero, zero, one, -s, -n]]
        return np.asarray(rows).transpose(0, 2, 1)

    def _starts(self, level: float) -> Array:
        """Shares of the typical loss for the terms, times exponents; 432 starts, 128 for "sparse"."""
        starts = []
        if self.form == "chinchilla":
            powers = (0.05, 0.2, 0.5, 1.0, 1.5, 2.5)
            for rest, part, alpha, beta in itertools.product((0.05, 0.3, 0.6, 0.9), (0.15, 0.5, 0.85), powers, powers):
                shares = ((1 - rest) * part, (1 - rest) * (1 - part), rest)
                starts.append([level + math.log(share) for share in shares] + [alpha, beta])
            return np.asarray(starts)
        choices = itertools.product((0.3, 0.7), (0.1, 0.3), (0.1, 0.3, 0.7, 1.2), (0.1, 0.4), (0.1, 0.4), (0.1, 0.4))
        for rest, alpha, beta, lam, delta, gamma in choices:
            quarter = level + math.log((1 - rest) / 4)
            starts.append([quarter, quarter, level + math.log(rest), alpha, beta, quarter, lam, quarter, delta, gamma])
        return np.asarray(starts)

    @staticmethod
    def _named(theta: Array, center: Mapping[str, float]) -> dict[str, Array]:
        """The coefficients in the units of the runs, for each row of theta."""
        a, b, e, alpha, beta = theta.T[:5]
        named = {
            "E": np.exp(e),
            "A": np.exp(a + alpha * center["N"]),
            "B": np.exp(b + beta * center["D"]),
            "alpha": alpha,
            "beta": beta,
        }
        if theta.shape[1] > 5:
            c, lam, d, delta, gamma = theta.T[5:]
            named |= {"C": np.exp(c), "lambda": lam, "d": np.exp(d + gamma * center["N"])}
            named |= {"delta": delta, "gamma": gamma}
        return named
