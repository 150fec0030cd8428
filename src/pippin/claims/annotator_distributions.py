"""How many people must label each item: a made world with known disagreement, and 100 voters on real pictures.

Notable here:
- in the made world, how much people disagree depends on another direction of the input than what they say, so it can
  be learnt, and from the votes only
- a control keeps each item's winner but takes the votes of another item with the same winner: as soft, but not its own
- with few items the metrics settle at different numbers of votes; with many, a model averages over like items
- real pictures are voted on by 100 small trees, each of which saw few other pictures and few pixels
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pippin.evaluate.annotation_budget import BudgetReport


@dataclass(frozen=True)
class Size:
    """Seeds with few items, with many, with pictures; votes with few and otherwise; steps; sentences for a GPU."""

    few: int
    many: int
    pictures: int
    sizes: tuple[int, ...]
    some: tuple[int, ...]
    steps: int
    sentences: int
    reader_steps: int


VOTES = (1, 2, 3, 5, 10, 20, 50, 100)
SIZES = {
    "smoke": Size(1, 1, 1, (1, 10, 100), (1, 10, 100), 10, 0, 0),
    "laptop": Size(10, 3, 3, VOTES, (1, 5, 10, 20, 100), 250, 0, 0),
    "gpu": Size(10, 10, 10, VOTES, VOTES, 250, 20_000, 1500),
}
CLASSES, TEST = 3, 400
DISAGREE, SURE = 0.7, 2.0
"""Spread of the logarithm of people's temperature along its direction, and the size of the logits."""


@claim(
    id="annotator-distributions",
    source="arXiv:2605.29797",
    paper="KL to people's distribution has 87 to 95 % of its improvement at about 10 annotators per item, entropy "
    "correlation needs 20 to 50; label smoothing reaches r 0.45 to 0.49 at any of five intensities, soft labels 0.643",
    setting="made world: softmax(x W / T(x)) with T along another direction, 3 classes, 100 votes, 400 test items; "
    "networks d-48-3, 250 steps of 128; 200 training items of 50 features (10 seeds), 1,200 of 20 (3 seeds); and "
    "scikit-learn's digits voted on by 100 trees on 60 other pictures and 16 pixels each, 300 training items (3 seeds)",
    accept="few items, means over seeds: the best smoothing's entropy r at least 0.2 below 100 votes'; smoothing's r "
    "within 0.1 of itself over 5 intensities; KL's share of improvement at 10 votes at least 0.8; entropy r's share at "
    "10 at least 0.08 below KL's, and the 95 % interval of that difference over seeds above 0; votes of another item "
    "with the same winner reach an r at least 0.2 below the item's own. Many items: both shares at 10 votes at least "
    "0.8 and within 0.08 of each other. Digits: the best smoothing's r at least 0.2 below 100 votes' on every seed; "
    "KL's share at 10 at least 0.8",
)
def run(scale: Scale) -> Evidence:
    """Few items, many items, pictures; and sentences on a large GPU."""
    evidence, size = Evidence(), SIZES[scale.name]
    few = _made_world(evidence, "few items", 200, 50, size.few, size)
    many = _made_world(evidence, "many items", 1200, 20, size.many, size)
    pictures = _pictures(evidence, size)
    smooth = {t: statistics.fmean(few.values("entropy_r", target=t)) for t in _smoothing(few)}
    own = statistics.fmean(few.values("entropy_r", 100))
    apart = [kl - r for kl, r in zip(_shares(few, "kl"), _shares(few, "entropy_r"), strict=True)]
    low = _interval(apart)[0]
    evidence.add("few items: KL's share at 10 votes - entropy r's, interval from", low)
    both = [statistics.fmean(_shares(many, metric)) for metric in ("kl", "entropy_r")]
    conditions = {
        "smoothing": max(smooth.values()) <= own - 0.2,
        "intensities": max(smooth.values()) - min(smooth.values()) <= 0.1,
        "kl": statistics.fmean(_shares(few, "kl")) >= 0.8,
        "entropy_later": statistics.fmean(apart) >= 0.08 and low > 0,
        "own_votes": evidence.mean("few items: entropy r, votes of another item") <= own - 0.2,
        "many_items": min(both) >= 0.8 and abs(both[0] - both[1]) <= 0.08,
        "pictures": all(gain >= 0.2 for gain in evidence.each("digits: entropy r, 100 votes - best smoothing")),
        "pictures_kl": statistics.fmean(_shares(pictures, "kl")) >= 0.8,
    }
    if size.sentences:
        conditions |= _sentences(evidence, size)
    return evidence.accept(**conditions)


