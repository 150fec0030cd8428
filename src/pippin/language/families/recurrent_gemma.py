"""RecurrentGemma: real-gated linear recurrent units, and attention within a window in every third layer.

Source: RecurrentGemma, Google 2024, arXiv:2404.07839; Griffin, arXiv:2402.19427.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import Family, Fields, TensorRule, activation_of, one_added, read_decoder, rename
from pippin.language.families.hybrid import layer_kinds, parameters, recurrence, rotated_in_part, with_recurrence
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.recurrent.rg_lru import RGLRUSpec

_GATES = ("input_gate_weight", "input_gate_bias", "recurrent_gate_weight", "recurrent_gate_bias", "recurrent_param")


def _read(config: Fields) -> DecoderConfig:
    count, width = config["num_hidden_layers"], config["hidden_size"]
    pattern = list(config.get("block_types") or config.get("_block_types") or ("recurrent", "recurrent", "attention"))
    kinds = layer_kinds(config, (pattern * count)[:count])
    bias = bool(config.get("attention_bias"))
    activation = activation_of(config, "hidden_activation", "gelu_pytorch_tanh")
    fields = {
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 8192,  # the length that the published models were trained for; files have none
        **config,
        "sliding_window": config.get("attention_window_size", 2048),
    }
    base = read_decoder(
        "recurrent_gemma",
        fields,
        feedforward=FeedForwardSpec(config["intermediate_size"] // 2, activation, bias=True),
        local=lambda index: True,
        tied=True,
        qkv_bias=bias,
        output_bias=True,
        embedding_scale=float(torch.tensor(math.sqrt(width), dtype=torch.bfloat16)),
        logit_softcap=config.get("logits_soft_cap", 30.0),
    )
    size = config.get("lru_width") or width
    spec = RGLRUSpec(size, config["num_attention_heads"], config.get("conv1d_width", 4), activation)
    return with_recurrence(base, spec, kinds)


def _write(config: DecoderConfig) -> dict[str, Any]:
    inner = config.layers[0].feedforward
    fields: dict[str, Any] = {
        "intermediate_size": 2 * inner.intermediate_size,
        "hidden_activation": "gelu_pytorch_tanh" if inner.activation == "gelu_tanh" else inner.activation,
        "attention_bias": config.qkv_bias,
        "logits_soft_cap": config.logit_softcap,
        "block_types": ["attention" if layer.recurrent is None else "recurrent" for layer in config.layers],
    }
    windows = {layer.attention.window for layer in config.layers if layer.attends}
    if windows:
        fields["attention_window_size"] = windows.pop()
    spec = recurrence(config)
    return fields if spec is None else fields | {"lru_width": spec.size, "conv1d_width": spec.conv}


def _rules(config: DecoderConfig) -> list[TensorRule]:
    mixer, inner = "temporal_block", "mlp_block"
    query, key = rotated_in_part("self_attn.q_proj", "self_attn.k_proj")
    return [
        TensorRule(f"{mixer}.q_proj", query.ours, query.split, query.join),
        TensorRule(f"{mixer}.k_proj", key.ours, key.split, key.join),
        *(_minus_one(ours, stored) for ours, stored in _NORMS.items()),
        *rename(
            self_attn__v_proj=f"{mixer}.v_proj",
            self_attn__o_proj=f"{mixer}.o_proj",
            mlp__gate_proj=f"{inner}.gate_proj",
            mlp__up_proj=f"{inner}.up_proj",
            mlp__down_proj=f"{inner}.down_proj",
            recurrent__x_proj=f"{mixer}.linear_x",
            recurrent__gate_proj=f"{mixer}.linear_y",
            recurrent__out_proj=f"{mixer}.linear_out",
            recurrent__conv=f"{mixer}.conv_1d",
        ),
        parameters(f"{mixer}.rg_lru", *_GATES),
    ]


_NORMS = {
    "norm": "final_norm",
    "input_layernorm": "temporal_pre_norm",
    "post_attention_layernorm": "channel_pre_norm",
}


def _minus_one(ours: str, stored: str) -> TensorRule:
    (rule,) = one_added(ours)
    return TensorRule(stored, rule.ours, rule.split, rule.join, rule.leaves)


RECURRENT_GEMMA = Family(
    "recurrent_gemma",
    "RecurrentGemmaForCausalLM",
    _read,
    _write,
    _rules,
    omitted=("layer_types", "sliding_window", "use_sliding_window"),
)
