"""How many people must label each item: every figure over the number of votes, and where it stops getting better.

Notable here:
- the answer is one for each metric: distributions settle with about ten votes, the ranking of ambiguity needs more
- what a size gains is measured seed by seed, as a share of the gain from the fewest votes to the most
- test items keep all their votes, and none of them is trained on
- without inputs to learn from, the votes themselves tell how much fewer of them lose against others of the same item
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

from pippin.bayes.metrics import entropy
from pippin.bayes.temperature import fit_temperature
from pippin.core import figures
from pippin.core.errors import InferenceAtRisk, InvalidArgument, InvalidInput
from pippin.core.report import Report, Row
from pippin.evaluate.annotators import (
    METRICS,
    SoftFit,
    check_counts,
    distribution_metrics,
    hard_labels,
    nested_votes,
    smoothed_labels,
    votes_to_distribution,
)

SIZES = (1, 2, 3, 5, 10, 20, 50, 100)
SMOOTHING = (0.05, 0.1, 0.2, 0.3, 0.4)
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Measured:
    """One figure of one training.

    Attributes:
        target: what was trained on: "votes", "hard", "smoothing 0.1", "temperature".
        size: votes of each item; those of all where the target is made of their winner.
        seed: of the model.
        draw: of the votes.
        metric: see `distribution_metrics`.
        value: the figure; NaN where it is undefined.
    """

    target: str
    size: int
    seed: int
    draw: int
    metric: str
    value: float


@dataclass(frozen=True)
class Saturation:
    """Where a metric stops getting better.

    Attributes:
        metric: which.
        share: of the gain that was asked for.
        size: the fewest votes that reach it on average, with an interval over the seeds that reaches ``1 - margin``;
            None if only the most votes do, as there is nothing beyond to compare them with.
        shares: by number of votes, the share of the gain for each seed.
    """

    metric: str
    share: float
    size: int | None
    shares: dict[int, tuple[float, ...]]


class BudgetReport:
    """Figures over the number of votes.

    Args:
        title: for tables and plots.
        figures: all that was measured.
    """

    def __init__(self, title: str, figures: Sequence[Measured]) -> None:
        self.title, self.figures = title, tuple(figures)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of votes that were tried."""
        return tuple(sorted({figure.size for figure in self.figures if figure.target == "votes"}))

    @property
    def metrics(self) -> tuple[str, ...]:
        """What was measured."""
        return tuple(dict.fromkeys(figure.metric for figure in self.figures))

    @property
    def targets(self) -> tuple[str, ...]:
        """What was trained on beside votes."""
        return tuple(dict.fromkeys(figure.target for figure in self.figures if figure.target != "votes"))

    def values(self, metric: str, size: int | None = None, target: str = "votes") -> tuple[float, ...]:
        """One value for each seed, the mean over its draws.

        Raises:
            InvalidArgument: nothing of the kind was measured.
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

    def saturation(self, metric: str, share: float = 0.9, margin: float = 0.05) -> Saturation:
        """Where so large a share of the gain from the fewest votes to the most is reached.

        Args:
            metric: which.
            share: above 0 and below 1.
            margin: how far below 1 the upper end of the interval over seeds may lie.

        Raises:
            InvalidArgument: numbers out of range, fewer than three sizes, or a metric that was not measured.

        Warns:
            InferenceAtRisk: the most votes are no better than the fewest on some seed: shares mean nothing.
        """
        if not (0 < share < 1 and 0 <= margin < 1):
            raise InvalidArgument(f"share is {share} and margin {margin}; give a share between 0 and 1")
        # a single vote has no entropy to compare: the gain begins where the metric is defined
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
            if statistics.fmean(shares[size]) >= share and interval(shares[size])[1] >= 1 - margin:
                reached = size
                break
        return Saturation(metric, share, reached, shares)

    def report(self, metrics: Sequence[str] = ("kl", "entropy_r", "accuracy")) -> Report:
        """The means over seeds, with their spread; what is undefined is left out."""
        rows = []
        for metric in metrics:
            rows += [_as_row(f"{metric}, {size} votes", self.values(metric, size)) for size in self.sizes]
            rows += [_as_row(f"{metric}, {target}", self.values(metric, target=target)) for target in self.targets]
        return Report(self.title, [row for row in rows if math.isfinite(row.value)])

    def to_dict(self) -> dict[str, Any]:
        """All figures, and where each metric saturates; what is undefined is None."""
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
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    def plot(self, path: Path, metrics: Sequence[str] = ("kl", "entropy_r", "accuracy")) -> None:
        """Draw each metric over the number of votes: every seed, their mean, and other targets as level lines.

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
            self._levels(panel, metric)
            panel.set_xscale("log")
            panel.set_xticks(self.sizes, [str(size) for size in self.sizes])
            panel.minorticks_off()
            panel.set_xlabel("votes per item")
            panel.set_title(_TITLES.get(metric, metric), fontsize=10)
        if self.targets:
            panels[0].legend(fontsize=8)
        figure.suptitle(self.title)
        figures.save(figure, path)

    def _levels(self, panel: Any, metric: str) -> None:
        """Hard labels, and the band of all intensities of smoothing."""
        smooth = [statistics.fmean(self.values(metric, target=t)) for t in self.targets if t.startswith("smoothing")]
        if smooth:
            panel.axhspan(min(smooth), max(smooth), color="C1", alpha=0.35, linewidth=0, label="label smoothing")
        for target, style in (("hard", "--"), ("temperature", ":")):
            if target in self.targets:
                level = statistics.fmean(self.values(metric, target=target))
                panel.axhline(level, color="0.4", linestyle=style, linewidth=1, label=_LABELS[target])


