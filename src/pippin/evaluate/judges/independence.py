"""The accuracy that a panel of judges would have if the judges erred independently of each other.

Notable here:
- each judge keeps its own confusion matrix, estimated for each gold label and each level of difficulty
- items of one gold label and one level (a cell) have the same expected accuracy, so it is computed once per cell
- the distribution of vote counts is computed exactly, one judge after another; where many classes and judges make it
  too large, votes are sampled instead
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pippin.evaluate.judges.votes import Codes, Floats

_STATES = 40_000
"""The largest number of vote counts that is enumerated; with more, votes are sampled."""
_ENTRIES = 4_000_000
"""The largest number of array elements that are held at a time."""


@dataclass(frozen=True)
class Cells:
    """A partition of the items into cells of equal gold label and equal level of difficulty.

    Attributes:
        of: [rows], the cell of each distinct row of votes.
        gold: [cells], the right label of each cell.
        votes: [rows, k, C + 1], one-hot votes; the last column stands for a missing vote.
    """

    of: Codes
    gold: Codes
    votes: Floats

    @classmethod
    def of_rows(cls, codes: Codes, gold: Codes, level: Codes, classes: int) -> Cells:
        """Group distinct rows of votes into cells.

        Args:
            codes: [rows, k] class indices; -1 is a missing vote.
            gold: [rows] right labels.
            level: [rows] levels of difficulty.
            classes: the number of classes.
        """
        keys, of = np.unique(level * classes + gold, return_inverse=True)
        labels = np.where(codes < 0, classes, codes)
        votes = (labels[..., None] == np.arange(classes + 1)).astype(np.float64)
        return cls(of.reshape(-1), keys % classes, votes)

    def confusion(self, weights: Floats) -> Floats:
        """Probabilities of each judge's labels in each cell, [..., cells, k, C + 1], from row weights [..., rows].

        A cell without weight gets a uniform distribution over the classes.
        """
        judges, labels = self.votes.shape[1:]
        found = np.zeros((*weights.shape[:-1], len(self.gold), judges, labels))
        for cell in range(len(self.gold)):
            here = self.of == cell
            sums = weights[..., here] @ self.votes[here].reshape(-1, judges * labels)
            total = weights[..., here].sum(-1)[..., None]
            uniform = np.tile(np.append(np.full(labels - 1, 1 / (labels - 1)), 0.0), judges)
            shares = np.where(total > 0, sums / np.where(total > 0, total, 1.0), uniform)
            found[..., cell, :, :] = shares.reshape(*weights.shape[:-1], judges, labels)
        return found

    def shares(self, weights: Floats) -> Floats:
        """The share of all items that lies in each cell, [..., cells], from row weights [..., rows]."""
        totals = np.stack([weights[..., self.of == cell].sum(-1) for cell in range(len(self.gold))], -1)
        found: Floats = totals / totals.sum(-1, keepdims=True)
        return found


def plurality_is_right(confusion: Floats, gold: Codes, num_samples: int, seed: int) -> Floats:
    """The probability that a plurality of independent votes is for the gold label; m tied labels count 1/m each.

    Args:
        confusion: [..., cells, k, C + 1] label probabilities of each judge; the last column is a missing vote.
        gold: [cells] right labels.
        num_samples: panels sampled for each cell where exact enumeration would take too long.
        seed: seed of this sampling.

    Returns:
        Probabilities, [..., cells].
    """
    flat = confusion.reshape(-1, *confusion.shape[-2:])
    right = np.tile(gold, len(flat) // len(gold))
    judges, labels = flat.shape[1:]
    # the column of missing votes is dropped where it is all zero, which makes the usual case smaller
    voting = labels - 1
    if not flat[..., -1].any():
        flat = flat[..., :-1]
    states = _count(judges, flat.shape[-1])
    exact = states <= _STATES and states * len(flat) * flat.shape[-1] <= 100 * _ENTRIES
    step = max(1, _ENTRIES // (states if exact else num_samples * judges))
    rng = np.random.default_rng(seed)
    uniform = None if exact else rng.random((num_samples, judges))
    found = np.empty(len(flat))
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        if uniform is None:
            found[part] = _enumerated(flat[part], right[part], voting)
        else:
            found[part] = _sampled(flat[part], right[part], voting, uniform)
    return found.reshape(confusion.shape[:-2])


def unanimous(confusion: Floats, gold: Codes) -> tuple[Floats, Floats]:
    """The probabilities that independent judges are all right, and that they are all wrong: [..., cells] each.

    Args:
        confusion: [..., cells, k, C + 1], as in `plurality_is_right`.
        gold: [cells] right labels.
    """
    right = np.take_along_axis(confusion, gold[:, None, None].astype(np.int64), -1)[..., 0]
    none = confusion[..., -1]
    return right.prod(-1), (1 - right - none).prod(-1)


def _count(judges: int, labels: int) -> int:
    """The number of ways to distribute the votes of the judges over the labels."""
    return math.comb(judges + labels - 1, labels - 1)


@lru_cache(maxsize=8)
def _votes(judges: int, labels: int) -> tuple[tuple[Codes, ...], Codes]:
    """The transitions between vote counts, and the final counts [states, labels].

    The transition table of each judge, [states before, labels], holds the index of the state after a vote.
    """
    counts = np.zeros((1, labels), dtype=np.int64)
    steps = []
    for _ in range(judges):
        after = (counts[:, None, :] + np.eye(labels, dtype=np.int64)).reshape(-1, labels)
        following, inverse = np.unique(after, axis=0, return_inverse=True)
        steps.append(inverse.reshape(len(counts), labels))
        counts = following
    return tuple(steps), counts


def _enumerated(probabilities: Floats, gold: Codes, voting: int) -> Floats:
    """Exact probability [b] that the plurality is right, by dynamic programming over the judges."""
    steps, counts = _votes(*probabilities.shape[1:])
    mass = np.ones((1, len(probabilities)))  # probability of each vote count, [states, b]
    for judge, step in enumerate(steps):
        after = np.zeros((int(step.max()) + 1, len(probabilities)))
        for label in range(probabilities.shape[2]):
            after[step[:, label]] += mass * probabilities[:, judge, label]
        mass = after
    right = _share_of_first(counts[:, :voting])  # [states, voting]
    found: Floats = np.einsum("sb,sb->b", mass, right[:, gold])
    return found


def _share_of_first(counts: Codes) -> Floats:
    """1 for the label with the most votes; m tied labels get 1/m each."""
    first = counts == counts.max(-1, keepdims=True)
    found: Floats = first / first.sum(-1, keepdims=True)
    return found


def _sampled(probabilities: Floats, gold: Codes, voting: int, uniform: Floats) -> Floats:
    """Monte Carlo estimate of `_enumerated`, with common random numbers so that cells can be compared."""
    edges = probabilities.cumsum(-1)[:, None, :, :-1]
    labels = (uniform[None, :, :, None] > edges).sum(-1, dtype=np.int16)  # [b, num_samples, k]
    counts = np.stack([(labels == label).sum(-1, dtype=np.int16) for label in range(voting)], -1)
    first = counts == counts.max(-1, keepdims=True)
    right = np.take_along_axis(first, gold[:, None, None], -1)[..., 0] / first.sum(-1)
    found: Floats = right.mean(1)
    return found
