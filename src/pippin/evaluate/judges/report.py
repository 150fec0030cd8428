"""The report on a panel of judges, as a table, as JSON, as Markdown and as a plot.

Notable here:
- `advice` says in a sentence or two what the figures mean: how many votes the panel is worth, and whom to drop
- an undefined value (such as the correlation of a judge who never errs) is null in JSON, not NaN
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pippin.core import plotting
from pippin.core.files import atomic_write
from pippin.core.report import Report, Row
from pippin.evaluate.judges.votes import Floats

Interval = tuple[float, float]
_DISTRUST = 0.5
_NAMED = 24


@dataclass(frozen=True)
class Subsets:
    """Effective votes of the subsets of one size.

    Attributes:
        size: number of judges in a subset.
        mean: mean effective votes over the subsets.
        low: the smallest over the subsets.
        high: the largest over the subsets.
        formula: Kish's formula for that many judges with the whole panel's mean correlation.
        count: number of subsets; all of them up to 2,000, a random sample beyond.
    """

    size: int
    mean: float
    low: float
    high: float
    formula: float
    count: int


@dataclass(frozen=True)
class LeftOut:
    """How the panel changes when one judge is left out.

    Attributes:
        judge: the judge's name.
        votes: change of the effective votes; NaN for a judge who always or never errs.
        votes_ci: 95 % interval of ``votes``.
        accuracy: change of the panel's accuracy; positive where the panel is better without the judge.
        accuracy_ci: 95 % interval of ``accuracy``.
    """

    judge: str
    votes: float
    votes_ci: Interval
    accuracy: float
    accuracy_ci: Interval


@dataclass(frozen=True)
class PanelReport:
    """The measurements of a panel of k judges. Accuracies and gaps are shares from 0 to 1; intervals are 95 %.

    Attributes:
        judges: names.
        items: number of items.
        n_eff: effective votes by Kish's formula.
        n_eff_ci: bootstrap interval of ``n_eff``.
        n_eff_eig: effective votes from the largest eigenvalue of the correlations.
        phi: [k, k] correlations of errors; NaN for judges who always or never err.
        mean_phi: mean correlation over all pairs of judges.
        accuracy: accuracy of the majority vote.
        judge_accuracy: accuracy of each judge.
        best_judge: the judge who is most often the best on a random half of the items.
        best_judge_accuracy: held-out accuracy of the judge chosen on one half, mean over 200 random halves.
        best_judge_advantage: its held-out accuracy less the panel's on the same items.
        null_accuracy: accuracy of the majority if the judges erred independently within levels of difficulty.
        gap: ``null_accuracy - accuracy``.
        gap_ci: bootstrap interval of ``gap``.
        p_value: share of permutations within levels whose mean correlation is at least as large.
        scaling: effective votes of smaller panels.
        leave_one_out: the changes when each judge is left out.
        aggregators: accuracy of each aggregation method, by name.
        all_right: share of items that all judges get right, observed and expected of independent judges.
        all_wrong: share of items that all judges get wrong, observed and expected.
        ties: number of items whose tied votes were decided by a hash.
        filled: number of missing votes that were replaced by a label chosen by a hash.
        levels: number of difficulty levels.
        checks: the gap without levels, with ten levels, and with confusion matrices from other items.
    """

    judges: tuple[str, ...]
    items: int
    n_eff: float
    n_eff_ci: Interval
    n_eff_eig: float
    phi: Floats
    mean_phi: float
    accuracy: float
    judge_accuracy: tuple[float, ...]
    best_judge: str
    best_judge_accuracy: float
    best_judge_advantage: float
    null_accuracy: float
    gap: float
    gap_ci: Interval
    p_value: float
    scaling: tuple[Subsets, ...]
    leave_one_out: tuple[LeftOut, ...]
    aggregators: dict[str, float]
    all_right: tuple[float, float]
    all_wrong: tuple[float, float]
    ties: int
    filled: int
    levels: int
    checks: dict[str, float]

    @property
    def limit(self) -> float:
        """Effective votes in the limit of infinitely many such judges; infinite without positive correlation."""
        return 1 / self.mean_phi if self.mean_phi > 0 else math.inf

    @property
    def advice(self) -> str:
        """One to four sentences on what the figures mean for whoever uses the panel."""
        k = len(self.judges)
        words = [f"This panel of {k} is worth {self.n_eff:.1f} independent votes."]
        if self.n_eff / k < _DISTRUST:
            words.append("Do not read its votes as if they were independent.")
        if self.best_judge_advantage >= 0:
            words.append(f"{self.best_judge} alone is as accurate or better.")
        worse = [left for left in self.leave_one_out if left.accuracy_ci[0] > 0]
        if worse and k > 2:
            drop = max(worse, key=lambda left: left.accuracy)
            words.append(f"Without {drop.judge} it is {100 * drop.accuracy:.1f} points more accurate.")
        return " ".join(words)

    def report(self) -> Report:
        """The main figures as a table."""
        k = len(self.judges)

        def percent(name: str, share: float) -> Row:
            return Row(name, 100 * share, "%")

        rows = [
            Row("effective votes (Kish)", self.n_eff, f"of {k}"),
            Row("  95 % from", self.n_eff_ci[0], f"of {k}"),
            Row("  to", self.n_eff_ci[1], f"of {k}"),
            Row("effective votes (eigenvalue)", self.n_eff_eig, f"of {k}"),
            *([Row("  limit for infinitely many judges", self.limit, "votes")] if math.isfinite(self.limit) else []),
            Row("mean correlation of errors", self.mean_phi),
            Row("p, errors independent", self.p_value),
            percent("panel, majority", self.accuracy),
            percent("panel, if independent", self.null_accuracy),
            percent("gap", self.gap),
            percent("  95 % from", self.gap_ci[0]),
            percent("  to", self.gap_ci[1]),
            percent(f"best judge, held out ({self.best_judge})", self.best_judge_accuracy),
            *(percent(name, value) for name, value in self.aggregators.items() if name != "majority"),
            percent("all right", self.all_right[0]),
            percent("  if independent", self.all_right[1]),
            percent("all wrong", self.all_wrong[0]),
            percent("  if independent", self.all_wrong[1]),
            Row("ties, broken by a hash", self.ties, "items"),
            *([Row("missing votes, filled by a hash", self.filled, "votes")] if self.filled else []),
        ]
        return Report(f"{k} judges, {self.items} items", rows)

    def judge_table(self) -> list[tuple[str, float, float, float, Interval]]:
        """For each judge: its name and accuracy, and the changes when it is left out.

        These are the change of effective votes, the change of accuracy, and the 95 % interval of the latter.
        """
        return [
            (left.judge, accuracy, left.votes, left.accuracy, left.accuracy_ci)
            for left, accuracy in zip(self.leave_one_out, self.judge_accuracy, strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values; undefined and infinite values are None."""
        values = asdict(self) | {"limit": self.limit, "advice": self.advice}
        found: dict[str, Any] = _jsonable(values)
        return found

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    def to_markdown(self) -> str:
        """The advice, followed by the main figures and the judges as two Markdown tables."""
        lines = [self.advice, "", "| what | value | unit |", "|---|---:|---|"]
        lines += [f"| {row.name.strip()} | {row.value:.4g} | {row.unit} |" for row in self.report().rows]
        lines += ["", "| judge | accuracy % | votes without | accuracy without, points |", "|---|---:|---:|---:|"]
        for name, accuracy, votes, change, (low, high) in self.judge_table():
            shown = "" if math.isnan(votes) else f"{votes:+.2f}"
            points = f"{100 * change:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
            lines.append(f"| {name.replace('|', '/')} | {100 * accuracy:.1f} | {shown} | {points} |")
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the JSON to a file, atomically."""
        with atomic_write(Path(path)) as file:
            file.write(f"{self.to_json()}\n".encode())

    def plot(self, path: Path) -> None:
        """Plot the matrix of error correlations, and effective votes over the size of the panel.

        Args:
            path: the image file; its suffix chooses the format (.png, .svg, .pdf).

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        figure = plotting.new(12, 5)
        left, right = figure.subplots(1, 2)
        self._map(figure, left)
        self._curve(right)
        figure.suptitle(
            f"{len(self.judges)} judges, {self.items} items: {self.n_eff:.2f} effective votes "
            f"[{self.n_eff_ci[0]:.2f}, {self.n_eff_ci[1]:.2f}]"
        )
        plotting.save(figure, path)

    def _map(self, figure: Any, panel: Any) -> None:
        """The correlation matrix, with judges ordered by the first eigenvector so that similar ones are neighbors."""
        order = np.argsort(np.linalg.eigh(np.nan_to_num(self.phi))[1][:, -1])
        phi = self.phi[np.ix_(order, order)].copy()
        np.fill_diagonal(phi, np.nan)  # always 1, which says nothing
        largest = float(np.nanmax(np.abs(phi))) if np.isfinite(phi).any() else 1.0
        image = panel.imshow(phi, cmap="RdBu_r", vmin=-largest, vmax=largest)
        figure.colorbar(image, ax=panel, shrink=0.85, label="correlation of errors")
        panel.set_facecolor("0.9")
        k = len(order)
        if k <= _NAMED:
            names = [_short(self.judges[i]) for i in order]
            panel.set_xticks(range(k), names, rotation=45, ha="right", fontsize=8)
            panel.set_yticks(range(k), names, fontsize=8)
        if k <= 12:
            for i, j in np.argwhere(np.isfinite(phi)):
                dark = abs(phi[i, j]) > 0.6 * largest
                panel.text(j, i, f"{phi[i, j]:.2f}", ha="center", va="center", fontsize=7, color="w" if dark else "k")
        panel.set_title(f"mean {self.mean_phi:.3f}", fontsize=10)

    def _curve(self, panel: Any) -> None:
        sizes = [1, *(subsets.size for subsets in self.scaling)]
        panel.plot(sizes, sizes, ":", color="0.5", label="independent judges")
        panel.plot(sizes, [1, *(s.mean for s in self.scaling)], "o-", color="C0", markersize=5, label="mean of panels")
        formula = [1, *(s.formula for s in self.scaling)]
        panel.plot(sizes, formula, "--", color="C1", linewidth=1.2, label="formula, mean correlation")
        low, high = [1, *(s.low for s in self.scaling)], [1, *(s.high for s in self.scaling)]
        panel.fill_between(sizes, low, high, color="C0", alpha=0.15, linewidth=0, label="least and most independent")
        top = max(1.0, *(s.mean for s in self.scaling)) if self.scaling else 1.0
        if math.isfinite(self.limit) and self.limit < 3 * top:
            panel.axhline(self.limit, color="C3", linewidth=1, label=f"infinitely many judges: {self.limit:.2f}")
            top = max(top, self.limit)
        panel.set_ylim(0.8, 1.6 * top)
        panel.set_xlim(1, max(sizes))
        panel.set_xlabel("judges")
        panel.set_ylabel("effective votes")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.legend(fontsize=8, loc="upper left")


def _short(name: str) -> str:
    return name if len(name) <= 18 else name[:17] + "…"


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, np.ndarray):
        return _jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
