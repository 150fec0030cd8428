"""Granite: Llama with multipliers on embeddings, attention, residual connections and logits.

TensorSource: Granite 3.0 language models, IBM 2024; the multipliers are those of maximal update parametrization.
"""

from __future__ import annotations

from typing import Any

from pippin.language.decoder import DecoderConfig
from pippin.language.families.family import Family, Fields, activation_of, read_decoder
from pippin.nn.feedforward import FeedForwardSpec


def _read(config: Fields) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    inner = FeedForwardSpec(config["intermediate_size"], activation_of(config), bias=bool(config.get("mlp_bias")))
    return read_decoder(
        "granite",
        config,
        feedforward=inner,
        qkv_bias=bias,
        output_bias=bias,
        embedding_scale=float(config.get("embedding_multiplier", 1.0)),
        attention_scale=float(config.get("attention_multiplier", 1.0)),
        residual_scale=float(config.get("residual_multiplier", 1.0)),
        logit_scale=1.0 / config.get("logits_scaling", 1.0),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.layers[0].feedforward.bias,
        "embedding_multiplier": config.embedding_scale,
        "attention_multiplier": config.attention_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": 1.0 / config.logit_scale,
    }


GRANITE = Family("granite", "GraniteForCausalLM", _read, _write)
