"""GPT-NeoX and Pythia: layer norms, attention and feed-forward layer in parallel on a norm each, biases everywhere.

Notable here:
- the rows of a head's query, key and value lie together, head by head, in one matrix
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import (
    Family,
    Fields,
    TensorRule,
    activation_of,
    from_halves,
    fused_rotated_qkv,
    read_decoder,
    rename,
    to_halves,
)
from pippin.language.families.gguf_layout import ALL_BIASES, GGUFHeader, GGUFLayout
from pippin.nn.feedforward.feedforward import FeedForwardSpec


def _read(config: Fields) -> DecoderConfig:
    bias = config.get("attention_bias", True)
    inner = FeedForwardSpec(config["intermediate_size"], activation_of(config, default="gelu"), gated=False, bias=True)
    return read_decoder(
        "gpt_neox",
        {"rotary_pct": 0.25, **config, "num_key_value_heads": config["num_attention_heads"]},
        eps="layer_norm_eps",
        feedforward=inner,
        norm="layer",
        norm_bias=True,
        residual="parallel two norms" if config.get("use_parallel_residual", True) else "pre",
        qkv_bias=bias,
        output_bias=bias,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    rotary = config.layers[0].attention.rotary
    part = 1.0 if rotary is None or rotary.dims is None else rotary.dims / config.head_dim
    theta = 10_000.0 if rotary is None else rotary.theta
    return {
        "use_parallel_residual": config.residual == "parallel two norms",
        "attention_bias": config.qkv_bias,
        "rotary_pct": part,
        "rotary_emb_base": theta,
    }


def _split(tensor: Tensor, config: DecoderConfig) -> list[Tensor]:
    heads = tensor.unflatten(0, (config.num_attention_heads, 3, config.head_dim))
    q, k, v = (heads[:, index].flatten(0, 1) for index in range(3))
    return [to_halves(q, config), to_halves(k, config), v]


def _join(parts: Sequence[Tensor], config: DecoderConfig) -> Tensor:
    q, k, v = parts
    rows = [from_halves(q, config), from_halves(k, config), v]
    return torch.stack([each.unflatten(0, (-1, config.head_dim)) for each in rows], 1).flatten(0, 2)


def _rules(config: DecoderConfig) -> list[TensorRule]:
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    names = rename(
        embed_tokens="embed_in",
        norm="final_layer_norm",
        self_attn__o_proj="attention.dense",
        mlp__up_proj="mlp.dense_h_to_4h",
        mlp__down_proj="mlp.dense_4h_to_h",
    )
    # older files call the output matrix "embed_out", today's "lm_head"
    heads = [TensorRule("lm_head", ("lm_head",)), TensorRule("embed_out", ("lm_head",))]
    return [TensorRule("attention.query_key_value", qkv, _split, _join), *names, *heads]


def _from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    return {"rotary_pct": 1.0, "use_parallel_residual": header.get("use_parallel_residual", bool, True)}


def _to_gguf(config: DecoderConfig) -> dict[str, Any]:
    return {"use_parallel_residual": config.residual == "parallel two norms"}


def _gguf_rules(config: DecoderConfig) -> list[TensorRule]:
    return [fused_rotated_qkv("attn_qkv", interleaved=False)]


GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    _read,
    _write,
    _rules,
    prefix="gpt_neox.",
    eps="layer_norm_eps",
    gguf=GGUFLayout("gptneox", _from_gguf, _to_gguf, _gguf_rules, own_output=True, biases=ALL_BIASES),
)
