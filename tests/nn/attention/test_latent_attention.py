"""Latent attention against keys and values that are computed for each head."""

import pytest
import torch
import torch.nn.functional as F

from pippin.nn.attention.attention import AttentionSpec, LatentSpec
from pippin.nn.attention.latent_attention import LatentAttention
from pippin.nn.attention.rotary import Rotary, apply_rotary
from pippin.nn.context import LayerContext
from pippin.nn.kv_cache import MaskedCache, NoCache, PastKeyValues

LATENT = LatentSpec(kv_rank=6, rotated_dim=4, plain_dim=5, value_dim=3, q_rank=7, bias=True)
HEADS = 3


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def layer():
    spec = AttentionSpec(latent=LATENT, rotary=Rotary(scaling="yarn", factor=8.0, mscale=1.0, mscale_all_dim=0.5))
    layer = LatentAttention(spec, hidden_size=10, num_attention_heads=HEADS, output_bias=True).double()
    layer.requires_grad_(False)
    for seed, weight in enumerate(layer.parameters()):
        weight.copy_(0.5 * normal(*weight.shape, seed=seed))
    return layer


def tables(new):
    return tuple(table.double() for table in Rotary().tables(torch.arange(new), LATENT.rotated_dim))


def normalized(x, weight):
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def expanded(layer, x, cos_sin):
    """The output with the keys and values of each head."""
    q = normalized(F.linear(x, layer.q_a_proj.weight, layer.q_a_proj.bias), layer.q_a_layernorm.weight)
    q = F.linear(q, layer.q_b_proj.weight).unflatten(-1, (HEADS, 9)).transpose(1, 2)
    both = F.linear(x, layer.kv_a_proj_with_mqa.weight, layer.kv_a_proj_with_mqa.bias)
    latent = normalized(both[..., :6], layer.kv_a_layernorm.weight)
    plain, values = (
        F.linear(latent, part.weight).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for part in (layer.k_b_proj, layer.v_b_proj)
    )
    shared = apply_rotary(both[:, None, :, 6:], *cos_sin).expand(-1, HEADS, -1, -1)
    keys = torch.cat([plain, shared], -1)
    q = torch.cat([q[..., :5], apply_rotary(q[..., 5:], *cos_sin)], -1)
    multiplier = 0.1 * 0.5 * torch.tensor(8.0).log().item() + 1
    scores = 9**-0.5 * multiplier**2 * q @ keys.transpose(-1, -2)
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    y = (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)
    return F.linear(y, layer.o_proj.weight, layer.o_proj.bias)


def test_absorbed_projections_give_what_expanded_keys_and_values_give(layer):
    x = normal(2, 7, 10, seed=20)
    found, (keys, _, _) = layer(x, LayerContext(NoCache(), cos_sin=tables(7)))
    torch.testing.assert_close(found, expanded(layer, x, tables(7)), rtol=1e-9, atol=1e-9)
    assert keys.shape == (2, 1, 7, LATENT.kv_rank + LATENT.rotated_dim)


def test_a_single_token_after_others_reads_one_small_vector_for_each(layer):
    x, past = normal(1, 7, 10, seed=20), PastKeyValues()
    cos, sin = tables(7)
    for at in range(7):
        cache = MaskedCache(torch.ones(1, 1, 1, at + 1, dtype=torch.bool), past, keep=True)
        found, _ = layer(x[:, at : at + 1], LayerContext(cache, cos_sin=(cos[at : at + 1], sin[at : at + 1])))
        cache.advance(1)
    torch.testing.assert_close(found[:, 0], expanded(layer, x, (cos, sin))[:, 6], rtol=1e-9, atol=1e-9)
