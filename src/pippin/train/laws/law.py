"""What every fitted law has: coefficients with their spread, a report, and a file.

Notable here:
- a law keeps the resamples of its coefficients and the runs that it was fitted on, so what is asked of it
  later, also by a program that only has the file, comes with an interval and knows where the runs ended
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
    """What every law has once it is fitted.

    Attributes:
        coefficients: by name, in the units of the runs.
        se: standard deviation of each over the resamples.
        intervals: from 2.5 % to 97.5 % of the resamples.
        goodness: of the predictions for the runs of the fit.
        runs: the variables of these runs.
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
        """Share of the variance of the runs' loss that is explained."""
        return self.goodness.r2

    @property
    def mae(self) -> float:
        """Mean absolute error over the runs of the fit, as a share of the loss."""
        return self.goodness.mae

    def _take(self, coefficients: Mapping[str, Array], samples: Mapping[str, Array], runs: Mapping[str, Array]) -> None:
        """Keep what was found: each coefficient, and its values over the resamples."""
        self.runs = dict(runs)
        self.samples = dict(samples)
        self.coefficients = {name: float(np.ravel(value)[0]) for name, value in coefficients.items()}
        self.se, self.intervals = {}, {}
        for name, values in samples.items():
            self.se[name] = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
            low, high = percentile_interval(values, skip_nan=True)
            self.intervals[name] = (float(low), float(high))

    def _known(self) -> dict[str, float]:
        if not self.coefficients:
            raise NotPrepared(f"this {type(self).__name__} was not fitted; call fit first, or load one with load_law")
        return self.coefficients

    def report(self) -> Report:
        """Coefficients with their spread, and how well they fit the runs."""
        rows = [
            Row(name, value, "", None if math.isnan(self.se[name]) else self.se[name])
            for name, value in self._known().items()
        ]
        fits = [Row("runs", len(next(iter(self.runs.values()))))]
        fits += [Row("R2", self.goodness.r2), Row("mean absolute error", 100 * self.goodness.mae, "%")]
        return Report(f"{self.form} law", rows + fits)

    def to_json(self) -> dict[str, Any]:
        """The law as JSON values: coefficients, resamples and the runs of the fit."""
        return {
            "form": self.form,
            "settings": self._settings(),
            "coefficients": self._known(),
            "samples": fitting.plain(self.samples),
            "goodness": asdict(self.goodness),
            "runs": fitting.plain(self.runs),
        }

    def _settings(self) -> dict[str, Any]:
        """The arguments that make such a law."""
        return {}

    def save(self, path: str | Path) -> None:
        """Write the law to a file, whole or not at all."""
        text = json.dumps(self.to_json(), allow_nan=False)
        with atomic_write(Path(path)) as file:
            file.write(f"{text}\n".encode())

    def plot(self, path: str | Path) -> None:
        """Draw runs, curves and their bands; the suffix chooses the format (.png, .svg, .pdf).

        Raises:
            NotPrepared: the law was not fitted.
            MissingDependency: matplotlib is not installed.
        """
        raise NotImplementedError
