"""SmolLM3: a Llama whose every fourth layer is not rotated."""

from __future__ import annotations

from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import Family, Fields, read_decoder, read_rotary
from pippin.language.families.gguf_layout import GGUFLayout
from pippin.language.families.llama import dense, write_biases
from pippin.nn.attention.rotary import Rotary


def _smollm3(config: Fields) -> DecoderConfig:
    rotates, interval = config.get("no_rope_layers"), config.get("no_rope_layer_interval", 4)

    def rotary(index: int, local: bool) -> Rotary | None:
        rotated = (index + 1) % interval != 0 if rotates is None else rotates[index]
        return read_rotary(config) if rotated else None

    bias = bool(config.get("attention_bias"))
    windowed = bool(config.get("sliding_window")) and bool(config.get("use_sliding_window"))
    local = None if config.get("layer_types") is not None else (lambda index: windowed)
    return read_decoder(
        "smollm3",
        config,
        feedforward=dense(config),
        rotary=rotary,
        local=local,
        tied=True,
        qkv_bias=bias,
        output_bias=bias,
    )


def _write_smollm3(config: DecoderConfig) -> dict[str, Any]:
    rotated = [int(layer.attention.rotary is not None) for layer in config.layers]
    return write_biases(config) | {"no_rope_layers": rotated}


_GGUF = GGUFLayout("smollm3", interleaved=True, any_head_dim=True)
SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", _smollm3, _write_smollm3, gguf=_GGUF)
