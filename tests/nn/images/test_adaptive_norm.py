"""Oracles: torch's own attention and transformer layer, and passes without a cache."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pippin.core.errors import InvalidArgument
from pippin.nn.attention.axial_rotary import axial_tables, grid_positions
from pippin.nn.context import LayerContext
from pippin.nn.images.adaptive_norm import AdaptiveBlock, BidirectionalCache, CrossAttention
from pippin.nn.kv_cache import NoCache
from pippin.nn.recurrent.states import RecurrentState


def random(module, seed=0, size=0.2):
    g = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = size * torch.randn(parameter.shape, generator=g)
    return module


@pytest.fixture
def x():
    return torch.randn(3, 9, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("causal", [False, True])
def test_a_plain_block_is_torchs_own_layer(x, causal):
    block = random(AdaptiveBlock(32, 4))
    peer = nn.TransformerEncoderLayer(
        32, 4, 128, 0.0, lambda y: F.gelu(y, approximate="tanh"), batch_first=True, norm_first=True
    ).eval()
    attention, feed = block.attention, block.feed_forward
    state = {
        "self_attn.in_proj_weight": torch.cat(
            [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        ),
        "self_attn.in_proj_bias": torch.zeros(96),
        "self_attn.out_proj.weight": attention.o_proj.weight,
        "self_attn.out_proj.bias": torch.zeros(32),
        "linear1.weight": feed.up_proj.weight,
        "linear1.bias": feed.up_proj.bias,
        "linear2.weight": feed.down_proj.weight,
        "linear2.bias": feed.down_proj.bias,
        "norm1.weight": block.attention_norm.weight,
        "norm1.bias": block.attention_norm.bias,
        "norm2.weight": block.feed_norm.weight,
        "norm2.bias": block.feed_norm.bias,
    }
    peer.load_state_dict(state)
    mask = nn.Transformer.generate_square_subsequent_mask(9) if causal else None
    with torch.no_grad():
        got = block(x, None, NoCache() if causal else BidirectionalCache(), 0)
        assert torch.allclose(got, peer(x, src_mask=mask), atol=1e-5)


def test_reading_a_text_is_torchs_own_attention(x):
    cross = random(CrossAttention(32, 4, 12))
    peer = nn.MultiheadAttention(32, 4, kdim=12, vdim=12, bias=False, batch_first=True)
    weights = [cross.q_proj.weight, cross.k_proj.weight, cross.v_proj.weight, cross.o_proj.weight]
    peer.q_proj_weight, peer.k_proj_weight, peer.v_proj_weight, peer.out_proj.weight = weights
    words = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(2))
    mask = torch.arange(5) < torch.tensor([[2], [5], [1]])
    with torch.no_grad():
        wanted = peer(x, words, words, key_padding_mask=~mask)[0]
        assert torch.allclose(cross(x, words, mask), wanted, atol=1e-5)
        nothing = cross(x, words, torch.zeros_like(mask))
    assert bool((nothing == 0).all())


def test_a_vector_shifts_scales_and_gates(x):
    block = random(AdaptiveBlock(32, 4, vector=8))
    vector = torch.randn(3, 1, 8, generator=torch.Generator().manual_seed(3))
    shift, scale, gate, shift2, scale2, gate2 = block.adapt(F.silu(vector)).chunk(6, -1)
    with torch.no_grad():
        y = F.layer_norm(x, (32,)) * (1 + scale) + shift
        after = x + gate * block.attention(y, LayerContext(BidirectionalCache()))[0]
        wanted = after + gate2 * block.feed_forward(F.layer_norm(after, (32,)) * (1 + scale2) + shift2)
        assert torch.allclose(block(x, None, BidirectionalCache(), 0, vector=vector), wanted, atol=1e-5)
        each = block(x, None, BidirectionalCache(), 0, vector=vector.expand(-1, 9, -1))
    assert torch.allclose(each, wanted, atol=1e-5)


def test_adapted_blocks_begin_closed_and_plain_ones_small(x):
    g = torch.Generator().manual_seed(0)
    closed = AdaptiveBlock(32, 4, vector=8, context=12).initialize(g)
    words, mask = torch.randn(3, 2, 12, generator=g), torch.ones(3, 2, dtype=torch.bool)
    vector = torch.randn(3, 1, 8, generator=g)
    assert torch.equal(closed(x, None, BidirectionalCache(), 0, vector=vector, context=words, context_mask=mask), x)
    deep = [AdaptiveBlock(32, 4).initialize(g, depth=16) for _ in range(16)]
    y = x
    with torch.no_grad():
        for layer, block in enumerate(deep):
            y = block(y, None, BidirectionalCache(), layer)
    assert 1 < float(y.std() / x.std()) < 3


@pytest.mark.parametrize("parts", [[1] * 9, [4, 1, 4], [9]])
def test_a_cache_gives_what_the_whole_gives(x, parts):
    blocks = [random(AdaptiveBlock(32, 4, kv_heads=2), seed=i) for i in range(2)]
    cos_sin = axial_tables(grid_positions(3, 3), 8)

    def run(cache, part, at):
        for layer, block in enumerate(blocks):
            part = block(part, (cos_sin[0][at], cos_sin[1][at]), cache, layer)
        return part

    with torch.no_grad():
        whole = run(NoCache(), x, slice(0, 9))
        cache, got, start = RecurrentState(), [], 0
        for size in parts:
            at = slice(start, start + size)
            run(cache, torch.zeros(3, size, 32), at)  # a try that is thrown away
            got.append(run(cache, x[:, at], at))
            cache.advance(size)
            start += size
    assert torch.allclose(torch.cat(got, 1), whole, atol=1e-5)


def test_mistakes():
    for width, heads in ((32, 5), (30, 10), (32, 0)):
        with pytest.raises(InvalidArgument, match="heads do not divide"):
            AdaptiveBlock(width, heads)
    block = AdaptiveBlock(32, 4, vector=8)
    with pytest.raises(InvalidArgument, match="conditioning vector must be given"):
        block(torch.zeros(1, 2, 32), None, BidirectionalCache(), 0)
