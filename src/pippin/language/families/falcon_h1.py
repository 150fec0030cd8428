"""Falcon-H1: in each layer attention and Mamba-2 side by side.

Notable here:
- the multipliers of maximal update parametrization are part of the matrices that a decoder holds: they are multiplied
  in when a file is read and divided out when one is written

Source: Falcon-H1, Technology Innovation Institute 2025, arXiv:2507.22448.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pippin.core.errors import UnsupportedModel
from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import Family, Fields, TensorRule, activation_of, read_decoder
from pippin.language.families.gguf_layout import GGUFHeader, GGUFLayout
from pippin.language.families.gguf_recurrent import has_bias, mamba_config, mamba_fields, mamba_metadata, mamba_rules
from pippin.language.families.hybrid import parameters, read_mamba, recurrence, write_mamba
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.recurrent.gated_norm import Gate
from pippin.nn.recurrent.mamba2 import Mamba2Spec

_MULTIPLIERS: Mapping[str, int] = {
    "attention_in_multiplier": 1,
    "attention_out_multiplier": 1,
    "key_multiplier": 1,
    "mlp_multipliers": 2,
    "ssm_in_multiplier": 1,
    "ssm_multipliers": 5,
    "ssm_out_multiplier": 1,
}
"""The multipliers of matrices, and how many numbers each has."""


def _multipliers(config: Fields) -> dict[str, tuple[float, ...]]:
    found = {}
    for name, count in _MULTIPLIERS.items():
        value = config.get(name)
        numbers = (1.0,) * count if value is None else tuple(value) if count > 1 else (value,)
        if len(numbers) != count or not all(isinstance(x, int | float) and x and math.isfinite(x) for x in numbers):
            raise ValueError(f"{name} must be {count} finite numbers other than zero, got {value!r:.60}")
        found[name] = tuple(float(x) for x in numbers)
    return found


def _read(config: Fields) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    base = read_decoder(
        "falcon_h1",
        config,
        feedforward=FeedForwardSpec(
            config["intermediate_size"], activation_of(config), bias=bool(config.get("mlp_bias"))
        ),
        qkv_bias=bias,
        output_bias=bias,
        embedding_scale=float(config.get("embedding_multiplier", 1.0)),
        logit_scale=float(config.get("lm_head_multiplier", 1.0)),
        multipliers=_multipliers(config),
    )
    if bool(config.get("projectors_bias")) != bool(config.get("mamba_proj_bias")):
        raise UnsupportedModel("projectors_bias and mamba_proj_bias differ; the decoder has both biases or none")
    norm: Gate = "silu after" if config.get("mamba_norm_before_gate", True) else "silu before"
    inner = config.get("mamba_d_ssm") or config.get("mamba_expand", 2) * config["hidden_size"]
    spec = read_mamba(config, inner, norm if config.get("mamba_rms_norm") else None)
    return replace(base, layers=tuple(replace(layer, recurrent=spec) for layer in base.layers))


def _write(config: DecoderConfig) -> dict[str, Any]:
    spec: Mamba2Spec = recurrence(config)
    numbers = {name: list(x) if len(x) > 1 else x[0] for name, x in config.multipliers.items()}
    return {
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.layers[0].feedforward.bias,
        "projectors_bias": spec.bias,
        "embedding_multiplier": config.embedding_scale,
        "lm_head_multiplier": config.logit_scale,
        **write_mamba(spec),
        "mamba_d_ssm": spec.inner,
        "mamba_rms_norm": spec.norm is not None,
        "mamba_norm_before_gate": spec.norm != "silu before",
        **numbers,
    }


def _scaled(stored: str, ours: str, weight: float | Tensor, bias: float | Tensor) -> list[TensorRule]:
    """Rules for a matrix and a bias that are multiplied, row by row or as a whole."""
    return [_times(stored, ours, weight, "weight"), _times(stored, ours, bias, "bias")]


def _times(stored: str, ours: str, factor: float | Tensor, leaf: str) -> TensorRule:
    def shaped(tensor: Tensor) -> float | Tensor:
        if not isinstance(factor, Tensor):
            return factor
        return factor.to(tensor.device).view(-1, *[1] * (tensor.ndim - 1))

    return TensorRule(
        stored,
        (ours,),
        # of a matrix the shape alone is asked for on the meta device, where arithmetic would import torch's compiler
        lambda tensor, config: [tensor if tensor.is_meta else tensor.float() * shaped(tensor)],
        lambda parts, config: parts[0] / shaped(parts[0]),
        leaves=(leaf,),
    )


def _rules(config: DecoderConfig) -> list[TensorRule]:
    spec: Mamba2Spec = recurrence(config)
    of = dict(config.multipliers)
    (enter,), (leave,), (key,), (start,), (end,) = (
        of[name]
        for name in (
            "attention_in_multiplier",
            "attention_out_multiplier",
            "key_multiplier",
            "ssm_in_multiplier",
            "ssm_out_multiplier",
        )
    )
    gate, down = of["mlp_multipliers"]
    rows = [spec.inner, *spec.sizes, spec.heads]  # gate, x, B, C, time steps
    each = torch.cat([torch.full((count,), x) for count, x in zip(rows, of["ssm_multipliers"], strict=True)])
    return [
        *_scaled("self_attn.q_proj", "self_attn.q_proj", enter, 1.0),
        *_scaled("self_attn.k_proj", "self_attn.k_proj", enter * key, key),
        *_scaled("self_attn.v_proj", "self_attn.v_proj", enter, 1.0),
        *_scaled("self_attn.o_proj", "self_attn.o_proj", leave, leave),
        *_scaled("feed_forward.gate_proj", "mlp.gate_proj", gate, gate),
        *_scaled("feed_forward.down_proj", "mlp.down_proj", down, down),
        *_scaled("mamba.in_proj", "recurrent.in_proj", each * start, each),
        *_scaled("mamba.out_proj", "recurrent.out_proj", end, end),
        TensorRule("final_layernorm", ("norm",)),
        TensorRule("pre_ff_layernorm", ("post_attention_layernorm",)),
        TensorRule("feed_forward.up_proj", ("mlp.up_proj",)),
        TensorRule("mamba.conv1d", ("recurrent.conv",)),
        TensorRule("mamba.norm", ("recurrent.norm",)),
        parameters("mamba", "A_log", "D", "dt_bias"),
    ]


def _from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    mamba = mamba_fields(header)
    return {
        **mamba_config(header),
        "mamba_d_ssm": mamba["heads"] * mamba["head_dim"],
        "mamba_rms_norm": any(name.endswith(".ssm_norm.weight") for name in header.shapes),
        "mamba_norm_before_gate": False,
        "projectors_bias": has_bias(header, "ssm_in"),
        "attention_bias": has_bias(header, "attn_q"),
        "mlp_bias": has_bias(header, "ffn_up"),
    }


def _without_multipliers(config: DecoderConfig) -> DecoderConfig:
    """The decoder whose matrices contain the multipliers, which a file does not name."""
    return replace(config, multipliers=_multipliers({}))


def _gguf_rules(config: DecoderConfig) -> list[TensorRule]:
    # the one norm whose name has no ending
    norm = TensorRule("ffn_norm", ("post_attention_layernorm",), leaves=("weight",), whole=True)
    return [norm, *mamba_rules(config)]


_GGUF = GGUFLayout(
    "falcon-h1", _from_gguf, mamba_metadata, _gguf_rules, any_head_dim=True, read_as=_without_multipliers
)
FALCON_H1 = Family(
    "falcon_h1", "FalconH1ForCausalLM", _read, _write, _rules, gguf=_GGUF, mlx_lm="multipliers in weights"
)
