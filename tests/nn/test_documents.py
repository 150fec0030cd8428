"""Documents end to end in one row: what each gives alone, for every kind of layer, gradients too."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pippin.core.errors import InvalidArgument
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig, LayerSpec
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.attention.rotary import Rotary
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.kv_cache import NoCache, PackedDocuments

FEED = FeedForwardSpec(24)
LAYERS = (
    LayerSpec(AttentionSpec(), FEED),
    LayerSpec(AttentionSpec(window=4, rotary=Rotary(theta=500.0)), FEED),
    LayerSpec(AttentionSpec(rotary=None), FEED),
    LayerSpec(AttentionSpec(kv_source=0), FEED),
    LayerSpec(AttentionSpec(window=4, kv_source=1), FEED),
)


@pytest.fixture(scope="module")
def decoder():
    """Global, sliding and position-free layers, and two that read the keys of others; in double precision."""
    config = DecoderConfig(
        "llama",
        40,
        16,
        LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=64,
        qk_norm="head",
    )
    return Decoder(config).initialize(seed=3).double()


@settings(deadline=None, max_examples=25)
@given(counts=st.lists(st.integers(1, 12), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_each_document_gets_the_logits_that_it_gets_alone(decoder, counts, seed):
    ids = torch.randint(0, 40, (1, sum(counts)), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        packed = decoder(ids, cache=PackedDocuments(counts))
        alone = torch.cat([decoder(part) for part in ids.split(counts, 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-9)


def test_gradients_are_the_sum_of_those_of_each_document_alone(decoder):
    counts = [7, 1, 9]
    ids = torch.randint(0, 40, (1, sum(counts)), generator=torch.Generator().manual_seed(1))
    weights = torch.randn(1, sum(counts), 40, dtype=torch.double, generator=torch.Generator().manual_seed(2))

    def gradients(logits):
        loss = sum((part * w).sum() for part, w in zip(logits, weights.split(counts, 1), strict=True))
        return torch.autograd.grad(loss, list(decoder.parameters()))

    packed = gradients(decoder(ids, cache=PackedDocuments(counts)).split(counts, 1))
    alone = gradients([decoder(part) for part in ids.split(counts, 1)])
    for ours, theirs in zip(packed, alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_one_document_is_a_pass_without_a_cache(decoder):
    ids = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(decoder(ids, cache=PackedDocuments([9])), decoder(ids, cache=NoCache()))


@pytest.mark.parametrize("counts", [[], [3, 0], [-1]])
def test_a_document_without_tokens_is_refused(counts):
    with pytest.raises(InvalidArgument, match="at least one token each"):
        PackedDocuments(counts)


@pytest.mark.parametrize("shape", [(1, 6), (2, 5)])
def test_other_rows_than_the_documents_are_refused(decoder, shape):
    with pytest.raises(InvalidArgument, match=r"documents of 5 tokens|5 positions for 6 tokens"):
        decoder(torch.zeros(shape, dtype=torch.long), cache=PackedDocuments([2, 3]))
