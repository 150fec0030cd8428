"""Oracles: sums and means written out by hand; a condition that says nothing must change nothing."""

import pytest
import torch

from pippin.core.errors import InvalidArgument
from pippin.generate.conditions import ConditionEmbedding, Conditioning, ConditioningSpec

FULL = ConditioningSpec(num_classes=3, text_dim=5, map_channels=2, vector_dim=4, null=True)


def everything(n=2, tokens=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(tokens) < torch.tensor([[1], [tokens]])
    return Conditioning(
        labels=torch.tensor([2, 0])[:n],
        text=torch.randn(n, tokens, 5, generator=g),
        text_mask=mask[:n],
        map=torch.randn(n, 2, 6, 6, generator=g),
        vector=torch.randn(n, 4, generator=g),
    )


def embedding(spec, width=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    made = ConditionEmbedding(spec, width).initialize(g)
    for parameter in made.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=g)
    return made


def test_the_vector_is_the_sum_of_class_text_and_vector():
    made, condition = embedding(FULL), everything()
    got = made(condition, 2)
    for i, (label, tokens) in enumerate([(2, 1), (0, 3)]):
        words = torch.stack([made.text(condition.text[i, j]) for j in range(tokens)])
        wanted = made.classes[label] + words.mean(0) + made.vector(condition.vector[i])
        assert torch.allclose(got.vector[i], wanted, atol=1e-6)
        assert torch.allclose(got.tokens[i, :tokens], words, atol=1e-6)
        assert got.mask[i].tolist() == [True] * tokens + [False] * (3 - tokens)
    assert torch.equal(got.map, condition.map)


def test_no_label_is_the_mean_of_all_and_what_is_learned():
    made = embedding(ConditioningSpec(num_classes=3, null=True))
    got = made(Conditioning(labels=torch.tensor([-1])), 1)
    assert torch.allclose(got.vector[0], made.classes.mean(0) + made.no_class)
    assert torch.equal(made(None, 1).vector, got.vector)


def test_nothing_said_is_the_same_however_it_is_not_said():
    made = embedding(ConditioningSpec(num_classes=3, text_dim=5, vector_dim=4, null=True))
    condition = everything()
    condition = Conditioning(condition.labels, condition.text, condition.text_mask, vector=condition.vector)
    null, none = made(condition.null(), 2), made(None, 2)
    assert torch.allclose(null.vector, none.vector)
    assert torch.equal(null.mask.sum(1), torch.ones(2, dtype=torch.long))
    assert torch.allclose(null.tokens[:, 0], made.no_text.expand(2, -1))


def test_dropping_is_by_sample():
    condition = everything()
    dropped = condition.dropped(torch.tensor([True, False]))
    made = embedding(FULL)
    assert torch.equal(made(dropped, 2).vector[0], made(condition, 2).vector[0])
    assert torch.equal(made(dropped, 2).vector[1], made(condition.null(), 2).vector[1])
    assert dropped.map[1].abs().sum() == 0


def test_padding_of_a_text_changes_nothing():
    made = embedding(ConditioningSpec(text_dim=5))
    text = torch.randn(1, 2, 5, generator=torch.Generator().manual_seed(1))
    short = Conditioning(text=text, text_mask=torch.ones(1, 2, dtype=torch.bool))
    long = Conditioning(text=torch.ones(1, 4, 5), text_mask=torch.ones(1, 4, dtype=torch.bool))
    both = Conditioning.concatenate([short, long])
    assert len(both) == 2
    assert torch.allclose(made(both, 2).vector[0], made(short, 1).vector[0], atol=1e-6)


def test_rows_and_joining_undo_each_other():
    condition = everything()
    again = Conditioning.concatenate([condition.select(slice(0, 1)), condition.select(torch.tensor([1]))])
    for part in condition.parts:
        assert torch.equal(getattr(again, part), getattr(condition, part))
    assert torch.equal(condition.to("cpu").map, condition.map)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (Conditioning(labels=torch.tensor([3])), "label 3 is outside 0 to 2"),
        (Conditioning(labels=torch.tensor([-2])), "label -2 is outside"),
        (Conditioning(vector=torch.zeros(1, 2)), r"reads \['labels'\], the condition has \['vector'\]"),
        (Conditioning(labels=torch.tensor([0]), vector=torch.zeros(1, 2)), "reads"),
    ],
)
def test_what_a_model_does_not_read_is_refused(condition, message):
    with pytest.raises(InvalidArgument, match=message):
        ConditionEmbedding(ConditioningSpec(num_classes=3), 8)(condition, 1)


def test_other_mistakes():
    with pytest.raises(InvalidArgument, match="map has 1 channels, the model reads 2"):
        ConditioningSpec(map_channels=2).check(Conditioning(map=torch.zeros(1, 1, 4, 4)))
    with pytest.raises(InvalidArgument, match="1 samples for 2 samples"):
        ConditionEmbedding(ConditioningSpec(num_classes=3), 8)(Conditioning(labels=torch.tensor([0])), 2)
    with pytest.raises(InvalidArgument, match="reads a map"):
        ConditionEmbedding(ConditioningSpec(map_channels=2), 8)(None, 2)
    with pytest.raises(InvalidArgument, match="comes with its text_mask"):
        Conditioning(text=torch.zeros(1, 2, 3))
    with pytest.raises(InvalidArgument, match=r"\[1, 2\]"):
        Conditioning(labels=torch.tensor([0]), vector=torch.zeros(2, 3))
    with pytest.raises(InvalidArgument, match="without any part"):
        Conditioning()
    with pytest.raises(InvalidArgument, match="cannot be one batch"):
        Conditioning.concatenate([Conditioning(labels=torch.tensor([0])), Conditioning(vector=torch.zeros(1, 2))])
    with pytest.raises(InvalidArgument, match="num_classes must be"):
        ConditioningSpec(num_classes=-1)
    assert ConditioningSpec().empty
    assert ConditionEmbedding(ConditioningSpec(), 4)(None, 3).vector.tolist() == [[0.0] * 4] * 3
