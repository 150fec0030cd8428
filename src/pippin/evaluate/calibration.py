"""Calibration of predictions in a CSV file, whichever program made them.

Notable here:
- classification: one column of probabilities for each class, and one with the right label
- regression: a column of means, one of standard deviations, and one with the true values
- the scores are those of `pippin.metrics`
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pippin import metrics
from pippin.core import plotting
from pippin.core.errors import InvalidInput
from pippin.core.report import Report, Row
from pippin.evaluate.judges.votes import listed, read_csv

if TYPE_CHECKING:
    from pippin.evaluate.judges.votes import Sheet

LEVELS = (0.5, 0.8, 0.9, 0.95)
"""Nominal probabilities of the intervals whose coverage is reported."""


@dataclass(frozen=True)
class ClassificationPredictions:
    """Predicted class probabilities and the right labels of n examples.

    Attributes:
        probs: predicted probability of each class.
        labels: indices of the right classes.
        classes: names of the classes.
    """

    probs: Float[Tensor, "n classes"]
    labels: Int[Tensor, " n"]
    classes: tuple[str, ...]

    def report(self, bins: int = 15) -> Report:
        """Accuracy, proper scores, calibration error and selective error as a table.

        Args:
            bins: bins of equal width for the calibration error.

        Raises:
            InvalidInput: a row that does not sum to 1.
            InvalidArgument: fewer than one bin.
        """
        reliability = metrics.reliability_diagram(self.probs, self.labels, bins)
        confidence, answer = self.probs.max(-1)
        curve = metrics.risk_coverage_curve(confidence, answer == self.labels)
        rows = [
            Row("examples", len(self.labels)),
            Row("accuracy", metrics.accuracy(self.probs, self.labels)),
            Row("mean confidence", float(confidence.mean())),
            Row("expected calibration error", reliability.expected_calibration_error),
            Row("maximum calibration error", reliability.max_calibration_error),
            Row("negative log-likelihood", metrics.log_loss(self.probs, self.labels), "nats"),
            Row("Brier score", metrics.brier_score(self.probs, self.labels)),
            Row("error at full coverage", curve.risk_at(1.0)),
            Row("selective error at 80 % coverage", curve.risk_at(0.8)),
            Row("area under the risk-coverage curve (AURC)", curve.aurc),
        ]
        return Report("Calibration of class probabilities", rows)

    def plot(self, path: Path, bins: int = 15) -> None:
        """Plot the reliability diagram and the risk-coverage curve; the suffix chooses .png, .svg or .pdf.

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        figure, (left, right) = _figure()
        metrics.reliability_diagram(self.probs, self.labels, bins).draw(left)
        confidence, answer = self.probs.max(-1)
        metrics.risk_coverage_curve(confidence, answer == self.labels).draw(right)
        plotting.save(figure, path)


@dataclass(frozen=True)
class RegressionPredictions:
    """Gaussian predictions and the true values of n examples, in the units of the target.

    Attributes:
        mean: predicted means.
        std: predicted standard deviations, above 0.
        y: true values.
    """

    mean: Float[Tensor, " n"]
    std: Float[Tensor, " n"]
    y: Float[Tensor, " n"]

    def report(self) -> Report:
        """Root mean square error, proper scores and the coverage of central intervals as a table.

        Raises:
            InvalidInput: a standard deviation that is not above 0.
        """
        variance = self.std.square()
        rows = [
            Row("examples", len(self.y)),
            Row("root mean square error", float((self.mean - self.y).square().mean().sqrt())),
            Row("negative log-likelihood", metrics.gaussian_nll(self.mean, variance, self.y), "nats"),
            Row("continuous ranked probability score", metrics.gaussian_crps(self.mean, variance, self.y)),
        ]
        for level in LEVELS:
            found = metrics.interval_coverage(self.mean, variance, self.y, level)
            rows.append(Row(f"share inside the {level:.0%} interval", found))
        return Report("Calibration of a regression", rows)

    def plot(self, path: Path) -> None:
        """Plot coverage against nominal probability, and absolute error against predicted standard deviation.

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        figure, (left, right) = _figure()
        levels = [level / 20 for level in range(1, 20)]
        variance = self.std.square()
        found = [metrics.interval_coverage(self.mean, variance, self.y, level) for level in levels]
        left.plot([0, 1], [0, 1], color="0.4", linewidth=1, linestyle="--")
        left.plot(levels, found, "o-", color="tab:green", markersize=4)
        left.set(xlim=(0, 1), ylim=(0, 1), xlabel="probability of the interval", ylabel="share of numbers inside")
        right.loglog(self.std.numpy(), (self.y - self.mean).abs().numpy(), ".", color="tab:green", alpha=0.4)
        ends = [float(self.std.min()), float(self.std.max())]
        right.plot(ends, ends, color="0.4", linewidth=1, linestyle="--")
        right.set(xlabel="predicted standard deviation", ylabel="absolute error")
        plotting.save(figure, path)


def read_predictions(path: str | Path, *, label: str = "label") -> ClassificationPredictions | RegressionPredictions:
    """Read predictions from a CSV file.

    Args:
        path: a file with a label column and either one column of probabilities for each class, named like the label,
            or two columns ``mean`` and ``sd``. A column ``item`` is ignored.
        label: name of the column with the right label or the true value.

    Raises:
        InvalidInput: no such column, a label without a column of its own, a cell that is not a number, a standard
            deviation that is not above 0, probabilities that do not sum to 1, or fewer than two classes.
    """
    sheet = read_csv(path)
    names = [name for name in sheet.columns if name not in (label, "item")]
    if {"mean", "sd"} <= set(names):
        mean, std, y = torch.from_numpy(sheet.floats(["mean", "sd", label])).unbind(1)
        if not bool((std > 0).all()):
            row = int((std <= 0).nonzero()[0])
            raise InvalidInput(f"{path}, line {sheet.lines[row]}: the standard deviation is not above 0")
        return RegressionPredictions(mean, std, y)
    labels = _labels(sheet, label, names, path)
    if len(names) < 2:
        raise InvalidInput(f"{path} has probabilities of {len(names)} classes ({names}); give a column for each class")
    probs = torch.from_numpy(sheet.floats(names))
    invalid = ~((probs.sum(-1) - 1).abs() <= 1e-3) | (probs < 0).any(-1)
    if invalid.any():
        row = int(invalid.nonzero()[0])
        raise InvalidInput(
            f"{path}, line {sheet.lines[row]}: the probabilities add up to {float(probs[row].sum()):.4g}, or one is "
            "below 0; remove columns other than the classes', the label's and 'item'"
        )
    return ClassificationPredictions(probs, labels, tuple(names))


def _labels(sheet: Sheet, label: str, names: list[str], path: str | Path) -> Int[Tensor, " n"]:
    index_of = {name: i for i, name in enumerate(names)}
    found = sheet.texts([label])[:, 0]
    for row, text in enumerate(found):
        if text not in index_of:
            raise InvalidInput(
                f"{path}, line {sheet.lines[row]}: the label {text!r} has no column of probabilities; there are "
                f"{listed(names)}. Name each column exactly as its label"
            )
    return torch.tensor([index_of[text] for text in found])


def _figure() -> tuple[Any, Any]:
    figure = plotting.new(9, 4.5)
    return figure, figure.subplots(1, 2)
