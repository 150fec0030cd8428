"""The measurements behind the report on a panel of judges.

Notable here:
- the bootstrap resamples the counts of distinct rows of votes, of which there are few even when there are many items
- each bootstrap sample has its own confusion matrices, and so its own accuracy under independence
"""

from __future__ import annotations

import math
import warnings
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from pippin.core.errors import InferenceAtRisk
from pippin.evaluate.judges.aggregation import dawid_skene, majority, weighted
from pippin.evaluate.judges.correlation import (
    effective_votes,
    kish,
    mean_phi,
    phi_from_sums,
    phi_matrix,
    sampled_phi,
    shuffled_phi,
    varied_part,
    votes_of,
    votes_without,
    weighted_sums,
)
from pippin.evaluate.judges.independence import Cells, plurality_is_right, unanimous
from pippin.evaluate.judges.report import LeftOut, PanelReport, Subsets
from pippin.evaluate.judges.votes import Floats, patterns
from pippin.metrics import percentile_interval

if TYPE_CHECKING:
    from pippin.evaluate.judges.panel import JudgePanel

TIED = 0.02
_SUBSETS = 2000
_HALVES = 200


class Measurement:
    """The measurements of `JudgePanel.report`, which all work on the distinct rows of votes.

    Args:
        panel: the votes.
        num_bootstrap: see `JudgePanel.report`, as for the other arguments.
        num_permutations: permutations of the p-value.
        num_null: sampled panels where the accuracy under independence cannot be enumerated.
        num_bins: levels of difficulty.
        seed: seed of all sampling.
    """

    def __init__(
        self, panel: JudgePanel, num_bootstrap: int, num_permutations: int, num_null: int, num_bins: int, seed: int
    ) -> None:
        self.panel, self.seed = panel, seed
        self.num_bootstrap, self.num_permutations, self.num_null = num_bootstrap, num_permutations, num_null
        self.classes = len(panel.classes)
        self.level = panel.levels(num_bins)
        chosen, self.tied = majority(panel.codes, self.classes)
        self.right = chosen == panel.gold
        others = [np.delete(panel.codes, j, 1) for j in range(panel.codes.shape[1])]
        # [n, k]: whether the panel without judge j is right; an item left without votes gets the first label
        self.without = np.stack([majority(codes, self.classes)[0] == panel.gold for codes in others], 1)
        self.errors = panel.errors
        self.varied = ~np.isnan(np.diag(phi_matrix(self.errors)))
        rows = np.column_stack([panel.codes, panel.gold, self.level, self.right, self.without])
        self.first, self.inverse, counts = patterns(rows)
        self.counts = counts.astype(np.float64)
        first = self.first
        self.cells = Cells.of_rows(panel.codes[first], panel.gold[first], self.level[first], self.classes)

    def report(self) -> PanelReport:
        """Measure everything; the bootstrap and the permutation test take most of the time."""
        panel = self.panel
        phi = phi_matrix(self.errors)
        inner = varied_part(phi, panel.judges)
        votes, mean = effective_votes(self.errors[:, self.varied]), mean_phi(inner)
        self._warn_of_ties()
        accuracy = float(self.right.mean())
        confusion = self.cells.confusion(self.counts)
        null = self._null(self.cells, confusion, self.counts)
        all_right, all_wrong = unanimous(confusion, self.cells.gold)
        shares = self.cells.shares(self.counts)
        interval, left_out = self._bootstrap(votes)
        best, best_accuracy, against = self._best_judge()
        observed_right, observed_wrong = self._unanimous()
        return PanelReport(
            judges=panel.judges,
            items=len(panel.gold),
            n_eff=votes,
            n_eff_ci=interval,
            n_eff_eig=effective_votes(self.errors[:, self.varied], "eigen"),
            phi=phi,
            mean_phi=mean,
            accuracy=accuracy,
            judge_accuracy=tuple(float(a) for a in 1 - np.nanmean(self.errors, 0)),
            best_judge=best,
            best_judge_accuracy=best_accuracy,
            best_judge_advantage=against,
            null_accuracy=null,
            gap=null - accuracy,
            gap_ci=self._gap_interval(),
            p_value=self._p_value(mean),
            scaling=self._scaling(inner),
            leave_one_out=left_out,
            aggregators=self._aggregators(),
            all_right=(observed_right, float(shares @ all_right)),
            all_wrong=(observed_wrong, float(shares @ all_wrong)),
            ties=len(self.tied),
            filled=panel.filled,
            levels=int(self.level.max()) + 1,
            checks=self._checks(accuracy),
        )

    def _warn_of_ties(self) -> None:
        share = len(self.tied) / len(self.right)
        if share > TIED:
            warnings.warn(
                f"{len(self.tied)} of {len(self.right)} items are ties, which are broken by a hash; "
                f"{self._fewer_ties()}",
                InferenceAtRisk,
                4,
            )

    def _fewer_ties(self) -> str:
        """What this panel, of an even or odd number of judges and of labels, can do about ties."""
        judges = len(self.panel.judges)
        if bool((self.panel.codes < 0).any()):
            return "votes are missing, so that some items have an even number of them: fill in the missing votes"
        if judges % 2 == 0:
            return f"a panel of {judges - 1} or {judges + 1} judges has fewer"
        return (
            f"{judges} judges tie as they choose among {len(self.panel.classes)} labels: decide by Dawid-Skene, which "
            "weighs the judges, or merge labels"
        )

    def _unanimous(self) -> tuple[float, float]:
        voted = ~np.isnan(self.errors)
        everyone = voted.all(1)
        right, wrong = ((everyone & (self.errors == value).all(1)).mean() for value in (0, 1))
        return float(right), float(wrong)

    def _null(self, cells: Cells, confusion: Floats, weights: Floats) -> float:
        right = plurality_is_right(confusion, cells.gold, self.num_null, self.seed)
        return float(cells.shares(weights) @ right)

    def _samples(self, samples: int, rng: np.random.Generator) -> Any:
        """Bootstrap counts of the distinct rows, in blocks [b, rows] that fit into memory."""
        items = int(self.counts.sum())
        step = max(1, 4_000_000 // len(self.counts))
        for start in range(0, samples, step):
            yield rng.multinomial(items, self.counts / items, min(step, samples - start)).astype(np.float64)

    def _bootstrap(self, votes: float) -> tuple[tuple[float, float], tuple[LeftOut, ...]]:
        """The interval of the effective votes, and the changes (with intervals) when each judge is left out."""
        rng = np.random.default_rng((self.seed, 1))
        errors = self.errors[self.first]
        right, without = self.right[self.first], self.without[self.first]
        effective, reduced, changes = [], [], []
        for weights in self._samples(self.num_bootstrap, rng):
            phi = phi_from_sums(weighted_sums(errors, weights))[:, self.varied][:, :, self.varied]
            effective.append(votes_of(phi))
            reduced.append(votes_without(phi))
            total = weights.sum(1)[:, None]
            changes.append((weights @ without - (weights @ right)[:, None]) / total)
        samples = np.concatenate(effective)
        inner = phi_matrix(self.errors)[np.ix_(self.varied, self.varied)]
        alone = votes_without(inner[None])[0]
        votes_changes = np.concatenate(reduced) - samples[:, None]
        accuracy_changes = np.concatenate(changes)
        left_out, at = [], 0
        for judge, name in enumerate(self.panel.judges):
            after, of_votes = math.nan, (math.nan, math.nan)
            if self.varied[judge]:
                after, of_votes = float(alone[at] - votes), _interval(votes_changes[:, at])
                at += 1
            change = float(self.without[:, judge].mean() - self.right.mean())
            left_out.append(LeftOut(name, after, of_votes, change, _interval(accuracy_changes[:, judge])))
        return _interval(samples), tuple(left_out)

    def _gap_interval(self) -> tuple[float, float]:
        rng = np.random.default_rng((self.seed, 2))
        right, gaps = self.right[self.first], []
        num_samples = max(100, self.num_null // 20)
        for weights in self._samples(max(100, self.num_bootstrap // 10), rng):
            expected = plurality_is_right(self.cells.confusion(weights), self.cells.gold, num_samples, self.seed)
            null = (self.cells.shares(weights) * expected).sum(-1)
            gaps.append(null - weights @ right / weights.sum(1))
        return _interval(np.concatenate(gaps))

    def _p_value(self, mean: float) -> float:
        rng = np.random.default_rng((self.seed, 3))
        errors = self.errors[:, self.varied]
        small = len(errors) * errors.shape[1] * self.num_permutations <= 400_000_000
        permute = shuffled_phi if small and not np.isnan(errors).any() else sampled_phi
        null = permute(errors, self.level, self.num_permutations, rng)
        return float((1 + (null >= mean - 1e-12).sum()) / (1 + len(null)))

    def _scaling(self, phi: Floats) -> tuple[Subsets, ...]:
        """Effective votes of smaller panels: of all subsets of a size, or of a random sample where there are many."""
        rng, k, found = np.random.default_rng((self.seed, 4)), len(phi), []
        for size in range(2, k + 1):
            members = _subsets(k, size, rng)
            pairs = np.einsum("si,ij,sj->s", members, phi, members)  # sum of phi over each subset, diagonal included
            values = kish(size, (pairs - size) / (size * (size - 1)))
            finite = values[np.isfinite(values)]
            if len(finite):
                found.append(
                    Subsets(
                        size,
                        float(finite.mean()),
                        float(finite.min()),
                        float(finite.max()),
                        float(kish(size, mean_phi(phi))),
                        len(finite),
                    )
                )
        return tuple(found)

    def _best_judge(self) -> tuple[str, float, float]:
        """The judge that is most often the best on a random half of the items.

        Also the mean accuracy of the chosen judge on the other half, and its mean lead over the panel there.
        """
        rng = np.random.default_rng((self.seed, 5))
        voted = ~np.isnan(self.errors)
        right = np.column_stack([np.where(voted, 1 - self.errors, 0.0), self.right])
        count = np.column_stack([voted, np.ones(len(right))]).astype(np.float64)
        chosen, scores, leads = [], [], []
        for _ in range(_HALVES):
            half = np.zeros(len(right))
            half[rng.permutation(len(right))[: len(right) // 2]] = 1.0
            hits, voted_on = half @ right, half @ count
            held_out = (right.sum(0) - hits) / np.maximum(count.sum(0) - voted_on, 1)
            judge = int((hits / np.maximum(voted_on, 1))[:-1].argmax())
            chosen.append(judge)
            scores.append(float(held_out[judge]))
            leads.append(float(held_out[judge] - held_out[-1]))
        return self.panel.judges[int(np.bincount(chosen).argmax())], float(np.mean(scores)), float(np.mean(leads))

    def _aggregators(self) -> dict[str, float]:
        codes, gold, classes = self.panel.codes, self.panel.gold, self.classes
        chosen = {
            "majority": majority(codes, classes)[0],
            "Dawid-Skene": dawid_skene(codes, classes).labels,
            "weighted by accuracy": weighted(codes, gold, classes, seed=self.seed),
            "decorrelated weights": weighted(codes, gold, classes, "decorrelated", seed=self.seed),
        }
        return {name: float((labels == gold).mean()) for name, labels in chosen.items()}

    def _checks(self, accuracy: float) -> dict[str, float]:
        """The gap without difficulty levels, with ten, and with confusion matrices estimated on the other half."""
        panel, found = self.panel, {}
        for name, bins in (("gap without levels", 1), ("gap with 10 levels", 10)):
            level = panel.levels(bins)
            first, _, found_counts = patterns(np.column_stack([panel.codes, panel.gold, level]))
            counts = found_counts.astype(np.float64)
            cells = Cells.of_rows(panel.codes[first], panel.gold[first], level[first], self.classes)
            found[name] = self._null(cells, cells.confusion(counts), counts) - accuracy
        rng, right, gaps = np.random.default_rng((self.seed, 6)), self.right[self.first], []
        for _ in range(10):
            half = np.bincount(self.inverse, rng.permutation(len(panel.gold)) % 2, len(self.counts)).astype(np.float64)
            for train in (half, self.counts - half):
                held_out = self.counts - train
                expected = self._null(self.cells, self.cells.confusion(train), held_out)
                gaps.append(expected - float(held_out @ right / held_out.sum()))
        found["gap from split halves"] = float(np.mean(gaps))
        return found


def _interval(values: Floats) -> tuple[float, float]:
    """The central 95 % of bootstrap samples, without interpolation, as effective votes may be infinite."""
    low, high = percentile_interval(values, method="nearest")
    return float(low), float(high)


def _subsets(k: int, size: int, rng: np.random.Generator) -> Floats:
    """Subsets of the given size as rows of 0 and 1, [subsets, k]."""
    if math.comb(k, size) <= _SUBSETS:
        chosen = np.array(list(combinations(range(k), size)))
    else:
        chosen = rng.random((_SUBSETS, k)).argsort(1)[:, :size]
    rows = np.zeros((len(chosen), k))
    np.put_along_axis(rows, chosen, 1.0, 1)
    return rows
