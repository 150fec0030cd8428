"""StableLM: layer norms, heads rotated in part, and attention and feed-forward layer in sequence or in parallel."""

from __future__ import annotations

from typing import Any

from pippin.language.decoder import DecoderConfig
from pippin.language.families.family import Family, Fields, TensorRule, read_decoder, refuse, rotated_rows


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


STABLELM = Family("stablelm", "StableLmForCausalLM", _read, _write, _rules, eps="layer_norm_eps")
