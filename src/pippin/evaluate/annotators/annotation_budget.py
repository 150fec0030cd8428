"""How many annotations per item are enough: metrics over the number of votes, and where they saturate.

Notable here:
- the answer differs by metric: KL divergence saturates with about ten votes, the ranking of items by ambiguity later
- the gain of a size is measured per seed, as a share of the gain from the fewest votes to the most
- test items keep all their votes, and none of them is trained on
- without inputs to train on, `annotation_curve` compares some votes of an item with other votes of the same item
"""

from __future__ import annotations

import json
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pippin.bayes.predictors.temperature_scaling import fit_temperature
from pippin.core import plotting as figures
from pippin.core.checks import Fraction, OpenFraction, PositiveInt, Probability, checked
from pippin.core.errors import InferenceAtRisk, InvalidArgument, InvalidInput
from pippin.core.report import Report, Row
from pippin.evaluate.annotators.soft_labels import (
    METRICS,
    SoftLabelFit,
    annotations_to_distribution,
    check_counts,
    distribution_metrics,
    hard_labels,
    nested_annotations,
    smoothed_labels,
)
from pippin.metrics import entropy, mean_interval

SIZES = (1, 2, 3, 5, 10, 20, 50, 100)
SMOOTHING = (0.05, 0.1, 0.2, 0.3, 0.4)


@dataclass(frozen=True)
class BudgetPoint:
    """The value of one metric of one trained model.

    Attributes:
        target: the training target: "votes", "hard", "smoothing 0.1", "temperature".
        size: votes per item; the largest number in the data for targets made from the majority label of all votes.
        seed: seed of the model.
        subsample: index of the subsample of votes.
        metric: name of the metric, see `distribution_metrics`.
        value: value of the metric; NaN where it is undefined.
    """

    target: str
    size: int
    seed: int
    subsample: int
    metric: str
    value: float


@dataclass(frozen=True)
class Saturation:
    """The number of votes at which a metric saturates.

    Attributes:
        metric: name of the metric.
        share: the requested share of the gain from the fewest votes to the most.
        size: the fewest votes whose mean share reaches ``share`` and whose 95 % interval over seeds reaches
            ``1 - margin``; None if only the largest number does, as there is nothing beyond to compare it with.
        shares: the share of the gain for each seed, by number of votes.
    """

    metric: str
    share: float
    size: int | None
    shares: dict[int, tuple[float, ...]]


