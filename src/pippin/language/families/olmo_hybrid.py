"""OLMo hybrid: Gated DeltaNet whose memory may have negative eigenvalues, and OLMo's attention in every fourth layer.

Notable here:
- recurrent layers have norms before each part, those that attend after it
- the published models have no positions

Source: OLMo hybrid, Allen Institute for AI 2026.
"""

from __future__ import annotations

from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import Family, Fields, TensorRule, read_decoder, read_rotary, rename
from pippin.language.families.hybrid import (
    convolutions,
    kinds_of,
    layer_kinds,
    parameters,
    recurrence,
    with_recurrence,
)
from pippin.nn.recurrent.gated_delta import GatedDeltaSpec

_EPS = 1e-5
"""Epsilon of the norms behind the recurrence, which no file says."""


def _read(config: Fields) -> DecoderConfig:
    count, heads = config["num_hidden_layers"], config["num_attention_heads"]
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(count)]
        kinds[-1] = kinds[-1] if "full_attention" in kinds else "full_attention"
    bias = bool(config.get("attention_bias"))
    base = read_decoder(
        "olmo_hybrid",
        config,
        rotary=lambda index, local: read_rotary(config) if _rotates(config) else None,
        local=lambda index: False,
        residual="post",
        qk_norm="full",
        qkv_bias=bias,
        output_bias=bias,
    )
    key_heads = config.get("linear_num_key_heads") or heads
    key_dim = config.get("linear_key_head_dim") or int(0.75 * config["hidden_size"] / key_heads)
    spec = GatedDeltaSpec(
        key_heads=key_heads,
        value_heads=config.get("linear_num_value_heads") or heads,
        key_dim=key_dim,
        value_dim=config.get("linear_value_head_dim") or 2 * key_dim,
        conv=config.get("linear_conv_kernel_dim", 4),
        beta=2.0 if config.get("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=_EPS,
    )
    return with_recurrence(base, spec, layer_kinds(config, kinds), residual="pre")


def _rotates(config: Fields) -> bool:
    rope = config.get("rope_parameters")
    return bool((rope or {}).get("rope_theta", config.get("rope_theta")))


def _write(config: DecoderConfig) -> dict[str, Any]:
    spec: GatedDeltaSpec = recurrence(config)
    fields = {
        "attention_bias": config.qkv_bias,
        "layer_types": kinds_of(config),
        "linear_num_key_heads": spec.key_heads,
        "linear_num_value_heads": spec.value_heads,
        "linear_key_head_dim": spec.key_dim,
        "linear_value_head_dim": spec.value_dim,
        "linear_conv_kernel_dim": spec.conv,
        "linear_allow_neg_eigval": spec.beta == 2.0,
    }
    if not any(layer.attention.rotary for layer in config.layers):
        fields |= {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": None}}
    return fields


def _rules(config: DecoderConfig) -> list[TensorRule]:
    spec: GatedDeltaSpec = recurrence(config)
    mixer = "linear_attn"
    return [
        *rename(input_layernorm="input_layernorm", post_attention_layernorm="post_attention_layernorm"),
        *rename(input_layernorm="attention_layer_norm", post_attention_layernorm="feedforward_layer_norm"),
        *rename(
            recurrent__q_proj=f"{mixer}.q_proj",
            recurrent__k_proj=f"{mixer}.k_proj",
            recurrent__v_proj=f"{mixer}.v_proj",
            recurrent__a_proj=f"{mixer}.a_proj",
            recurrent__b_proj=f"{mixer}.b_proj",
            recurrent__gate_proj=f"{mixer}.g_proj",
            recurrent__out_proj=f"{mixer}.o_proj",
            recurrent__norm=f"{mixer}.o_norm",
            recurrent__q_conv=f"{mixer}.q_conv1d",
            recurrent__k_conv=f"{mixer}.k_conv1d",
            recurrent__v_conv=f"{mixer}.v_conv1d",
        ),
        convolutions(f"{mixer}.conv1d", spec.sizes),
        parameters(mixer, "A_log", "dt_bias"),
    ]


OLMO_HYBRID = Family("olmo_hybrid", "OlmoHybridForCausalLM", _read, _write, _rules)
