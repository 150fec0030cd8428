"""The forecast for independent judges against every combination of votes, and against closed forms."""

import itertools
from math import comb

import numpy as np
import pytest

from pippin.evaluate.judges import independence
from pippin.evaluate.judges.independence import Cells, plurality_is_right, unanimous


def by_all_votes(rows, gold):
    """Add up the probability of every combination of labels in which gold leads, by its share of the first place."""
    k, labels = rows.shape
    total = 0.0
    for votes in itertools.product(range(labels), repeat=k):
        counts = np.bincount(votes, minlength=labels)[: labels - 1]
        first = counts == counts.max()
        total += np.prod(rows[range(k), votes]) * first[gold] / first.sum()
    return total


@pytest.mark.parametrize(("k", "classes", "abstain"), [(3, 2, False), (4, 3, False), (4, 3, True), (2, 2, True)])
def test_enumeration_is_every_combination_of_votes(k, classes, abstain):
    rng = np.random.default_rng(k)
    rows = rng.dirichlet(np.ones(classes + 1), (5, k))
    if not abstain:
        rows[..., -1] = 0
        rows /= rows.sum(-1, keepdims=True)
    gold = rng.integers(0, classes, 5)
    found = plurality_is_right(rows, gold, 100, 0)
    np.testing.assert_allclose(found, [by_all_votes(row, g) for row, g in zip(rows, gold, strict=True)], atol=1e-12)


@pytest.mark.parametrize(("k", "p"), [(9, 0.68), (5, 0.6), (15, 0.9)])
def test_condorcets_formula(k, p):
    rows = np.tile([p, 1 - p, 0.0], (1, k, 1))
    exact = sum(comb(k, i) * p**i * (1 - p) ** (k - i) for i in range(k // 2 + 1, k + 1))
    assert plurality_is_right(rows, np.array([0]), 100, 0)[0] == pytest.approx(exact, abs=1e-12)


def test_nine_judges_of_68_percent_would_reach_87():
    assert plurality_is_right(np.tile([0.68, 0.32, 0.0], (1, 9, 1)), np.array([0]), 100, 0)[0] == pytest.approx(
        0.87, abs=0.01
    )


def test_drawn_votes_agree_with_enumerated_ones(monkeypatch):
    rng = np.random.default_rng(0)
    rows, gold = rng.dirichlet(np.full(5, 2.0), (3, 6, 7)), rng.integers(0, 4, 6)
    exact = plurality_is_right(rows, gold, 20_000, 0)
    monkeypatch.setattr(independence, "_STATES", 0)
    drawn = plurality_is_right(rows, gold, 20_000, 0)
    assert drawn.shape == exact.shape == (3, 6)
    np.testing.assert_allclose(drawn, exact, atol=0.015)
    assert (plurality_is_right(rows, gold, 500, 1) == plurality_is_right(rows, gold, 500, 1)).all()


def test_confusion_counts_votes_by_gold_and_level():
    codes = np.array([[0, 1], [0, -1], [1, 1], [0, 0]])
    gold, level = np.array([0, 0, 1, 0]), np.array([0, 0, 0, 1])
    cells = Cells.of_rows(codes, gold, level, 2)
    found = cells.confusion(np.array([1.0, 1.0, 1.0, 1.0]))
    assert cells.gold.tolist() == [0, 1, 0]
    assert found[0].tolist() == [[1, 0, 0], [0, 0.5, 0.5]]
    assert found[1].tolist() == [[0, 1, 0], [0, 1, 0]]
    assert cells.shares(np.array([1.0, 1.0, 1.0, 1.0])).tolist() == [0.5, 0.25, 0.25]
    empty = cells.confusion(np.array([[0.0, 0.0, 1.0, 1.0]]))[0, 0]
    assert empty.tolist() == [[0.5, 0.5, 0], [0.5, 0.5, 0]]
    right, wrong = unanimous(found, cells.gold)
    assert right.tolist() == [0, 1, 1]
    assert wrong.tolist() == [0, 0, 0]
