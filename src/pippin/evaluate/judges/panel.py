"""How many independent votes a panel of judges is worth, and how much accuracy their correlated errors cost.

Notable here:
- the measure is the correlation of errors, not agreement: judges who are all right also agree
- the bootstrap resamples counts of distinct rows of votes, so 10,000 samples of 1,000 items take a second or two
- the accuracy under independence uses each judge's own confusion matrix, within levels of difficulty
- the best judge is chosen on one half of the items and scored on the other

Source: G. Kohli, Nine Judges, Two Effective Votes, arXiv:2605.29800.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from pippin.core.checks import NonNegativeInt, PositiveInt, checked
from pippin.core.errors import InferenceAtRisk, InvalidArgument, InvalidInput
from pippin.evaluate.judges.aggregation import check_voted
from pippin.evaluate.judges.correlation import effective_votes, phi_matrix
from pippin.evaluate.judges.measures import Measurement
from pippin.evaluate.judges.report import LeftOut, PanelReport, Subsets
from pippin.evaluate.judges.votes import Codes, Floats, as_array, encode, listed, read_csv

__all__ = ["JudgePanel", "LeftOut", "PanelReport", "Subsets", "effective_votes", "phi_matrix"]

Missing = Literal["error", "pairwise", "fill"]
FEWEST, ENOUGH = 30, 200


@dataclass(frozen=True)
class JudgePanel:
    """The votes of k judges on n items whose right label is known.

    Attributes:
        codes: [n, k] class indices; -1 for a missing vote.
        gold: [n] class indices of the right labels.
        classes: the label of each class index.
        judges: names.
        difficulty: [n], larger is harder (the entropy of human labels, for example); None if it is unknown.
        filled: number of missing votes that were replaced by a label chosen by a hash.
    """

    codes: Codes
    gold: Codes
    classes: tuple[Any, ...]
    judges: tuple[str, ...]
    difficulty: Floats | None = None
    filled: int = 0

    @classmethod
    @checked
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
        """Make a panel from a table of labels.

        Args:
            labels: [n, k], one row per item, one column per judge; words or numbers; an array, a tensor, a data frame.
            gold: [n], the right labels.
            difficulty: [n] finite numbers, larger is harder.
            judges: names; None takes the column names of a data frame, or "judge 1", "judge 2" and so on.
            classes: all labels that may occur; None takes those in ``gold``.
            missing: how to treat votes that are None or NaN: "error" refuses them; "pairwise" compares each pair of
                judges on the items that both voted on; "fill" replaces them by a label chosen by a hash.
            where: gives the name of an item in messages.

        Raises:
            InvalidArgument: another number of names than of judges, or a repeated name.
            InvalidInput: fewer than 2 judges, fewer than 30 items or than judges, unknown or missing labels, a single
                class, or difficulties that are not finite.

        Warns:
            InferenceAtRisk: fewer than 200 items.
        """
        if judges is None and hasattr(labels, "columns"):
            judges = list(map(str, labels.columns))
        table = as_array(labels)
        names = _names(judges, table)
        _check_size(table, names)
        codes, gold_codes, known = encode(table, gold, classes=classes, judges=names, where=where)
        assert gold_codes is not None
        absent = codes < 0
        if absent.any() and missing == "error":
            item, judge = np.argwhere(absent)[0]
            raise InvalidInput(
                f"judge {names[judge]!r} has no label on {where(int(item))} ({int(absent.sum())} missing in all); fill "
                "them in, leave the items out, or choose how to treat them: missing='pairwise' or 'fill'"
            )
        filled = int(absent.sum()) if missing == "fill" else 0
        if filled:
            codes = _filled(codes, len(known))
        check_voted(codes)
        return cls(codes, gold_codes, known, names, _difficulty(difficulty, len(codes), where), filled)

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
            gold: name of the column of right labels.
            difficulty: name of the column of difficulties.
            judges: names of the columns of votes; None takes all others except those called id or item.
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
        return cls.from_labels(
            sheet.texts(columns),
            right,
            None if difficulty is None else sheet.floats([difficulty])[:, 0],
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
        """The difficulty level of each item, [n]: quantile bins, in which items of equal difficulty stay together.

        Args:
            bins: the largest number of levels.
        """
        if self.difficulty is None or bins == 1:
            return np.zeros(len(self.gold), dtype=np.int64)
        values = np.unique(self.difficulty)
        if len(values) <= bins:
            return np.searchsorted(values, self.difficulty)
        edges = np.unique(np.quantile(self.difficulty, np.arange(1, bins) / bins))
        return np.searchsorted(edges, self.difficulty, side="right")

    @checked
    def report(
        self,
        *,
        num_bootstrap: Annotated[int, Ge(100)] = 10_000,
        num_permutations: Annotated[int, Ge(99)] = 10_000,
        num_null: Annotated[int, Ge(100)] = 10_000,
        num_bins: PositiveInt = 3,
        seed: NonNegativeInt = 0,
    ) -> PanelReport:
        """Measure accuracy, correlation of errors, effective votes and the cost of correlated errors.

        Args:
            num_bootstrap: bootstrap samples of the items for intervals; the gap, which costs more, uses a tenth.
            num_permutations: permutations for the p-value.
            num_null: sampled panels where the accuracy of independent judges cannot be computed exactly.
            num_bins: levels of difficulty within which judges are assumed independent, where difficulties are known.
            seed: seed of all sampling.

        Raises:
            InvalidInput: fewer than two judges err sometimes and not always, or their errors cancel.

        Warns:
            InferenceAtRisk: judges who always or never err, or many ties.
        """
        return Measurement(self, num_bootstrap, num_permutations, num_null, num_bins, seed).report()


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
        raise InvalidInput(f"{items} items are too few for correlations; give {FEWEST} at least, better {ENOUGH}")
    if items < ENOUGH:
        warnings.warn(
            f"{items} items: correlations of errors are unreliable with fewer than about {ENOUGH}",
            InferenceAtRisk,
            stacklevel=4,
        )


def _difficulty(values: Any, items: int, where: Callable[[int], str]) -> Floats | None:
    if values is None:
        return None
    table = as_array(values)
    if table.shape != (items,) or table.dtype.kind not in "biuf":
        raise InvalidInput(f"difficulty must be one number for each of {items} items; got shape {table.shape}")
    found: Floats = table.astype(np.float64)
    if not np.isfinite(found).all():
        raise InvalidInput(f"the difficulty of {where(int((~np.isfinite(found)).argmax()))} is not finite")
    return found


def _filled(codes: Codes, classes: int) -> Codes:
    """Replace missing votes by labels chosen by the SHA-256 of item and judge."""
    found = codes.copy()
    for item, judge in np.argwhere(codes < 0):
        found[item, judge] = int.from_bytes(hashlib.sha256(f"{item}:{judge}".encode()).digest()[:8]) % classes
    return found
