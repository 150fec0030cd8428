"""EXAONE 4: norms after each part of a layer, norms of heads; where layers attend locally, the others do not rotate."""

from __future__ import annotations

from typing import Any

from pippin.core.errors import UnsupportedModel
from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import Family, Fields, layer_types, read_decoder, read_rotary
from pippin.language.families.gguf_layout import GGUFLayout, rotary_table
from pippin.nn.attention.rotary import Rotary


def _read(config: Fields) -> DecoderConfig:
    windowed = config.get("sliding_window") is not None

    def rotary(index: int, local: bool) -> Rotary | None:
        return read_rotary(config) if local or not windowed else None

    return read_decoder("exaone4", config, rotary=rotary, residual="post", qk_norm="head")


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"layer_types": layer_types(config)}


def _to_gguf(config: DecoderConfig) -> dict[str, Any]:
    if len(config.layers) != _WINDOWED_LAYERS and any(layer.attention.window for layer in config.layers):
        raise UnsupportedModel(
            f"llama.cpp has windows of exaone4 models in that of {_WINDOWED_LAYERS} layers only, not in one of "
            f"{len(config.layers)}, whose layers it would all rotate"
        )
    return {}


_WINDOWED_LAYERS = 64
_GGUF = GGUFLayout("exaone4", write=_to_gguf, tables=rotary_table, pattern=4, windows=True)
EXAONE4 = Family("exaone4", "Exaone4ForCausalLM", _read, _write, gguf=_GGUF)
