"""Annotation curves: estimate from a table of labels how many annotators each item needs.

Notable here:
- with features, a small network is trained on increasing numbers of annotations, on their distributions, on majority
  labels and on smoothed ones; without features, subsets of each item's annotations are compared with the rest
- annotations are given as columns of label counts, or as one column of labels per annotator
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pippin.core import progress
from pippin.core.checks import NonNegativeInt, OpenFraction, PositiveInt, checked
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.core.options import Option
from pippin.recipes.options import StrPath

if TYPE_CHECKING:
    from torch import Tensor

    from pippin.evaluate.annotators.annotation_budget import BudgetReport
    from pippin.evaluate.judges.votes import Sheet

METRICS = ("kl", "entropy_r", "accuracy")
"""The reported metrics: KL divergence, correlation of entropies, and accuracy."""


def names_of(text: str, *, option: str) -> tuple[str, ...]:
    """Parse comma-separated names.

    Args:
        text: the names.
        option: the option's name, for error messages.

    Raises:
        InvalidArgument: a name is empty or repeated.
    """
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise InvalidArgument(f"{option} is {text!r}; give different names between commas")
    return names


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise InvalidArgument(f"--sizes is {text!r}; give whole numbers between commas") from None


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a measurement."""

    table: Annotated[StrPath, Option("A CSV file in UTF-8: a row per item, its labels in columns.", positional=True)]
    counts: Annotated[
        tuple[str, ...],
        Option(
            "Columns that count the annotations of each label: yes,no,unsure.",
            metavar="NAMES",
            parse=partial(names_of, option="--counts"),
        ),
    ] = ()
    annotators: Annotated[
        tuple[str, ...],
        Option(
            "Columns of people's labels, by commas; without it all but id, item and features.",
            metavar="NAMES",
            parse=partial(names_of, option="--annotators"),
        ),
    ] = ()
    features: Annotated[
        tuple[str, ...],
        Option(
            "Columns of numbers to train on, by commas; without it no model is trained.",
            metavar="NAMES",
            parse=partial(names_of, option="--features"),
        ),
    ] = ()
    labels: Annotated[
        tuple[str, ...],
        Option(
            "All labels that people may give, by commas; without it all that occur.",
            metavar="NAMES",
            parse=partial(names_of, option="--labels"),
        ),
    ] = ()
    sizes: Annotated[
        tuple[PositiveInt, ...],
        Option("Annotations per item to try, by commas.", metavar="NUMBERS", parse=_sizes),
    ] = (1, 2, 3, 5, 10, 20, 50, 100)
    num_seeds: Annotated[PositiveInt, Option("Models of each kind, or random divisions of the annotations.")] = 3
    steps: Annotated[PositiveInt, Option("Optimizer steps of each model.")] = 250
    test: Annotated[OpenFraction, Option("Share of the items that is held out for the test.")] = 0.2
    saturation: Annotated[OpenFraction, Option("Share of the gain at which a metric counts as saturated.")] = 0.9
    seed: Annotated[NonNegativeInt, Option("Of the division of the items.")] = 0


def run(config: Config, *, show_progress: bool = True) -> BudgetReport:
    """Measure KL divergence, correlation of entropies and accuracy over the number of annotations per item.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: columns that do not exist, or incompatible settings.
        InvalidInput: the table cannot be read, or an item has no label.
    """
    from pippin.evaluate.annotators.annotation_budget import annotation_curve
    from pippin.evaluate.judges.votes import read_csv

    sheet = read_csv(Path(config.table))
    counts = _counts(config, sheet)
    if not config.features:
        return annotation_curve(counts, list(config.sizes), num_subsamples=max(2, config.num_seeds), seed=config.seed)
    return _trained(config, sheet, counts, show_progress=show_progress)


def saturation(report: BudgetReport, share: float) -> list[str]:
    """One sentence per metric on the number of annotations at which it saturates."""
    sentences = []
    for metric in METRICS:
        try:
            result = report.saturation(metric, share)
        except InvalidArgument as error:
            sentences.append(str(error))
            continue
        gain = {size: statistics.fmean(shares) for size, shares in result.shares.items()}
        if result.size is None:
            last = list(gain)[-2]
            sentences.append(f"{metric}: {100 * gain[last]:.0f} % of the gain at {last} annotations; more still help")
        elif gain[result.size] > 1:
            sentences.append(f"{metric}: all of the gain at {result.size} annotations; more did not help")
        else:
            sentences.append(f"{metric}: {100 * gain[result.size]:.0f} % of the gain at {result.size} annotations")
    return sentences


def _counts(config: Config, sheet: Sheet) -> Tensor:
    """Label counts [items, labels], from columns of counts or from columns of labels."""
    import torch

    from pippin.evaluate.annotators.soft_labels import check_counts
    from pippin.evaluate.judges.votes import encode

    if config.counts:
        if config.annotators or config.labels:
            raise InvalidArgument("give counts (--counts), or annotators and labels; not both")
        return check_counts(torch.from_numpy(sheet.floats(list(config.counts))))
    not_labels = {"id", "item", *config.features}
    candidates = [name for name in sheet.columns if name not in not_labels and name.lower() not in not_labels]
    annotators = list(config.annotators) or candidates
    if len(annotators) < 2:
        raise InvalidInput(f"{sheet.name} has {len(annotators)} columns of annotators; give 2 or more, or --counts")
    codes, _, labels = encode(
        sheet.texts(annotators),
        classes=list(config.labels) or None,
        judges=annotators,
        where=lambda row: f"line {sheet.lines[row]} of {sheet.name}",
    )
    if not config.labels and len(labels) > max(20, len(codes) // 10):
        raise InvalidInput(
            f"{sheet.name} holds {len(labels)} different labels in {', '.join(annotators[:6])}; name the columns of "
            "annotators with --annotators, or those of label counts with --counts"
        )
    counts = torch.from_numpy((codes[..., None] == range(len(labels))).sum(1))  # [items, labels]
    unlabeled = (counts.sum(1) == 0).nonzero()[:, 0]
    if len(unlabeled):
        raise InvalidInput(f"line {sheet.lines[int(unlabeled[0])]} of {sheet.name} has no label at all; leave it out")
    return counts


def _trained(config: Config, sheet: Sheet, counts: Tensor, *, show_progress: bool) -> BudgetReport:
    """Train on features standardized with the statistics of the training items, and evaluate on the test items."""
    import torch
    from torch import nn

    from pippin.evaluate.annotators.annotation_budget import AnnotationBudget, split_items
    from pippin.evaluate.annotators.soft_labels import SoftLabelFit

    x = torch.from_numpy(sheet.floats(list(config.features)))
    train, test = split_items(counts, config.test, config.seed)
    mean, deviation = x[train].mean(0), x[train].std(0)
    x = ((x - mean) / torch.where(deviation > 0, deviation, 1.0)).float()

    def network(seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(x.shape[1], 48), nn.ReLU(), nn.Linear(48, counts.shape[1]))

    budget = AnnotationBudget(
        network, SoftLabelFit(steps=config.steps), sizes=list(config.sizes), num_seeds=config.num_seeds
    )
    total = budget.num_trainings(counts[train])
    with progress.bar(total, "training", unit="models", show_progress=show_progress) as bar:
        return budget.run(
            (x[train], counts[train]),
            (x[test], counts[test]),
            title=f"{len(train)} items to train on, {len(test)} for the test",
            on_progress=bar.advance,
        )
