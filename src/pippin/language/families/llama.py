"""Llama, and families that differ from it only in biases, windows and layers without rotation.

Notable here:
- Mistral's window, where its configuration names one, is that of every layer
- every fourth layer of SmolLM3 is not rotated
- queries of Ministral 3 grow with their position beyond the trained context
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pippin.language.decoder import DecoderConfig
from pippin.language.families.family import Family, Fields, activation_of, read_decoder, read_rotary, rope_fields
from pippin.language.families.gguf_layout import ALL_BIASES, GGUFHeader, GGUFLayout, rotary_table
from pippin.nn.attention import AttentionSpec, PositionScale
from pippin.nn.feedforward import FeedForwardSpec
from pippin.nn.rotary import Rotary


def _dense(config: Fields) -> FeedForwardSpec:
    return FeedForwardSpec(config["intermediate_size"], activation_of(config), bias=bool(config.get("mlp_bias")))


def _llama(config: Fields) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    return read_decoder("llama", config, feedforward=_dense(config), qkv_bias=bias, output_bias=bias)


def _mistral(config: Fields) -> DecoderConfig:
    windowed = bool(config.get("sliding_window")) and config.get("use_sliding_window", True)
    kinds = config.get("layer_types")
    local = None if kinds is not None else (lambda index: windowed)
    return read_decoder("mistral", config, local=local)


def _ministral(config: Fields) -> DecoderConfig:
    return read_decoder("ministral", config)


def _ministral3(config: Fields) -> DecoderConfig:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scale = None
    if beta := rope.get("llama_4_scaling_beta"):
        scale = PositionScale(beta, rope["original_max_position_embeddings"])
    windowed = bool(config.get("sliding_window"))
    return read_decoder(
        "ministral3", config, local=lambda index: windowed, attention=AttentionSpec(position_scale=scale)
    )


def _smollm3(config: Fields) -> DecoderConfig:
    rotates, interval = config.get("no_rope_layers"), config.get("no_rope_layer_interval", 4)

    def rotary(index: int, local: bool) -> Rotary | None:
        rotated = (index + 1) % interval != 0 if rotates is None else rotates[index]
        return read_rotary(config) if rotated else None

    bias = bool(config.get("attention_bias"))
    windowed = bool(config.get("sliding_window")) and bool(config.get("use_sliding_window"))
    local = None if config.get("layer_types") is not None else (lambda index: windowed)
    return read_decoder(
        "smollm3",
        config,
        feedforward=_dense(config),
        rotary=rotary,
        local=local,
        tied=True,
        qkv_bias=bias,
        output_bias=bias,
    )


def _write_biases(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.layers[0].feedforward.bias}


def _write_smollm3(config: DecoderConfig) -> dict[str, Any]:
    rotated = [int(layer.attention.rotary is not None) for layer in config.layers]
    return _write_biases(config) | {"no_rope_layers": rotated}


def _write_ministral3(config: DecoderConfig) -> dict[str, Any]:
    attention = config.layers[0].attention
    if attention.position_scale is None or attention.rotary is None:
        return {}
    fields = rope_fields(config)
    theta, scaling = fields["rope_theta"], fields.get("rope_scaling", {"rope_type": "default"})
    own = {
        "rope_theta": theta,
        "llama_4_scaling_beta": attention.position_scale.beta,
        "original_max_position_embeddings": attention.position_scale.length,
    }
    return {"rope_scaling": None, "rope_parameters": scaling | own}


def _is_mistral(header: GGUFHeader) -> bool:
    return not header.get("expert_count", int, 0) and bool(header.get("attention.sliding_window", int, 0))


def _is_llama(header: GGUFHeader) -> bool:
    return not header.get("expert_count", int, 0) and not _is_mistral(header)


# the architecture of all of them; which one a file is does not change what is computed
_GGUF = GGUFLayout(
    "llama", tables=rotary_table, interleaved=True, applies=_is_llama, any_head_dim=True, biases=ALL_BIASES
)
_GGUF_WINDOWED = replace(_GGUF, applies=_is_mistral)
_GGUF_SMOLLM3 = GGUFLayout("smollm3", interleaved=True, any_head_dim=True)
LLAMA = Family("llama", "LlamaForCausalLM", _llama, _write_biases, gguf=_GGUF)
MISTRAL = Family("mistral", "MistralForCausalLM", _mistral, gguf=_GGUF_WINDOWED)
MINISTRAL = Family("ministral", "MinistralForCausalLM", _ministral, gguf=_GGUF_WINDOWED)
MINISTRAL3 = Family("ministral3", "Ministral3ForCausalLM", _ministral3, _write_ministral3)
SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", _smollm3, _write_smollm3, gguf=_GGUF_SMOLLM3)