def _shares(report: BudgetReport, metric: str, votes: int = 10) -> tuple[float, ...]:
    """For each seed, the share of the improvement from the fewest votes to the most."""
    return report.saturation(metric).shares[votes]


def _smoothing(report: BudgetReport) -> list[str]:
    return [target for target in report.targets if target.startswith("smoothing")]


def _interval(values: list[float]) -> tuple[float, float]:
    from pippin.evaluate.annotation_budget import interval

    return interval(values)


def _note(evidence: Evidence, name: str, report: BudgetReport, seed: int | None = None) -> None:
    """Every mean over seeds that a reader may ask for; with a seed, those of a report of one seed."""
    units = {"kl": "nats", "entropy_r": "", "accuracy": ""}
    words = {"kl": "KL", "entropy_r": "entropy r", "accuracy": "accuracy"}
    every = [("votes", votes, f"{votes} votes") for votes in report.sizes]
    every += [(target, None, target) for target in report.targets]  # type: ignore[misc]
    for metric, unit in units.items():
        for target, votes, word in every:
            values = report.values(metric, votes, target)
            for at, value in enumerate(values):
                evidence.add(f"{name}: {words[metric]}, {word}", value, seed=at if seed is None else seed, unit=unit)
    for metric in ("kl", "entropy_r"):
        found = report.saturation(metric)
        for votes in report.sizes[1:-1]:
            for at, share in enumerate(found.shares[votes]):
                label = f"{name}: {words[metric]}'s share of improvement at {votes}"
                evidence.add(label, share, seed=at if seed is None else seed)
        evidence.add(f"{name}: votes that {words[metric]} needs", found.size or 100, seed=seed, unit="votes")
    for target in ("votes", "smoothing 0.1"):
        most = 100 if target == "votes" else None
        means = [statistics.fmean(report.values(f"entropy_{part}", most, target)) for part in ("ambiguous", "clear")]
        word = "100 votes" if target == "votes" else target
        evidence.add(f"{name}: entropy of ambiguous - clear items, {word}", means[0] - means[1], seed=seed, unit="nats")


# --- the made world ---------------------------------------------------------------------------------------------------


class World:
    """Items of d features, and 100 people's votes: softmax(x W / T(x)), with log T along a direction of its own."""

    def __init__(self, features: int, seed: int) -> None:
        import torch

        self.generator = torch.Generator().manual_seed(3_000 + seed)
        self.W = torch.randn(features, CLASSES, generator=self.generator) / features**0.5
        self.u = torch.randn(features, generator=self.generator) / features**0.5

    def draw(self, n: int) -> tuple[Tensor, Tensor]:
        """Inputs and counts of votes."""
        import torch

        x = torch.randn(n, len(self.u), generator=self.generator)
        logits = SURE * x @ self.W / torch.exp(DISAGREE * (x @ self.u))[:, None]
        votes = torch.multinomial(logits.softmax(-1), 100, replacement=True, generator=self.generator)
        return x, torch.zeros(n, CLASSES, dtype=torch.long).scatter_add_(1, votes, torch.ones_like(votes))


def _network(features: int, classes: int) -> Any:
    def make(seed: int) -> nn.Module:
        import torch
        from torch import nn

        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(features, 48), nn.ReLU(), nn.Linear(48, classes))

    return make


def _fit(size: Size) -> Any:
    from pippin.evaluate.annotators import SoftFit

    return SoftFit(steps=size.steps, batch=128, lr=5e-3, weight_decay=2.0)


def _made_world(evidence: Evidence, name: str, items: int, features: int, seeds: int, size: Size) -> BudgetReport:
    """Another world for each seed: as many reports of one seed, put together."""
    from dataclasses import replace

    from pippin.evaluate.annotation_budget import SMOOTHING, AnnotationBudget, BudgetReport

    figures: list[Any] = []
    make, fit = _network(features, CLASSES), _fit(size)
    for seed in range(seeds):
        world = World(features, seed)
        train, test = world.draw(items), world.draw(TEST)

        def seeded(_: int, seed: int = seed) -> nn.Module:
            model: nn.Module = make(seed)
            return model

        sizes, smoothing = (size.sizes, SMOOTHING) if name == "few items" else (size.some, (0.1, 0.2))
        report = AnnotationBudget(seeded, fit, sizes=sizes, seeds=1, smoothing=smoothing).run(train, test)
        figures += [replace(figure, seed=seed) for figure in report.figures]
        if name == "few items":
            r = _votes_of_another(make(seed), fit, train, test, seed)
            evidence.add(f"{name}: entropy r, votes of another item", r, seed=seed)
    whole = BudgetReport(name, figures)
    _note(evidence, name, whole)
    return whole


