"""Saturation against figures set by hand and against what sampling alone predicts; budgets on a made world."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from pippin.core.errors import InferenceAtRisk, InvalidArgument, InvalidInput
from pippin.evaluate.annotators.annotation_budget import (
    AnnotationBudget,
    BudgetPoint,
    BudgetReport,
    annotation_curve,
    split_items,
)
from pippin.evaluate.annotators.soft_labels import SoftLabelFit, annotations_to_distribution


def world(n, seed=0, people=20):
    """Votes of people who disagree more along one direction of the inputs."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g)
    p = (3 * x[:, :3] / torch.exp(x[:, 3:])).softmax(-1)
    votes = torch.multinomial(p, people, True, generator=g)
    return x, torch.zeros(n, 3, dtype=torch.long).scatter_add_(1, votes, torch.ones_like(votes))


def network(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


def by_hand(values, metric="kl"):
    """A report from {size: one value per seed}."""
    return BudgetReport(
        "by hand",
        [BudgetPoint("votes", n, seed, 0, metric, v) for n, each in values.items() for seed, v in enumerate(each)],
    )


def test_saturation_by_hand():
    report = by_hand({1: (1.0, 2.0), 5: (0.3, 0.6), 10: (0.1, 0.3), 20: (0.02, 0.08), 100: (0.0, 0.0)})
    found = report.saturation("kl")
    assert found.shares[5] == pytest.approx((0.7, 0.7))
    assert found.shares[10] == pytest.approx((0.9, 0.85))
    assert found.shares[20] == pytest.approx((0.98, 0.96))
    assert found.shares[100] == pytest.approx((1.0, 1.0))
    assert found.size == 20
    assert report.saturation("kl", share=0.6).size is None or report.saturation("kl", share=0.6).size > 5
    assert report.saturation("kl", share=0.99).size is None
    # a mean above 90 % is not enough where even the interval stays below 95 %
    assert by_hand({1: (0, 0), 10: (0.92, 0.92), 20: (0.99, 0.99), 50: (1, 1)}).saturation("kl").size == 20


def test_shares_without_a_gain_are_doubted():
    report = by_hand({1: (1.0, 0.0), 5: (0.5, 0.5), 10: (0.0, 1.0)})
    with pytest.warns(InferenceAtRisk, match="do not gain on every seed"):
        report.saturation("kl")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r.saturation("kl", 1.0), "share must be above 0 and below 1, got 1.0"),
        (lambda r: r.saturation("luck"), "no 'luck' of 'votes'"),
        (lambda r: r.values("kl", 7), "sizes: 1, 5, 10"),
        (lambda r: by_hand({1: (0,), 2: (1,)}).saturation("kl"), "needs 3 or more"),
    ],
)
def test_questions_without_an_answer(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call(by_hand({1: (1.0, 2.0), 5: (0.5, 0.5), 10: (0.0, 1.0)}))


def test_a_budget_on_a_made_world(tmp_path):
    fit = SoftLabelFit(steps=40, lr=1e-2)
    budget = AnnotationBudget(network, fit, sizes=(1, 5, 20, 50), num_seeds=2, num_subsamples=2, smoothing=(0.1,))
    train, test = world(150), world(200, seed=1)
    trained = []
    before = torch.random.get_rng_state()
    report = budget.run(train, test, on_progress=trained.append)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert sum(trained) == budget.num_trainings(train[1]) == 2 * (3 * 2 + 3)
    assert report.sizes == (1, 5, 20)  # nobody has 50 votes
    assert report.targets == ("hard", "smoothing 0.1", "temperature")
    assert np.mean(report.values("kl", 20)) < np.mean(report.values("kl", 5)) < np.mean(report.values("kl", 1))
    assert np.mean(report.values("entropy_r", 20)) > np.mean(report.values("entropy_r", target="smoothing 0.1"))
    # one figure is what anyone would measure
    model = network(1)
    from pippin.evaluate.annotators.soft_labels import distribution_metrics, nested_annotations

    fit(model, train[0], annotations_to_distribution(nested_annotations(train[1], [1, 5, 20], seed=1001)[1]), 1)
    with torch.no_grad():
        found = distribution_metrics(model(test[0]).softmax(-1), annotations_to_distribution(test[1]))
    (figure,) = [
        f for f in report.figures if (f.size, f.seed, f.subsample, f.metric) == (5, 1, 1, "kl") and f.target == "votes"
    ]
    assert figure.value == pytest.approx(found["kl"], rel=1e-5)
    fewer = AnnotationBudget(network, fit, sizes=(1, 5, 20), num_seeds=1, smoothing=()).run(train, test)
    assert set(fewer.figures) < set(report.figures)
    saved = json.loads(report.to_json())
    assert saved["saturation"]["kl"]["shares"]["20"] == [1.0, 1.0]
    report.plot(tmp_path / "b.svg")
    assert b"<svg" in (tmp_path / "b.svg").read_bytes()
    assert "kl, 5 votes" in str(report.report())


def test_bad_budgets():
    train = world(40)
    budget = AnnotationBudget(network, SoftLabelFit(steps=2), sizes=(30,), num_seeds=1, smoothing=())
    with pytest.raises(InvalidInput, match="20 votes, fewer than the smallest size asked for, 30"):
        budget.run(train, train)
    budget = AnnotationBudget(network, SoftLabelFit(steps=2), sizes=(1,), num_seeds=1, smoothing=())
    bad = train[0].clone()
    bad[3] = math.nan
    for wrong, message in (
        ((train[0], train[1][:, :2] + 1), "training has 2 classes, test 3"),
        ((train[0][:9], train[1]), "training: 9 inputs and 40 rows"),
        ((bad, train[1]), "an input is NaN"),
        ((train[0], torch.tensor([[4, 0, 0]]).repeat(40, 1)), "single class"),
        ((train[0], -train[1]), "votes for class"),
    ):
        with pytest.raises(InvalidInput, match=message):
            budget.run(wrong, train)
    for options in (
        {"sizes": ()},
        {"sizes": (0,)},
        {"metrics": ("luck",)},
        {"metrics": ()},
    ):
        with pytest.raises(InvalidArgument, match=r"sizes|not known"):
            AnnotationBudget(network, **options)

    def explode(model, x, probs, seed):
        for parameter in model.parameters():
            parameter.data.fill_(math.nan)

    with pytest.raises(InvalidInput, match="predicts NaN; lower its learning rate"):
        AnnotationBudget(network, explode, sizes=(1,), num_seeds=1, smoothing=()).run(train, train)


def test_parts_are_alike_in_disagreement_and_cover_all_items():
    _, counts = world(300)
    train, test = split_items(counts, 0.2, seed=1)
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(300))
    assert len(test) == 60
    entropy = torch.special.entr(annotations_to_distribution(counts).double()).sum(1)
    assert float(entropy[train].mean() - entropy[test].mean()) == pytest.approx(0, abs=0.06)
    with pytest.raises(InvalidArgument, match="share must be above 0 and below 1"):
        split_items(counts, 1.0)
    with pytest.raises(InvalidInput, match="2 items leave"):
        split_items(counts[:2], 0.2)


def test_votes_alone_follow_the_law_of_sampling():
    """Items of one distribution: the expected quadratic loss of a share falls like 1/N; the curve is monotone."""
    rng = np.random.default_rng(0)
    p = rng.dirichlet([2, 1, 1], 800)
    counts = torch.tensor(np.array([rng.multinomial(100, row) for row in p]))
    report = annotation_curve(counts, num_subsamples=3)
    assert report.sizes == (1, 2, 3, 5, 10, 20, 50)
    kl = [np.mean(report.values("kl", n)) for n in report.sizes]
    assert all(b < a for a, b in pairwise(kl))
    # both sides are 50 votes of the same law: the divergence of two such shares is about (C - 1) / 50
    assert kl[-1] == pytest.approx(2 / 50, rel=0.15)
    assert math.isnan(report.values("entropy_r", 1)[0])
    r = [np.mean(report.values("entropy_r", n)) for n in (10, 20, 50)]
    assert 0.5 < r[0] < r[1] < r[2] < 1
    with pytest.raises(InvalidInput, match="an item has 3 votes"):
        annotation_curve([[2, 1]])
