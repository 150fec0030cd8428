"""Gemma 3n: four streams of hidden states, a low-rank residual path, inputs of each layer, and KV sharing.

Notable here:
- each layer computes one stream and corrects the others by it (`pippin.nn.alternating_updates`)
- the first layers cut off the gates that are not among the largest 5%
- norm weights multiply as they are stored, and scores are not scaled, as queries, keys and values are normalized
- the last layers read the keys and values of the last earlier layer of their kind; older files hold matrices for them
  that nothing reads
- special tokens at the end of the vocabulary have no rows in the table of the layers' inputs
"""

from __future__ import annotations

import math
from typing import Any

from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.language.decoder_config import DecoderConfig, LayerSpec
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
from pippin.language.families.sizes import MAX_LAYERS, check_size
from pippin.nn.attention import AttentionSpec
from pippin.nn.feedforward import FeedForwardSpec
from pippin.nn.rotary import Rotary


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


GEMMA3N = Family("gemma3n_text", "Gemma3nForCausalLM", _read, _write, _rules, shares_kv=True)
