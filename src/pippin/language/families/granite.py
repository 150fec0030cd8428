"""Granite: Llama with multipliers on embeddings, attention, residual connections and logits; with experts, too.

Notable here:
- the experts lie in one tensor; a shared expert, which has no gate, stands beside the mixture in the file

Source: Granite 3.0 language models, IBM 2024; the multipliers are those of maximal update parametrization.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.experts import expert_rules
from pippin.language.families.family import Family, Fields, TensorRule, activation_of, fused, read_decoder, rename
from pippin.language.families.gguf_layout import ALL_BIASES, GGUFHeader, GGUFLayout, rotary_table
from pippin.nn.feedforward.feedforward import FeedForwardSpec


def _dense(config: Fields) -> DecoderConfig:
    inner = FeedForwardSpec(config["intermediate_size"], activation_of(config), bias=bool(config.get("mlp_bias")))
    return _read("granite", config, inner)


def _mixture(config: Fields) -> DecoderConfig:
    return _read(config["model_type"], config, mixture(config))


def mixture(config: Fields) -> FeedForwardSpec:
    """Experts with a shared one."""
    return FeedForwardSpec(
        config["intermediate_size"],
        activation_of(config),
        num_experts=config["num_local_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        shared_intermediate_size=config.get("shared_intermediate_size") or 0,
        shared_gate=False,
    )


def _read(family: str, config: Fields, inner: FeedForwardSpec) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    return read_decoder(
        family,
        config,
        feedforward=inner,
        qkv_bias=bias,
        output_bias=bias,
        **multipliers(config),
    )


def multipliers(config: Fields) -> dict[str, Any]:
    """Granite's multipliers, as fields of a `DecoderConfig`."""
    return {
        "embedding_scale": float(config.get("embedding_multiplier", 1.0)),
        "attention_scale": float(config.get("attention_multiplier", 1.0)),
        "residual_scale": float(config.get("residual_multiplier", 1.0)),
        "logit_scale": 1.0 / config.get("logits_scaling", 1.0),
    }


def multiplier_fields(config: DecoderConfig) -> dict[str, Any]:
    """The fields that `multipliers` reads."""
    return {
        "embedding_multiplier": config.embedding_scale,
        "attention_multiplier": config.attention_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": 1.0 / config.logit_scale,
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    inner = config.layers[0].feedforward
    fields: dict[str, Any] = {
        "attention_bias": config.qkv_bias,
        "mlp_bias": inner.bias,
        **multiplier_fields(config),
    }
    if inner.num_experts:
        fields |= {"num_local_experts": inner.num_experts, "num_experts_per_tok": inner.num_experts_per_tok}
    if inner.shared_intermediate_size:
        fields["shared_intermediate_size"] = inner.shared_intermediate_size
    return fields


def mixture_rules(config: DecoderConfig) -> list[TensorRule]:
    """Rules of experts, and of a shared one."""
    room = "block_sparse_moe"
    found = [
        *expert_rules({}, f"{room}.router.layer", (f"{room}.input_linear.weight", f"{room}.output_linear.weight"))(
            config
        ),
        *expert_rules({}, f"{room}.router", (f"{room}.experts.gate_up_proj", f"{room}.experts.down_proj"))(config),
    ]
    size = config.layers[0].feedforward.shared_intermediate_size
    if size:
        gates = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
        found.append(fused("shared_mlp.input_linear", gates, lambda config: [size, size]))
        found += rename(mlp__shared_expert__down_proj="shared_mlp.output_linear")
    return found


def multipliers_from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    """Granite's multipliers in a GGUF header."""
    return {
        "embedding_multiplier": header.get("embedding_scale", float, 1.0),
        "attention_multiplier": header.get("attention.scale", float, fields["head_dim"] ** -0.5),
        "residual_multiplier": header.get("residual_scale", float, 1.0),
        "logits_scaling": header.get("logit_scale", float),
    }


def multipliers_to_gguf(config: DecoderConfig) -> dict[str, Any]:
    """The keys of Granite's multipliers."""
    return {
        "embedding_scale": config.embedding_scale,
        "attention.scale": config.attention_scale,
        "residual_scale": config.residual_scale,
        "logit_scale": 1.0 / config.logit_scale,
    }


def _is_shared(header: GGUFHeader) -> bool:
    return bool(header.get("expert_shared_feed_forward_length", int, 0))


def _is_not_shared(header: GGUFHeader) -> bool:
    return not _is_shared(header)


def _experts_from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    shared = header.get("expert_shared_feed_forward_length", int, 0)
    own = {"model_type": "granitemoeshared" if shared else "granitemoe", "shared_intermediate_size": shared}
    return {**multipliers_from_gguf(header, fields), **own}


def _experts_to_gguf(config: DecoderConfig) -> dict[str, Any]:
    shared = config.layers[0].feedforward.shared_intermediate_size
    return {**multipliers_to_gguf(config), "expert_shared_feed_forward_length": shared or None}


_GGUF = GGUFLayout(
    "granite",
    multipliers_from_gguf,
    multipliers_to_gguf,
    tables=rotary_table,
    interleaved=True,
    any_head_dim=True,
    biases=ALL_BIASES,
)
GRANITE = Family("granite", "GraniteForCausalLM", _dense, _write, gguf=_GGUF)
_GGUF_EXPERTS = replace(
    _GGUF,
    architecture="granitemoe",
    read=_experts_from_gguf,
    write=_experts_to_gguf,
    applies=_is_not_shared,
    biases=("attention output",),
)
_GGUF_SHARED = replace(_GGUF_EXPERTS, applies=_is_shared)
GRANITE_MOE = Family("granitemoe", "GraniteMoeForCausalLM", _mixture, _write, mixture_rules, gguf=_GGUF_EXPERTS)
GRANITE_MOE_SHARED = Family(
    "granitemoeshared", "GraniteMoeSharedForCausalLM", _mixture, _write, mixture_rules, gguf=_GGUF_SHARED
)
