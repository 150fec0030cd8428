"""Granite 4: Mamba-2 and attention without positions, with Granite's multipliers.

Source: Granite 4.0 language models, IBM 2025.
"""

from __future__ import annotations

from typing import Any

from pippin.language.decoder import DecoderConfig
from pippin.language.families.family import (
    Family,
    Fields,
    TensorRule,
    activation_of,
    fused_gate_up,
    read_decoder,
    read_rotary,
)
from pippin.language.families.granite import mixture, mixture_rules, multiplier_fields, multipliers
from pippin.language.families.hybrid import (
    kinds_of,
    layer_kinds,
    read_mamba,
    recurrence,
    with_recurrence,
    write_mamba,
)
from pippin.language.families.mamba2 import mixer_rules
from pippin.nn.feedforward import FeedForwardSpec


def _read(config: Fields) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    rotates = config.get("position_embedding_type") == "rope"
    dense = FeedForwardSpec(config["shared_intermediate_size"], activation_of(config))
    base = read_decoder(
        "granitemoehybrid",
        config,
        feedforward=mixture(config) if config.get("num_local_experts") else dense,
        rotary=lambda index, local: read_rotary(config) if rotates else None,
        local=lambda index: False,
        qkv_bias=bias,
        output_bias=bias,
        **multipliers(config),
    )
    kinds = layer_kinds(config, config.get("layer_types") or config["layers_block_type"])
    if "recurrent" not in kinds:
        return base
    spec = read_mamba(config, config.get("mamba_expand", 2) * config["hidden_size"], "silu before")
    return with_recurrence(base, spec, kinds)


def _write(config: DecoderConfig) -> dict[str, Any]:
    inner, spec = config.layers[0].feedforward, recurrence(config)
    rotates = any(layer.attention.rotary for layer in config.layers)
    fields: dict[str, Any] = {
        "attention_bias": config.qkv_bias,
        "shared_intermediate_size": inner.shared_intermediate_size if inner.num_experts else inner.intermediate_size,
        "num_local_experts": inner.num_experts,
        "position_embedding_type": "rope" if rotates else None,
        "layer_types": kinds_of(config),
        **multiplier_fields(config),
    }
    if inner.num_experts:
        fields["num_experts_per_tok"] = inner.num_experts_per_tok
    if spec is None:
        return fields
    return fields | write_mamba(spec) | {"mamba_expand": spec.inner // config.hidden_size}


def _rules(config: DecoderConfig) -> list[TensorRule]:
    if config.layers[0].feedforward.num_experts:
        return [*mixture_rules(config), *mixer_rules("mamba")]
    return [
        fused_gate_up("shared_mlp.input_linear"),
        TensorRule("shared_mlp.output_linear", ("mlp.down_proj",)),
        *mixer_rules("mamba"),
    ]


GRANITE_HYBRID = Family("granitemoehybrid", "GraniteMoeHybridForCausalLM", _read, _write, _rules)
