"""Mistral, Ministral and Ministral 3.

Notable here:
- Mistral's window, where its configuration names one, is that of every layer
- queries of Ministral 3 grow with their position beyond the trained context, which in GGUF is that of YaRN
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import Family, Fields, read_decoder, rope_fields
from pippin.language.families.gguf_layout import GGUFHeader
from pippin.language.families.llama import GGUF
from pippin.nn.attention.attention import AttentionSpec, PositionScale


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


# llama.cpp stores them as Llama models
_GGUF = replace(GGUF, applies=_is_mistral)
MISTRAL = Family("mistral", "MistralForCausalLM", _mistral, gguf=_GGUF)
MINISTRAL = Family("ministral", "MinistralForCausalLM", _ministral, gguf=_GGUF)


_GROWTH, _LOG_MULTIPLIER = "attention.temperature_scale", "rope.scaling.yarn_log_multiplier"


def _ministral3_from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    rope = dict(fields["rope_parameters"])
    if rope["rope_type"] == "yarn" and (weight := header.get(_LOG_MULTIPLIER, float, 0.0)):
        rope |= {"mscale": 1.0, "mscale_all_dim": weight}
    if growth := header.get(_GROWTH, float, 0.0):
        original = header.get("rope.scaling.original_context_length", int)
        rope |= {"llama_4_scaling_beta": growth, "original_max_position_embeddings": original}
    return {"rope_parameters": rope}


def _ministral3_to_gguf(config: DecoderConfig) -> dict[str, Any]:
    attention, fields = config.layers[0].attention, dict[str, Any]()
    rotary, growth = attention.rotary, attention.position_scale
    if rotary is not None and rotary.scaling == "yarn":
        fields |= {
            "rope.scaling.yarn_beta_fast": float(rotary.high),
            "rope.scaling.yarn_beta_slow": float(rotary.low),
            _LOG_MULTIPLIER: rotary.mscale_all_dim,
        }
    if growth is not None:
        fields |= {_GROWTH: growth.beta, "rope.scaling.original_context_length": growth.length}
    return fields


_GGUF3 = replace(
    GGUF, architecture="mistral3", read=_ministral3_from_gguf, write=_ministral3_to_gguf, applies=lambda header: True
)
MINISTRAL3 = Family("ministral3", "Ministral3ForCausalLM", _ministral3, _write_ministral3, gguf=_GGUF3)
