"""GLM and GLM-4: interleaved rotation of half of each head, gate and up in one matrix; GLM-4 has norms after, too.

Notable here:
- the mixtures of experts (GLM-4.5 and later) are routed as those of DeepSeek 3, and rotate the halves of a head's half
"""

from __future__ import annotations

from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.deepseek import (
    balanced_router,
    expert_layers,
    experts_from_gguf,
    experts_to_gguf,
    write_experts,
)
from pippin.language.families.experts import expert_rules, shared_expert
from pippin.language.families.family import (
    Family,
    Fields,
    TensorRule,
    fused_gate_up,
    read_decoder,
    rename,
    rotated_rows,
)
from pippin.language.families.gguf_layout import GGUFHeader, GGUFLayout


def _glm(config: Fields) -> DecoderConfig:
    return read_decoder("glm", _with_part(config), qkv_bias=bool(config.get("attention_bias")))


def _glm4(config: Fields) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    return read_decoder("glm4", _with_part(config), residual="pre and post", qkv_bias=bias)


def _glm4_moe(config: Fields) -> DecoderConfig:
    return read_decoder(
        "glm4_moe",
        _with_part(config),
        feedforward=expert_layers(config, balanced_router(config)),
        qk_norm="head" if config.get("use_qk_norm") else None,
        qkv_bias=bool(config.get("attention_bias")),
    )


def _with_part(config: Fields) -> dict[str, Any]:
    """The fields, with the share of each head that is rotated, which is half where they do not say."""
    return {"partial_rotary_factor": 0.5, **config}


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias}


def _write_moe(config: DecoderConfig) -> dict[str, Any]:
    return {**_write(config), **write_experts(config), "use_qk_norm": config.qk_norm is not None}


def _rules(config: DecoderConfig) -> list[TensorRule]:
    return [*rotated_rows(interleaved=True), fused_gate_up()]


def _glm4_rules(config: DecoderConfig) -> list[TensorRule]:
    norms = rename(
        post_attention_layernorm="post_self_attn_layernorm",
        pre_feedforward_layernorm="post_attention_layernorm",
        post_feedforward_layernorm="post_mlp_layernorm",
    )
    return [*_rules(config), *norms]


def _moe_rules(config: DecoderConfig) -> list[TensorRule]:
    return [*expert_rules()(config), *shared_expert(), *rotated_rows(interleaved=False, norms=True)]


def _gguf_rules(config: DecoderConfig) -> list[TensorRule]:
    return [fused_gate_up("ffn_up")]


_GGUF = GGUFLayout("chatglm", rules=_gguf_rules, interleaved=True)
_GGUF4 = GGUFLayout("glm4", rules=_gguf_rules, interleaved=True, any_head_dim=True)
GLM = Family("glm", "GlmForCausalLM", _glm, _write, _rules, gguf=_GGUF)
GLM4 = Family("glm4", "Glm4ForCausalLM", _glm4, _write, _glm4_rules, gguf=_GGUF4)


def _moe_from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    return {
        **experts_from_gguf(header, fields),
        "partial_rotary_factor": 1.0,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header,
    }


def _moe_gguf_rules(config: DecoderConfig) -> list[TensorRule]:
    return rename(post_attention_layernorm="post_attention_norm")


_GGUF4_MOE = GGUFLayout("glm4moe", _moe_from_gguf, experts_to_gguf, _moe_gguf_rules, any_head_dim=True)
GLM4_MOE = Family(
    "glm4_moe", "Glm4MoeForCausalLM", _glm4_moe, _write_moe, _moe_rules, predicts_more=True, gguf=_GGUF4_MOE
)
