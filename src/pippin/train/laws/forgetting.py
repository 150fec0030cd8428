r"""Forgetting laws: how much a model forgets in fine-tuning, and how much pretraining data prevents that.

Notable here:
- forgetting grows with the target data and shrinks with model size, and a share p of pretraining data acts as if the
  model were 1 + B p times as large: $L' = L_0 + A D^\beta / ((1 + B p) N)^\alpha$
- the loss before fine-tuning is measured for each model, not predicted
- goodness of fit is also reported for the forgetting alone, since the total loss is mostly the loss before
- a run is measured at the checkpoint with the lowest target loss: `forgetting_evaluation` selects it

Source: Bethune et al., arXiv:2502.06042 (the law of forgetting); the fit and the law of the target loss are ours, after
arXiv:2504.07951 and the multiplicative form of arXiv:2402.17193.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from torch import nn

from pippin.core.checks import PositiveFloat, checked
from pippin.core.errors import Extrapolation, InvalidArgument, InvalidInput
from pippin.core.report import Report, Row
from pippin.metrics import percentile_interval
from pippin.train.laws import fitting, plots
from pippin.train.laws.fitting import Array
from pippin.train.laws.law import Law
from pippin.train.trainer import Evaluation

FAR = 4.0
"""Factor over the largest model or share of the fit beyond which `required_share` warns."""
_NOISE = 0.05  # decrease of the loss in nats that still counts as noise around no forgetting

Measure = Callable[[nn.Module], Mapping[str, float]]


@dataclass(frozen=True)
class RequiredShare:
    """The share of pretraining data that limits forgetting.

    Attributes:
        share: fraction of the training data, from 0 to below 1.
        interval: the 2.5 % and 97.5 % quantiles of the resamples; NaN without resamples.
        reached: False if by the law no share is enough; ``share`` is then the largest number below 1.
    """

    share: float
    interval: tuple[float, float]
    reached: bool


class ForgettingLaw(Law):
    r"""The loss on pretraining data after fine-tuning: $L_0 + A D^\beta / ((1 + B p) N)^\alpha\;[+ E]$.

    Args:
        with_offset: whether to fit E, forgetting that neither model size nor pretraining data reduces.

    >>> N, D, p = np.meshgrid([1e6, 4e6, 16e6], [1e5, 1e6], [0.0, 0.01, 0.05])
    >>> forgotten = 2.0 * D**0.2 / ((1 + 100 * p) * N) ** 0.4
    >>> law = ForgettingLaw().fit(N.ravel(), D.ravel(), p.ravel(), 2.5, 2.5 + forgotten.ravel(), num_resamples=0)
    >>> round(law.coefficients["B"], 3), round(law.required_share(4e6, 1e6, 0.05).share, 4)
    (100.0, 0.0153)
    """

    form = "forgetting"

    def __init__(self, with_offset: bool = False) -> None:
        super().__init__()
        self.with_offset = with_offset
        self.r2_forgetting = math.nan

    def fit(
        self,
        N: ArrayLike,
        D: ArrayLike,
        p: ArrayLike,
        loss_before: ArrayLike,
        loss_after: ArrayLike,
        *,
        delta: float = 1e-3,
        num_resamples: int = 200,
        seed: int = 0,
    ) -> Self:
        """Fit the coefficients to runs of one target domain.

        Args:
            N: number of parameters of each run.
            D: unique tokens of its target data.
            p: share of pretraining data in training, from 0 to below 1.
            loss_before: loss on pretraining data before fine-tuning; one number, or one for each run.
            loss_after: the same at the checkpoint with the lowest target loss.
            delta: threshold of the Huber loss, on differences of log losses.
            num_resamples: number of bootstrap resamples of the runs; 0 for no intervals.
            seed: of the resamples.

        Raises:
            InvalidArgument: a share outside its range, a size, number of tokens or loss that is not positive, fewer
                than 8 runs, fewer than 2 different sizes or shares, or a run whose loss fell by more than 0.05.

        Warns:
            Extrapolation: an exponent is uncertain by more than 30 %, or the initial values converge differently.
        """
        after = np.atleast_1d(np.asarray(loss_after, dtype=float))
        before = np.broadcast_to(np.asarray(loss_before, dtype=float), after.shape)
        runs = fitting.columns(N=N, D=D, p=p, loss_before=before, loss_after=after)
        fitting.check_positive(**{name: runs[name] for name in ("N", "D", "loss_before", "loss_after")})
        _check_shares(runs["p"])
        fitting.check_runs(runs, 8, N=2, p=2)
        fallen = np.flatnonzero(runs["loss_after"] < runs["loss_before"] - _NOISE)
        if len(fallen):
            run = int(fallen[0])
            raise InvalidArgument(
                f"no forgetting in run {run}: its loss fell from {before[run]:.4g} to {after[run]:.4g} (and in "
                f"{len(fallen) - 1} more runs); leave such runs out"
            )
        forgotten = runs["loss_after"] - runs["loss_before"]
        if forgotten.mean() <= 0:
            raise InvalidArgument(f"no forgetting: the loss rises by {forgotten.mean():.2g} on average; nothing to fit")
        center = {name: float(np.log(runs[name]).mean()) for name in ("N", "D")}
        fitted = fitting.fit(
            self._terms(runs, center),
            runs["loss_after"],
            self._starts(float(forgotten.mean())),
            delta=delta,
            num_resamples=num_resamples,
            seed=seed,
            distinct=[(runs["N"], 2), (runs["p"], 2)] + [(runs["D"], 2)] * (len(np.unique(runs["D"])) > 1),
        )
        self._set(self._named(fitted.theta[None], center), self._named(fitted.samples, center), runs)
        fitting.warn_if_uncertain(fitted, {"alpha": (self.coefficients["alpha"], self.samples["alpha"])})
        return self

    def predict(self, N: ArrayLike, D: ArrayLike, p: ArrayLike, loss_before: ArrayLike) -> Array:
        """The loss on pretraining data after fine-tuning, in the shape of the arguments."""
        return np.asarray(loss_before, dtype=float) + self.forgetting(N, D, p)

    def forgetting(self, N: ArrayLike, D: ArrayLike, p: ArrayLike) -> Array:
        """The increase of the loss on pretraining data, in nats.

        Raises:
            NotPrepared: the law was not fitted.
            InvalidArgument: a size or number of tokens that is not positive, or a share outside its range.
        """
        return _forgotten(self._fitted(), *_checked_arrays(N, D, p))

    def band(self, N: ArrayLike, D: ArrayLike, p: ArrayLike) -> Array:
        """The 2.5 % and 97.5 % quantiles of `forgetting` [2, *shape] over the resamples; NaN without resamples."""
        size, data, share = _checked_arrays(N, D, p)
        dimensions = np.broadcast(size, data, share).ndim
        samples = {name: values.reshape(-1, *[1] * dimensions) for name, values in self.samples.items()}
        return percentile_interval(_forgotten(samples, size, data, share), skip_nan=True)

    @checked
    def required_share(self, N: float, D: float, max_forgetting: PositiveFloat) -> RequiredShare:
        r"""The share of pretraining data that keeps forgetting within a tolerance.

        $p = \big((A D^\beta / t)^{1 / \alpha} / N - 1\big) / B$, clipped to 0 and 1; t is the tolerance minus E.

        Args:
            N: number of parameters of the model.
            D: unique tokens of the target data.
            max_forgetting: allowed increase of the loss on pretraining data, in nats.

        Raises:
            InvalidArgument: a number that is not positive.
            InvalidInput: alpha is not positive, so by the fitted law more capacity does not help.

        Warns:
            Extrapolation: the model is more than 4 times as large as the largest of the fit, the share more than 4
                times the largest of the fit, or no share is enough.
        """
        coefficients = self._fitted()
        size, data, _ = _checked_arrays(N, D, 0.0)
        if coefficients["alpha"] <= 0:
            raise InvalidInput(
                f"alpha is {coefficients['alpha']:.3g}: by this law neither size nor pretraining data helps"
            )
        needed = float(_needed(coefficients, size, data, max_forgetting))
        samples = _needed(self.samples, size, data, max_forgetting)
        low, high = percentile_interval(np.clip(samples, 0, 1), skip_nan=True) if len(samples) else (math.nan, math.nan)
        max_size, max_share = self.runs["N"].max(), self.runs["p"].max()
        share = float(np.clip(needed, 0.0, np.nextafter(1.0, 0.0)))
        warning = None
        if size > FAR * max_size:
            warning = f"a model of {N:.3g} parameters is over {FAR:g} times the largest of the fit ({max_size:.3g})"
        elif needed >= 1:
            warning = f"no share of pretraining data keeps forgetting within {max_forgetting:g} nats, by this law"
        elif share > FAR * max_share:
            warning = f"a share of {share:.2g} is over {FAR:g} times the largest of the fit ({max_share:.2g})"
        if warning is not None:
            warnings.warn(warning, Extrapolation, stacklevel=2)
        return RequiredShare(share, (float(low), float(high)), needed < 1)

    def report(self) -> Report:
        """Report coefficients with standard errors, and goodness of fit of the losses and of the forgetting alone."""
        report = super().report()
        return Report(report.title, [*report.rows, Row("R2 of the forgetting", self.r2_forgetting)])

    def plot(self, path: str | Path) -> None:
        """Plot forgetting over the share of pretraining data by model size, and predicted against measured."""
        self._fitted()
        plots.forgetting(self, Path(path))

    def _set(self, coefficients: Mapping[str, Array], samples: Mapping[str, Array], runs: Mapping[str, Array]) -> None:
        super()._set(coefficients, samples, runs)
        self._measure()

    def _measure(self) -> None:
        runs = self.runs
        predicted = self.forgetting(runs["N"], runs["D"], runs["p"])
        self.goodness = fitting.goodness(runs["loss_before"] + predicted, runs["loss_after"])
        self.r2_forgetting = fitting.goodness(predicted, runs["loss_after"] - runs["loss_before"]).r2

    def _settings(self) -> dict[str, Any]:
        return {"with_offset": self.with_offset}

    def _terms(self, runs: Mapping[str, Array], center: Mapping[str, float]) -> fitting.Terms:
        """The terms of the law: loss before, forgetting, and the offset if it is fitted."""
        n, d = (np.log(runs[name]) - center[name] for name in ("N", "D"))
        share, before = runs["p"], np.log(runs["loss_before"])
        offset = self.with_offset

        def terms(theta: Array) -> tuple[Array, Array]:
            a, alpha, beta, log_b = (column[:, None] for column in theta.T[:4])
            gain = np.exp(log_b) * share
            larger = n + np.log1p(gain)
            logs = [np.broadcast_to(before, larger.shape), a + beta * d - alpha * larger]
            slopes = np.zeros((len(theta), 2 + offset, len(share), theta.shape[1]))
            slopes[:, 1, :, 0], slopes[:, 1, :, 1], slopes[:, 1, :, 2] = 1.0, -larger, d
            slopes[:, 1, :, 3] = -alpha * gain / (1 + gain)
            if offset:
                logs.append(np.broadcast_to(theta[:, 4, None], larger.shape))
                slopes[:, 2, :, 4] = 1.0
            return np.stack(logs, 1), slopes

        return terms

    def _starts(self, level: float) -> Array:
        """96 initial values around the mean forgetting ``level``; with an offset, two for each of them."""
        log_level = math.log(level)
        grid = itertools.product((-1.0, 0.0, 1.0), (0.1, 0.3, 0.6, 1.0), (0.0, 0.3), (1.0, 3.0, 5.0, 7.0))
        starts = [[log_level + shift, alpha, beta, log_b] for shift, alpha, beta, log_b in grid]
        if self.with_offset:
            starts = [[*start, log_level + math.log(fraction)] for start in starts for fraction in (0.05, 0.5)]
        return np.asarray(starts)

    @staticmethod
    def _named(theta: Array, center: Mapping[str, float]) -> dict[str, Array]:
        a, alpha, beta, log_b = theta.T[:4]
        with np.errstate(over="ignore"):
            named = {"A": np.exp(a + alpha * center["N"] - beta * center["D"]), "alpha": alpha, "beta": beta}
            named["B"] = np.exp(log_b)
            return named | ({"E": np.exp(theta[:, 4])} if theta.shape[1] > 4 else {})


class FinetuningLaw(Law):
    r"""The target loss after fine-tuning: $E + A / (((1 + B p) N)^\alpha D^\beta)$.

    Args:
        with_share: whether to fit the effect B of the share p of pretraining data; otherwise B is 0.

    >>> N, D = (x.ravel() for x in np.meshgrid([1e6, 4e6, 16e6], [1e5, 1e6, 1e7]))
    >>> law = FinetuningLaw().fit(N, D, 1.5 + 30 / (N**0.2 * D**0.1), num_resamples=0)
    >>> round(law.coefficients["alpha"], 3), round(law.coefficients["beta"], 3)
    (0.2, 0.1)
    """

    form = "finetuning"

    def __init__(self, with_share: bool = False) -> None:
        super().__init__()
        self.with_share = with_share

    def fit(
        self,
        N: ArrayLike,
        D: ArrayLike,
        loss: ArrayLike,
        p: ArrayLike | None = None,
        *,
        delta: float = 1e-3,
        num_resamples: int = 200,
        seed: int = 0,
    ) -> Self:
        """Fit the coefficients to runs; errors as in `ForgettingLaw.fit`.

        Args:
            N: number of parameters of each run.
            D: unique tokens of its target data.
            loss: its lowest target loss.
            p: share of pretraining data; None for none.
            delta: threshold of the Huber loss, on differences of log losses.
            num_resamples: number of bootstrap resamples of the runs; 0 for no intervals.
            seed: of the resamples.
        """
        shares = np.zeros(np.shape(np.atleast_1d(np.asarray(loss)))) if p is None else p
        runs = fitting.columns(N=N, D=D, p=shares, loss=loss)
        fitting.check_positive(**{name: runs[name] for name in ("N", "D", "loss")})
        _check_shares(runs["p"])
        distinct = {"N": 2, "D": 2} | ({"p": 2} if self.with_share else {})
        fitting.check_runs(runs, 8, **distinct)
        if np.ptp(runs["loss"]) == 0:
            raise InvalidArgument(f"the loss is {runs['loss'][0]:g} in every run; there is nothing to fit")
        center = {name: float(np.log(runs[name]).mean()) for name in ("N", "D")}
        n, d = (np.log(runs[name]) - center[name] for name in ("N", "D"))
        share, with_share = runs["p"], self.with_share

        def terms(theta: Array) -> tuple[Array, Array]:
            a, e, alpha, beta = (column[:, None] for column in theta.T[:4])
            gain = np.exp(theta[:, 4, None]) * share if with_share else np.zeros((len(theta), len(share)))
            larger = n + np.log1p(gain)
            slopes = np.zeros((len(theta), 2, len(share), theta.shape[1]))
            slopes[:, 0, :, 0], slopes[:, 0, :, 2], slopes[:, 0, :, 3], slopes[:, 1, :, 1] = 1.0, -larger, -d, 1.0
            if with_share:
                slopes[:, 0, :, 4] = -alpha * gain / (1 + gain)
            return np.stack([a - alpha * larger - beta * d, np.broadcast_to(e, larger.shape)], 1), slopes

        level = float(np.log(runs["loss"]).mean())
        powers, bs = (0.05, 0.2, 0.5, 1.0), ((0.0, 2.0, 5.0) if with_share else (None,))
        starts = [
            [level + math.log(1 - share_e), level + math.log(share_e), alpha, beta, *([] if b is None else [b])]
            for share_e, alpha, beta, b in itertools.product((0.1, 0.4, 0.7, 0.95), powers, powers, bs)
        ]
        fitted = fitting.fit(
            terms,
            runs["loss"],
            np.asarray(starts, dtype=float),
            delta=delta,
            num_resamples=num_resamples,
            seed=seed,
            distinct=[(runs[name], required) for name, required in distinct.items()],
        )

        def named(theta: Array) -> dict[str, Array]:
            a, e, alpha, beta = theta.T[:4]
            scale = np.exp(a + alpha * center["N"] + beta * center["D"])
            coefficients = {"E": np.exp(e), "A": scale, "alpha": alpha, "beta": beta}
            return coefficients | ({"B": np.exp(theta[:, 4])} if with_share else {})

        self._set(named(fitted.theta[None]), named(fitted.samples), runs)
        self.goodness = fitting.goodness(self.predict(N, D, runs["p"]), runs["loss"])
        fitting.warn_if_uncertain(
            fitted, {name: (self.coefficients[name], self.samples[name]) for name in ("alpha", "beta")}
        )
        return self

    def predict(self, N: ArrayLike, D: ArrayLike, p: ArrayLike = 0.0) -> Array:
        """The predicted target loss, in the shape of the arguments."""
        return _target_loss(self._fitted(), *_checked_arrays(N, D, p))

    def band(self, N: ArrayLike, D: ArrayLike, p: ArrayLike = 0.0) -> Array:
        """The 2.5 % and 97.5 % quantiles of `predict` [2, *shape] over the resamples; NaN without resamples."""
        size, data, share = _checked_arrays(N, D, p)
        dimensions = np.broadcast(size, data, share).ndim
        samples = {name: values.reshape(-1, *[1] * dimensions) for name, values in self.samples.items()}
        return percentile_interval(_target_loss(samples, size, data, share), skip_nan=True)

    def plot(self, path: str | Path) -> None:
        """Plot the target loss over the target data, a curve for each size."""
        self._fitted()
        plots.finetuning(self, Path(path))

    def _settings(self) -> dict[str, Any]:
        return {"with_share": self.with_share}


def forgetting_evaluation(target: Measure, pretraining: Measure, eval_every: int) -> Evaluation:
    """An evaluation of both losses during fine-tuning; the best checkpoint is that with the lowest target loss.

    Args:
        target: measures "loss" on held-out target data, such as `pippin.language.objectives.held_out(batches)`.
        pretraining: the same on held-out pretraining data; its metrics are logged as "pretraining loss" etc.
        eval_every: steps between evaluations.
    """

    def measure(model: nn.Module) -> Mapping[str, float]:
        metrics = {f"pretraining {name}": value for name, value in pretraining(model).items()}
        return {**target(model), **metrics}

    return Evaluation(measure, eval_every, best="loss")


def _forgotten(c: Mapping[str, Any], N: Array, D: Array, p: Array) -> Array:
    capacity = (1 + c["B"] * p) * N
    return np.asarray(c["A"] * D ** c["beta"] * capacity ** -c["alpha"] + c.get("E", 0.0))


def _target_loss(c: Mapping[str, Any], N: Array, D: Array, p: Array) -> Array:
    capacity = (1 + c.get("B", 0.0) * p) * N
    return np.asarray(c["E"] + c["A"] * capacity ** -c["alpha"] * D ** -c["beta"])


def _needed(c: Mapping[str, Any], N: Array, D: Array, tolerance: float) -> Array:
    """The share by the law, not clipped; infinite where the offset alone exceeds the tolerance."""
    margin = np.asarray(tolerance - c.get("E", 0.0))
    with np.errstate(all="ignore"):
        capacity = (c["A"] * D ** c["beta"] / np.where(margin > 0, margin, np.nan)) ** (1 / c["alpha"])
        return np.asarray(np.where(margin > 0, (capacity / N - 1) / c["B"], np.inf))


def _checked_arrays(N: ArrayLike, D: ArrayLike, p: ArrayLike) -> tuple[Array, Array, Array]:
    size, data, share = (np.asarray(value, dtype=float) for value in (N, D, p))
    for name, values in (("N", size), ("D", data)):
        if not ((values > 0) & np.isfinite(values)).all():
            raise InvalidArgument(f"{name} must be above 0 and finite, got {values.min():g}")
    _check_shares(np.atleast_1d(share))
    return size, data, share


def _check_shares(p: Array) -> None:
    bad = p[~((p >= 0) & (p < 1))]
    if len(bad):
        raise InvalidArgument(f"a share of pretraining data is {bad[0]:g}; give numbers from 0 to below 1")