class BudgetReport:
    """Metrics over the number of votes per item.

    Args:
        title: title of tables and plots.
        figures: one point for each model, subsample and metric.
    """

    def __init__(self, title: str, figures: Sequence[BudgetPoint]) -> None:
        self.title, self.figures = title, tuple(figures)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of votes per item that were tried, ascending."""
        return tuple(sorted({figure.size for figure in self.figures if figure.target == "votes"}))

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return tuple(dict.fromkeys(figure.metric for figure in self.figures))

    @property
    def targets(self) -> tuple[str, ...]:
        """The training targets other than votes."""
        return tuple(dict.fromkeys(figure.target for figure in self.figures if figure.target != "votes"))

    def values(self, metric: str, size: int | None = None, target: str = "votes") -> tuple[float, ...]:
        """The values of a metric, one for each seed: the mean over its subsamples.

        Args:
            metric: name of the metric.
            size: votes per item; None takes all sizes.
            target: the training target.

        Raises:
            InvalidArgument: there are no such points.
        """
        chosen: dict[int, list[float]] = {}
        for figure in self.figures:
            if figure.metric == metric and figure.target == target and size in (None, figure.size):
                chosen.setdefault(figure.seed, []).append(figure.value)
        if not chosen:
            raise InvalidArgument(
                f"no {metric!r} of {target!r} with {size} votes was measured; metrics: {', '.join(self.metrics)}; "
                f"sizes: {', '.join(map(str, self.sizes))}; targets: {', '.join(('votes', *self.targets))}"
            )
        return tuple(statistics.fmean(values) for values in chosen.values())

    @checked
    def saturation(self, metric: str, share: OpenFraction = 0.9, margin: Fraction = 0.05) -> Saturation:
        """The number of votes that reaches a share of the gain from the fewest votes to the most.

        Args:
            metric: name of the metric.
            share: share of the gain to reach, above 0 and below 1.
            margin: how far below 1 the upper end of the 95 % interval over seeds may lie.

        Raises:
            InvalidArgument: fewer than three sizes, or a metric that was not measured.

        Warns:
            InferenceAtRisk: on some seed the most votes are no better than the fewest, so that shares mean little.
        """
        # entropy correlations are undefined for a single vote: the gain starts at the first size with a value
        sizes = [size for size in self.sizes if not any(map(math.isnan, self.values(metric, size)))]
        if len(sizes) < 3:
            raise InvalidArgument(f"{metric} is known for {len(sizes)} numbers of votes; saturation needs 3 or more")
        low, high = self.values(metric, sizes[0]), self.values(metric, sizes[-1])
        gains = [b - a for a, b in zip(low, high, strict=True)]
        if min(gains) < 0 < max(gains) or not all(gains):
            warnings.warn(
                f"{metric}: the most votes do not gain on every seed ({', '.join(f'{g:.3g}' for g in gains)}), so "
                "shares of the gain say little",
                InferenceAtRisk,
                2,
            )
        shares = {
            size: tuple(
                (value - a) / gain if gain else math.nan
                for value, a, gain in zip(self.values(metric, size), low, gains, strict=True)
            )
            for size in sizes
        }
        reached = None
        for size in sizes[:-1]:
            if statistics.fmean(shares[size]) >= share and mean_interval(shares[size]).high >= 1 - margin:
                reached = size
                break
        return Saturation(metric, share, reached, shares)

    def report(self, metrics: Sequence[str] = ("kl", "entropy_r", "accuracy")) -> Report:
        """Means and standard deviations over seeds as a table; undefined values are left out."""
        rows = []
        for metric in metrics:
            rows += [_as_row(f"{metric}, {size} votes", self.values(metric, size)) for size in self.sizes]
            rows += [_as_row(f"{metric}, {target}", self.values(metric, target=target)) for target in self.targets]
        return Report(self.title, [row for row in rows if math.isfinite(row.value)])

    def to_dict(self) -> dict[str, Any]:
        """All points and the saturation of each metric as JSON values; undefined values are None."""
        found: dict[str, Any] = {"title": self.title, "saturation": {}}
        found["figures"] = [asdict(f) | {"value": f.value if math.isfinite(f.value) else None} for f in self.figures]
        for metric in self.metrics:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", InferenceAtRisk)
                try:
                    settled = self.saturation(metric)
                except InvalidArgument:  # too few numbers of votes
                    continue
            shares = {
                str(size): [share if math.isfinite(share) else None for share in each]
                for size, each in settled.shares.items()
            }
            found["saturation"][metric] = {"size": settled.size, "shares": shares}
        return found

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    def plot(self, path: Path, metrics: Sequence[str] = ("kl", "entropy_r", "accuracy")) -> None:
        """Plot each metric over the number of votes: every seed, their mean, and other targets as horizontal lines.

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        figure = figures.new(4.4 * len(metrics), 4.2)
        panels = figure.subplots(1, len(metrics), squeeze=False)[0]
        for panel, metric in zip(panels, metrics, strict=True):
            each = [self.values(metric, size) for size in self.sizes]
            for seed in zip(*each, strict=True):
                panel.plot(self.sizes, seed, color="C0", alpha=0.25, linewidth=0.8)
            panel.plot(self.sizes, [statistics.fmean(v) for v in each], "o-", color="C0", markersize=4, label="votes")
            self._plot_targets(panel, metric)
            panel.set_xscale("log")
            panel.set_xticks(self.sizes, [str(size) for size in self.sizes])
            panel.minorticks_off()
            panel.set_xlabel("votes per item")
            panel.set_title(_TITLES.get(metric, metric), fontsize=10)
        if self.targets:
            panels[0].legend(fontsize=8)
        figure.suptitle(self.title)
        figures.save(figure, path)

    def _plot_targets(self, panel: Any, metric: str) -> None:
        """Lines for hard labels and temperature scaling, and a band for all amounts of label smoothing."""
        smooth = [statistics.fmean(self.values(metric, target=t)) for t in self.targets if t.startswith("smoothing")]
        if smooth:
            panel.axhspan(min(smooth), max(smooth), color="C1", alpha=0.35, linewidth=0, label="label smoothing")
        for target, style in (("hard", "--"), ("temperature", ":")):
            if target in self.targets:
                level = statistics.fmean(self.values(metric, target=target))
                panel.axhline(level, color="0.4", linestyle=style, linewidth=1, label=_LABELS[target])


_TITLES = {"kl": "KL(people || model), nats", "entropy_r": "correlation of entropies", "accuracy": "accuracy"}
_LABELS = {"hard": "hard labels", "temperature": "hard labels, temperature"}


def _as_row(name: str, values: Sequence[float]) -> Row:
    if not all(map(math.isfinite, values)):
        return Row(name, math.nan)
    return Row(name, statistics.fmean(values), "", statistics.stdev(values) if len(values) > 1 else None)


# --- with a model -----------------------------------------------------------------------------------------------------


