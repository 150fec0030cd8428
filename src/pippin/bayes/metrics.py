"""Scores of predictions that say how sure they are: calibration, proper scores, ranking, selective prediction.

Notable here:
- everything is computed in float64, whatever comes in, and returned as a float or as a small frozen result
- a ranking score takes two sets of scores, what should rank high first; ties count half, as in the Mann-Whitney test
- probabilities are checked once, at the door: what does not add up to 1, NaN and foreign labels are named
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from pippin.core import figures
from pippin.core.errors import InvalidArgument, InvalidInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FLOOR = 1e-12
"""No probability counts as less than this in a logarithm, so that one wrong certainty does not make a mean infinite."""


@dataclass(frozen=True)
class Reliability:
    """How often predictions of each confidence come true.

    Attributes:
        edges: borders of the bins of confidence, from 0 to 1.
        confidence: mean confidence in each bin; NaN where it is empty.
        accuracy: share that came true in each bin; NaN where it is empty.
        count: predictions in each bin.
    """

    edges: Float[Tensor, " edges"]
    confidence: Float[Tensor, " bins"]
    accuracy: Float[Tensor, " bins"]
    count: Int[Tensor, " bins"]

    @property
    def error(self) -> float:
        """Expected calibration error: the gap of each bin, weighted by its count; in 0..1."""
        full = self.count > 0
        gaps = (self.confidence - self.accuracy).abs()[full]
        return float((gaps * self.count[full]).sum() / self.count.sum())

    @property
    def worst(self) -> float:
        """Maximum calibration error: the largest gap of a bin that is not empty; in 0..1."""
        return float((self.confidence - self.accuracy).abs()[self.count > 0].max())

    def draw(self, axes: Axes) -> None:
        """The diagram on axes of yours: bars of accuracy, the diagonal, the counts as shade."""
        width = (self.edges[1:] - self.edges[:-1]).numpy()
        shares = (self.count / self.count.max()).clamp(min=0.15).numpy()
        heights = self.accuracy.nan_to_num(0.0).numpy()
        bars = axes.bar(self.edges[:-1].numpy(), heights, width, align="edge", color="tab:green", edgecolor="white")
        for bar, share in zip(bars, shares, strict=True):
            bar.set_alpha(float(share))
        axes.plot([0, 1], [0, 1], color="0.4", linewidth=1, linestyle="--")
        axes.plot(self.confidence.numpy(), self.accuracy.numpy(), "o", color="tab:red", markersize=4)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
        axes.set_title(f"calibration error {self.error:.3f}")

    def plot(self, path: Path) -> None:
        """Write the diagram; the suffix chooses the format (.png, .svg, .pdf).

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        _plot(self.draw, path)


