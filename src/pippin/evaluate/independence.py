"""What a panel of judges would say if every judge erred by itself.

Notable here:
- judges keep what they are: each one's confusion matrix is estimated for each gold label and each level of difficulty
- items of one gold label and one level share their forecast, so it is computed once for each such cell, not per item
- the forecast is exact, by adding one judge after another to the distribution of vote counts; only where many classes
  make these too many are votes drawn instead
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pippin.evaluate.votes import Codes, Floats

_STATES = 40_000
"""More distributions of votes than this are drawn from, not enumerated."""
_ENTRIES = 4_000_000
"""Numbers held at a time."""


@dataclass(frozen=True)
class Cells:
    """Items of equal gold label and level of difficulty.

    Attributes:
        of: [rows], the cell of each distinct row of votes.
        gold: [cells], the right label.
        votes: [rows, k, C + 1], 1 where a judge gave a label; the last column stands for none.
    """

    of: Codes
    gold: Codes
    votes: Floats

    @classmethod
    def of_rows(cls, codes: Codes, gold: Codes, level: Codes, classes: int) -> Cells:
        """Group rows of votes."""
        keys, of = np.unique(level * classes + gold, return_inverse=True)
        labels = np.where(codes < 0, classes, codes)
        votes = (labels[..., None] == np.arange(classes + 1)).astype(np.float64)
        return cls(of.reshape(-1), keys % classes, votes)

    def confusion(self, weights: Floats) -> Floats:
        """Probabilities of each judge's labels in each cell, [..., cells, k, C + 1], from weights [..., rows].

        A cell without weight has even rows.
        """
        judges, labels = self.votes.shape[1:]
        found = np.zeros((*weights.shape[:-1], len(self.gold), judges, labels))
        for cell in range(len(self.gold)):
            here = self.of == cell
            sums = weights[..., here] @ self.votes[here].reshape(-1, judges * labels)
            total = weights[..., here].sum(-1)[..., None]
            even = np.tile(np.append(np.full(labels - 1, 1 / (labels - 1)), 0.0), judges)
            rows_ = np.where(total > 0, sums / np.where(total > 0, total, 1.0), even)
            found[..., cell, :, :] = rows_.reshape(*weights.shape[:-1], judges, labels)
        return found

    def shares(self, weights: Floats) -> Floats:
        """The share of each cell in all items, [..., cells]."""
        totals = np.stack([weights[..., self.of == cell].sum(-1) for cell in range(len(self.gold))], -1)
        found: Floats = totals / totals.sum(-1, keepdims=True)
        return found


def plurality_is_right(confusion: Floats, gold: Codes, draws: int, seed: int) -> Floats:
    """How often most of independent votes are for the gold label; a shared first place counts its share.

    Args:
        confusion: [..., cells, k, C + 1], the last column for no vote.
        gold: [cells].
        draws: votes of a panel drawn for each cell where enumeration would take too long.
        seed: of these.

    Returns:
        [..., cells]
    """
    flat = confusion.reshape(-1, *confusion.shape[-2:])
    right = np.tile(gold, len(flat) // len(gold))
    judges, labels = flat.shape[1:]
    # a column that nobody uses is left out, which makes the usual case (no missing votes) smaller
    voting = labels - 1
    if not flat[..., -1].any():
        flat = flat[..., :-1]
    states = _count(judges, flat.shape[-1])
    exact = states <= _STATES and states * len(flat) * flat.shape[-1] <= 100 * _ENTRIES
    step = max(1, _ENTRIES // (states if exact else draws * judges))
    rng = np.random.default_rng(seed)
    uniform = None if exact else rng.random((draws, judges))
    found = np.empty(len(flat))
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        if uniform is None:
            found[part] = _enumerated(flat[part], right[part], voting)
        else:
            found[part] = _drawn(flat[part], right[part], voting, uniform)
    return found.reshape(confusion.shape[:-2])


def unanimous(confusion: Floats, gold: Codes) -> tuple[Floats, Floats]:
    """Probabilities, by cell, that all judges are right, and that all are wrong: [..., cells] each."""
    right = np.take_along_axis(confusion, gold[:, None, None].astype(np.int64), -1)[..., 0]
    none = confusion[..., -1]
    return right.prod(-1), (1 - right - none).prod(-1)


def _count(judges: int, labels: int) -> int:
    """The number of ways to divide the votes."""
    return math.comb(judges + labels - 1, labels - 1)


@lru_cache(maxsize=8)
def _votes(judges: int, labels: int) -> tuple[tuple[Codes, ...], Codes]:
    """After each judge, where a vote for each label leads; and the counts at the end, [states, labels]."""
    counts = np.zeros((1, labels), dtype=np.int64)
    steps = []
    for _ in range(judges):
        after = (counts[:, None, :] + np.eye(labels, dtype=np.int64)).reshape(-1, labels)
        following, inverse = np.unique(after, axis=0, return_inverse=True)
        steps.append(inverse.reshape(len(counts), labels))
        counts = following
    return tuple(steps), counts


def _enumerated(probabilities: Floats, gold: Codes, voting: int) -> Floats:
    """Add judge after judge to the distribution of the counts."""
    steps, counts = _votes(*probabilities.shape[1:])
    mass = np.ones((1, len(probabilities)))
    for judge, step in enumerate(steps):
        after = np.zeros((int(step.max()) + 1, len(probabilities)))
        for label in range(probabilities.shape[2]):
            after[step[:, label]] += mass * probabilities[:, judge, label]
        mass = after
    right = _share_of_first(counts[:, :voting])  # [states, voting]
    found: Floats = np.einsum("sb,sb->b", mass, right[:, gold])
    return found


def _share_of_first(counts: Codes) -> Floats:
    """1 for the label with most votes, equal shares where several have."""
    first = counts == counts.max(-1, keepdims=True)
    found: Floats = first / first.sum(-1, keepdims=True)
    return found


def _drawn(probabilities: Floats, gold: Codes, voting: int, uniform: Floats) -> Floats:
    """The same from draws; all cells see the same uniform numbers, so that differences between them are not noise."""
    edges = probabilities.cumsum(-1)[:, None, :, :-1]
    labels = (uniform[None, :, :, None] > edges).sum(-1, dtype=np.int16)  # [b, draws, k]
    counts = np.stack([(labels == label).sum(-1, dtype=np.int16) for label in range(voting)], -1)
    first = counts == counts.max(-1, keepdims=True)
    right = np.take_along_axis(first, gold[:, None, None], -1)[..., 0] / first.sum(-1)
    found: Floats = right.mean(1)
    return found
