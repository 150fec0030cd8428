"""EXAONE 4: norms after each part of a layer, norms of heads; where layers attend locally, the others do not rotate."""

from __future__ import annotations

from typing import Any

from pippin.language.decoder import DecoderConfig
from pippin.language.families.family import Family, Fields, layer_types, read_decoder, read_rotary
from pippin.nn.rotary import Rotary


def _read(config: Fields) -> DecoderConfig:
    windowed = config.get("sliding_window") is not None

    def rotary(index: int, local: bool) -> Rotary | None:
        return read_rotary(config) if local or not windowed else None

    return read_decoder("exaone4", config, rotary=rotary, residual="post", qk_norm="head")


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"layer_types": layer_types(config)}


EXAONE4 = Family("exaone4", "Exaone4ForCausalLM", _read, _write)
