"""Correlations of errors against numpy, Kish's identities, and shuffles against what probability says of them."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pippin.core.errors import InferenceAtRisk, InvalidArgument, InvalidInput
from pippin.evaluate.judges.correlation import (
    effective_votes,
    kish,
    phi_from_sums,
    phi_matrix,
    sampled_phi,
    shuffled_phi,
    votes_of,
    votes_without,
    weighted_sums,
)


def errors(n, k, rho=0.3, rate=0.32, seed=0):
    """Errors with one common cause."""
    from scipy.stats import norm

    rng = np.random.default_rng(seed)
    cause = np.sqrt(rho) * rng.standard_normal((n, 1)) + np.sqrt(1 - rho) * rng.standard_normal((n, k))
    return (cause < norm.ppf(rate)).astype(float)


@pytest.mark.parametrize(("k", "phi", "votes"), [(9, 0.391, 2.180), (5, 0.391, 1.950), (9, 0.0, 9.0), (9, 1.0, 1.0)])
def test_kish_gives_the_published_figures(k, phi, votes):
    assert float(kish(k, phi)) == pytest.approx(votes, abs=1e-3)


def test_endless_judges_are_worth_one_over_phi():
    assert float(kish(10**9, 0.391)) == pytest.approx(2.558, abs=1e-3)


@pytest.mark.parametrize("method", ["kish", "eigen"])
def test_nine_copies_are_one_vote(method):
    one = errors(500, 1)
    assert effective_votes(np.repeat(one, 9, 1), method) == pytest.approx(1.0, abs=1e-12)


def test_phi_is_numpys_correlation():
    table = errors(300, 6)
    np.testing.assert_allclose(phi_matrix(table), np.corrcoef(table.T), atol=1e-12)
    phi = np.corrcoef(table.T)
    mean = phi[np.triu_indices(6, 1)].mean()
    assert effective_votes(table) == pytest.approx(6 / (1 + 5 * mean), abs=1e-10)
    assert effective_votes(table, "eigen") == pytest.approx(6 / np.linalg.eigvalsh(phi)[-1], abs=1e-10)


def test_equal_correlations_make_both_estimates_one():
    # all 0/1 rows of three judges, weighted by a law that is symmetric in them
    rows = [row for row in np.ndindex(2, 2, 2) for _ in range((5, 2, 1, 3)[sum(row)])]
    table = np.array(rows, dtype=float)
    assert effective_votes(table) == pytest.approx(effective_votes(table, "eigen"), abs=1e-12)


def test_pairs_are_compared_on_what_both_voted_on():
    table = errors(200, 4, seed=1)
    table[np.random.default_rng(2).random(table.shape) < 0.2] = np.nan
    phi = phi_matrix(table)
    for i in range(4):
        for j in range(4):
            both = ~np.isnan(table[:, i]) & ~np.isnan(table[:, j])
            assert phi[i, j] == pytest.approx(np.corrcoef(table[both, i], table[both, j])[0, 1], abs=1e-12)


def test_weights_are_repetitions():
    table, weights = errors(40, 3, seed=3), np.random.default_rng(3).integers(0, 4, (5, 40)).astype(float)
    found = phi_from_sums(weighted_sums(table, weights))
    for phi, times in zip(found, weights.astype(int), strict=True):
        np.testing.assert_allclose(phi, phi_matrix(np.repeat(table, times, 0)), atol=1e-12)


@given(st.integers(0, 1000))
@settings(max_examples=30)
def test_leaving_one_out_is_measuring_the_others(seed):
    table = errors(60, 4, seed=seed)
    phi = phi_matrix(table)[None]
    if np.isnan(phi).any():
        return
    assert votes_of(phi)[0] == pytest.approx(effective_votes(table), rel=1e-9)
    for judge, value in enumerate(votes_without(phi)[0]):
        assert value == pytest.approx(effective_votes(np.delete(table, judge, 1)), rel=1e-9)


def test_order_and_sign_of_the_labels_do_not_matter():
    table = errors(200, 5, seed=4)
    assert effective_votes(table[:, ::-1]) == pytest.approx(effective_votes(table))
    assert effective_votes(1 - table) == pytest.approx(effective_votes(table))


def test_a_judge_who_never_errs_is_named_and_left_out():
    table = np.column_stack([errors(100, 3), np.zeros(100)])
    with pytest.warns(InferenceAtRisk, match="left out of the effective votes: '3'"):
        votes = effective_votes(table)
    assert votes == pytest.approx(effective_votes(table[:, :3]))
    assert np.isnan(phi_matrix(table)[3]).all()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.zeros((50, 1)), "2 or more of each"),
        (np.zeros(50), "2 or more of each"),
        (np.full((50, 2), 2.0), "0, 1 or NaN; got 2.0"),
        (np.array([["a", "b"], ["a", "b"]]), "must be numbers"),
        (np.zeros((50, 3)), "0 of 3 judges err sometimes"),
        (np.column_stack([np.arange(50) % 2, 1 - np.arange(50) % 2]), "infinite"),
        (np.array([[0, np.nan], [1, np.nan], [np.nan, 0], [np.nan, 1]]), "too few items in common"),
    ],
)
@pytest.mark.filterwarnings("ignore::pippin.core.errors.InferenceAtRisk")
def test_errors_that_cannot_be_used(table, message):
    with pytest.raises(InvalidInput, match=message):
        effective_votes(table)


def test_an_unknown_method():
    with pytest.raises(InvalidArgument, match="method must be 'kish' or 'eigen'"):
        effective_votes(errors(50, 2), "mean")


def test_shuffles_keep_margins_and_levels():
    """With all errors in one level, shuffling within levels keeps the correlation that the levels make."""
    level = np.repeat([0, 1], 100)
    rng = np.random.default_rng(5)
    table = np.where(level[:, None] == 1, rng.random((200, 3)) < 0.9, rng.random((200, 3)) < 0.1).astype(float)
    null = shuffled_phi(table, level, 400, np.random.default_rng(0))
    rate = np.array([table[level == value].mean(0) for value in (0, 1)])
    expected = []
    for i, j in ((0, 1), (0, 2), (1, 2)):
        both = (rate[:, i] * rate[:, j]).mean()
        mean = rate.mean(0)
        expected.append((both - mean[i] * mean[j]) / np.sqrt(mean[i] * (1 - mean[i]) * mean[j] * (1 - mean[j])))
    assert null.mean() == pytest.approx(np.mean(expected), abs=0.01)
    assert shuffled_phi(table, np.zeros(200, int), 400, np.random.default_rng(0)).mean() == pytest.approx(0, abs=0.01)


def test_drawn_pairs_agree_with_shuffles_in_mean_and_spread():
    table, level = errors(300, 4, seed=6), np.arange(300) % 3
    slow = shuffled_phi(table, level, 3000, np.random.default_rng(1))
    fast = sampled_phi(table, level, 3000, np.random.default_rng(2))
    assert fast.mean() == pytest.approx(slow.mean(), abs=4 * slow.std() / 3000**0.5)
    assert fast.std() == pytest.approx(slow.std(), rel=0.07)


def test_one_shuffle_by_hand():
    table, level = errors(90, 3, seed=7), np.zeros(90, int)
    copies = np.random.default_rng(3).permuted(np.tile(table.T.astype(np.uint8), (1, 1)), axis=1)
    phi = np.corrcoef(copies)[np.triu_indices(3, 1)].mean()
    assert shuffled_phi(table, level, 1, np.random.default_rng(3))[0] == pytest.approx(phi, abs=1e-6)
