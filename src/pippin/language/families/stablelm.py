"""StableLM: layer norms, heads rotated in part, and attention and feed-forward layer in sequence or in parallel."""

from __future__ import annotations

from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import Family, Fields, TensorRule, read_decoder, refuse, rotated_rows
from pippin.language.families.gguf_layout import GGUFHeader, GGUFLayout


def _read(config: Fields) -> DecoderConfig:
    refuse("stablelm", config, "qk_layernorm")
    return read_decoder(
        "stablelm",
        {"partial_rotary_factor": 0.25, **config},
        eps="layer_norm_eps",
        norm="layer",
        norm_bias=True,
        residual="parallel" if config.get("use_parallel_residual") else "pre",
        qkv_bias=bool(config.get("use_qkv_bias")),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"use_qkv_bias": config.qkv_bias, "use_parallel_residual": config.residual == "parallel"}


def _rules(config: DecoderConfig) -> list[TensorRule]:
    return rotated_rows(interleaved=False)


def _from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    # as llama.cpp finds out
    return {"partial_rotary_factor": 1.0, "use_parallel_residual": "blk.0.ffn_norm.weight" not in header}


def _to_gguf(config: DecoderConfig) -> dict[str, Any]:
    return {"use_parallel_residual": config.residual == "parallel"}


_GGUF = GGUFLayout("stablelm", _from_gguf, _to_gguf, own_output=True)
STABLELM = Family("stablelm", "StableLmForCausalLM", _read, _write, _rules, eps="layer_norm_eps", gguf=_GGUF)
