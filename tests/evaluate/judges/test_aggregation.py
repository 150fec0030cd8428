"""One label of many votes against counting by hand, a plain EM in loops, and the data that EM was first used on."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.evaluate.anesthesia import VOTES

from pippin.core.errors import InferenceAtRisk, InvalidArgument, InvalidInput
from pippin.evaluate.judges.aggregation import aggregate, dawid_skene, majority, weighted

votes = st.lists(st.lists(st.integers(-1, 2), min_size=4, max_size=4), min_size=1, max_size=20)


@given(votes)
def test_majority_is_the_most_common_vote_and_ties_are_named(rows):
    chosen, tied = majority(np.array(rows), 3)
    for item, (row, label) in enumerate(zip(rows, chosen, strict=True)):
        counts = Counter(vote for vote in row if vote >= 0)
        most = max(counts.values(), default=0)
        first = [label for label in range(3) if counts[label] == most]
        assert label in first
        assert (item in tied) == (len(first) > 1)


def test_ties_are_even_and_repeat():
    rows = np.tile([[0, 1, 2, 0, 1, 2]], (3000, 1))
    chosen, tied = majority(rows, 3)
    assert len(tied) == 3000
    assert np.bincount(chosen).min() > 900
    assert (majority(rows, 3)[0] == chosen).all()


def slow_em(rows, classes, iterations):
    """Dawid and Skene's equations 2.3 to 2.5, one product at a time."""
    n, k = len(rows), len(rows[0])
    T = [[sum(v == c for v in row) / sum(v >= 0 for v in row) for c in range(classes)] for row in rows]
    for _ in range(iterations):
        prior = [sum(T[i][c] for i in range(n)) / n for c in range(classes)]
        pi = [[[0.0] * classes for _ in range(classes)] for _ in range(k)]
        for j in range(k):
            for c in range(classes):
                total = sum(T[i][c] for i in range(n) if rows[i][j] >= 0)
                for label in range(classes):
                    hits = sum(T[i][c] for i in range(n) if rows[i][j] == label)
                    pi[j][c][label] = hits / total if total else 1 / classes
        likelihood = 0.0
        for i in range(n):
            joint = [
                prior[c] * math.prod(pi[j][c][rows[i][j]] for j in range(k) if rows[i][j] >= 0) for c in range(classes)
            ]
            likelihood += math.log(sum(joint))
            T[i] = [p / sum(joint) for p in joint]
    return T, pi, prior, likelihood


@pytest.mark.filterwarnings("ignore::pippin.core.errors.InferenceAtRisk")
@pytest.mark.parametrize("seed", range(3))
def test_em_is_the_plain_em(seed):
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 3, 60)
    rows = np.where(rng.random((60, 5)) < 0.7, truth[:, None], rng.integers(0, 3, (60, 5)))
    rows = np.where(rng.random(rows.shape) < 0.15, -1, rows)
    rows[(rows < 0).all(1), 0] = 0
    found = dawid_skene(rows, 3, max_iterations=12, tolerance=0.0)
    T, pi, prior, likelihood = slow_em(rows.tolist(), 3, 12)
    np.testing.assert_allclose(found.posterior, T, atol=1e-9)
    np.testing.assert_allclose(found.confusion, pi, atol=1e-9)
    np.testing.assert_allclose(found.prior, prior, atol=1e-9)
    assert found.log_likelihood[-1] == pytest.approx(likelihood, abs=1e-8)


def test_em_on_the_ratings_of_patients_it_was_published_with():
    found = dawid_skene(np.array(VOTES), 4)
    # the paper's shares are .40, .42, .11 and .07 with one matrix for the three ratings of the first person
    np.testing.assert_allclose(found.prior, [0.40, 0.42, 0.11, 0.07], atol=0.03)
    assert all(b >= a - 1e-9 for a, b in zip(found.log_likelihood, found.log_likelihood[1:], strict=False))
    unanimous = [len({*row}) == 1 for row in VOTES]
    assert (found.labels[unanimous] == np.array(VOTES)[unanimous, 0]).all()


def test_em_turns_a_judge_around_who_always_says_the_opposite():
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 2, 400)
    rows = np.where(rng.random((400, 4)) < 0.8, truth[:, None], 1 - truth[:, None])
    rows = np.column_stack([rows, 1 - truth])  # worth more than all others together
    assert (dawid_skene(rows, 2).labels == truth).mean() > 0.99
    assert (majority(rows, 2)[0] == truth).mean() < 0.9


def test_em_that_is_stopped_says_so():
    with pytest.warns(InferenceAtRisk, match="did not converge within 2"):
        assert not dawid_skene(np.array(VOTES), 4, max_iterations=2).converged


def test_weights_are_fitted_on_other_items():
    rng = np.random.default_rng(1)
    truth = rng.integers(0, 2, 1000)
    good, fair, poor = (np.where(rng.random(1000) < share, truth, 1 - truth) for share in (0.95, 0.8, 0.6))
    rows = np.column_stack([good, fair, poor, poor, poor])
    assert (majority(rows, 2)[0] == poor).all()
    # three copies of one vote together weigh as much as one, so this is the majority of three
    assert (weighted(rows, truth, 2, "decorrelated") == majority(rows[:, :3], 2)[0]).all()
    # accuracy alone does not see that they are copies: 0.95 + 0.8 < 3 x 0.6
    assert (weighted(rows, truth, 2, "accuracy") == poor).mean() > 0.9
    # labels that say nothing give weights that say nothing: no look at the item itself
    noise = rng.integers(0, 2, (1000, 5))
    assert abs((weighted(noise, truth, 2, "decorrelated") == truth).mean() - 0.5) < 0.06


def test_aggregate_gives_labels_back():
    rows = [["ja", "ja", "nein"], ["nein", "ja", "nein"], ["ja", None, "ja"]]
    assert aggregate(rows) == ["ja", "nein", "ja"]
    assert aggregate(rows, "weighted", weights=[0, 0, 1.0]) == ["nein", "nein", "ja"]
    assert aggregate(VOTES, "dawid_skene") == dawid_skene(np.array(VOTES), 4).labels.tolist()


@pytest.mark.parametrize(
    ("method", "weights", "message"),
    [
        ("mean", None, "method must be 'majority'"),
        ("weighted", None, "weights go with"),
        ("majority", [1, 1], "weights go with"),
        ("weighted", [1.0], "one number for each of 2 judges"),
        ("weighted", [1.0, math.nan], "one number for each"),
        ("weighted", [1.0, math.inf], "must be finite"),
        ("weighted", ["a", "b"], "one number for each"),
    ],
)
def test_bad_arguments(method, weights, message):
    with pytest.raises(InvalidArgument, match=message):
        aggregate([["a", "b"], ["b", "b"]], method, weights=weights)


def test_bad_folds_and_silent_items():
    rows, gold = np.array([[0, 1], [1, 1]]), np.array([0, 1])
    with pytest.raises(InvalidArgument, match="5 folds of 2 items"):
        weighted(rows, gold, 2)
    with pytest.raises(InvalidArgument, match="by must be"):
        weighted(rows, gold, 2, "luck", folds=2)
    with pytest.raises(InvalidInput, match="item 1 has no vote"):
        aggregate([["a", "b"], [None, None]])
