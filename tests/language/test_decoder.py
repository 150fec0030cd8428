"""The decoder against transformers: the same weights, the same logits, for every family that it reads."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pippin.core.errors import CorruptedFile, InvalidArgument, UnsupportedModel
from pippin.language import families
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig, LayerSpec
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.attention.rotary import Rotary
from pippin.nn.feedforward.feedforward import FeedForwardSpec

from .dense import DenseCache
from .families.checkpoints import read

SMALL = {
    "vocab_size": 307,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64, "factor": 8.0}
FAMILIES = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama, tied, 3.1 scaling": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3},
    },
    "llama, linear scaling": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    },
    "mistral, window": {"model_type": "mistral", "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3, yarn": {
        "model_type": "qwen3",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 8, "query_pre_attn_scalar": 24, "num_hidden_layers": 7},
    "smollm3": {"model_type": "smollm3", "tie_word_embeddings": True},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
}


@pytest.fixture(params=FAMILIES)
def pair(request, tmp_path):
    """A random transformers model, and our decoder with the same weights, read as a checkpoint is read."""
    torch.manual_seed(0)
    fields = SMALL | FAMILIES[request.param]
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), attn_implementation="eager").eval()
    for parameter in reference.parameters():  # norms and biases away from their trivial starting values
        parameter.data += 0.1 * torch.randn_like(parameter)
    reference.save_pretrained(tmp_path)
    return reference, read(tmp_path)


@pytest.mark.parametrize("packed", [False, True])
def test_logits_equal_transformers(pair, packed):
    reference, decoder = pair
    decoder = decoder.pack() if packed else decoder
    ids = torch.randint(3, 307, (3, 41), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(decoder(ids), reference(ids).logits, atol=1e-4, rtol=0)


def test_logits_with_cache_in_uneven_pieces_equal_those_without(pair):
    reference, decoder = pair
    ids = torch.randint(3, 307, (2, 37), generator=torch.Generator().manual_seed(2))
    cache = DenseCache(decoder.config, 40, batch=2)
    with torch.no_grad():
        pieces = [decoder(piece, cache=cache) for piece in ids.split([1, 17, 1, 1, 12, 5], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, 1), reference(ids).logits, atol=1e-4, rtol=0)
    assert cache.length == 37


def test_left_padded_batches_equal_each_row_alone(pair):
    reference, decoder = pair
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, 307, (n,), generator=generator) for n in (20, 7, 13)]
    padding = torch.tensor([20 - len(row) for row in rows])
    ids = torch.stack([torch.nn.functional.pad(row, (20 - len(row), 0)) for row in rows])
    cache = DenseCache(decoder.config, 20, batch=3, padding=padding)
    with torch.no_grad():
        whole = decoder(ids, padding=padding)
        pieces = torch.cat([decoder(piece, cache=cache, padding=padding) for piece in ids.split([11, 1, 8], dim=1)], 1)
        for index, row in enumerate(rows):
            alone = reference(row[None]).logits[0]
            torch.testing.assert_close(whole[index, padding[index] :], alone, atol=1e-4, rtol=0)
            torch.testing.assert_close(pieces[index, padding[index] :], alone, atol=1e-4, rtol=0)


def test_truncated_cache_continues_as_if_the_rest_had_never_been(pair):
    _, decoder = pair
    ids = torch.randint(3, 307, (1, 30), generator=torch.Generator().manual_seed(4))
    cache = DenseCache(decoder.config, 40)
    with torch.no_grad():
        decoder(ids, cache=cache)
        cache.truncate(12)
        again = decoder(ids[:, 12:], cache=cache)
        torch.testing.assert_close(again, decoder(ids)[:, 12:], atol=1e-4, rtol=0)


def test_saved_configuration_describes_the_same_decoder(pair):
    _, decoder = pair
    assert families.from_hf(families.to_hf(decoder.config)) == decoder.config


def spec(source=None, **feedforward):
    return LayerSpec(
        AttentionSpec(rotary=Rotary(), kv_source=source), FeedForwardSpec(intermediate_size=64, **feedforward)
    )


BASE = DecoderConfig(
    "llama",
    50,
    32,
    (spec(), spec(), spec(1), spec(1)),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)


@pytest.mark.parametrize(
    "other", [spec(gated=False), replace(spec(), feedforward=FeedForwardSpec(intermediate_size=32))]
)
def test_what_no_family_has_is_not_written_down_as_if_it_had(other):
    with pytest.raises(UnsupportedModel, match=r"of different sizes|differs from llama models"):
        families.to_hf(replace(BASE, layers=(spec(), other)))


@torch.no_grad()
def test_layers_that_share_keys_equal_layers_that_hold_copies_of_them():
    decoder = Decoder(BASE).initialize(seed=0).eval()
    ids = torch.randint(0, 50, (1, 12), generator=torch.Generator().manual_seed(0))
    whole = decoder(ids)
    cache = DenseCache(BASE, 12)
    assert cache.store.shape[0] == 2
    pieces = torch.cat([decoder(piece, cache=cache) for piece in ids.split([5, 1, 6], dim=1)], 1)
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=0)
    # the keys of layer 1 are all that layers 2 and 3 know of the past: without their change nothing changes
    changed = Decoder(BASE).initialize(seed=0).eval()
    changed.layers[1].self_attn.k_proj.weight.data += 0.5
    assert not torch.allclose(changed(ids), whole)
    assert not hasattr(changed.layers[2].self_attn, "k_proj")


def test_the_published_on_device_decoder_has_the_published_number_of_parameters():
    layers = tuple(
        LayerSpec(AttentionSpec(rotary=Rotary(500_000.0), kv_source=34 if i >= 35 else None), FeedForwardSpec(6656))
        for i in range(56)
    )
    config = DecoderConfig(
        "afm",
        153_600,
        2048,
        layers,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=4096,
        qk_norm="head",
    )
    with torch.device("meta"):
        decoder = Decoder(config)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == 3_111_368_064


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads .3. must be a multiple of num_key_value_heads .2."),
        ({"head_dim": 7}, "head_dim must be even to be rotated, got 7"),
        ({"layers": ()}, "at least one layer"),
        ({"layers": (spec(0),)}, "layer 0 reads layer 0"),
        ({"layers": (spec(), spec(0), spec(1))}, "layer 2 reads layer 1"),
    ],
)
def test_impossible_configurations_name_the_value(change, message):
    with pytest.raises(InvalidArgument, match=message):
        replace(BASE, **change)


def test_no_tokens_is_an_error():
    with pytest.raises(InvalidArgument, match="no tokens"):
        Decoder(BASE)(torch.zeros(1, 0, dtype=torch.long))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "rwkv"}, "model_type 'rwkv' is not supported"),
        (SMALL | {"model_type": "llama", "hidden_act": "snake"}, "activation 'snake' is not supported"),
        (SMALL | {"model_type": "llama", "rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
    ],
)
def test_what_the_decoder_lacks_is_refused_by_name(config, message):
    with pytest.raises(UnsupportedModel, match=message):
        families.from_hf(config)


MOE = {"model_type": "qwen3_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 100_000}, "num_hidden_layers must be an integer from 1 to 1,024, got 100000"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer from 1 to 1,024, got True"),
        ({"hidden_size": 2**62}, "hidden_size must be an integer from 1 to 1,048,576"),
        ({"vocab_size": 2**100}, "vocab_size must be an integer from 1 to 16,777,216"),
        ({"intermediate_size": 2**61}, "intermediate_size must be an integer"),
        ({"max_position_embeddings": 2**70}, "max_position_embeddings must be an integer"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window must be an integer"),
        ({"rope_theta": float("nan")}, "rope_theta must be positive and finite, got nan"),
        ({"rope_theta": float("inf")}, "rope_theta must be positive and finite, got inf"),
        (MOE | {"num_experts": 10**7}, "num_experts must be an integer from 1 to 65,536"),
        (MOE | {"num_experts": 60_000}, "num_experts in all layers must be an integer from 1 to 65,536"),
        (MOE | {"num_experts": 1}, "num_experts_per_tok must be an integer from 1 to 1, got 2"),
        ({"model_type": "gemma3", "text_config": 3}, "no object 'text_config'"),
    ],
)
def test_impossible_sizes_are_refused_before_anything_is_built(changes, message):
    with pytest.raises(CorruptedFile, match=message):
        families.from_hf(SMALL | {"model_type": "llama"} | changes)
