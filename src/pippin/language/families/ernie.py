"""ERNIE 4.5: Llama with interleaved rotation."""

from __future__ import annotations

from typing import Any

from pippin.language.decoder import DecoderConfig
from pippin.language.families.family import Family, Fields, TensorRule, activation_of, read_decoder, rotated_rows
from pippin.nn.feedforward import FeedForwardSpec


def _read(config: Fields) -> DecoderConfig:
    bias = bool(config.get("use_bias"))
    inner = FeedForwardSpec(config["intermediate_size"], activation_of(config), bias=bias)
    return read_decoder("ernie4_5", config, feedforward=inner, tied=True, qkv_bias=bias, output_bias=bias)


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"use_bias": config.qkv_bias}


def _rules(config: DecoderConfig) -> list[TensorRule]:
    return rotated_rows(interleaved=True)


ERNIE4_5 = Family("ernie4_5", "Ernie4_5ForCausalLM", _read, _write, _rules)
