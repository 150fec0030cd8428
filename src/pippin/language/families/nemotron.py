"""Nemotron: layer norms whose weights are stored minus one, a squared rectifier without gate, heads rotated in part."""

from __future__ import annotations

from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import (
    Family,
    Fields,
    TensorRule,
    activation_of,
    one_added,
    read_decoder,
    rotated_rows,
)
from pippin.language.families.gguf_layout import ALL_BIASES, GGUFLayout
from pippin.nn.feedforward.feedforward import FeedForwardSpec


def _read(config: Fields) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    activation = activation_of(config, default="relu2")
    inner = FeedForwardSpec(config["intermediate_size"], activation, gated=False, bias=bool(config.get("mlp_bias")))
    return read_decoder(
        "nemotron",
        {"partial_rotary_factor": 0.5, **config},
        eps="norm_eps",
        feedforward=inner,
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        output_bias=bias,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.layers[0].feedforward.bias}


def _rules(config: DecoderConfig) -> list[TensorRule]:
    return [*one_added("norm", "input_layernorm", "post_attention_layernorm"), *rotated_rows(interleaved=False)]


_GGUF = GGUFLayout("nemotron", own_output=True, biases=ALL_BIASES)
NEMOTRON = Family("nemotron", "NemotronForCausalLM", _read, _write, _rules, eps="norm_eps", gguf=_GGUF)
