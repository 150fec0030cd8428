"""How many independent votes a panel of judges is worth, and what their common mistakes cost.

Notable here:
- what counts is the correlation of errors, not agreement: judges who are right together agree, too
- items are drawn again through their distinct rows of votes, so 10,000 bootstraps of 1,000 items take a second or two
- the forecast for independent judges keeps every judge's own confusion matrix, within levels of difficulty
- the best judge is chosen on one half of the items and scored on the other

Source: G. Kohli, Nine Judges, Two Effective Votes, arXiv:2605.29800.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pippin.core.errors import InferenceAtRisk, InvalidArgument, InvalidInput
from pippin.evaluate.aggregate import check_voted
from pippin.evaluate.correlation import effective_votes, phi_matrix
from pippin.evaluate.panel_measures import Measurement
from pippin.evaluate.panel_report import LeftOut, PanelReport, Subsets
from pippin.evaluate.votes import Codes, Floats, encode, listed, plain, read_csv

__all__ = ["JudgePanel", "LeftOut", "PanelReport", "Subsets", "effective_votes", "phi_matrix"]

Missing = Literal["error", "pairwise", "fill"]
FEWEST, ENOUGH = 30, 200


@dataclass(frozen=True)
class JudgePanel:
    """Votes of some judges on items whose right label is known.

    Attributes:
        codes: [n, k], numbers of labels; -1 for none.
        gold: [n].
        classes: what the numbers stand for.
        judges: names.
        difficulty: [n], how hard each item is (the entropy of people's labels, say); None if nobody knows.
        filled: labels that were missing and were put in by a hash.
    """

    codes: Codes
    gold: Codes
    classes: tuple[Any, ...]
    judges: tuple[str, ...]
    difficulty: Floats | None = None
    filled: int = 0

    @classmethod
    def from_labels(
        cls,
        labels: Any,
        gold: Any,
        difficulty: Any = None,
        *,
        judges: Sequence[str] | None = None,
        classes: Sequence[Any] | None = None,
        missing: Missing = "error",
        where: Callable[[int], str] = lambda item: f"item {item}",
    ) -> JudgePanel:
        """Check and number the votes.

        Args:
            labels: [n, k], one row per item, one column per judge; words or numbers; an array, a tensor, a data frame.
            gold: [n], the right labels.
            difficulty: [n] finite numbers, larger is harder.
            judges: names; None takes those of the data frame, or "judge 1"...
            classes: all labels that may occur; None takes those in ``gold``.
            missing: what to do about votes that are None or NaN: "error" refuses them; "pairwise" compares each pair
                of judges on what both voted on; "fill" puts in a label chosen by a hash and counts them.
            where: names an item in messages.

        Raises:
            InvalidArgument: an unknown ``missing``; names that do not fit.
            InvalidInput: fewer than 2 judges, fewer than 30 items or than judges, unknown or missing labels, a single
                class, or difficulties that are not finite.

        Warns:
            InferenceAtRisk: fewer than 200 items.
        """
        if missing not in ("error", "pairwise", "fill"):
            raise InvalidArgument(f"missing={missing!r} is not known; use 'error', 'pairwise' or 'fill'")
        if judges is None and hasattr(labels, "columns"):
            judges = list(map(str, labels.columns))
        table = plain(labels)
        names = _names(judges, table)
        _check_size(table, names)
        codes, coded, known = encode(table, gold, classes=classes, judges=names, where=where)
        assert coded is not None
        lost = codes < 0
        if lost.any() and missing == "error":
            item, judge = np.argwhere(lost)[0]
            raise InvalidInput(
                f"judge {names[judge]!r} has no label on {where(int(item))} ({int(lost.sum())} missing in all); fill "
                "them in, leave the items out, or choose how to treat them: missing='pairwise' or 'fill'"
            )
        filled = int(lost.sum()) if missing == "fill" else 0
        if filled:
            codes = _filled(codes, len(known))
        check_voted(codes)
        return cls(codes, coded, known, names, _difficulty(difficulty, len(codes), where), filled)

    @classmethod
    def from_csv(
        cls,
        path: str | Path,
        *,
        gold: str = "gold",
        difficulty: str | None = None,
        judges: Sequence[str] | None = None,
        classes: Sequence[Any] | None = None,
        missing: Missing = "error",
    ) -> JudgePanel:
        """Read votes from a CSV file with one row per item and a column for each judge.

        Args:
            path: the file, in UTF-8; its first line names the columns.
            gold: the column of right labels.
            difficulty: the column of difficulties.
            judges: columns of votes; None takes all others but those called id or item.
            classes: all labels that may occur; None takes those in the gold column.
            missing: see `from_labels`; empty cells, NA and NaN are missing.

        Raises:
            InvalidInput: the file or its votes cannot be used; the message names line and column.
        """
        sheet = read_csv(path)
        taken = {gold, difficulty, "id", "item"}
        columns = list(judges) if judges is not None else [name for name in sheet.columns if name.lower() not in taken]
        columns = [name for name in columns if name not in (gold, difficulty)]
        right = sheet.texts([gold])[:, 0]
        if len(columns) < 2:
            raise InvalidInput(f"{path} has {len(columns)} columns of votes beside {gold!r}; a panel needs 2 or more")
        hard = None if difficulty is None else sheet.numbers([difficulty])[:, 0]
        return cls.from_labels(
            sheet.texts(columns),
            right,
            hard,
            judges=columns,
            classes=classes,
            missing=missing,
            where=lambda item: f"line {sheet.lines[item]} of {sheet.name}",
        )

    @property
    def errors(self) -> Floats:
        """[n, k]: 1 where a judge erred, 0 where not, NaN where there is no vote."""
        return np.where(self.codes < 0, np.nan, (self.codes != self.gold[:, None]).astype(np.float64))

    def levels(self, bins: int) -> Codes:
        """The level of difficulty of each item: equal parts of the items, and equal difficulties together."""
        if self.difficulty is None or bins == 1:
            return np.zeros(len(self.gold), dtype=np.int64)
        values = np.unique(self.difficulty)
        if len(values) <= bins:
            return np.searchsorted(values, self.difficulty)
        edges = np.unique(np.quantile(self.difficulty, np.arange(1, bins) / bins))
        return np.searchsorted(edges, self.difficulty, side="right")

    def report(
        self, *, n_boot: int = 10_000, n_perm: int = 10_000, n_null: int = 10_000, bins: int = 3, seed: int = 0
    ) -> PanelReport:
        """Everything that the votes say about the panel.

        Args:
            n_boot: samples of the items for intervals; the gap, which costs more, takes a tenth of them.
            n_perm: shuffles for the p-value.
            n_null: draws of an independent panel, where its accuracy cannot be enumerated.
            bins: levels of difficulty within which judges are taken for independent, where difficulties are known.
            seed: of everything that is drawn.

        Raises:
            InvalidArgument: a number out of range.
            InvalidInput: fewer than two judges err sometimes and not always, or their errors cancel.

        Warns:
            InferenceAtRisk: judges who always or never err, or many ties.
        """
        for name, value, least in (("n_boot", n_boot, 100), ("n_perm", n_perm, 99), ("n_null", n_null, 100)):
            if value < least:
                raise InvalidArgument(f"{name} is {value}; give {least} or more")
        if bins < 1 or seed < 0:
            raise InvalidArgument(f"bins is {bins} and seed {seed}; give 1 level or more, and a seed of 0 or more")
        return Measurement(self, n_boot, n_perm, n_null, bins, seed).report()


def _names(judges: Sequence[str] | None, table: NDArray[Any]) -> tuple[str, ...]:
    count = table.shape[1] if table.ndim == 2 else 0
    names = tuple(judges) if judges is not None else tuple(f"judge {j + 1}" for j in range(count))
    if len(names) != count or len(set(names)) != count:
        raise InvalidArgument(f"{len(names)} names for {count} judges, all different: {listed(names)}")
    return names


def _check_size(table: NDArray[Any], names: tuple[str, ...]) -> None:
    items = len(table) if table.ndim else 0
    if table.ndim != 2 or len(names) < 2:
        raise InvalidInput(f"labels must be [items, judges] with 2 judges or more; got shape {table.shape}")
    if items < len(names):
        raise InvalidInput(
            f"there are fewer items ({items}) than judges ({len(names)}); one row per item, one column per judge, and "
            f"{ENOUGH} items or more"
        )
    if items < FEWEST:
        raise InvalidInput(f"{items} items say nothing about correlations; give {FEWEST} at least, better {ENOUGH}")
    if items < ENOUGH:
        warnings.warn(
            f"{items} items: correlations of errors settle from about {ENOUGH} on", InferenceAtRisk, stacklevel=4
        )


def _difficulty(values: Any, items: int, where: Callable[[int], str]) -> Floats | None:
    if values is None:
        return None
    table = plain(values)
    if table.shape != (items,) or table.dtype.kind not in "biuf":
        raise InvalidInput(f"difficulty must be one number for each of {items} items; got shape {table.shape}")
    found: Floats = table.astype(np.float64)
    if not np.isfinite(found).all():
        raise InvalidInput(f"the difficulty of {where(int((~np.isfinite(found)).argmax()))} is not finite")
    return found


def _filled(codes: Codes, classes: int) -> Codes:
    """Labels for missing votes, by SHA-256 of item and judge."""
    found = codes.copy()
    for item, judge in np.argwhere(codes < 0):
        found[item, judge] = int.from_bytes(hashlib.sha256(f"{item}:{judge}".encode()).digest()[:8]) % classes
    return found
