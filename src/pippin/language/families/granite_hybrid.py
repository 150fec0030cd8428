"""Granite 4: Mamba-2 and attention without positions, with Granite's multipliers.

Source: Granite 4.0 language models, IBM 2025.
"""

from __future__ import annotations

from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import (
    Family,
    Fields,
    TensorRule,
    activation_of,
    fused_gate_up,
    read_decoder,
    read_rotary,
    rename,
)
from pippin.language.families.gguf_layout import GGUFHeader, GGUFLayout
from pippin.language.families.gguf_recurrent import (
    has_bias,
    key_heads,
    mamba_config,
    mamba_fields,
    mamba_metadata,
    mamba_rules,
    recurrent_layers,
)
from pippin.language.families.granite import (
    mixture,
    mixture_rules,
    multiplier_fields,
    multipliers,
    multipliers_from_gguf,
    multipliers_to_gguf,
)
from pippin.language.families.hybrid import (
    kinds_of,
    layer_kinds,
    read_mamba,
    recurrence,
    with_recurrence,
    write_mamba,
)
from pippin.language.families.mamba2 import mixer_rules
from pippin.nn.feedforward.feedforward import FeedForwardSpec


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
        *rename(**{f"mlp__{name}": f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}),  # of mlx-lm
        *mixer_rules("mamba"),
    ]


def _from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    recurs = recurrent_layers(header, fields["num_hidden_layers"])
    mamba, shared = mamba_fields(header), header.get("expert_shared_feed_forward_length", int, 0)
    return {
        **multipliers_from_gguf(header, fields),
        "layer_types": ["mamba" if one else "attention" for one in recurs],
        "position_embedding_type": "rope" if header.get("rope.scaling.finetuned", bool, False) else None,
        "shared_intermediate_size": shared or fields["intermediate_size"],
        **mamba_config(header),
        "mamba_expand": mamba["heads"] * mamba["head_dim"] // fields["hidden_size"],
        "attention_bias": has_bias(header, "attn_q"),
    }


def _to_gguf(config: DecoderConfig) -> dict[str, Any]:
    rotates, inner = any(layer.attention.rotary for layer in config.layers), config.layers[0].feedforward
    return {
        **multipliers_to_gguf(config),
        **mamba_metadata(config),
        "attention.head_count_kv": key_heads(config),
        "expert_shared_feed_forward_length": inner.shared_intermediate_size or inner.intermediate_size,
        "rope.scaling.finetuned": rotates,
    }


_GGUF = GGUFLayout(
    "granitehybrid",
    _from_gguf,
    _to_gguf,
    mamba_rules,
    interleaved=True,
    any_head_dim=True,
    biases=("attention output",),
)
GRANITE_HYBRID = Family("granitemoehybrid", "GraniteMoeHybridForCausalLM", _read, _write, _rules, gguf=_GGUF)
