"""Passes with a mask of their own: ordinary passes where the mask is theirs, and nothing from unseen tokens."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pippin.core.errors import InvalidArgument
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig, LayerSpec
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.kv_cache import MaskedCache, PastKeyValues, causal_mask

LAYERS = (
    LayerSpec(AttentionSpec(), FeedForwardSpec(24)),
    LayerSpec(AttentionSpec(rotary=None), FeedForwardSpec(24)),
    LayerSpec(AttentionSpec(kv_source=0), FeedForwardSpec(24)),
)


@pytest.fixture(scope="module")
def decoder():
    """Two layers with keys of their own and one that reads the first's; in double precision."""
    config = DecoderConfig(
        "llama", 40, 16, LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=4, max_position_embeddings=64
    )
    return Decoder(config).initialize(seed=3).double().requires_grad_(False)


def tokens(count, seed=0, rows=1):
    return torch.randint(0, 40, (rows, count), generator=torch.Generator().manual_seed(seed))


def blocks_mask(blocks):
    """Causal, and within a block everybody sees everybody."""
    return (torch.tensor(blocks)[:, None] >= torch.tensor(blocks)[None])[None, None]


def test_the_causal_mask_is_the_ordinary_pass(decoder):
    ids = tokens(9, rows=2)
    mask = causal_mask(0, 9, 99, torch.zeros(1, dtype=torch.int64), torch.device("cpu"))
    torch.testing.assert_close(decoder(ids, cache=MaskedCache(mask)), decoder(ids), rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=15)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_blocks_one_by_one_behind_what_is_kept_are_the_whole_pass(decoder, sizes):
    ids = tokens(sum(sizes))
    blocks = [number for number, size in enumerate(sizes) for _ in range(size)]
    whole = decoder(ids, cache=MaskedCache(blocks_mask(blocks)))
    past, parts = PastKeyValues(), []
    for part in ids.split(sizes, 1):
        sees = torch.ones(1, 1, part.shape[1], past.length + part.shape[1], dtype=torch.bool)
        draft = decoder(part, cache=MaskedCache(sees, past))  # leaves no trace
        parts.append(decoder(part, cache=MaskedCache(sees, past, keep=True)))
        assert torch.equal(draft, parts[-1])
    assert past.length == sum(sizes)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)


def test_padding_on_the_left_with_positions_of_its_own_is_the_ordinary_pass(decoder):
    ids, padding = tokens(9, rows=2), torch.tensor([0, 4])
    mask = causal_mask(0, 9, None, padding, torch.device("cpu"))
    places = (torch.arange(9) - padding[:, None]).clamp(min=0)
    found = decoder(ids, cache=MaskedCache(mask, positions=places))
    torch.testing.assert_close(found, decoder(ids, padding=padding), rtol=1e-9, atol=1e-9)


def test_what_is_not_seen_has_no_influence_and_what_is_seen_has(decoder):
    ids = tokens(6)
    mask = blocks_mask([0, 0, 0, 1, 1, 1])
    before = decoder(ids, cache=MaskedCache(mask))
    later, sooner = ids.clone(), ids.clone()
    later[0, 5], sooner[0, 2] = (ids[0, 5] + 1) % 40, (ids[0, 2] + 1) % 40
    changed = decoder(later, cache=MaskedCache(mask))
    assert torch.equal(changed[:, :3], before[:, :3])
    assert not torch.allclose(changed[:, 3], before[:, 3])  # a token to its right, of its own block
    assert not torch.allclose(decoder(sooner, cache=MaskedCache(mask))[:, 0], before[:, 0])


def test_masks_that_fit_nothing_are_refused(decoder):
    with pytest.raises(InvalidArgument, match="must have 3 columns, got 4"):
        MaskedCache(torch.ones(1, 1, 3, 4, dtype=torch.bool))
    with pytest.raises(InvalidArgument, match="attend to nothing"):
        MaskedCache(torch.eye(3, dtype=torch.bool)[None, None] & (torch.arange(3) < 2))
    with pytest.raises(InvalidArgument, match="needs a past"):
        MaskedCache(torch.ones(1, 1, 3, 3, dtype=torch.bool), keep=True)
    with pytest.raises(InvalidArgument, match="for 3 new tokens, the pass has 4"):
        decoder(tokens(4), cache=MaskedCache(torch.ones(1, 1, 3, 3, dtype=torch.bool)))
