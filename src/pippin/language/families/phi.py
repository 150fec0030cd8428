"""Phi-3 and Phi-4: Llama with fused matrices; heads of Phi-4 mini are rotated in part. Phi-3.5-MoE has experts.

Notable here:
- Phi-3.5-MoE has layer norms, and weighs each expert among those that are nearly as good (SparseMixer)
- the long-context variants have two tables of divisors (LongRoPE), for short and for long sequences; keys of one
  cannot be read with the other, so a sequence that outgrows the trained context is computed anew
"""

from __future__ import annotations

import math
from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import (
    Family,
    Fields,
    TensorRule,
    activation_of,
    fused_gate_up,
    fused_rotated_qkv,
    read_decoder,
    read_rotary,
)
from pippin.language.families.gguf_layout import GGUFLayout, long_tables
from pippin.language.families.mixtral import mixtral_rules
from pippin.nn.attention.rotary import Rotary
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.feedforward.routing import RouterSpec


def _phi3(config: Fields) -> DecoderConfig:
    windowed = bool(config.get("sliding_window"))
    rotary = _long_rotary(config)
    chosen = None if rotary is None else (lambda index, local: rotary)
    return read_decoder("phi3", config, rotary=chosen, local=lambda index: windowed)


def _phimoe(config: Fields) -> DecoderConfig:
    inner = FeedForwardSpec(
        config["intermediate_size"],
        activation_of(config),
        num_experts=config["num_local_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        router=RouterSpec(scores="sparsemixer", jitter=config.get("router_jitter_noise", 0.01)),
    )
    bias, windowed = bool(config.get("attention_bias")), bool(config.get("sliding_window"))
    fields = {"rope_theta": 1_000_000.0, **config}
    rotary = _long_rotary(fields)
    return read_decoder(
        "phimoe",
        fields,
        feedforward=inner,
        rotary=None if rotary is None else (lambda index, local: rotary),
        local=lambda index: windowed,
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        output_bias=bias,
        head_bias=bool(config.get("lm_head_bias")),
    )


def _long_rotary(config: Fields) -> Rotary | None:
    """The rotary encoding of a long-context variant; None for others."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type")) not in ("longrope", "su"):
        return None
    original = scaling.get("original_max_position_embeddings") or config["original_max_position_embeddings"]
    base = read_rotary({**config, "rope_parameters": {**scaling, "rope_type": "default"}, "rope_scaling": None})
    factor = scaling.get("factor") or config["max_position_embeddings"] / original
    attention = scaling.get("short_mscale", scaling.get("attention_factor"))
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rotary(
        base.theta,
        original_max_position_embeddings=original,
        attention_factor=attention,
        divisors=tuple(scaling["short_factor"]),
        long_divisors=tuple(scaling["long_factor"]),
        long_attention_factor=scaling.get("long_mscale"),
        dims=base.dims,
    )


def _write_long(config: DecoderConfig) -> dict[str, Any]:
    """The fields of positions."""
    rotary = config.layers[0].attention.rotary
    original: dict[str, Any] = {
        "original_max_position_embeddings": config.original_max_position_embeddings or config.max_position_embeddings
    }
    if rotary is None or rotary.long_divisors is None or rotary.divisors is None:
        return original
    scaling = {
        "rope_type": "longrope",
        "rope_theta": rotary.theta,
        "short_factor": list(rotary.divisors),
        "long_factor": list(rotary.long_divisors),
        **original,
    }
    if rotary.dims is not None:
        scaling["partial_rotary_factor"] = rotary.dims / config.head_dim
    if rotary.long_attention_factor is None:
        scaling["attention_factor"] = rotary.attention_factor
    else:
        scaling |= {"short_mscale": rotary.attention_factor, "long_mscale": rotary.long_attention_factor}
    return {"rope_scaling": None, "rope_parameters": scaling, **original}


def _write_phimoe(config: DecoderConfig) -> dict[str, Any]:
    inner = config.layers[0].feedforward
    return {
        **_write_long(config),
        "num_local_experts": inner.num_experts,
        "num_experts_per_tok": inner.num_experts_per_tok,
        "router_jitter_noise": inner.router.jitter,
        "attention_bias": config.qkv_bias,
        "lm_head_bias": config.head_bias,
    }


def _rules(config: DecoderConfig) -> list[TensorRule]:
    return [fused_rotated_qkv("self_attn.qkv_proj", interleaved=False), fused_gate_up()]


def _phimoe_rules(config: DecoderConfig) -> list[TensorRule]:
    return mixtral_rules(config, "mlp.router")


def _gguf_rules(config: DecoderConfig) -> list[TensorRule]:
    return [fused_rotated_qkv("attn_qkv", interleaved=False), fused_gate_up("ffn_up")]


def _to_gguf(config: DecoderConfig) -> dict[str, Any]:
    rotary = config.layers[0].attention.rotary
    if rotary is None or rotary.long_divisors is None:
        return {}
    original = rotary.original_max_position_embeddings
    return {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": rotary.magnitude}


_GGUF = GGUFLayout("phi3", write=_to_gguf, rules=_gguf_rules, tables=long_tables)
PHI3 = Family("phi3", "Phi3ForCausalLM", _phi3, _write_long, _rules, gguf=_GGUF)
PHIMOE = Family("phimoe", "PhimoeForCausalLM", _phimoe, _write_phimoe, _phimoe_rules)