_TITLES = {"kl": "KL(people || model), nats", "entropy_r": "correlation of entropies", "accuracy": "accuracy"}
_LABELS = {"hard": "hard labels", "temperature": "hard labels, temperature"}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean by Student's t; of a single value, the value itself."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean
    freedom = len(values) - 1
    # beyond the table, the two first terms of the expansion in 1 / freedom
    t = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.373 / freedom + 2.823 / freedom**2
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def _as_row(name: str, values: Sequence[float]) -> Row:
    if not all(map(math.isfinite, values)):
        return Row(name, math.nan)
    return Row(name, statistics.fmean(values), "", statistics.stdev(values) if len(values) > 1 else None)


# --- with a model -----------------------------------------------------------------------------------------------------


class AnnotationBudget:
    """Trains the same model on fewer and more votes, on their winner, and on smoothed winners.

    Args:
        make_model: gives a new model for a seed: logits [b, C] for inputs [b, ...].
        fit: called as ``fit(model, x, target_probs, seed)``; trains in place.
        metrics: of `distribution_metrics`.
        sizes: votes of each item; those beyond the item with the fewest are left out.
        seeds: models of each kind.
        draws: draws of the votes for each model.
        smoothing: intensities of label smoothing to compare with; none leaves the baselines out.

    Raises:
        InvalidArgument: no sizes, seeds or draws, or metrics that are not known.
    """

    def __init__(
        self,
        make_model: Callable[[int], nn.Module],
        fit: Callable[[nn.Module, Tensor, Tensor, int], Any] | None = None,
        *,
        metrics: Sequence[str] = METRICS,
        sizes: Sequence[int] = SIZES,
        seeds: int = 5,
        draws: int = 1,
        smoothing: Sequence[float] = SMOOTHING,
    ) -> None:
        unknown = [metric for metric in metrics if metric not in METRICS]
        if unknown or not metrics:
            raise InvalidArgument(f"metrics {unknown} are not known; use some of {', '.join(METRICS)}")
        if not sizes or min(sizes) < 1 or seeds < 1 or draws < 1:
            raise InvalidArgument(f"sizes {list(sizes)}, {seeds} seeds, {draws} draws; give 1 or more of each")
        self.make_model, self.fit = make_model, fit or SoftFit()
        self.metrics, self.sizes, self.seeds, self.draws = tuple(metrics), sorted(set(sizes)), seeds, draws
        self.smoothing = tuple(smoothing)

    def run(
        self,
        train: tuple[Tensor, Any],
        test: tuple[Tensor, Any],
        *,
        title: str = "votes per item",
        on_progress: Callable[[int], None] = lambda trained: None,
    ) -> BudgetReport:
        """Train and measure.

        Args:
            train: inputs and counts of votes [n, C].
            test: the same of other items; all their votes are the reference.
            title: of the report.
            on_progress: called with 1 after each training.

        Raises:
            InvalidInput: counts that are none, numbers of classes or items that differ, or one class in all votes.
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
        q = votes_to_distribution(reference)
        figures: list[Measured] = []
        for seed in range(self.seeds):
            for target, size, draw, probs in self._targets(votes, seed):
                predicted = self._predict(seed, x, probs, test_x)
                figures += self._measure(target, size, seed, draw, predicted, q)
                on_progress(1)
            if self.smoothing:
                predicted = self._cooled(seed, x, votes, test_x)
                figures += self._measure("temperature", int(votes.sum(1).max()), seed, 0, predicted, q)
                on_progress(1)
        return BudgetReport(title, figures)

    def trainings(self, counts: Any) -> int:
        """How many models `run` trains on these votes."""
        sizes = len(self._reachable(check_counts(counts)))
        return self.seeds * (sizes * self.draws + (2 + len(self.smoothing) if self.smoothing else 0))

    def _reachable(self, votes: Tensor) -> list[int]:
        fewest = int(votes.sum(1).min())
        sizes = [size for size in self.sizes if size <= fewest]
        if not sizes:
            raise InvalidInput(f"an item has {fewest} votes, fewer than the smallest size asked for, {self.sizes[0]}")
        return sizes

    def _targets(self, votes: Tensor, seed: int) -> Any:
        """Name, votes, draw and distributions of everything that is trained on."""
        sizes = self._reachable(votes)
        for draw in range(self.draws):
            drawn = nested_votes(votes, sizes, seed=1000 * seed + draw)
            for size, some in zip(sizes, drawn, strict=True):
                yield "votes", size, draw, votes_to_distribution(some)
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

    def _cooled(self, seed: int, x: Tensor, votes: Tensor, test_x: Tensor) -> Tensor:
        """Hard labels of four fifths of the items, and a temperature fitted on the fifth that is left."""
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        held, rest = order[: max(2, len(order) // 5)], order[max(2, len(order) // 5) :]
        labels = hard_labels(votes, seed=seed)
        hard = smoothed_labels(labels, votes.shape[1], 0.0)
        kept, logits = self._logits(seed, x[rest], hard[rest], x[held], test_x)
        try:
            temperature = fit_temperature(kept, labels[held])
        except InvalidInput:  # a single class among the few that were held out says nothing about confidence
            temperature = 1.0
        return (logits / temperature).softmax(-1)

    def _measure(self, target: str, size: int, seed: int, draw: int, probs: Tensor, q: Tensor) -> list[Measured]:
        if not probs.isfinite().all():
            raise InvalidInput(f"the model trained on {target} with {size} votes predicts NaN; lower its learning rate")
        found = distribution_metrics(probs, q)
        return [Measured(target, size, seed, draw, metric, found[metric]) for metric in self.metrics]


def split_items(counts: Any, share: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Items for training and for the test, alike in how much people disagree.

    Args:
        counts: [n, C].
        share: of the items for the test, above 0 and below 1.
        seed: of the draw, within thirds of the items by entropy.

    Raises:
        InvalidArgument: ``share`` out of range. InvalidInput: a part that would be empty.
    """
    if not 0 < share < 1:
        raise InvalidArgument(f"a share of {share} for the test; give one between 0 and 1")
    order = entropy(votes_to_distribution(counts).double()).argsort(stable=True)
    generator = torch.Generator().manual_seed(seed)
    train, test = [], []
    for third in order.tensor_split(3):
        mixed = third[torch.randperm(len(third), generator=generator)]
        cut = round(share * len(third))
        test.append(mixed[:cut])
        train.append(mixed[cut:])
    parts = torch.cat(train).sort().values, torch.cat(test).sort().values
    if not all(map(len, parts)):
        raise InvalidInput(f"{len(order)} items leave {len(parts[0])} for training and {len(parts[1])} for the test")
    return parts


