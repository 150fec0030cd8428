"""Llama.

Notable here:
- Mistral, SmolLM3 and others differ from it in a few settings: each has a file of its own
- its GGUF architecture is that of several families; which one a file is does not change what is computed
"""

from __future__ import annotations

from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import Family, Fields, activation_of, read_decoder
from pippin.language.families.gguf_layout import ALL_BIASES, GGUFHeader, GGUFLayout, rotary_table
from pippin.nn.feedforward.feedforward import FeedForwardSpec


def dense(config: Fields) -> FeedForwardSpec:
    """The feed-forward layer, with biases where the file says so."""
    return FeedForwardSpec(config["intermediate_size"], activation_of(config), bias=bool(config.get("mlp_bias")))


def _llama(config: Fields) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    return read_decoder("llama", config, feedforward=dense(config), qkv_bias=bias, output_bias=bias)


def write_biases(config: DecoderConfig) -> dict[str, Any]:
    """Which layers have biases, as `config.json` says it."""
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.layers[0].feedforward.bias}


def _is_llama(header: GGUFHeader) -> bool:
    return not header.get("expert_count", int, 0) and not header.get("attention.sliding_window", int, 0)


GGUF = GGUFLayout(
    "llama", tables=rotary_table, interleaved=True, applies=_is_llama, any_head_dim=True, biases=ALL_BIASES
)
"""How llama.cpp stores dense models of this architecture."""
LLAMA = Family("llama", "LlamaForCausalLM", _llama, write_biases, gguf=GGUF)