class AnnotationBudget:
    """Trains the same model on different numbers of votes per item, on hard labels, and on smoothed labels.

    Args:
        make_model: makes a new model from a seed; it maps inputs [b, ...] to logits [b, C].
        fit: called as ``fit(model, x, target_probs, seed)``; trains the model in place. None takes `SoftLabelFit`.
        metrics: names of metrics of `distribution_metrics`.
        sizes: numbers of votes per item; sizes above the fewest votes of any item are left out.
        num_seeds: models of each kind.
        num_subsamples: subsamples of the votes for each seed and size.
        smoothing: amounts of label smoothing to compare with; an empty sequence leaves out all baselines.

    Raises:
        InvalidArgument: no sizes, or unknown metrics.
    """

    @checked
    def __init__(
        self,
        make_model: Callable[[int], nn.Module],
        fit: Callable[[nn.Module, Tensor, Tensor, int], Any] | None = None,
        *,
        metrics: Sequence[str] = METRICS,
        sizes: Sequence[PositiveInt] = SIZES,
        num_seeds: PositiveInt = 5,
        num_subsamples: PositiveInt = 1,
        smoothing: Sequence[Probability] = SMOOTHING,
    ) -> None:
        unknown = [metric for metric in metrics if metric not in METRICS]
        if unknown or not metrics:
            raise InvalidArgument(f"metrics {unknown} are not known; use some of {', '.join(METRICS)}")
        if not sizes:
            raise InvalidArgument("sizes is empty; give at least one number of votes")
        self.make_model, self.fit = make_model, fit or SoftLabelFit()
        self.metrics, self.sizes, self.smoothing = tuple(metrics), sorted(set(sizes)), tuple(smoothing)
        self.num_seeds, self.num_subsamples = num_seeds, num_subsamples

    def run(
        self,
        train: tuple[Tensor, Any],
        test: tuple[Tensor, Any],
        *,
        title: str = "votes per item",
        on_progress: Callable[[int], None] = lambda trained: None,
    ) -> BudgetReport:
        """Train all models and measure them.

        Args:
            train: inputs [n, ...] and vote counts [n, C].
            test: inputs and vote counts of other items; all their votes are the reference.
            title: title of the report.
            on_progress: called with 1 after each trained model.

        Raises:
            InvalidInput: invalid counts, different numbers of classes or items, or votes for a single class only.
        """
        (x, counts), (test_x, test_counts) = train, test
        votes, reference = check_counts(counts), check_counts(test_counts)
        if votes.shape[1] != reference.shape[1]:
            raise InvalidInput(f"training has {votes.shape[1]} classes, test {reference.shape[1]}")
        for name, inputs, labels in (("training", x, votes), ("test", test_x, reference)):
            if len(inputs) != len(labels):
                raise InvalidInput(f"{name}: {len(inputs)} inputs and {len(labels)} rows of counts")
            if torch.is_floating_point(inputs) and not inputs.isfinite().all():
                raise InvalidInput(f"{name}: an input is NaN or infinite; leave it out")
        if (votes.sum(0) > 0).sum() < 2:
            raise InvalidInput("all training votes are for a single class; there is nothing to learn")
        q = annotations_to_distribution(reference)
        figures: list[BudgetPoint] = []
        for seed in range(self.num_seeds):
            for target, size, subsample, probs in self._targets(votes, seed):
                predicted = self._predict(seed, x, probs, test_x)
                figures += self._measure(target, size, seed, subsample, predicted, q)
                on_progress(1)
            if self.smoothing:
                predicted = self._temperature_scaled(seed, x, votes, test_x)
                figures += self._measure("temperature", int(votes.sum(1).max()), seed, 0, predicted, q)
                on_progress(1)
        return BudgetReport(title, figures)

    def num_trainings(self, counts: Any) -> int:
        """How many models `run` trains on these votes."""
        sizes = len(self._reachable(check_counts(counts)))
        return self.num_seeds * (sizes * self.num_subsamples + (2 + len(self.smoothing) if self.smoothing else 0))

    def _reachable(self, votes: Tensor) -> list[int]:
        fewest = int(votes.sum(1).min())
        sizes = [size for size in self.sizes if size <= fewest]
        if not sizes:
            raise InvalidInput(f"an item has {fewest} votes, fewer than the smallest size asked for, {self.sizes[0]}")
        return sizes

    def _targets(self, votes: Tensor, seed: int) -> Any:
        """Yield the target's name, votes per item, subsample and distributions [n, C] of every model to train."""
        sizes = self._reachable(votes)
        for subsample in range(self.num_subsamples):
            subsampled = nested_annotations(votes, sizes, seed=1000 * seed + subsample)
            for size, counts in zip(sizes, subsampled, strict=True):
                yield "votes", size, subsample, annotations_to_distribution(counts)
        if self.smoothing:
            most, labels = int(votes.sum(1).max()), hard_labels(votes, seed=seed)
            yield "hard", most, 0, smoothed_labels(labels, votes.shape[1], 0.0)
            for amount in self.smoothing:
                yield f"smoothing {amount:g}", most, 0, smoothed_labels(labels, votes.shape[1], amount)

    def _logits(self, seed: int, x: Tensor, probs: Tensor, *inputs: Tensor) -> list[Tensor]:
        model = self.make_model(seed)
        self.fit(model, x, probs, seed)
        with torch.no_grad():
            return [model(some) for some in inputs]

    def _predict(self, seed: int, x: Tensor, probs: Tensor, test_x: Tensor) -> Tensor:
        return self._logits(seed, x, probs, test_x)[0].softmax(-1)

    def _temperature_scaled(self, seed: int, x: Tensor, votes: Tensor, test_x: Tensor) -> Tensor:
        """Train on the hard labels of four fifths of the items, and fit a temperature on the held-out fifth."""
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        held_out, rest = order[: max(2, len(order) // 5)], order[max(2, len(order) // 5) :]
        labels = hard_labels(votes, seed=seed)
        hard = smoothed_labels(labels, votes.shape[1], 0.0)
        held_out_logits, logits = self._logits(seed, x[rest], hard[rest], x[held_out], test_x)
        try:
            temperature = fit_temperature(held_out_logits, labels[held_out])
        except InvalidInput:  # a single class among the held-out items says nothing about confidence
            temperature = 1.0
        return (logits / temperature).softmax(-1)

    def _measure(
        self, target: str, size: int, seed: int, subsample: int, probs: Tensor, q: Tensor
    ) -> list[BudgetPoint]:
        if not probs.isfinite().all():
            raise InvalidInput(f"the model trained on {target} with {size} votes predicts NaN; lower its learning rate")
        found = distribution_metrics(probs, q)
        return [BudgetPoint(target, size, seed, subsample, metric, found[metric]) for metric in self.metrics]


@checked
def split_items(counts: Any, share: OpenFraction = 0.2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Split items into training and test items, stratified by how much the annotators disagree.

    Args:
        counts: vote counts [n, C].
        share: share of the items for the test, above 0 and below 1.
        seed: seed of the split, which is random within each third of the items by entropy.

    Returns:
        The indices of the training items and of the test items, each ascending.

    Raises:
        InvalidInput: one of the two would be empty.
    """
    order = entropy(annotations_to_distribution(counts).double()).argsort(stable=True)
    generator = torch.Generator().manual_seed(seed)
    train, test = [], []
    for third in order.tensor_split(3):
        shuffled = third[torch.randperm(len(third), generator=generator)]
        cut = round(share * len(third))
        test.append(shuffled[:cut])
        train.append(shuffled[cut:])
    parts = torch.cat(train).sort().values, torch.cat(test).sort().values
    if not all(map(len, parts)):
        raise InvalidInput(f"{len(order)} items leave {len(parts[0])} for training and {len(parts[1])} for the test")
    return parts


# --- without a model --------------------------------------------------------------------------------------------------


@checked
def annotation_curve(
    counts: Any, sizes: Sequence[int] = SIZES, *, num_subsamples: PositiveInt = 20, seed: int = 0
) -> BudgetReport:
    """How well some votes of an item predict other votes of the same item.

    A random half of each item's votes is the reference; subsets of the other half are compared with it. Half a vote is
    added to each class, so that a class without votes gives no infinite KL divergence.

    Args:
        counts: vote counts [n, C], at least 4 votes for each item.
        sizes: numbers of votes; sizes from half of the fewest votes of any item on are replaced by that half.
        num_subsamples: random splits of the votes; each takes the place of a seed in the report.
        seed: seed of the first split.

    Raises:
        InvalidInput: invalid counts, or an item with fewer than 4 votes.
    """
    votes = check_counts(counts)
    fewest = int(votes.sum(1).min())
    if fewest < 4:
        raise InvalidInput(f"an item has {fewest} votes; to compare some with others, give 4 or more of each")
    half = fewest // 2
    tried = sorted({size for size in sizes if 0 < size < half} | {half})
    figures = []
    for split in range(num_subsamples):
        *subsets, whole = nested_annotations(votes, [*tried, half], seed=seed + split)
        reference = annotations_to_distribution(votes - whole)
        for size, subset in zip(tried, subsets, strict=True):
            with warnings.catch_warnings():
                # with one vote all entropies are equal and their correlation is NaN, which is what the report shows
                warnings.simplefilter("ignore", InferenceAtRisk)
                found = distribution_metrics(annotations_to_distribution(subset, 0.5), reference)
            figures += [BudgetPoint("votes", size, split, 0, metric, value) for metric, value in found.items()]
    return BudgetReport(f"votes alone, against {fewest - half} others of the same item", figures)
