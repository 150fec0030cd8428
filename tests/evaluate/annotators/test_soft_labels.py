"""Votes and their distributions against scipy, the hypergeometric law, and torch's own cross-entropy."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from pippin.core.errors import InferenceAtRisk, InvalidArgument, InvalidInput
from pippin.evaluate.annotators.soft_labels import (
    SoftLabelFit,
    SoftLabelLoss,
    annotations_to_distribution,
    check_counts,
    distribution_metrics,
    hard_labels,
    nested_annotations,
    smoothed_labels,
    subsample_annotations,
)

counts = st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3).filter(any), min_size=1, max_size=12)


def dirichlet(n, classes=3, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).dirichlet(np.ones(classes), n))


@given(counts, st.integers(0, 5))
def test_smaller_draws_are_parts_of_larger_ones_and_of_the_votes(rows, seed):
    votes = torch.tensor(rows)
    fewest = int(votes.sum(1).min())
    parts = nested_annotations(votes, range(1, fewest + 1), seed=seed)
    for size, part in enumerate(parts, 1):
        assert (part.sum(1) == size).all()
        assert (part <= votes).all()
    for small, large in pairwise(parts):
        assert (small <= large).all()
    even = (votes.sum(1) == fewest).all()
    assert not even or torch.equal(parts[-1], votes)


@pytest.mark.parametrize("replace", [False, True])
def test_draws_follow_the_hypergeometric_or_the_multinomial_law(replace):
    votes = torch.tensor([[6, 3, 1]]).repeat(20_000, 1)
    drawn = subsample_annotations(votes, 5, replace=replace, generator=torch.Generator().manual_seed(1)).double()
    p = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    assert (drawn.sum(1) == 5).all()
    torch.testing.assert_close(drawn.mean(0), 5 * p, atol=0.03, rtol=0)
    shrink = 1.0 if replace else (10 - 5) / (10 - 1)
    torch.testing.assert_close(drawn.var(0), 5 * p * (1 - p) * shrink, atol=0.03, rtol=0)


def test_the_same_generator_gives_the_same_draw_and_the_global_one_stays():
    votes, before = torch.tensor([[5, 5]] * 50), torch.random.get_rng_state()
    one, two = (subsample_annotations(votes, 3, generator=torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, subsample_annotations(votes, 3, generator=torch.Generator().manual_seed(5)))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_shares_and_added_votes():
    assert annotations_to_distribution([[3, 1]]).tolist() == [[0.75, 0.25]]
    torch.testing.assert_close(annotations_to_distribution(np.array([[3.0, 1.0]]), 0.5), torch.tensor([[0.7, 0.3]]))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, -1]], "item 0 has -1 votes for class 1"),
        ([[1.0, 2.5]], "2.5 votes for class 1; counts are whole"),
        ([[1.0, math.nan]], "nan votes"),
        ([[1, 1], [0, 0]], "item 1 has no votes"),
        ([[3]], "2 classes or more"),
        ([1, 2], "items, classes"),
        (torch.zeros(0, 3), "items, classes"),
    ],
)
def test_counts_that_are_none(rows, message):
    for call in (check_counts, annotations_to_distribution, hard_labels, lambda c: subsample_annotations(c, 1)):
        with pytest.raises(InvalidInput, match=message):
            call(rows)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: subsample_annotations([[2, 1]], 4), "4 votes cannot be taken from items that have 3"),
        (lambda: subsample_annotations([[2, 1]], 0), "n must be at least 1, got 0"),
        (lambda: annotations_to_distribution([[1, 1]], -1), "smoothing must be at least 0"),
        (lambda: smoothed_labels(torch.tensor([0]), 2, 1.5), "amount must be from 0 to 1"),
        (lambda: SoftLabelLoss("max"), "reduction must be"),
    ],
)
def test_arguments_out_of_range(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()


def test_hard_labels_are_the_winners_and_ties_are_even():
    assert hard_labels([[3, 1, 0], [0, 2, 5]]).tolist() == [0, 2]
    ties = hard_labels(torch.tensor([[2, 0, 2]]).repeat(2000, 1), seed=3)
    assert set(ties.tolist()) == {0, 2}
    assert abs((ties == 0).float().mean() - 0.5) < 0.04


def test_smoothed_labels_are_torchs_label_smoothing():
    logits, labels = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 4
    for amount in (0.0, 0.1, 0.4):
        wanted = nn.CrossEntropyLoss(label_smoothing=amount)(logits, labels)
        torch.testing.assert_close(SoftLabelLoss()(logits, smoothed_labels(labels, 4, amount)), wanted)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_is_torchs_and_its_gradient_that_of_the_divergence(reduction):
    logits = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = dirichlet(9).float()
    loss = SoftLabelLoss(reduction)(logits, target)
    torch.testing.assert_close(loss, nn.CrossEntropyLoss(reduction=reduction)(logits, target))
    divergence = nn.functional.kl_div(logits.log_softmax(-1), target, reduction="sum")
    ours, theirs = (torch.autograd.grad(part, logits)[0] for part in (loss.sum(), divergence))
    torch.testing.assert_close(ours * (9 if reduction == "mean" else 1), theirs)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.tensor([[0.5, 0.4]]), r"row 0 of targets is \[0.5, 0.4\]"),
        (torch.tensor([[1.5, -0.5]]), "add up to 1"),
        (torch.tensor([[math.nan, 1.0]]), "add up to 1"),
        (torch.tensor([[0, 1]]), "of torch.int64"),
        (torch.tensor([[0.2, 0.3, 0.5]]), "logits are"),
        (torch.tensor([0.5, 0.5]), "items, classes"),
    ],
)
def test_targets_that_are_no_distributions(target, message):
    with pytest.raises(InvalidInput, match=message):
        SoftLabelLoss()(torch.zeros(1, 2), target)


def test_rows_may_be_off_by_rounding():
    loss = SoftLabelLoss()(torch.zeros(1, 2), torch.tensor([[0.50005, 0.5]]))
    assert float(loss) == pytest.approx(math.log(2), abs=1e-4)


def test_metrics_are_scipys():
    from scipy import stats
    from scipy.spatial.distance import jensenshannon

    f, q = dirichlet(60, 4, seed=1), dirichlet(60, 4, seed=2)
    q[:10] = torch.eye(4, dtype=torch.float64)[0]  # ties among entropies, and zeros
    found = distribution_metrics(f, q)
    mine, people = stats.entropy(f, axis=1), stats.entropy(q, axis=1)
    assert found["kl"] == pytest.approx(stats.entropy(q, f, axis=1).mean(), abs=1e-9)
    assert found["entropy_r"] == pytest.approx(stats.pearsonr(mine, people)[0], abs=1e-9)
    assert found["entropy_rho"] == pytest.approx(stats.spearmanr(mine, people)[0], abs=1e-9)
    assert found["jsd"] == pytest.approx(jensenshannon(f, q, axis=1).mean(), abs=1e-9)
    assert found["accuracy"] == pytest.approx(float((f.argmax(1) == q.argmax(1)).double().mean()))
    order = people.argsort(kind="stable")
    assert found["entropy_clear"] == pytest.approx(mine[order[:20]].mean())
    assert found["entropy_ambiguous"] == pytest.approx(mine[order[-20:]].mean())


@given(st.integers(0, 10_000))
@settings(max_examples=20)
def test_a_divergence_is_zero_only_from_itself(seed):
    f, q = dirichlet(30, seed=seed), dirichlet(30, seed=seed + 1)
    same, other = distribution_metrics(q, q), distribution_metrics(f, q)
    assert same["kl"] == pytest.approx(0, abs=1e-8)
    assert same["jsd"] == pytest.approx(0, abs=1e-6)
    assert same["entropy_r"] == pytest.approx(1)
    assert other["kl"] > 0
    assert 0 < other["jsd"] <= math.log(2) ** 0.5


def test_a_floor_keeps_kl_finite():
    q = torch.tensor([[1.0, 0.0], [0.4, 0.6]]).repeat(20, 1)
    f = torch.tensor([[0.0, 1.0], [0.4, 0.6]]).repeat(20, 1)
    assert distribution_metrics(f, q)["kl"] == pytest.approx(math.log(1e9) / 2, rel=1e-6)


def test_what_is_at_risk_is_said():
    q = dirichlet(29)
    with pytest.warns(InferenceAtRisk, match="29 items"):
        distribution_metrics(q, q)
    certain = torch.eye(3).repeat(20, 1)
    with pytest.warns(InferenceAtRisk, match="same entropy"):
        assert math.isnan(distribution_metrics(dirichlet(60), certain)["entropy_r"])
    with pytest.raises(InvalidInput, match="must be equal"):
        distribution_metrics(dirichlet(30), dirichlet(31))


def test_training_on_shares_finds_the_shares():
    """One input per pattern: the best distribution is the mean of its targets."""
    x = torch.eye(3).repeat(30, 1)
    target = annotations_to_distribution([[7, 2, 1], [0, 5, 5], [1, 1, 8]]).repeat(30, 1)
    model = nn.Linear(3, 3)
    before = torch.random.get_rng_state()
    SoftLabelFit(steps=400, batch_size=30, lr=0.1, weight_decay=0.0)(model, x, target, seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not model.training
    torch.testing.assert_close(model(torch.eye(3)).softmax(-1), target[:3], atol=5e-3, rtol=0)


def test_training_needs_a_target_for_each_input():
    with pytest.raises(InvalidInput, match="2 inputs and 1 targets"):
        SoftLabelFit(steps=1)(nn.Linear(3, 2), torch.zeros(2, 3), torch.tensor([[0.5, 0.5]]))
