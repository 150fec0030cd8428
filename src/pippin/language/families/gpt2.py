"""GPT-2: learned positions, layer norms, biases everywhere; matrices are stored with inputs as rows."""

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
    fused_qkv,
    read_decoder,
    refuse,
    rename,
)
from pippin.language.families.gguf_layout import ALL_BIASES, GGUFHeader, GGUFLayout
from pippin.nn.feedforward.feedforward import FeedForwardSpec


def _read(config: Fields) -> DecoderConfig:
    refuse("gpt2", config, "scale_attn_by_inverse_layer_idx", "add_cross_attention")
    width = config["n_embd"]
    activation = activation_of(config, "activation_function", "gelu_new")
    fields = {
        **config,
        "hidden_size": width,
        "num_attention_heads": config["n_head"],
        "num_key_value_heads": config["n_head"],
        "num_hidden_layers": config["n_layer"],
        "max_position_embeddings": config["n_positions"],
    }
    return read_decoder(
        "gpt2",
        fields,
        eps="layer_norm_epsilon",
        feedforward=FeedForwardSpec(config.get("n_inner") or 4 * width, activation, gated=False, bias=True),
        rotary=lambda index, local: None,
        tied=True,
        norm="layer",
        norm_bias=True,
        qkv_bias=True,
        output_bias=True,
        learned_positions=True,
        attention_scale=None if config.get("scale_attn_weights", True) else 1.0,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    inner = config.layers[0].feedforward
    return {
        "n_embd": config.hidden_size,
        "n_head": config.num_attention_heads,
        "n_layer": len(config.layers),
        "n_positions": config.max_position_embeddings,
        "n_inner": inner.intermediate_size,
        "activation_function": "gelu_new" if inner.activation == "gelu_tanh" else inner.activation,
        "scale_attn_weights": config.attention_scale is None,
    }


def _transposed(tensor: Tensor) -> Tensor:
    """A matrix with its other side up; a bias as it is."""
    return tensor.t() if tensor.ndim == 2 else tensor


def _rules(config: DecoderConfig) -> list[TensorRule]:
    def split(tensor: Tensor, config: DecoderConfig) -> Sequence[Tensor]:
        return _transposed(tensor).chunk(3)

    def join(parts: Sequence[Tensor], config: DecoderConfig) -> Tensor:
        return _transposed(torch.cat(list(parts)))

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    matrices = [
        TensorRule(
            stored, (ours,), lambda tensor, config: [_transposed(tensor)], lambda parts, config: _transposed(parts[0])
        )
        for ours, stored in (
            ("self_attn.o_proj", "attn.c_proj"),
            ("mlp.up_proj", "mlp.c_fc"),
            ("mlp.down_proj", "mlp.c_proj"),
        )
    ]
    names = rename(
        embed_tokens="wte",
        embed_positions="wpe",
        norm="ln_f",
        input_layernorm="ln_1",
        post_attention_layernorm="ln_2",
    )
    return [TensorRule("attn.c_attn", qkv, split, join), *matrices, *names]


def _from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    return {
        "n_embd": fields["hidden_size"],
        "n_head": fields["num_attention_heads"],
        "n_layer": fields["num_hidden_layers"],
        "n_positions": fields["max_position_embeddings"],
        "n_inner": header.count("feed_forward_length"),
    }


def _gguf_rules(config: DecoderConfig) -> list[TensorRule]:
    return [fused_qkv("attn_qkv")]


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    _read,
    _write,
    _rules,
    prefix="transformer.",
    layers="h",
    eps="layer_norm_epsilon",
    gguf=GGUFLayout("gpt2", _from_gguf, rules=_gguf_rules, biases=ALL_BIASES),
)
