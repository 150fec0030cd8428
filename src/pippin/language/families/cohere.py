"""Command R (Cohere) and Command R7B (Cohere 2): attention and feed-forward layer in parallel on one layer norm.

Notable here:
- rotated pairs are interleaved, logits are scaled, and embedding and output matrix are one
- Cohere 2 attends within a window in three of four layers, and does not rotate in the fourth
"""

from __future__ import annotations

from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import (
    Family,
    Fields,
    TensorRule,
    layer_types,
    read_decoder,
    read_rotary,
    refuse,
    rotated_rows,
)
from pippin.language.families.gguf_layout import GGUFHeader, GGUFLayout
from pippin.nn.attention.rotary import Rotary


def _cohere(config: Fields) -> DecoderConfig:
    refuse("cohere", config, "use_qk_norm")
    return read_decoder("cohere", config, **_fields(config))


def _cohere2(config: Fields) -> DecoderConfig:
    refuse("cohere2", config, "use_qk_norm")
    kinds, pattern = config.get("layer_types"), config.get("sliding_window_pattern", 4)

    def rotary(index: int, local: bool) -> Rotary | None:
        return read_rotary(config) if local else None

    local = None if kinds is not None else (lambda index: (index + 1) % pattern != 0)
    return read_decoder("cohere2", config, rotary=rotary, local=local, **_fields(config))


def _fields(config: Fields) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {
        "eps": "layer_norm_eps",
        "tied": True,
        "norm": "layer",
        "residual": "parallel",
        "logit_scale": config.get("logit_scale", 0.0625),
        "qkv_bias": bias,
        "output_bias": bias,
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    fields = {"logit_scale": config.logit_scale, "attention_bias": config.qkv_bias, "use_qk_norm": False}
    return fields | ({"layer_types": layer_types(config)} if config.family == "cohere2" else {})


def _rules(config: DecoderConfig) -> list[TensorRule]:
    return rotated_rows(interleaved=True)


def _from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    return {"logit_scale": header.get("logit_scale", float, 1.0)}


def _to_gguf(config: DecoderConfig) -> dict[str, Any]:
    return {"logit_scale": config.logit_scale}


_GGUF = GGUFLayout("command-r", _from_gguf, _to_gguf, interleaved=True)
_GGUF2 = GGUFLayout("cohere2", _from_gguf, _to_gguf, interleaved=True, pattern=4, windows=True)
COHERE = Family("cohere", "CohereForCausalLM", _cohere, _write, _rules, eps="layer_norm_eps", gguf=_GGUF)
COHERE2 = Family("cohere2", "Cohere2ForCausalLM", _cohere2, _write, _rules, eps="layer_norm_eps", gguf=_GGUF2)
