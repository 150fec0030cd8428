"""Arcee (AFM): Llama with a feed-forward layer without gate and a squared rectifier."""

from __future__ import annotations

from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import Family, Fields, activation_of, read_decoder
from pippin.language.families.gguf_layout import GGUFLayout, rotary_table
from pippin.nn.feedforward.feedforward import FeedForwardSpec


def _read(config: Fields) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    activation = activation_of(config, default="relu2")
    inner = FeedForwardSpec(config["intermediate_size"], activation, gated=False, bias=bool(config.get("mlp_bias")))
    return read_decoder("arcee", config, feedforward=inner, qkv_bias=bias, output_bias=bias)


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.layers[0].feedforward.bias}


_GGUF = GGUFLayout("arcee", tables=rotary_table, interleaved=True, any_head_dim=True)
ARCEE = Family("arcee", "ArceeForCausalLM", _read, _write, gguf=_GGUF)
