"""Calibration of a classifier: reliability diagram and expected calibration error.

Notable here:
- bins have equal width, and a confidence on a border belongs to the lower bin, as in the source
- the input is class probabilities and labels, or the confidence of each answer and whether it was right

Source: Guo, Pleiss, Sun, Weinberger, arXiv:1706.04599, equations 2 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pippin.core import plotting
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidInput
from pippin.metrics.classification import checked_probs

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class ReliabilityDiagram:
    """Accuracy against confidence, in bins of confidence.

    Attributes:
        edges: borders of the bins, from 0 to 1.
        confidence: mean confidence in each bin; NaN where it is empty.
        accuracy: share of right answers in each bin; NaN where it is empty.
        count: answers in each bin.
    """

    edges: Float[Tensor, " edges"]
    confidence: Float[Tensor, " bins"]
    accuracy: Float[Tensor, " bins"]
    count: Int[Tensor, " bins"]

    @classmethod
    @checked
    def from_confidence(
        cls,
        confidence: Sequence[float] | Float[Tensor, " n"] | Any,
        correct: Sequence[bool] | Tensor | Any,
        num_bins: PositiveInt = 15,
    ) -> ReliabilityDiagram:
        """Make the diagram from the confidence and correctness of each answer.

        Args:
            confidence: probability of the answer that was given, in [0, 1]; a tensor, an array or a list.
            correct: whether that answer was right.
            num_bins: number of bins of equal width.

        Raises:
            InvalidArgument: ``num_bins`` below 1.
            InvalidInput: no answers, different lengths, or a confidence outside [0, 1].

        >>> confidence, correct = [0.9, 0.9, 0.9, 0.9], [True, True, True, False]
        >>> round(ReliabilityDiagram.from_confidence(confidence, correct).expected_calibration_error, 3)
        0.15
        """
        given = torch.as_tensor(confidence, dtype=torch.float64).detach().cpu()
        right = torch.as_tensor(correct).detach().double().cpu()
        if given.ndim != 1 or not len(given) or given.shape != right.shape:
            raise InvalidInput(
                f"confidence and correct must have the same length, at least 1, got {tuple(given.shape)} and "
                f"{tuple(right.shape)}"
            )
        wrong = ~((given >= 0) & (given <= 1))
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise InvalidInput(f"confidence {row} is {float(given[row]):g}; a probability is between 0 and 1")
        edges = torch.linspace(0, 1, num_bins + 1, dtype=torch.float64)
        index = (torch.bucketize(given, edges, right=False) - 1).clamp(0, num_bins - 1)
        count = torch.bincount(index, minlength=num_bins)
        total = torch.bincount(index, weights=given, minlength=num_bins)
        hits = torch.bincount(index, weights=right, minlength=num_bins)
        return cls(edges, total / count, hits / count, count)

    @property
    def expected_calibration_error(self) -> float:
        """Expected calibration error (ECE): mean gap between confidence and accuracy of bins, by count; in 0..1."""
        full = self.count > 0
        gaps = (self.confidence - self.accuracy).abs()[full]
        return float((gaps * self.count[full]).sum() / self.count.sum())

    @property
    def max_calibration_error(self) -> float:
        """Maximum calibration error: the largest gap of a bin that is not empty; in 0..1."""
        return float((self.confidence - self.accuracy).abs()[self.count > 0].max())

    def draw(self, axes: Axes) -> None:
        """Draw the diagram on matplotlib axes: bars of accuracy, shaded by their counts, and the diagonal."""
        width = (self.edges[1:] - self.edges[:-1]).numpy()
        shares = (self.count / self.count.max()).clamp(min=0.15).numpy()
        heights = self.accuracy.nan_to_num(0.0).numpy()
        bars = axes.bar(self.edges[:-1].numpy(), heights, width, align="edge", color="tab:green", edgecolor="white")
        for bar, share in zip(bars, shares, strict=True):
            bar.set_alpha(float(share))
        axes.plot([0, 1], [0, 1], color="0.4", linewidth=1, linestyle="--")
        axes.plot(self.confidence.numpy(), self.accuracy.numpy(), "o", color="tab:red", markersize=4)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
        axes.set_title(f"ECE {self.expected_calibration_error:.3f}")

    def plot(self, path: Path) -> None:
        """Write the diagram to a file, whose suffix chooses the format (.png, .svg, .pdf).

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        figure = plotting.new(4.5, 4.5)
        self.draw(figure.subplots())
        plotting.save(figure, path)


def reliability_diagram(
    probs: Float[Tensor, "n classes"], labels: Int[Tensor, " n"], num_bins: int = 15
) -> ReliabilityDiagram:
    """The reliability diagram of the most probable class of each row.

    Args:
        probs: predicted probabilities.
        labels: right classes.
        num_bins: number of bins of equal width.

    Raises:
        InvalidArgument: ``num_bins`` below 1.
        InvalidInput: no rows, rows that do not sum to 1, or labels out of range.
    """
    probs, labels = checked_probs(probs, labels)
    confidence, answer = probs.max(-1)
    return ReliabilityDiagram.from_confidence(confidence.clamp(max=1.0), answer == labels, num_bins)


def expected_calibration_error(
    probs: Float[Tensor, "n classes"], labels: Int[Tensor, " n"], num_bins: int = 15
) -> float:
    """Expected calibration error (ECE) of the most probable class; in 0..1.

    With few examples it is biased upwards: a perfectly calibrated classifier has about sqrt(num_bins / n) / 3.

    Raises:
        InvalidArgument: ``num_bins`` below 1.
        InvalidInput: see `reliability_diagram`.

    >>> round(expected_calibration_error(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1])), 6)
    0.4
    """
    return reliability_diagram(probs, labels, num_bins).expected_calibration_error