def _votes_of_another(model: nn.Module, fit: Any, train: Any, test: Any, seed: int) -> float:
    """Train on the votes of another item that has the same winner."""
    import torch

    from pippin.evaluate.annotators import distribution_metrics, hard_labels, votes_to_distribution

    x, counts = train
    winner, other = hard_labels(counts, seed=seed), torch.arange(len(counts))
    generator = torch.Generator().manual_seed(seed)
    for label in range(counts.shape[1]):
        group = (winner == label).nonzero()[:, 0]
        order = group[torch.randperm(len(group), generator=generator)]
        other[order] = order.roll(1)
    fit(model, x, votes_to_distribution(counts[other]), seed)
    with torch.no_grad():
        return distribution_metrics(model(test[0]).softmax(-1), votes_to_distribution(test[1]))["entropy_r"]


# --- real pictures ----------------------------------------------------------------------------------------------------


def _pictures(evidence: Evidence, size: Size) -> BudgetReport:
    """Digits, and 100 voters who each learnt from 60 pictures and 16 pixels, none of which is an item."""
    from dataclasses import replace

    import numpy as np
    import torch
    from sklearn.datasets import load_digits
    from sklearn.tree import DecisionTreeClassifier

    from pippin.evaluate.annotation_budget import AnnotationBudget, BudgetReport

    pictures, digits = load_digits(return_X_y=True)
    figures: list[Any] = []
    for seed in range(size.pictures):
        rng = np.random.default_rng((7_000, seed))
        order = rng.permutation(len(pictures))
        known, items = order[:600], order[600:]
        counts = np.zeros((len(items), 10), dtype=np.int64)
        for voter in range(100):
            seen, pixels = rng.choice(known, 60, replace=False), rng.permutation(64)[:16]
            tree = DecisionTreeClassifier(max_depth=6, random_state=voter)
            votes = tree.fit(pictures[seen][:, pixels], digits[seen]).predict(pictures[items][:, pixels])
            counts[np.arange(len(items)), votes] += 1
        x = torch.tensor(pictures[items] / 8 - 1, dtype=torch.float32)
        votes = torch.from_numpy(counts)

        def make(_: int, seed: int = seed) -> nn.Module:
            model: nn.Module = _network(64, 10)(seed)
            return model

        budget = AnnotationBudget(make, _fit(size), sizes=size.some, seeds=1)
        report = budget.run((x[:300], votes[:300]), (x[300:], votes[300:]))
        figures += [replace(figure, seed=seed) for figure in report.figures]
        best = max(report.values("entropy_r", target=target)[0] for target in _smoothing(report))
        gain = report.values("entropy_r", 100)[0] - best
        evidence.add("digits: entropy r, 100 votes - best smoothing", gain, seed=seed)
    whole = BudgetReport("digits", figures)
    _note(evidence, "digits", whole)
    return whole


# --- sentences, on a large GPU ----------------------------------------------------------------------------------------


def _sentences(evidence: Evidence, size: Size) -> dict[str, bool]:
    """Transformers from scratch on made entailment whose hedges people read differently."""
    from pippin.claims._made_entailment import Sentences, reader
    from pippin.evaluate.annotation_budget import AnnotationBudget
    from pippin.evaluate.annotators import SoftFit

    train, test = Sentences(0).draw(size.sentences), Sentences(1).draw(2000)
    fit = SoftFit(steps=size.reader_steps, batch=256, lr=3e-4, weight_decay=0.01)
    device = next(reader(64, 0, 1).parameters()).device
    budget = AnnotationBudget(lambda seed: reader(384, seed), fit, sizes=VOTES, seeds=3, smoothing=(0.05, 0.2))
    report = budget.run((train[0].to(device), train[1]), (test[0].to(device), test[1]))
    _note_sentences(evidence, report)
    smooth = max(statistics.fmean(report.values("entropy_r", target=target)) for target in _smoothing(report))
    return {
        "sentences": smooth <= statistics.fmean(report.values("entropy_r", 100)) - 0.2,
        "sentences_kl": statistics.fmean(_shares(report, "kl")) >= 0.8,
    }


def _note_sentences(evidence: Evidence, report: BudgetReport) -> None:
    for metric in ("kl", "entropy_r", "accuracy"):
        for votes in report.sizes:
            for seed, value in enumerate(report.values(metric, votes)):
                evidence.add(f"sentences: {metric}, {votes} votes", value, seed=seed)
        for target in report.targets:
            for seed, value in enumerate(report.values(metric, target=target)):
                evidence.add(f"sentences: {metric}, {target}", value, seed=seed)
