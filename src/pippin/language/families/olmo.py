"""OLMo 1, 2 and 3, and OLMoE.

Notable here:
- OLMo 1 has layer norms without weights; OLMo 2 and 3 have RMS norms after attention and after the feed-forward layer,
  none before, and norms over all queries and all keys together; OLMo 3 attends within a window in three of four layers
- OLMoE has the norms of queries and keys, but norms before each part of a layer
"""

from __future__ import annotations

from typing import Any

from pippin.core.errors import UnsupportedModel
from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.experts import expert_rules
from pippin.language.families.family import (
    Family,
    Fields,
    activation_of,
    expert_fields,
    layer_types,
    read_decoder,
    refuse,
)
from pippin.language.families.gguf_layout import GGUFHeader, GGUFLayout
from pippin.nn.feedforward.feedforward import FeedForwardSpec


def _olmo(config: Fields) -> DecoderConfig:
    refuse("olmo", config, "clip_qkv")
    bias = bool(config.get("attention_bias"))
    plain = {**config, "rms_norm_eps": 1e-5}
    return read_decoder("olmo", plain, norm="layer", norm_weight=False, qkv_bias=bias, output_bias=bias)


def _olmo2(config: Fields) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    return read_decoder("olmo2", config, residual="post", qk_norm="full", qkv_bias=bias, output_bias=bias)


def _olmo3(config: Fields) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    kinds = config.get("layer_types")
    return read_decoder(
        "olmo3",
        config,
        local=None if kinds is not None else (lambda index: (index + 1) % 4 != 0),
        residual="post",
        qk_norm="full",
        qkv_bias=bias,
        output_bias=bias,
    )


def _olmoe(config: Fields) -> DecoderConfig:
    refuse("olmoe", config, "clip_qkv")
    bias = bool(config.get("attention_bias"))
    inner = FeedForwardSpec(
        config["intermediate_size"],
        activation_of(config),
        num_experts=config["num_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        norm_topk_prob=config.get("norm_topk_prob", False),
    )
    return read_decoder("olmoe", config, feedforward=inner, qk_norm="full", qkv_bias=bias, output_bias=bias)


def _write(config: DecoderConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"attention_bias": config.qkv_bias, **expert_fields(config.layers[0].feedforward)}
    if config.family == "olmo3":
        fields["layer_types"] = layer_types(config)
    return fields


def _olmo_from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    return {"clip_qkv": header.get("attention.clamp_kqv", float, 0.0) or None}


def _olmo3_from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    # a stretched encoding is that of the layers without window
    rope = fields["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": header.get("rope.freq_base_swa", float, rope["rope_theta"])}
    return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}


def _olmoe_from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    return {"norm_topk_prob": False}


def _olmoe_to_gguf(config: DecoderConfig) -> dict[str, Any]:
    if config.num_key_value_heads != config.num_attention_heads:
        raise UnsupportedModel(
            f"llama.cpp has olmoe models with as many key and value heads as query heads only, not "
            f"{config.num_key_value_heads} of {config.num_attention_heads}"
        )
    return {}


def _is_olmo3(header: GGUFHeader) -> bool:
    return bool(header.get("attention.sliding_window", int, 0))


def _is_olmo2(header: GGUFHeader) -> bool:
    return not _is_olmo3(header)


_GGUF = GGUFLayout("olmo", _olmo_from_gguf, interleaved=True)
_GGUF2 = GGUFLayout("olmo2", applies=_is_olmo2, own_output=True)
_GGUF3 = GGUFLayout("olmo2", _olmo3_from_gguf, applies=_is_olmo3, pattern=4, windows=True, own_output=True)
_GGUF_EXPERTS = GGUFLayout("olmoe", _olmoe_from_gguf, _olmoe_to_gguf, own_output=True)
OLMO = Family("olmo", "OlmoForCausalLM", _olmo, _write, gguf=_GGUF)
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", _olmo2, _write, gguf=_GGUF2)
OLMO3 = Family("olmo3", "Olmo3ForCausalLM", _olmo3, _write, gguf=_GGUF3)
OLMOE = Family("olmoe", "OlmoeForCausalLM", _olmoe, _write, expert_rules(), gguf=_GGUF_EXPERTS)
