"""Calibration of predictions that stand in a CSV file, whatever program made them.

Notable here:
- for classes: one column of probabilities for each class, and one that says which it was
- for a number: a mean, a standard deviation, and what it was
- the scores are those of `pippin.bayes.metrics`
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pippin.bayes import metrics
from pippin.core import figures
from pippin.core.errors import InvalidInput
from pippin.core.report import Report, Row
from pippin.evaluate.votes import listed, read_csv

if TYPE_CHECKING:
    from pippin.evaluate.votes import Sheet

LEVELS = (0.5, 0.8, 0.9, 0.95)
"""Probabilities of the intervals whose coverage is told."""


@dataclass(frozen=True)
class ClassPredictions:
    """Probabilities of classes, and what came true.

    Attributes:
        probs: of each class.
        labels: the place of the right class.
        classes: their names.
    """

    probs: Float[Tensor, "n classes"]
    labels: Int[Tensor, " n"]
    classes: tuple[str, ...]

    def report(self, bins: int = 15) -> Report:
        """Accuracy, proper scores, calibration and selective risk.

        Raises:
            InvalidInput: a row that does not add up to 1.
            InvalidArgument: fewer than one bin.
        """
        reliability = metrics.reliability(self.probs, self.labels, bins)
        confidence, answer = self.probs.max(-1)
        curve = metrics.selective(confidence, answer == self.labels)
        rows = [
            Row("examples", len(self.labels)),
            Row("accuracy", metrics.accuracy(self.probs, self.labels)),
            Row("mean confidence", float(confidence.mean())),
            Row("expected calibration error", reliability.error),
            Row("maximum calibration error", reliability.worst),
            Row("negative log-likelihood", metrics.nll(self.probs, self.labels), "nats"),
            Row("Brier score", metrics.brier(self.probs, self.labels)),
            Row("share wrong, all given", curve.at(1.0)),
            Row("share wrong, surest 80 %", curve.at(0.8)),
            Row("area under risk and coverage", curve.area),
        ]
        return Report("Calibration of classes", rows)

    def plot(self, path: Path, bins: int = 15) -> None:
        """Draw reliability and selective risk; the suffix chooses the format (.png, .svg, .pdf).

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        figure, (left, right) = _figure()
        metrics.reliability(self.probs, self.labels, bins).draw(left)
        confidence, answer = self.probs.max(-1)
        metrics.selective(confidence, answer == self.labels).draw(right)
        figures.save(figure, path)


@dataclass(frozen=True)
class NumberPredictions:
    """Gaussian predictions of a number, and what it was, in its own units."""

    mean: Float[Tensor, " n"]
    sd: Float[Tensor, " n"]
    y: Float[Tensor, " n"]

    def report(self) -> Report:
        """Error, proper scores and the coverage of intervals.

        Raises:
            InvalidInput: a standard deviation that is not above 0.
        """
        variance = self.sd.square()
        rows = [
            Row("examples", len(self.y)),
            Row("root mean square error", float((self.mean - self.y).square().mean().sqrt())),
            Row("negative log-likelihood", metrics.gaussian_nll(self.mean, variance, self.y), "nats"),
            Row("continuous ranked probability score", metrics.gaussian_crps(self.mean, variance, self.y)),
        ]
        for level in LEVELS:
            found = metrics.interval_coverage(self.mean, variance, self.y, level)
            rows.append(Row(f"share inside the {level:.0%} interval", found))
        return Report("Calibration of a number", rows)

    def plot(self, path: Path) -> None:
        """Draw coverage against nominal probability, and errors against their predicted size.

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        figure, (left, right) = _figure()
        levels = [level / 20 for level in range(1, 20)]
        variance = self.sd.square()
        found = [metrics.interval_coverage(self.mean, variance, self.y, level) for level in levels]
        left.plot([0, 1], [0, 1], color="0.4", linewidth=1, linestyle="--")
        left.plot(levels, found, "o-", color="tab:green", markersize=4)
        left.set(xlim=(0, 1), ylim=(0, 1), xlabel="probability of the interval", ylabel="share of numbers inside")
        right.loglog(self.sd.numpy(), (self.y - self.mean).abs().numpy(), ".", color="tab:green", alpha=0.4)
        ends = [float(self.sd.min()), float(self.sd.max())]
        right.plot(ends, ends, color="0.4", linewidth=1, linestyle="--")
        right.set(xlabel="predicted standard deviation", ylabel="absolute error")
        figures.save(figure, path)


def read_predictions(path: str | Path, *, label: str = "label") -> ClassPredictions | NumberPredictions:
    """Predictions of a CSV file.

    Args:
        path: a file with a column ``label`` and either one column for each class, named as in ``label``, that holds its
            probability, or two columns ``mean`` and ``sd``. The column ``item`` is left out, if there is one.
        label: the name of the column that says what came true.

    Raises:
        InvalidInput: no such column, a label without a column of its own, a cell that is no number, one class.
    """
    sheet = read_csv(path)
    names = [name for name in sheet.columns if name not in (label, "item")]
    if {"mean", "sd"} <= set(names):
        numbers = torch.from_numpy(sheet.numbers(["mean", "sd", label]))
        if not bool((numbers[:, 1] > 0).all()):
            row = int((numbers[:, 1] <= 0).nonzero()[0])
            raise InvalidInput(f"{path}, line {sheet.lines[row]}: the standard deviation is not above 0")
        return NumberPredictions(numbers[:, 0], numbers[:, 1], numbers[:, 2])
    labels = _labels(sheet, label, names, path)
    if len(names) < 2:
        raise InvalidInput(f"{path} has probabilities of {len(names)} classes ({names}); give a column for each class")
    probs = torch.from_numpy(sheet.numbers(names))
    off = ~((probs.sum(-1) - 1).abs() <= 1e-3) | (probs < 0).any(-1)
    if off.any():
        row = int(off.nonzero()[0])
        raise InvalidInput(
            f"{path}, line {sheet.lines[row]}: the probabilities add up to {float(probs[row].sum()):.4g}, or one is "
            "below 0; columns other than the classes', the label's and 'item' must go"
        )
    return ClassPredictions(probs, labels, tuple(names))


def _labels(sheet: Sheet, label: str, names: list[str], path: str | Path) -> Int[Tensor, " n"]:
    places = {name: i for i, name in enumerate(names)}
    found = sheet.texts([label])[:, 0]
    for row, text in enumerate(found):
        if text not in places:
            raise InvalidInput(
                f"{path}, line {sheet.lines[row]}: the label {text!r} has no column of probabilities; there are "
                f"{listed(names)}. Call each column as its label is written"
            )
    return torch.tensor([places[text] for text in found])


def _figure() -> tuple[Any, Any]:
    figure = figures.new(9, 4.5)
    return figure, figure.subplots(1, 2)
