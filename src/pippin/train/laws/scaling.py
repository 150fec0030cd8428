r"""Scaling laws: the loss predicted from model size and data, and the compute-optimal size and data.

Notable here:
- $L(N, D) = E + A / N^\alpha + B / D^\beta$, and a variant with the sparsity of a mixture of experts
- the optimum for the cost $6 N D$ has a closed form; for any other cost, as of a late-fusion model, it is searched
- predictions have bootstrap intervals, and extrapolation far outside the runs is warned of

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
"""Factor above the largest or below the smallest run beyond which `optimal` warns."""


class ScalingLaw(Law):
    r"""The loss of a run as a function of model size and data.

    "chinchilla" is $E + A N^{-\alpha} + B D^{-\beta}$. "sparse", for mixtures of experts with a share S of inactive
    parameters, adds $C (1 - S)^{-\lambda} + d\,(1 - S)^{-\delta} N^{-\gamma}$. N is the number of (active) parameters
    and D that of training tokens, each in any unit, the same for all runs.

    Args:
        form: form of the law.

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
        r"""Fit the coefficients to runs.

        Args:
            N: number of parameters of each run.
            D: number of training tokens of each run.
            loss: final loss of each run.
            sparsity: for "sparse", the share of inactive parameters, from 0 to below 1.
            delta: threshold of the Huber loss, on differences of log losses.
            num_resamples: number of bootstrap resamples of the runs; 0 for no intervals.
            seed: of the resamples.

        Raises:
            InvalidArgument: a number that is not positive and finite, different lengths, fewer than 8 runs (13 for
                "sparse"), fewer than 3 different sizes or numbers of tokens, or the same loss in all runs.

        Warns:
            Extrapolation: an exponent is uncertain by more than 30 %, or the initial values converge differently.
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

        fitted = fitting.fit(
            terms,
            runs["loss"],
            self._starts(float(np.log(runs["loss"]).mean())),
            delta=delta,
            num_resamples=num_resamples,
            seed=seed,
            distinct=[(runs[name], required) for name, required in distinct.items()],
        )
        self._set(self._named(fitted.theta[None], center), self._named(fitted.samples, center), runs)
        self.goodness = self.score(N, D, loss, sparsity=sparsity)
        exponents = ("alpha", "beta")
        fitting.warn_if_uncertain(fitted, {name: (self.coefficients[name], self.samples[name]) for name in exponents})
        return self

    def predict(self, N: ArrayLike, D: ArrayLike, *, sparsity: ArrayLike | None = None) -> Array:
        """The predicted loss, in the shape of the arguments.

        Raises:
            NotPrepared: the law was not fitted.
            InvalidArgument: a number that is not above 0, or a sparsity for another form than "sparse".
        """
        return np.asarray(self._losses(self._fitted(), N, D, sparsity))

    def band(self, N: ArrayLike, D: ArrayLike, *, sparsity: ArrayLike | None = None) -> Array:
        """The 2.5 % and 97.5 % quantiles of `predict` [2, *shape] over the resamples; NaN without resamples."""
        shape = np.broadcast(np.asarray(N), np.asarray(D)).shape
        samples = {name: values.reshape(-1, *[1] * len(shape)) for name, values in self.samples.items()}
        return percentile_interval(
            np.broadcast_to(self._losses(samples, N, D, sparsity), (self._resamples, *shape)), skip_nan=True
        )

    def score(
        self, N: ArrayLike, D: ArrayLike, loss: ArrayLike, *, sparsity: ArrayLike | None = None
    ) -> fitting.Goodness:
        """Goodness of fit on runs, those of the fit or others."""
        return fitting.goodness(self.predict(N, D, sparsity=sparsity), loss)

    @property
    def exponents(self) -> ScalingExponents:
        r"""Exponents of the optimal N and D for $C = 6 N D$: $a = \beta / (\alpha + \beta)$ and $b = 1 - a$."""
        alpha, beta = self._powers()
        return ScalingExponents(beta / (alpha + beta), alpha / (alpha + beta))

    @property
    def exponents_interval(self) -> tuple[float, float]:
        """The 2.5 % and 97.5 % quantiles of `exponents.a` over the resamples; b is 1 - a."""
        self._powers()
        alpha, beta = self.samples["alpha"], self.samples["beta"]
        low, high = percentile_interval(beta / (alpha + beta), skip_nan=True)
        return float(low), float(high)

    @checked
    def optimal(self, compute: PositiveFloat, flops: Flops | None = None) -> ComputeOptimum:
        r"""The model size and data with the lowest loss for a compute budget.

        For $C = 6 N D$: $N^* = G (C / 6)^a$ with $G = (\alpha A / \beta B)^{1 / (\alpha + \beta)}$ and `exponents`.
        For another cost, the lowest loss along the curve where it equals the budget.

        Args:
            compute: floating-point operations, in the unit of N times that of D.
            flops: the cost of a run; None for 6 N D.

        Raises:
            InvalidArgument: no N has this cost, or the exponents have no optimum.

        Warns:
            Extrapolation: the optimum lies more than 10 times outside the runs.

        Source: arXiv:2504.07951, section A.
        """
        if self.form != "chinchilla":
            raise InvalidArgument("only form='chinchilla' has an optimum; fit it to the runs of one sparsity")
        self._powers()
        search = (
            budgets.optimum_in_closed_form
            if flops is None
            else budgets.optimum_by_search(flops, self._middle(compute), self._losses)
        )
        with np.errstate(all="ignore"):
            N, D = (float(value) for value in search(compute, self._fitted()))
            samples = {name: values[:, None] for name, values in self.samples.items()}  # [resamples, 1]
            sizes, data = search(compute, samples)
            losses = self._losses(samples, sizes, data)
        intervals = {
            name: tuple(percentile_interval(np.ravel(values), skip_nan=True).tolist())
            for name, values in (("N", sizes), ("D", data), ("loss", losses))
        }
        for name, value in (("N", N), ("D", D)):
            low, high = self.runs[name].min(), self.runs[name].max()
            if not low / FAR <= value <= high * FAR:
                warnings.warn(
                    f"the optimal {name} is {value:.3g}, far outside the runs of the fit ({low:.3g} to {high:.3g})",
                    Extrapolation,
                    stacklevel=2,
                )
        return ComputeOptimum(compute, N, D, float(self.predict(N, D)), intervals)

    def growth(self, compute: ArrayLike, flops: Flops | None = None) -> ScalingExponents:
        """Exponents of the optimal N and D over these budgets: slopes of their logarithms over the log compute."""
        budgets = np.asarray(compute, dtype=float)
        if len(np.unique(budgets)) < 2:
            raise InvalidArgument("growth is a slope; give at least two different budgets")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Extrapolation)
            optima = [self.optimal(float(budget), flops) for budget in budgets]
        slopes = [np.polyfit(np.log(budgets), np.log([getattr(each, name) for each in optima]), 1)[0] for name in "ND"]
        return ScalingExponents(*map(float, slopes))

    def plot(self, path: str | Path) -> None:
        """Plot the loss over data, a curve for each size, and over compute with the compute-optimal curve."""
        self._fitted()
        plots.scaling(self, Path(path))

    @property
    def _resamples(self) -> int:
        return len(next(iter(self.samples.values())))

    def _powers(self) -> tuple[float, float]:
        """Alpha and beta, checked to be positive.

        Raises:
            InvalidArgument: one is not positive, so that there is no optimum.
        """
        coefficients = self._fitted()
        alpha, beta = coefficients["alpha"], coefficients["beta"]
        if alpha <= 0 or beta <= 0:
            raise InvalidArgument(f"alpha is {alpha:.3g} and beta {beta:.3g}; only positive ones have an optimum")
        return alpha, beta

    def _middle(self, compute: float) -> float:
        """The optimal D for the cost 6 N D, as the center of a search."""
        return float(budgets.optimum_in_closed_form(compute, self._fitted())[1])

    @staticmethod
    def _losses(c: Mapping[str, Any], N: ArrayLike, D: ArrayLike, sparsity: ArrayLike | None = None) -> Array:
        size, data = np.asarray(N, dtype=float), np.asarray(D, dtype=float)
        if not ((size > 0).all() and (data > 0).all()):
            raise InvalidArgument("N and D must be above 0")
        if (sparsity is None) != ("lambda" not in c):
            raise InvalidArgument("sparsity is for laws of form='sparse', and those need it")
        total = c["E"] + c["A"] * size ** -c["alpha"] + c["B"] * data ** -c["beta"]
        if sparsity is not None:
            active = 1 - np.asarray(sparsity, dtype=float)
            total = total + c["C"] * active ** -c["lambda"]
            total = total + c["d"] * active ** -c["delta"] * size ** -c["gamma"]
        return np.asarray(total)

    @staticmethod
    def _matrix(runs: Mapping[str, Array], center: Mapping[str, float]) -> Array:
        """The design matrix of the log terms, which are linear in the coefficients [T, runs, P]."""
        n, d = (np.log(runs[name]) - center[name] for name in ("N", "D"))
        one, zero = np.ones_like(n), np.zeros_like(n)
        rows = [[one, zero, zero, -n, zero], [zero, one, zero, zero, -d], [zero, zero, one, zero, zero]]
        if "S" in runs:
            s = np.log(1 - runs["S"])
            rows = [row + [zero] * 5 for row in rows]
            rows += [[zero] * 5 + [one, -s, zero, zero, zero], [zero] * 5 + [zero, zero, one, -s, -n]]
        return np.asarray(rows).transpose(0, 2, 1)

    def _starts(self, level: float) -> Array:
        """Initial values: fractions of the mean loss for each term, times exponents; 432, or 128 for "sparse"."""
        starts = []
        if self.form == "chinchilla":
            powers = (0.05, 0.2, 0.5, 1.0, 1.5, 2.5)
            # E is a share of the loss, and A's term a share of the remainder
            for share_e, share_a, alpha, beta in itertools.product(
                (0.05, 0.3, 0.6, 0.9), (0.15, 0.5, 0.85), powers, powers
            ):
                shares = ((1 - share_e) * share_a, (1 - share_e) * (1 - share_a), share_e)
                starts.append([level + math.log(share) for share in shares] + [alpha, beta])
            return np.asarray(starts)
        grid = itertools.product((0.3, 0.7), (0.1, 0.3), (0.1, 0.3, 0.7, 1.2), (0.1, 0.4), (0.1, 0.4), (0.1, 0.4))
        for share_e, alpha, beta, lam, delta, gamma in grid:
            log_e, quarter = level + math.log(share_e), level + math.log((1 - share_e) / 4)
            starts.append([quarter, quarter, log_e, alpha, beta, quarter, lam, quarter, delta, gamma])
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
