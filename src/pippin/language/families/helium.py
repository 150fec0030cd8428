"""Helium: Llama with interleaved rotation."""

from __future__ import annotations

from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import Family, Fields, TensorRule, read_decoder, rotated_rows


def _read(config: Fields) -> DecoderConfig:
    return read_decoder("helium", config, qkv_bias=bool(config.get("attention_bias")))


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias}


def _rules(config: DecoderConfig) -> list[TensorRule]:
    return rotated_rows(interleaved=True)


HELIUM = Family("helium", "HeliumForCausalLM", _read, _write, _rules)