@dataclass(frozen=True)
class SelectiveCurve:
    """The error that is left when the least confident predictions are withheld.

    Attributes:
        coverage: share of predictions that are given, rising to 1.
        risk: share of those that are wrong.
        area: mean risk over all coverages, in 0..1; less is better.
    """

    coverage: Float[Tensor, " n"]
    risk: Float[Tensor, " n"]
    area: float

    def at(self, coverage: float) -> float:
        """The risk where at least this share of the predictions is given.

        Raises:
            InvalidArgument: the coverage is not in (0, 1].
        """
        if not 0 < coverage <= 1:
            raise InvalidArgument(f"coverage is a share above 0 and at most 1, got {coverage}")
        return float(self.risk[math.ceil(coverage * len(self.risk) - 1e-9) - 1])

    def draw(self, axes: Axes) -> None:
        """The curve on axes of yours."""
        axes.plot(self.coverage.numpy(), self.risk.numpy(), color="tab:green")
        axes.set(xlim=(0, 1), xlabel="share of predictions given", ylabel="share of them wrong")
        axes.set_ylim(bottom=0)
        axes.set_title(f"selective prediction, area {self.area:.3f}")

    def plot(self, path: Path) -> None:
        """Write the curve; the suffix chooses the format (.png, .svg, .pdf).

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        _plot(self.draw, path)


def accuracy(probs: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    """Share of rows whose largest probability is that of the label."""
    probs, labels = _checked(probs, labels)
    return float((probs.argmax(-1) == labels).double().mean())


def nll(probs: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    """Mean negative log-likelihood of the labels, in nats; probabilities below 1e-12 count as that.

    >>> round(nll(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 1])), 4)
    0.4904
    """
    probs, labels = _checked(probs, labels)
    return float(-probs.gather(-1, labels[:, None]).clamp(min=_FLOOR).log().mean())


def brier(probs: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    """Mean squared distance of the probabilities from the one-hot label, summed over the classes; in 0..2."""
    probs, labels = _checked(probs, labels)
    truth = torch.nn.functional.one_hot(labels, probs.shape[1])
    return float((probs - truth).square().sum(-1).mean())


def reliability(probs: Float[Tensor, "n classes"], labels: Int[Tensor, " n"], bins: int = 15) -> Reliability:
    """Confidence of the most probable class against how often it is right, in bins of equal width.

    A confidence on a border belongs to the lower bin, as in the source.

    Raises:
        InvalidArgument: fewer than one bin.
        InvalidInput: no rows, rows that do not add up to 1, labels out of range.

    Source: Guo, Pleiss, Sun, Weinberger, arXiv:1706.04599, equations 2 and 3.
    """
    if bins < 1:
        raise InvalidArgument(f"bins is at least 1, got {bins}")
    probs, labels = _checked(probs, labels)
    confidence, chosen = probs.max(-1)
    right = (chosen == labels).double()
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    place = (torch.bucketize(confidence, edges, right=False) - 1).clamp(0, bins - 1)
    count = torch.bincount(place, minlength=bins)
    total = torch.bincount(place, weights=confidence, minlength=bins)
    hits = torch.bincount(place, weights=right, minlength=bins)
    return Reliability(edges, total / count, hits / count, count)


def ece(probs: Float[Tensor, "n classes"], labels: Int[Tensor, " n"], bins: int = 15) -> float:
    """Expected calibration error of the most probable class, in bins of equal width; in 0..1.

    It is biased upwards on few examples: a perfect forecaster has about sqrt(bins / n) / 3.

    >>> round(ece(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1])), 6)
    0.4
    """
    return reliability(probs, labels, bins).error


def entropy(probs: Float[Tensor, "*shape classes"]) -> Float[Tensor, "*shape"]:
    """Entropy of each row, in nats; 0 log 0 is 0."""
    parts: Tensor = torch.special.entr(probs)
    return parts.sum(-1)


def auroc(positive: Shaped[Tensor, " p"], negative: Shaped[Tensor, " n"]) -> float:
    """Probability that a positive's score lies above a negative's, ties half: area under the ROC curve.

    Raises:
        InvalidInput: either is empty or holds NaN.

    >>> auroc(torch.tensor([0.9, 0.5]), torch.tensor([0.1, 0.5]))
    0.875
    """
    positive, negative = _scores(positive), _scores(negative)
    ranked = negative.sort().values
    below = torch.searchsorted(ranked, positive, right=False)
    up_to = torch.searchsorted(ranked, positive, right=True)
    return float((below + up_to).double().mean() / (2 * len(ranked)))


def auprc(positive: Shaped[Tensor, " p"], negative: Shaped[Tensor, " n"]) -> float:
    """Average precision: precision at each recall that is reached, weighted by its step; in 0..1."""
    positive, negative = _scores(positive), _scores(negative)
    scores, order = torch.cat([positive, negative]).sort(descending=True)
    hit = (order < len(positive)).double().cumsum(0)
    last = torch.cat([scores[1:] != scores[:-1], torch.tensor([True])])  # equal scores are one threshold
    hit, taken = hit[last], torch.arange(1, len(scores) + 1)[last]
    recall = hit / len(positive)
    return float(((hit / taken) * torch.diff(recall, prepend=torch.zeros(1, dtype=torch.float64))).sum())


def fpr_at_tpr(positive: Shaped[Tensor, " p"], negative: Shaped[Tensor, " n"], tpr: float = 0.95) -> float:
    """Share of negatives that pass the highest threshold which at least ``tpr`` of the positives pass.

    Raises:
        InvalidArgument: the rate is not in (0, 1].
    """
    if not 0 < tpr <= 1:
        raise InvalidArgument(f"tpr is a rate above 0 and at most 1, got {tpr}")
    positive, negative = _scores(positive), _scores(negative)
    kept = math.ceil(tpr * len(positive) - 1e-9)
    threshold = positive.sort(descending=True).values[kept - 1]
    return float((negative >= threshold).double().mean())


def selective(confidence: Shaped[Tensor, " n"], correct: Shaped[Tensor, " n"]) -> SelectiveCurve:
    """Risk against coverage when predictions are given from the most confident down; ties share their mean risk.

    Args:
        confidence: higher is surer; any scale.
        correct: true or 1 where the prediction was right.

    Source: Geifman and El-Yaniv, arXiv:1705.08500, section 2.
    """
    confidence = _scores(confidence)
    if len(correct) != len(confidence):
        raise InvalidInput(f"{len(confidence)} confidences for {len(correct)} outcomes")
    ranked, order = confidence.sort(descending=True, stable=True)
    wrong = 1 - correct.double().cpu()[order]
    _, group = torch.unique_consecutive(ranked, return_inverse=True)
    sizes = torch.bincount(group).double()
    wrong = (torch.bincount(group, weights=wrong) / sizes)[group]
    taken = torch.arange(1, len(wrong) + 1, dtype=torch.float64)
    risk = wrong.cumsum(0) / taken
    return SelectiveCurve(taken / len(wrong), risk, float(risk.mean()))


def gaussian_nll(mean: Float[Tensor, "*shape"], variance: Float[Tensor, "*shape"], y: Float[Tensor, "*shape"]) -> float:
    """Mean negative log density of ``y`` under independent Gaussians, in nats for each number."""
    mean, variance, y = _moments(mean, variance, y)
    return float(0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi)).mean())


def gaussian_crps(
    mean: Float[Tensor, "*shape"], variance: Float[Tensor, "*shape"], y: Float[Tensor, "*shape"]
) -> float:
    """Mean continuous ranked probability score of Gaussians, in the units of ``y``; less is better.

    Source: Gneiting and Raftery (2007), equation 21.
    """
    mean, variance, y = _moments(mean, variance, y)
    sd = variance.sqrt()
    z = (y - mean) / sd
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return float((sd * (z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))).mean())


def interval_coverage(
    mean: Float[Tensor, "*shape"], variance: Float[Tensor, "*shape"], y: Float[Tensor, "*shape"], level: float = 0.95
) -> float:
    """Share of ``y`` inside the central interval that a Gaussian gives this probability.

    Raises:
        InvalidArgument: the level is not between 0 and 1.
    """
    if not 0 < level < 1:
        raise InvalidArgument(f"level is a probability between 0 and 1, got {level}")
    mean, variance, y = _moments(mean, variance, y)
    half = torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64))
    return float(((y - mean).abs() <= half * variance.sqrt()).double().mean())


def _checked(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Both on the CPU, in double precision; refused where they are no probabilities and labels of one set."""
    if probs.ndim != 2 or not len(probs) or probs.shape[1] < 2:
        raise InvalidInput(f"probabilities are (n, classes) with n >= 1 and classes >= 2, got {tuple(probs.shape)}")
    if labels.shape != probs.shape[:1]:
        raise InvalidInput(f"labels of shape {tuple(labels.shape)} for {len(probs)} rows of probabilities")
    if labels.is_floating_point() or labels.is_complex():
        raise InvalidInput(f"labels are whole numbers, got {labels.dtype}")
    probs, labels = probs.detach().double().cpu(), labels.detach().long().cpu()
    off = ~((probs.sum(-1) - 1).abs() <= 1e-3) | ~(probs >= -1e-6).all(-1)
    if off.any():
        row = int(off.nonzero()[0])
        raise InvalidInput(
            f"row {row} is no distribution (it adds up to {float(probs[row].sum()):.4g}); give probabilities, "
            f"not logits: logits.softmax(-1)"
        )
    if int(labels.min()) < 0 or int(labels.max()) >= probs.shape[1]:
        raise InvalidInput(f"labels from {int(labels.min())} to {int(labels.max())} for {probs.shape[1]} classes")
    return probs, labels


def _scores(values: Tensor) -> Tensor:
    if values.ndim != 1 or not len(values):
        raise InvalidInput(f"scores are one number for each example, at least one; got shape {tuple(values.shape)}")
    values = values.detach().double().cpu()
    if values.isnan().any():
        raise InvalidInput(f"score {int(values.isnan().nonzero()[0])} is NaN")
    return values


def _moments(mean: Tensor, variance: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not mean.shape == variance.shape == y.shape or not mean.numel():
        raise InvalidInput(
            f"mean, variance and y have one shape and are not empty, got {tuple(mean.shape)}, "
            f"{tuple(variance.shape)} and {tuple(y.shape)}"
        )
    mean, variance, y = (part.detach().double().cpu() for part in (mean, variance, y))
    if not bool((variance > 0).all()) or not bool(torch.stack([mean, variance, y]).isfinite().all()):
        raise InvalidInput("mean and y are finite and variances are finite and above 0; at least one number is not")
    return mean, variance, y


def _plot(draw: Any, path: Path) -> None:
    figure = figures.new(4.5, 4.5)
    draw(figure.subplots())
    figures.save(figure, path)
