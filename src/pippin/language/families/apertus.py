"""Apertus: norms of heads, and feed-forward layers without a gate, whose nonlinearity xIELU has learned slopes.

Notable here:
- GGUF has the slopes among the metadata
"""

from __future__ import annotations

from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import Family, Fields, TensorRule, activation_of, read_decoder, rename
from pippin.language.families.gguf_layout import GGUFLayout, rotary_table
from pippin.nn.feedforward.feedforward import FeedForwardSpec


def _read(config: Fields) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    inner = FeedForwardSpec(config["intermediate_size"], activation_of(config, default="xielu"), gated=False)
    return read_decoder("apertus", config, feedforward=inner, qk_norm="head", qkv_bias=bias, output_bias=bias)


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias}


def _rules(config: DecoderConfig) -> list[TensorRule]:
    return rename(input_layernorm="attention_layernorm", post_attention_layernorm="feedforward_layernorm")


_GGUF = GGUFLayout(
    "apertus",
    tables=rotary_table,
    any_head_dim=True,
    biases=("attention output",),
    own_output=True,
    numbers={f"xielu.{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")},
)
APERTUS = Family("apertus", "ApertusForCausalLM", _read, _write, _rules, gguf=_GGUF)
