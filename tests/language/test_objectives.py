"""The loss in chunks: torch's own cross-entropy, in value and gradient, for heads of every kind."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pippin.core.errors import InvalidArgument
from pippin.data.token_batches import IGNORE, TokenBatch
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig, LayerSpec
from pippin.language.objectives import NextToken, cross_entropy, held_out
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec

VOCAB = 131


def decoder(*, tied=True, seed=0):
    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(24))
    config = DecoderConfig(
        "llama",
        VOCAB,
        16,
        (layer,) * 2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return Decoder(config).initialize(seed=seed)


def batch(rows=3, length=20, *, documents=None, ignored=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
    targets = torch.randint(0, VOCAB, (rows, length), generator=generator)
    targets[torch.rand(rows, length, generator=generator) < ignored] = IGNORE
    return TokenBatch(ids, targets, documents)


def gradients(model, total):
    total.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


class Biased(nn.Module):
    """A head that is no plain matrix product."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(8, VOCAB)

    def forward(self, x):
        return self.b(self.a(x).tanh())


@pytest.mark.parametrize("chunk", [1, 7, 1000, None])
@pytest.mark.parametrize("kind", ["tied", "untied", "another head", "frozen head"])
def test_value_and_gradients_are_those_of_torch(kind, chunk):
    model = decoder(tied=kind == "tied")
    if kind == "another head":
        torch.manual_seed(1)
        model.lm_head = Biased()
    model.lm_head.requires_grad_(kind != "frozen head")
    data = batch()
    loss = NextToken(chunk)(model, data)
    assert loss.count == data.learned
    ours = gradients(model, loss.total / loss.count)
    logits = model(data.ids).flatten(0, 1)
    targets = data.targets.flatten()
    expected = F.cross_entropy(logits, targets, ignore_index=IGNORE)
    torch.testing.assert_close(loss.total / loss.count, expected)
    right = (logits.argmax(-1) == targets).sum()
    assert float(loss.metrics["accuracy"]) == right
    theirs = gradients(model, expected)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_documents_in_a_row_are_learned_one_by_one():
    model, data = decoder(), batch(2, 10, documents=(4, 6, 1, 9))
    ours = NextToken(3)(model, data)
    parts = zip(data.ids.view(-1).split((4, 6, 1, 9)), data.targets.view(-1).split((4, 6, 1, 9)), strict=True)
    expected = sum(
        F.cross_entropy(model(ids[None])[0], targets, ignore_index=IGNORE, reduction="sum") for ids, targets in parts
    )
    torch.testing.assert_close(ours.total, expected)


@pytest.mark.parametrize("kind", ["tied", "another head"])
def test_under_autocast_it_is_torch_under_autocast(kind):
    model, data = decoder(), batch()
    if kind == "another head":
        model.lm_head = Biased()
    with torch.autocast("cpu", torch.bfloat16):
        ours = NextToken(16)(model, data)
        mine = gradients(model, ours.total / ours.count)
        logits = model(data.ids).flatten(0, 1)
        expected = F.cross_entropy(logits.float(), data.targets.flatten(), ignore_index=IGNORE)
    theirs = gradients(model, expected)
    assert ours.total.dtype == torch.float32
    torch.testing.assert_close(ours.total / ours.count, expected, rtol=2e-3, atol=1e-3)
    for name, gradient in theirs.items():
        assert mine[name].dtype == torch.float32
        scale = gradient.abs().max()
        torch.testing.assert_close(mine[name] / scale, gradient / scale, rtol=0, atol=0.03, msg=name)


def test_a_weight_that_is_computed_gets_its_gradient():
    """A fake-quantized head: a parametrized `Linear`, whose weight has a graph of its own."""

    class Half(nn.Module):
        def forward(self, weight):
            return weight * 0.5

    model, data = decoder(tied=False), batch()
    nn.utils.parametrize.register_parametrization(model.lm_head, "weight", Half())
    ours = gradients(model, NextToken(8)(model, data).total)
    logits = model(data.ids).flatten(0, 1)
    theirs = gradients(model, F.cross_entropy(logits, data.targets.flatten(), ignore_index=IGNORE, reduction="sum"))
    assert "lm_head.parametrizations.weight.original" in ours
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


def test_nothing_to_learn_is_a_loss_of_nothing():
    model, data = decoder(), batch(ignored=2.0)
    loss = NextToken()(model, data)
    assert (loss.total.item(), loss.count, float(loss.metrics["accuracy"])) == (0.0, 0.0, 0.0)
    assert all(float(g.abs().sum()) == 0 for g in gradients(model, loss.total).values())


def test_the_logits_never_lie_in_memory_all_at_once():
    model = decoder()
    hidden, targets = torch.randn(4096, 16, requires_grad=True), torch.randint(0, VOCAB, (4096,))
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            made = function(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                largest = max(largest, made.numel())
            return made

    with Watch():
        total, _ = cross_entropy(model, hidden, targets, chunk_size=64)
        total.backward()
    assert largest <= max(64 * VOCAB, hidden.numel())


def test_the_held_out_loss_is_a_mean_over_tokens_and_leaves_the_model_alone():
    model = decoder().train()
    data = [batch(1, 5, seed=1), batch(4, 12, seed=2, ignored=0.6), batch(2, 9, seed=3, documents=(9, 5, 4))]
    figures = held_out(data)(model)
    with torch.no_grad():
        losses = [NextToken()(model, each) for each in data]
    count = sum(loss.count for loss in losses)
    assert figures["loss"] == pytest.approx(sum(float(loss.total) for loss in losses) / count)
    assert figures["accuracy"] == pytest.approx(sum(float(loss.metrics["accuracy"]) for loss in losses) / count)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(InvalidArgument, match="hold no token"):
        held_out([batch(ignored=2.0)])(model)


def test_a_chunk_of_nothing_is_refused():
    with pytest.raises(InvalidArgument, match="chunk_size must be at least 1, got 0"):
        NextToken(0)
