"""Gemma 3n: four streams of hidden states, a low-rank residual path, inputs of each layer, and KV sharing.

Notable here:
- each layer computes one stream and corrects the others by it (`pippin.nn.alternating_updates`)
- the first layers cut off the gates that are not among the largest 5%
- norm weights multiply as they are stored, and scores are not scaled, as queries, keys and values are normalized
- the last layers read the keys and values of the last earlier layer of their kind; older files hold matrices for them
  that nothing reads
- special tokens at the end of the vocabulary have no rows in the table of the layers' inputs
- llama.cpp has some sizes built in, so a GGUF file is written of models with these only; it has the missing rows of
  the table, and matrices of keys and values of every layer
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any, Final

import torch
from torch import Tensor

from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.language.decoder_config import DecoderConfig, LayerSpec
from pippin.language.families.experts import stacked
from pippin.language.families.family import (
    Family,
    Fields,
    TensorRule,
    activation_of,
    layer_types,
    read_decoder,
    read_rotary,
    rename,
)
from pippin.language.families.gguf_layout import GGUFHeader, GGUFLayout
from pippin.language.families.sizes import MAX_LAYERS, check_size
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.attention.rotary import Rotary
from pippin.nn.feedforward.feedforward import FeedForwardSpec


def _read(config: Fields) -> DecoderConfig:
    check_size("num_hidden_layers", config["num_hidden_layers"], MAX_LAYERS)
    for name, expected in (("altup_active_idx", 0), ("altup_correct_scale", True)):
        if config.get(name, expected) != expected:
            raise UnsupportedModel(f"{name}={config[name]!r} is not supported for the gemma3n_text family")
    count = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [
        "full_attention" if (index + 1) % 5 == 0 else "sliding_attention" for index in range(count)
    ]
    sizes = _of_each("intermediate_size", config.get("intermediate_size", 16_384), count)
    usual = [0.95] * 10 + [0.0] * (count - 10) if count > 10 else 0.0
    given = config.get("activation_sparsity_pattern")
    sparsity = _of_each("activation_sparsity_pattern", usual if given is None else given, count)
    first_shared = count - config.get("num_kv_shared_layers", 15)
    activation = activation_of({"hidden_act": config.get("hidden_activation") or "gelu_pytorch_tanh"})

    def layer(index: int) -> LayerSpec:
        local, source = kinds[index] == "sliding_attention", None
        if index >= first_shared:
            source = max((at for at in range(max(first_shared, 0)) if kinds[at] == kinds[index]), default=None)
            if source is None:
                raise CorruptedFile(
                    f"layer {index} reads the keys of an earlier {kinds[index]} layer, and none has any"
                )
        attention = AttentionSpec(
            window=config.get("sliding_window", 512) if local else None,
            rotary=_rotary(config, local),
            kv_source=source,
            value_norm=True,
        )
        return LayerSpec(attention, FeedForwardSpec(sizes[index], activation, activation_sparsity=sparsity[index]))

    bias = bool(config.get("attention_bias"))
    return read_decoder(
        "gemma3n_text",
        {**config, "layer_types": kinds},
        layer=layer,
        tied=True,
        residual="pre and post",
        qk_norm="head",
        embedding_scale=math.sqrt(config["hidden_size"]),
        per_layer_size=config.get("hidden_size_per_layer_input", 256),
        per_layer_vocab_size=config.get("vocab_size_per_layer_input", 262_144),
        num_streams=config.get("altup_num_inputs", 4),
        laurel_rank=config.get("laurel_rank", 64),
        attention_scale=1.0,
        logit_softcap=config.get("final_logit_softcapping", 30.0),
        qkv_bias=bias,
        output_bias=bias,
    )


def _of_each(name: str, given: Any, layers: int) -> list[Any]:
    """A number of each layer, which may be given once."""
    found = list(given) if isinstance(given, list | tuple) else [given] * layers
    if len(found) != layers:
        raise CorruptedFile(f"{name} has {len(found)} values for {layers} layers")
    return found


def _rotary(config: Fields, local: bool) -> Rotary:
    if local and not config.get("rope_parameters"):
        return Rotary(config.get("rope_local_base_freq", 10_000.0))
    return read_rotary(config, local, theta=10_000.0 if local else 1_000_000.0)


def _write(config: DecoderConfig) -> dict[str, Any]:
    inner = [layer.feedforward for layer in config.layers]
    activation = "gelu_pytorch_tanh" if inner[0].activation == "gelu_tanh" else "gelu"
    local = next((layer.attention.rotary for layer in config.layers if layer.attention.window is not None), None)
    return {
        "layer_types": layer_types(config),
        "hidden_activation": activation,
        "hidden_act": activation,
        "intermediate_size": [spec.intermediate_size for spec in inner],
        "activation_sparsity_pattern": [spec.activation_sparsity for spec in inner],
        "num_kv_shared_layers": sum(layer.attention.kv_source is not None for layer in config.layers),
        "attention_bias": config.qkv_bias,
        "hidden_size_per_layer_input": config.per_layer_size,
        "vocab_size_per_layer_input": config.per_layer_vocab_size,
        "altup_num_inputs": config.num_streams,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "laurel_rank": config.laurel_rank,
        "final_logit_softcapping": config.logit_softcap,
        "rope_local_base_freq": 10_000.0 if local is None else local.theta,
    }


def _rules(config: DecoderConfig) -> list[TensorRule]:
    found = [
        TensorRule("altup.correct_output_scale", ("updates",), leaves=("output_scale",), whole=True),
        *rename(
            updates__router_norm="altup.router_norm",
            updates__router="altup.modality_router",
            updates__prediction="altup.prediction_coefs",
            updates__correction="altup.correction_coefs",
            laurel__left="laurel.linear_left",
            laurel__right="laurel.linear_right",
            laurel__norm="laurel.post_laurel_norm",
            per_layer__embed="embed_tokens_per_layer",
            per_layer__proj="per_layer_model_projection",
            per_layer__norm="per_layer_projection_norm",
            layer_input__gate="per_layer_input_gate",
            layer_input__proj="per_layer_projection",
            layer_input__norm="post_per_layer_input_norm",
            norm__norm="norm",
        ),
    ]
    for index in range(config.num_streams - 1):
        found += [
            TensorRule(f"altup_projections.{index}", (f"streams.projections.{index}",)),
            TensorRule(f"altup_unembed_projections.{index}", (f"norm.projections.{index}",)),
        ]
    return found


# --- GGUF -------------------------------------------------------------------------------------------------------------

_BUILT_IN: Final = {"num_streams": 4, "laurel_rank": 64, "per_layer_size": 256, "logit_softcap": 30.0}
_OWN_KEYS, _SPARSE, _SPARSITY = 20, 10, 0.95
"""What llama.cpp takes for granted; of the first layers, how many have keys, and how many are how sparse."""


def _from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    count = fields["num_hidden_layers"]
    multipliers = _listed(header, "activation_sparsity_scale", float, count)
    table, low_rank = (
        header.shapes.get(name, (0, 0)) for name in ("per_layer_token_embd.weight", "blk.0.laurel_l.weight")
    )
    theta = header.get("rope.freq_base", float, 1_000_000.0)
    return {
        "intermediate_size": _listed(header, "feed_forward_length", int, count),
        # the file holds how many standard deviations a gate is above the mean of its token's
        "activation_sparsity_pattern": [round(NormalDist().cdf(one), 6) for one in multipliers],
        "num_kv_shared_layers": header.get("attention.shared_kv_layers", int, max(count - _OWN_KEYS, 0)),
        "hidden_size_per_layer_input": header.get("embedding_length_per_layer_input", int, 256),
        "vocab_size_per_layer_input": table[0],
        "altup_num_inputs": header.get("altup.num_inputs", int, 4),
        "altup_active_idx": header.get("altup.active_idx", int, 0),
        "laurel_rank": low_rank[0],
        "final_logit_softcapping": header.get("final_logit_softcapping", float, 30.0),
        "rope_parameters": {
            "full_attention": dict(fields["rope_parameters"]) | {"rope_theta": theta},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": header.get("rope.freq_base_swa", float, 10_000.0),
            },
        },
    }


def _listed(header: GGUFHeader, key: str, kind: type, layers: int) -> list[Any]:
    """A number of each layer, which may be given once."""
    given = header.metadata.get(f"{header.architecture}.{key}")
    found = given if isinstance(given, list) else [header.get(key, kind)] * layers
    if len(found) < layers or any(type(one) is not kind for one in found):
        raise CorruptedFile(f"{header.where}: metadata {key!r} is {found!r:.80}, expected {layers} numbers")
    return list(found[:layers])


def _to_gguf(config: DecoderConfig) -> dict[str, Any]:
    inner = [layer.feedforward for layer in config.layers]
    shared = sum(layer.attention.kv_source is not None for layer in config.layers)
    sparse = [_SPARSITY if index < _SPARSE else 0.0 for index in range(len(inner))]
    wanted = {**_BUILT_IN, "layers with keys of their own": min(_OWN_KEYS, len(inner))}
    found = {name: getattr(config, name) for name in _BUILT_IN} | {"layers with keys of their own": len(inner) - shared}
    unlike = [f"{name} is {found[name]}, not {value}" for name, value in wanted.items() if found[name] != value]
    if [spec.activation_sparsity for spec in inner] != sparse:
        unlike.append(f"activation_sparsity is not {_SPARSITY} in the first {_SPARSE} layers and 0 in others")
    if len({spec.intermediate_size for spec in inner}) > 1:
        unlike.append("layers have feed-forward layers of different sizes")
    if unlike:
        raise UnsupportedModel(f"llama.cpp has gemma3n models of some sizes only: {'; '.join(unlike)}")
    local = next((layer.attention.rotary for layer in config.layers if layer.attention.window is not None), None)
    return {
        "feed_forward_length": [spec.intermediate_size for spec in inner],
        "activation_sparsity_scale": [NormalDist().inv_cdf(one) if one else -math.inf for one in sparse],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.per_layer_size,
        "altup.num_inputs": config.num_streams,
        "altup.active_idx": 0,
        "final_logit_softcapping": config.logit_softcap,
        "rope.freq_base_swa": None if local is None else float(local.theta),
    }


def _unread(config: DecoderConfig) -> Mapping[str, Tensor]:
    """Keys and values of the layers that read those of others, which llama.cpp wants to find and does not use."""
    rows = config.num_key_value_heads * config.head_dim
    found: dict[str, Tensor] = {}
    for index, layer in enumerate(config.layers):
        if layer.attention.kv_source is not None:
            matrix = torch.zeros(1).expand(rows, config.hidden_size)
            found |= {f"blk.{index}.attn_k.weight": matrix, f"blk.{index}.attn_v.weight": matrix}
            found[f"blk.{index}.attn_k_norm.weight"] = torch.ones(config.head_dim)
    return found


def _with_every_row(parts: Sequence[Tensor], config: DecoderConfig) -> Tensor:
    """The table of the layers' inputs with rows of all tokens: those without one read the first."""
    (table,) = parts
    return torch.cat([table, table[:1].expand(max(config.vocab_size - len(table), 0), -1)])


