"""GLM and GLM-4: interleaved rotation of half of each head, gate and up in one matrix; GLM-4 has norms after, too."""

from __future__ import annotations

from typing import Any

from pippin.language.decoder import DecoderConfig
from pippin.language.families.family import (
    Family,
    Fields,
    TensorRule,
    fused_gate_up,
    read_decoder,
    rename,
    rotated_rows,
)


def _glm(config: Fields) -> DecoderConfig:
    return read_decoder("glm", _with_part(config), qkv_bias=bool(config.get("attention_bias")))


def _glm4(config: Fields) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    return read_decoder("glm4", _with_part(config), residual="pre and post", qkv_bias=bias)


def _with_part(config: Fields) -> dict[str, Any]:
    """The fields, with the share of each head that is rotated, which is half where they do not say."""
    return {"partial_rotary_factor": 0.5, **config}


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias}


def _rules(config: DecoderConfig) -> list[TensorRule]:
    return [*rotated_rows(interleaved=True), fused_gate_up()]


def _glm4_rules(config: DecoderConfig) -> list[TensorRule]:
    norms = rename(
        post_attention_layernorm="post_self_attn_layernorm",
        pre_feedforward_layernorm="post_attention_layernorm",
        post_feedforward_layernorm="post_mlp_layernorm",
    )
    return [*_rules(config), *norms]


GLM = Family("glm", "GlmForCausalLM", _glm, _write, _rules)
GLM4 = Family("glm4", "Glm4ForCausalLM", _glm4, _write, _glm4_rules)
