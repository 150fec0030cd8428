"""The base class of fitted laws: coefficients with intervals, a report, and a file.

Notable here:
- a law stores the resamples of its coefficients and the runs of its fit, so predictions have intervals and
  extrapolation is noticed, also in a program that loads it from a file
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pippin.core.errors import NotPrepared
from pippin.core.files import atomic_write
from pippin.core.report import Report, Row
from pippin.metrics import percentile_interval
from pippin.train.laws import fitting
from pippin.train.laws.fitting import Array


class Law:
    """A fitted law.

    Attributes:
        coefficients: by name, in the units of the runs.
        se: standard error of each coefficient: the standard deviation over the resamples.
        intervals: the 2.5 % and 97.5 % quantiles of the resamples, by coefficient.
        goodness: goodness of fit on the runs.
        runs: the variables of the runs.
        samples: the coefficients of the resamples.
    """

    form: str

    def __init__(self) -> None:
        self.coefficients: dict[str, float] = {}
        self.se: dict[str, float] = {}
        self.intervals: dict[str, tuple[float, float]] = {}
        self.goodness = fitting.Goodness(math.nan, math.nan, math.nan)
        self.runs: dict[str, Array] = {}
        self.samples: dict[str, Array] = {}

    @property
    def r2(self) -> float:
        """Coefficient of determination of the runs' loss."""
        return self.goodness.r2

    @property
    def mae(self) -> float:
        """Mean relative absolute error over the runs of the fit."""
        return self.goodness.mae

    def _set(self, coefficients: Mapping[str, Array], samples: Mapping[str, Array], runs: Mapping[str, Array]) -> None:
        """Set the fitted coefficients and compute their standard errors and intervals from the resamples."""
        self.runs = dict(runs)
        self.samples = dict(samples)
        self.coefficients = {name: float(np.ravel(value)[0]) for name, value in coefficients.items()}
        self.se, self.intervals = {}, {}
        for name, values in samples.items():
            self.se[name] = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
            low, high = percentile_interval(values, skip_nan=True)
            self.intervals[name] = (float(low), float(high))

    def _fitted(self) -> dict[str, float]:
        """The coefficients.

        Raises:
            NotPrepared: the law was not fitted.
        """
        if not self.coefficients:
            raise NotPrepared(f"this {type(self).__name__} was not fitted; call fit first, or load one with load_law")
        return self.coefficients

    def report(self) -> Report:
        """Report the coefficients with their standard errors, and the goodness of fit."""
        rows = [
            Row(name, value, "", None if math.isnan(self.se[name]) else self.se[name])
            for name, value in self._fitted().items()
        ]
        rows += [Row("runs", len(next(iter(self.runs.values()))))]
        rows += [Row("R2", self.goodness.r2), Row("mean absolute error", 100 * self.goodness.mae, "%")]
        return Report(f"{self.form} law", rows)

    def to_json(self) -> dict[str, Any]:
        """The law as JSON values: coefficients, resamples and the runs of the fit."""
        return {
            "form": self.form,
            "settings": self._settings(),
            "coefficients": self._fitted(),
            "samples": fitting.plain(self.samples),
            "goodness": asdict(self.goodness),
            "runs": fitting.plain(self.runs),
        }

    def _settings(self) -> dict[str, Any]:
        """The constructor arguments of the law."""
        return {}

    def save(self, path: str | Path) -> None:
        """Write the law to a JSON file, atomically."""
        text = json.dumps(self.to_json(), allow_nan=False)
        with atomic_write(Path(path)) as file:
            file.write(f"{text}\n".encode())

    def plot(self, path: str | Path) -> None:
        """Plot runs, curves and their intervals; the suffix determines the format (.png, .svg, .pdf).

        Raises:
            NotPrepared: the law was not fitted.
            MissingDependency: matplotlib is not installed.
        """
        raise NotImplementedError
