"""Seed-OSS: Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import Family, Fields, TensorRule, activation_of, read_decoder, rename
from pippin.language.families.gguf_layout import GGUFLayout
from pippin.nn.feedforward.feedforward import FeedForwardSpec


def _read(config: Fields) -> DecoderConfig:
    inner = FeedForwardSpec(config["intermediate_size"], activation_of(config), bias=bool(config.get("mlp_bias")))
    return read_decoder(
        "seed_oss",
        config,
        feedforward=inner,
        qkv_bias=config.get("attention_bias", True),
        output_bias=config.get("attention_out_bias", False),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.qkv_bias,
        "attention_out_bias": config.output_bias,
        "mlp_bias": config.layers[0].feedforward.bias,
    }


def _gguf_rules(config: DecoderConfig) -> list[TensorRule]:
    return rename(post_attention_layernorm="post_attention_norm")


_GGUF = GGUFLayout("seed_oss", rules=_gguf_rules, any_head_dim=True)
SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", _read, _write, gguf=_GGUF)
