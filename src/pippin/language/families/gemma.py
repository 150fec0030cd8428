"""Gemma 1, 2 and 3.

Notable here:
- embeddings are scaled by the square root of the hidden size, and norm weights are stored minus one
- Gemma 2 bounds the scores of attention and the logits; from Gemma 2 on there are norms before and after each part of a
  layer, and layers that attend within a window
- Gemma 3 normalizes queries and keys, and rotates its local layers with a base of their own
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
    layer_types,
    one_added,
    read_decoder,
    read_rotary,
)
from pippin.language.families.gguf_layout import GGUFHeader, GGUFLayout
from pippin.nn.attention.rotary import Rotary
from pippin.nn.feedforward.feedforward import FeedForwardSpec


def _feedforward(config: Fields) -> FeedForwardSpec:
    # older files of Gemma 1 say "gelu" and mean its approximation
    name = config.get("hidden_activation") or "gelu_pytorch_tanh"
    return FeedForwardSpec(config["intermediate_size"], activation_of({"hidden_act": name}))


def _attention_scale(config: Fields) -> float | None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    scale = config.get("query_pre_attn_scalar")
    return None if scale is None or scale == head_dim else float(scale**-0.5)


def _gemma(config: Fields) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    return read_decoder(
        "gemma",
        config,
        feedforward=_feedforward(config),
        tied=True,
        embedding_scale=math.sqrt(config["hidden_size"]),
        qkv_bias=bias,
        output_bias=bias,
    )


def _gemma2(config: Fields) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    kinds = config.get("layer_types")
    return read_decoder(
        "gemma2",
        config,
        feedforward=_feedforward(config),
        local=None if kinds is not None else (lambda index: index % 2 == 0),
        softcap=config.get("attn_logit_softcapping"),
        tied=True,
        residual="pre and post",
        embedding_scale=math.sqrt(config["hidden_size"]),
        attention_scale=_attention_scale(config),
        logit_softcap=config.get("final_logit_softcapping"),
        qkv_bias=bias,
        output_bias=bias,
    )


def _gemma3(config: Fields) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    kinds, pattern = config.get("layer_types"), config.get("sliding_window_pattern", 6)

    def rotary(index: int, local: bool) -> Rotary:
        rope = config.get("rope_parameters") or {}
        if local and "sliding_attention" not in rope and not rope:
            return Rotary(config.get("rope_local_base_freq", 10_000.0))
        return read_rotary(config, local, theta=10_000.0 if local else 1_000_000.0)

    return read_decoder(
        "gemma3_text",
        config,
        feedforward=_feedforward(config),
        rotary=rotary,
        local=None if kinds is not None else (lambda index: (index + 1) % pattern != 0),
        softcap=config.get("attn_logit_softcapping"),
        tied=True,
        residual="pre and post",
        qk_norm="head",
        embedding_scale=math.sqrt(config["hidden_size"]),
        attention_scale=_attention_scale(config),
        logit_softcap=config.get("final_logit_softcapping"),
        qkv_bias=bias,
        output_bias=bias,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    attention = config.layers[0].attention
    activation = "gelu_pytorch_tanh" if config.layers[0].feedforward.activation == "gelu_tanh" else "gelu"
    fields = {
        "hidden_activation": activation,
        "hidden_act": activation,
        "attention_bias": config.qkv_bias,
        "query_pre_attn_scalar": round((config.attention_scale or config.head_dim**-0.5) ** -2),
        "layer_types": layer_types(config),
        "attn_logit_softcapping": attention.softcap,
        "final_logit_softcapping": config.logit_softcap,
    }
    local = next((layer.attention.rotary for layer in config.layers if layer.attention.window is not None), None)
    if config.family == "gemma3_text" and local is not None:
        fields["rope_local_base_freq"] = local.theta
    return fields


def _rules(config: DecoderConfig) -> list[TensorRule]:
    names = ["norm", "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"]
    return one_added(*names, "post_feedforward_layernorm", "self_attn.q_norm", "self_attn.k_norm")


def _scaled_by(fields: Fields, layers: int) -> int:
    """What llama.cpp divides scores by the square root of: the largest model of a family is the one that differs."""
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    return int(width // heads if fields["num_hidden_layers"] == layers else fields["head_dim"])


def _gemma2_from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _scaled_by(fields, 46),
        "attn_logit_softcapping": header.get("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": header.get("final_logit_softcapping", float, 30.0),
    }


def _gemma3_from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    everywhere = dict(fields["rope_parameters"])
    everywhere["rope_theta"] = header.get("rope.freq_base", float, 1_000_000.0)
    local = {"rope_type": "default", "rope_theta": header.get("rope.freq_base_swa", float, 10_000.0)}
    return {
        "query_pre_attn_scalar": _scaled_by(fields, 62),
        "final_logit_softcapping": header.get("final_logit_softcapping", float, 0.0) or None,
        "rope_parameters": {"full_attention": everywhere, "sliding_attention": local},
    }


def _to_gguf(config: DecoderConfig) -> dict[str, Any]:
    softcap = config.layers[0].attention.softcap
    return {"attn_logit_softcapping": softcap, "final_logit_softcapping": config.logit_softcap}


def _gemma3_to_gguf(config: DecoderConfig) -> dict[str, Any]:
    local = next((layer.attention.rotary for layer in config.layers if layer.attention.window is not None), None)
    return {**_to_gguf(config), "rope.freq_base_swa": None if local is None else float(local.theta)}


_GGUF = GGUFLayout("gemma", any_head_dim=True)
_GGUF2 = GGUFLayout("gemma2", _gemma2_from_gguf, _to_gguf, window=4096, pattern=2, windows=True, any_head_dim=True)
_GGUF3 = GGUFLayout("gemma3", _gemma3_from_gguf, _gemma3_to_gguf, pattern=6, windows=True, any_head_dim=True)
GEMMA = Family("gemma", "GemmaForCausalLM", _gemma, _write, _rules, gguf=_GGUF)
GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", _gemma2, _write, _rules, gguf=_GGUF2)
GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", _gemma3, _write, _rules, gguf=_GGUF3)
