"""Hunyuan: Llama with norms of heads after the rotation, whose base is stretched for a longer context."""

from __future__ import annotations

from typing import Any

from pippin.language.decoder import DecoderConfig
from pippin.language.families.family import Family, Fields, TensorRule, read_decoder, read_rotary, rename
from pippin.nn.rotary import Rotary


def _read(config: Fields) -> DecoderConfig:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    alpha = scaling.get("alpha") if scaling.get("rope_type", scaling.get("type")) == "dynamic" else None
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]

    def rotary(index: int, local: bool) -> Rotary:
        if not alpha:
            return read_rotary(config)
        theta = scaling.get("rope_theta", config.get("rope_theta", 10_000.0))
        return Rotary(theta * alpha ** (head_dim / (head_dim - 2)))

    bias = bool(config.get("attention_bias"))
    return read_decoder(
        "hunyuan_v1_dense",
        config,
        rotary=rotary,
        qk_norm="rotated head",
        qkv_bias=bias,
        output_bias=bias,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias}


def _rules(config: DecoderConfig) -> list[TensorRule]:
    return rename(self_attn__q_norm="self_attn.query_layernorm", self_attn__k_norm="self_attn.key_layernorm")


HUNYUAN = Family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", _read, _write, _rules)
