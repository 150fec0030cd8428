"""Phi-3 and Phi-4: Llama with fused matrices; heads of Phi-4 mini are rotated in part.

Notable here:
- the long-context variants have two tables of divisors, one for short and one for long sequences; keys of one cannot be
  read with the other, so a model is opened with the short table and for the context that it is for
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pippin.language.decoder import DecoderConfig
from pippin.language.families.family import (
    Family,
    Fields,
    TensorRule,
    from_halves,
    fused_gate_up,
    fused_qkv,
    read_decoder,
    read_rotary,
    to_halves,
)
from pippin.nn.rotary import Rotary


def _read(config: Fields) -> DecoderConfig:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    windowed = bool(config.get("sliding_window"))
    if scaling.get("rope_type", scaling.get("type")) not in ("longrope", "su"):
        return read_decoder("phi3", config, local=lambda index: windowed)
    original = scaling.get("original_max_position_embeddings") or config["original_max_position_embeddings"]
    plain = {**config, "rope_parameters": {**scaling, "rope_type": "default"}, "rope_scaling": None}
    base = read_rotary(plain)
    factor = config["max_position_embeddings"] / original
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    rotary = Rotary(base.theta, attention_factor=attention, divisors=tuple(scaling["short_factor"]), dims=base.dims)
    return read_decoder(
        "phi3",
        {**config, "max_position_embeddings": original},
        rotary=lambda index, local: rotary,
        local=lambda index: windowed,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"original_max_position_embeddings": config.max_position_embeddings}


def _rules(config: DecoderConfig) -> list[TensorRule]:
    qkv = fused_qkv("self_attn.qkv_proj")

    def split(tensor: Tensor, config: DecoderConfig) -> list[Tensor]:
        q, k, v = qkv.split(tensor, config)
        return [to_halves(q, config), to_halves(k, config), v]

    def join(parts: Any, config: DecoderConfig) -> Tensor:
        q, k, v = parts
        return torch.cat([from_halves(q, config), from_halves(k, config), v])

    return [TensorRule(qkv.stored, qkv.ours, split, join), fused_gate_up()]


PHI3 = Family("phi3", "Phi3ForCausalLM", _read, _write, _rules)
