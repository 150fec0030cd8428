"""What a panel of judges agrees on where no right labels are known: agreement, a label for each item, each judge.

Notable here:
- agreement is Krippendorff's alpha, which allows missing votes; it says nothing of whether the judges are right
- labels and the accuracy of judges are those of Dawid and Skene's model, which assumes independent errors: judges with
  the same mistakes look right to it
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pippin.core.errors import InvalidInput
from pippin.core.files import atomic_write
from pippin.core.report import Report, Row
from pippin.evaluate.judges.aggregation import check_voted, dawid_skene, majority
from pippin.evaluate.judges.votes import encode, read_csv
from pippin.metrics.agreement import krippendorff_alpha

SOUND, TENTATIVE = 0.8, 0.667
"""Krippendorff's own bounds: labels are reliable from the first, and good for tentative conclusions from the second."""


@dataclass(frozen=True)
class Consensus:
    """The labels of n items by k judges, without right labels.

    Attributes:
        items: names of the items: the column id or item, or their numbers from 1.
        judges: names of the judges.
        labels: the most probable label of each item by Dawid and Skene's model.
        confidence: its probability under the model.
        majority: the label with the most votes; a tie is broken by a hash.
        ties: number of items whose votes are tied.
        alpha: Krippendorff's alpha of all votes, at most 1.
        judge_accuracy: how often each judge is right, as the model estimates it.
    """

    items: tuple[str, ...]
    judges: tuple[str, ...]
    labels: tuple[Any, ...]
    confidence: tuple[float, ...]
    majority: tuple[Any, ...]
    ties: int
    alpha: float
    judge_accuracy: tuple[float, ...]

    @property
    def advice(self) -> str:
        """What the agreement means for whoever uses the labels."""
        if self.alpha >= SOUND:
            return f"The judges agree (alpha {self.alpha:.2f}); whether they are right, only right labels can tell."
        if self.alpha >= TENTATIVE:
            return f"The judges agree enough for tentative conclusions (alpha {self.alpha:.2f}, reliable from {SOUND})."
        return (
            f"The judges do not agree enough to rely on their labels (alpha {self.alpha:.2f}, reliable from {SOUND}): "
            "make the question clearer, or have people label the items with low confidence."
        )

    def report(self) -> Report:
        """Agreement, ties, and the accuracy of each judge."""
        changed = sum(a != b for a, b in zip(self.labels, self.majority, strict=True))
        rows = [
            Row("Krippendorff's alpha", self.alpha),
            Row("ties of the majority", self.ties, "items"),
            Row("Dawid-Skene decides otherwise", changed, "items"),
            Row("mean confidence", 100 * sum(self.confidence) / len(self.confidence), "%"),
        ]
        rows += [
            Row(f"accuracy of {judge}, estimated", 100 * share, "%")
            for judge, share in zip(self.judges, self.judge_accuracy, strict=True)
        ]
        return Report(f"{len(self.judges)} judges, {len(self.items)} items, no right labels", rows)

    def to_json(self) -> str:
        """Everything, with a line for each item."""
        items = [
            {"item": item, "label": label, "confidence": share, "majority": other}
            for item, label, share, other in zip(self.items, self.labels, self.confidence, self.majority, strict=True)
        ]
        record = {
            "alpha": self.alpha,
            "ties": self.ties,
            "judges": dict(zip(self.judges, self.judge_accuracy, strict=True)),
            "advice": self.advice,
            "items": items,
        }
        return json.dumps(record, indent=1, ensure_ascii=False)

    def save(self, path: str | Path) -> None:
        """Write item, label, confidence and majority as a CSV file, atomically."""
        with atomic_write(Path(path), mode="w") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("item", "label", "confidence", "majority"))
            for row in zip(self.items, self.labels, self.confidence, self.majority, strict=True):
                writer.writerow((row[0], row[1], f"{row[2]:.4f}", row[3]))


def consensus(
    labels: Any,
    *,
    items: Sequence[str] | None = None,
    judges: Sequence[str] | None = None,
    classes: Sequence[Any] | None = None,
) -> Consensus:
    """Labels, agreement and reliability from votes alone.

    Args:
        labels: [n, k], one row per item and one column per judge; None or NaN where a judge gave no label.
        items: names of the items; None numbers them from 1.
        judges: names of the judges; None numbers them from 1.
        classes: every label that may occur; None takes those that do.

    Raises:
        InvalidInput: fewer than two judges, an item without a vote, or labels that cannot be used.
    """
    codes, _, known = encode(labels, classes=classes, judges=judges)
    if codes.shape[1] < 2:
        raise InvalidInput("agreement needs the votes of two judges or more, got one")
    check_voted(codes)
    found = dawid_skene(codes, len(known))
    chosen, tied = majority(codes, len(known))
    accuracy = np.einsum("c,kcc->k", found.prior, found.confusion)
    names = judges or [f"judge {index + 1}" for index in range(codes.shape[1])]
    return Consensus(
        items=tuple(items or map(str, range(1, len(codes) + 1))),
        judges=tuple(names),
        labels=tuple(known[label] for label in found.labels),
        confidence=tuple(map(float, found.posterior.max(1))),
        majority=tuple(known[label] for label in chosen),
        ties=len(tied),
        alpha=krippendorff_alpha([[int(c) if c >= 0 else None for c in row] for row in codes]),
        judge_accuracy=tuple(map(float, accuracy)),
    )


def consensus_of_csv(
    path: str | Path, *, judges: Sequence[str] | None = None, classes: Sequence[Any] | None = None
) -> Consensus:
    """As `consensus`, from a CSV file with a row per item and a column per judge; id or item names the items.

    Raises:
        InvalidInput: the file or its votes cannot be used.
    """
    sheet = read_csv(path)
    named = next((name for name in sheet.columns if name.lower() in ("id", "item")), None)
    columns = list(judges) if judges is not None else [name for name in sheet.columns if name != named]
    items = None if named is None else [str(text) for text in sheet.texts([named])[:, 0]]
    return consensus(sheet.texts(columns), items=items, judges=columns, classes=classes)
