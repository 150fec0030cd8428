"""OLMo 1, 2 and 3, and OLMoE.

Notable here:
- OLMo 1 has layer norms without weights; OLMo 2 and 3 have RMS norms after attention and after the feed-forward layer,
  none before, and norms over all queries and all keys together; OLMo 3 attends within a window in three of four layers
- OLMoE has the norms of queries and keys, but norms before each part of a layer
"""

from __future__ import annotations

from typing import Any

from pippin.language.decoder import DecoderConfig
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
from pippin.nn.feedforward import FeedForwardSpec


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


OLMO = Family("olmo", "OlmoForCausalLM", _olmo, _write)
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", _olmo2, _write)
OLMO3 = Family("olmo3", "Olmo3ForCausalLM", _olmo3, _write)
OLMOE = Family("olmoe", "OlmoeForCausalLM", _olmoe, _write, expert_rules())