def _gguf_rules(config: DecoderConfig) -> list[TensorRule]:
    others = range(config.num_streams - 1)
    return [
        *(
            stacked(stored, tuple(f"{ours}.projections.{at}" for at in others), lambda all_, at: all_[at], torch.stack)
            for stored, ours in (("altup_proj.weight", "streams"), ("altup_unembd_proj.weight", "norm"))
        ),
        TensorRule("altup_correct_scale.weight", ("updates",), leaves=("output_scale",), whole=True),
        TensorRule("per_layer_token_embd", ("per_layer.embed",), join=_with_every_row),
        *rename(
            updates__router_norm="altup_router_norm",
            updates__router="altup_router",
            updates__prediction="altup_predict_coef",
            updates__correction="altup_correct_coef",
            laurel__left="laurel_l",
            laurel__right="laurel_r",
            laurel__norm="laurel_post_norm",
            per_layer__proj="per_layer_model_proj",
            per_layer__norm="per_layer_proj_norm",
            layer_input__gate="inp_gate",
            layer_input__proj="proj",
            layer_input__norm="post_norm",
            norm__norm="output_norm",
        ),
    ]


_GGUF = GGUFLayout(
    "gemma3n",
    _from_gguf,
    _to_gguf,
    _gguf_rules,
    _unread,
    window=512,
    pattern=5,
    windows=True,
    any_head_dim=True,
    read_as=lambda config: replace(config, per_layer_vocab_size=max(config.per_layer_vocab_size, config.vocab_size)),
    varied=("feed_forward_length",),
)
GEMMA3N = Family("gemma3n_text", "Gemma3nForCausalLM", _read, _write, _rules, shares_kv=True, gguf=_GGUF)
