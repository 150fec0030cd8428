"""Cross-entropy among allowed tokens, against the whole softmax with everything else at minus infinity."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pippin.core.errors import InvalidArgument
from pippin.language.constrained_objective import ConstrainedBatch, ConstrainedExample, ConstrainedNextToken


def example(model, length, seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(32, 127, length)
    places = np.sort(rng.choice(np.arange(2, length - 1), 5, replace=False))
    allowed = rng.random((5, model.config.vocab_size)) < 0.1
    allowed[np.arange(5), ids[places + 1]] = True
    bits = np.packbits(allowed, axis=1, bitorder="little")
    return ConstrainedExample(tuple(ids.tolist()), places, ids[places + 1], bits), allowed


def test_the_loss_and_its_gradient_are_those_of_the_masked_softmax(tiny):
    pairs = [example(tiny, length, length) for length in (12, 30)]
    batch = ConstrainedBatch.of([each for each, _ in pairs])
    model = tiny.module
    weight = model.embed_tokens.weight
    before = weight.requires_grad
    weight.requires_grad_(True)
    try:
        loss = ConstrainedNextToken()(model, batch)
        gradient = torch.autograd.grad(loss.total, weight)[0]
        expected, right = torch.zeros(()), 0
        for each, allowed in pairs:
            logits = model(torch.tensor([each.ids]))[0, torch.from_numpy(each.places)]
            logits = logits.masked_fill(~torch.from_numpy(allowed), -torch.inf)
            targets = torch.from_numpy(each.targets)
            expected = expected + F.cross_entropy(logits, targets, reduction="sum")
            right += int((logits.argmax(-1) == targets).sum())
        wanted = torch.autograd.grad(expected, weight)[0]
    finally:
        weight.requires_grad_(before)
    assert loss.count == 10
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-4)
    assert float(loss.metrics["accuracy"]) == right
    torch.testing.assert_close(gradient, wanted, atol=1e-4, rtol=1e-3)


def test_only_one_allowed_token_is_no_loss(tiny):
    each, _ = example(tiny, 12, 0)
    only = np.zeros((5, tiny.config.vocab_size), bool)
    only[np.arange(5), each.targets] = True
    sure = ConstrainedExample(each.ids, each.places, each.targets, np.packbits(only, axis=1, bitorder="little"))
    loss = ConstrainedNextToken()(tiny.module, ConstrainedBatch.of([sure]))
    assert loss.total.item() == pytest.approx(0.0, abs=1e-6)


def test_a_choice_counts_as_much_as_its_weight(tiny):
    pairs = [example(tiny, 12, 0), example(tiny, 30, 1)]
    first, second = (each for each, _ in pairs)
    weights = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    alone = [ConstrainedNextToken()(tiny.module, ConstrainedBatch.of([
        ConstrainedExample(first.ids, first.places[i : i + 1], first.targets[i : i + 1], first.allowed[i : i + 1])
    ])).total.item() for i in range(5)]  # fmt: skip
    batch = ConstrainedBatch.of([replace(first, weights=weights), second])
    loss = ConstrainedNextToken()(tiny.module, batch)
    others = ConstrainedNextToken()(tiny.module, ConstrainedBatch.of([second])).total.item()
    assert loss.total.item() == pytest.approx((np.dot(weights, alone) + others) * 10 / (10 + 5), rel=1e-4)
    assert loss.count == 10


def test_a_batch_needs_an_example():
    with pytest.raises(InvalidArgument, match="at least one example"):
        ConstrainedBatch.of([])