# --- without a model --------------------------------------------------------------------------------------------------


def vote_curve(counts: Any, sizes: Sequence[int] = SIZES, *, draws: int = 20, seed: int = 0) -> BudgetReport:
    """How much some votes of an item tell of other votes of the same item.

    Half of each item's votes, drawn at random, are the reference; of the others so many are compared with it. Shares
    have half a vote added to each class, so that a class that nobody chose costs no infinite KL.

    Args:
        counts: [n, C], 4 votes or more of each item.
        sizes: numbers of votes; those beyond half of the fewest are left out, and that half is tried.
        draws: divisions of the votes; each stands as a seed of the report.
        seed: of the first.

    Raises:
        InvalidInput: counts that are none, or an item with fewer than 4 votes.
        InvalidArgument: no draws.
    """
    votes = check_counts(counts)
    fewest = int(votes.sum(1).min())
    if fewest < 4:
        raise InvalidInput(f"an item has {fewest} votes; to compare some with others, give 4 or more of each")
    if draws < 1:
        raise InvalidArgument(f"{draws} draws; give 1 or more")
    half = fewest // 2
    tried = sorted({size for size in sizes if 0 < size < half} | {half})
    figures = []
    for draw in range(draws):
        *some, whole = nested_votes(votes, [*tried, half], seed=seed + draw)
        reference = votes_to_distribution(votes - whole)
        for size, drawn in zip(tried, some, strict=True):
            with warnings.catch_warnings():
                # with one vote all entropies are alike: the NaN says so
                warnings.simplefilter("ignore", InferenceAtRisk)
                found = distribution_metrics(votes_to_distribution(drawn, 0.5), reference)
            figures += [Measured("votes", size, draw, 0, metric, value) for metric, value in found.items()]
    return BudgetReport(f"votes alone, against {fewest - half} others of the same item", figures)
