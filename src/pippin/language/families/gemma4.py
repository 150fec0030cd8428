"""Gemma 4: global layers with heads of their own size, normalized values, inputs of each layer, and KV sharing.

Notable here:
- norm weights multiply as they are stored, unlike in earlier Gemmas; scores are not scaled, as queries and keys are
  normalized
- global layers rotate a quarter of each head, with the frequencies of the whole; in the larger models their keys are
  their values, too
- the last layers of the small models read the keys and values of the last earlier layer of their kind
- the mixture of experts stands beside the dense layer of each layer, both with norms of their own
- the cache stores heads of the smaller size; global layers store theirs as several
- in GGUF the dimensions of a global head that are not rotated have frequencies divided by a number without end
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.language.decoder_config import DecoderConfig, LayerSpec
from pippin.language.families.experts import fused_experts, gates_and_ups, stacked
from pippin.language.families.family import (
    Family,
    Fields,
    TensorRule,
    activation_of,
    layer_types,
    read_decoder,
    rename,
)
from pippin.language.families.gguf_layout import TABLE, GGUFHeader, GGUFLayout
from pippin.language.families.sizes import MAX_LAYERS, check_size
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.attention.rotary import Rotary
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.feedforward.routing import RouterSpec

_ROPE: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}


def _read(config: Fields) -> DecoderConfig:
    if config.get("use_bidirectional_attention") == "all":
        raise UnsupportedModel("use_bidirectional_attention='all' is not supported for the gemma4_text family")
    check_size("num_hidden_layers", config["num_hidden_layers"], MAX_LAYERS)
    count, kinds = config["num_hidden_layers"], list(config.get("layer_types") or ())
    kinds = kinds or ["full_attention" if (index + 1) % 6 == 0 else "sliding_attention" for index in range(count)]
    kinds[-1] = "full_attention"
    shared = count - config.get("num_kv_shared_layers", 0)
    rope = config.get("rope_parameters") or _ROPE

    def layer(index: int) -> LayerSpec:
        local = kinds[index] == "sliding_attention"
        heads, size = _heads(config, index, local)
        source = None
        if index >= shared:
            source = max(earlier for earlier in range(shared) if kinds[earlier] == kinds[index])
        wide = source is not None and config.get("use_double_wide_mlp")
        attention = AttentionSpec(
            window=config["sliding_window"] if local else None,
            rotary=_rotary(rope[kinds[index]], size),
            kv_source=source,
            num_key_value_heads=heads,
            head_dim=size,
            keys_are_values=bool(config.get("attention_k_eq_v")) and not local,
            value_norm=True,
        )
        inner = config["intermediate_size"] * (2 if wide else 1)
        name = config.get("hidden_activation") or "gelu_pytorch_tanh"
        activation, experts = activation_of({"hidden_act": name}), None
        if config.get("enable_moe_block"):
            experts = FeedForwardSpec(
                config["moe_intermediate_size"],
                activation,
                num_experts=config["num_experts"],
                num_experts_per_tok=config["top_k_experts"],
                router=RouterSpec(scaled=True),
            )
        return LayerSpec(attention, FeedForwardSpec(inner, activation), experts=experts)

    shapes = [_heads(config, index, kinds[index] == "sliding_attention") for index in range(count)]
    stored = math.gcd(*(size for _, size in shapes))
    fields = {
        **config,
        "layer_types": kinds,
        "head_dim": stored,
        "num_key_value_heads": max(heads * size for heads, size in shapes) // stored,
    }
    bias = bool(config.get("attention_bias"))
    return read_decoder(
        "gemma4_text",
        fields,
        layer=layer,
        tied=True,
        residual="pre and post",
        qk_norm="head",
        embedding_scale=math.sqrt(config["hidden_size"]),
        per_layer_size=config.get("hidden_size_per_layer_input", 256) or 0,
        layer_scalar=True,
        attention_scale=1.0,
        logit_softcap=config.get("final_logit_softcapping"),
        qkv_bias=bias,
        output_bias=bias,
    )


def _heads(config: Fields, index: int, local: bool) -> tuple[int, int]:
    """Number and size of a layer's key heads: older files give those of all global layers, newer ones those of each."""
    heads, size = config["num_key_value_heads"], config.get("head_dim", 256)
    if "per_layer_config" in config:
        own = config["per_layer_config"].get(str(index), {})
        heads, size = own.get("num_key_value_heads", heads), own.get("head_dim", size)
    elif not local:
        heads = config.get("num_global_key_value_heads") or heads if config.get("attention_k_eq_v") else heads
        size = config.get("global_head_dim", 512)
    check_size("num_key_value_heads", heads, 1 << 16)
    check_size("head_dim", size, 1 << 16)
    return heads, size


def _rotary(rope: Fields, head_dim: int) -> Rotary:
    kind, theta = rope.get("rope_type", "default"), rope["rope_theta"]
    if kind not in ("default", "proportional"):
        raise UnsupportedModel(f"rope type {kind!r} is not supported for the gemma4_text family")
    if kind == "default":
        return Rotary(theta)
    return Rotary(theta, dims=2 * int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2), proportional=True)


def _write(config: DecoderConfig) -> dict[str, Any]:
    def one(*, local: bool) -> AttentionSpec | None:
        return next((layer.attention for layer in config.layers if (layer.attention.window is not None) == local), None)

    near, far = one(local=True), one(local=False)
    assert far is not None
    near = near or far
    heads = {"num_key_value_heads": near.num_key_value_heads, "head_dim": near.head_dim}
    heads |= {"num_global_key_value_heads": far.num_key_value_heads, "global_head_dim": far.head_dim}
    shared = [layer.attention.kv_source is not None for layer in config.layers]
    sizes = [layer.feedforward.intermediate_size for layer in config.layers]
    activation = "gelu_pytorch_tanh" if config.layers[0].feedforward.activation == "gelu_tanh" else "gelu"
    return {
        **heads,
        "layer_types": layer_types(config),
        "hidden_activation": activation,
        "hidden_act": activation,
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] != sizes[0],
        "num_kv_shared_layers": sum(shared),
        "attention_k_eq_v": far.keys_are_values,
        "attention_bias": config.qkv_bias,
        "hidden_size_per_layer_input": config.per_layer_size,
        "vocab_size_per_layer_input": config.vocab_size,
        "final_logit_softcapping": config.logit_softcap,
        **_write_experts(config.layers[0].experts),
        "rope_theta": None,
        "partial_rotary_factor": None,
        "rope_parameters": {
            "sliding_attention": _rope(near),
            "full_attention": _rope(far),
        },
    }


def _write_experts(spec: FeedForwardSpec | None) -> dict[str, Any]:
    if spec is None:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "moe_intermediate_size": spec.intermediate_size,
        "num_experts": spec.num_experts,
        "top_k_experts": spec.num_experts_per_tok,
    }


def _rope(spec: AttentionSpec) -> dict[str, Any]:
    assert spec.rotary is not None
    assert spec.head_dim is not None
    fields: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rotary.theta}
    if spec.rotary.dims is not None:
        fields |= {"rope_type": "proportional", "partial_rotary_factor": spec.rotary.dims / spec.head_dim}
    return fields


def _rules(config: DecoderConfig) -> list[TensorRule]:
    room = "expert_branch.mlp"
    experts = config.layers[0].experts
    found = [
        TensorRule("router", (f"{room}.gate",), leaves=("scale", "per_expert_scale")),
        TensorRule("router.proj", (f"{room}.gate",)),
        *(fused_experts("experts", experts.num_experts, f"{room}.experts") if experts else ()),
    ]
    return found + rename(
        per_layer__embed="embed_tokens_per_layer",
        per_layer__proj="per_layer_model_projection",
        per_layer__norm="per_layer_projection_norm",
        layer_input__gate="per_layer_input_gate",
        layer_input__proj="per_layer_projection",
        layer_input__norm="post_per_layer_input_norm",
        expert_branch__dense_norm="post_feedforward_layernorm_1",
        expert_branch__input_norm="pre_feedforward_layernorm_2",
        expert_branch__output_norm="post_feedforward_layernorm_2",
    )


# --- GGUF -------------------------------------------------------------------------------------------------------------

_STILL: Final = 1e30
"""The divisor of frequencies that are none."""


def _from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    count, kinds = fields["num_hidden_layers"], fields["layer_types"]
    size, near = header.get("attention.key_length", int), header.get("attention.key_length_swa", int)
    heads, inner = (_of_each(header, f"{key}", count) for key in ("attention.head_count_kv", "feed_forward_length"))
    shared, theta = header.get("attention.shared_kv_layers", int, 0), header.get("rope.freq_base", float)
    own = [index for index in range(max(count - shared, 0)) if kinds[index] == "full_attention"]
    table = header.read(TABLE).float() if TABLE in header else torch.ones(size // 2)
    turning = int((table < _STILL / 2).sum())
    if table.shape != (size // 2,) or not bool((table[:turning] == 1.0).all()):
        raise UnsupportedModel(f"{header.where}: {TABLE} of gemma4 models has ones for what rotates, and then {_STILL}")
    return {
        "per_layer_config": {
            str(index): {"num_key_value_heads": heads[index], "head_dim": near if kind == "sliding_attention" else size}
            for index, kind in enumerate(kinds)
        },
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] != inner[0],
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": bool(own) and not any(f"blk.{index}.attn_v.weight" in header for index in own),
        "hidden_size_per_layer_input": header.get("embedding_length_per_layer_input", int, 0),
        "final_logit_softcapping": header.get("final_logit_softcapping", float, 0.0) or None,
        "enable_moe_block": bool(fields.get("num_experts")),
        "top_k_experts": fields.get("num_experts_per_tok"),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": header.get("rope.freq_base_swa", float, theta)},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": theta,
                "partial_rotary_factor": (2 * turning + 0.5) / size,  # which is rounded down to pairs
            },
        },
    }


def _of_each(header: GGUFHeader, key: str, layers: int) -> list[int]:
    """A number of each layer, which may be given once."""
    given = header.metadata.get(f"{header.architecture}.{key}")
    found = given if isinstance(given, list) else [header.get(key, int)] * layers
    if len(found) < layers or any(type(one) is not int for one in found):
        raise CorruptedFile(f"{header.where}: metadata {key!r} is {found!r:.80}, expected {layers} integers")
    return found[:layers]


def _to_gguf(config: DecoderConfig) -> dict[str, Any]:
    near, far = (
        next((layer.attention for layer in config.layers if (layer.attention.window is not None) == local), None)
        for local in (True, False)
    )
    if near is None or far is None or near.rotary is None or far.rotary is None:
        raise UnsupportedModel("llama.cpp has gemma4 models with both local and global layers that rotate only")
    inner = [layer.feedforward.intermediate_size for layer in config.layers]
    heads = [layer.attention.num_key_value_heads for layer in config.layers]
    experts = config.layers[0].experts
    fields: dict[str, Any] = {
        "feed_forward_length": inner if len(set(inner)) > 1 else inner[0],
        "attention.head_count_kv": heads if len(set(heads)) > 1 else heads[0],
        "attention.shared_kv_layers": sum(layer.attention.kv_source is not None for layer in config.layers),
        "embedding_length_per_layer_input": config.per_layer_size,
        "final_logit_softcapping": config.logit_softcap,
        "rope.freq_base": float(far.rotary.theta),
        "rope.freq_base_swa": float(near.rotary.theta),
    }
    for suffix, spec in (("", far), ("_swa", near)):
        names = (f"attention.key_length{suffix}", f"attention.value_length{suffix}", f"rope.dimension_count{suffix}")
        fields |= dict.fromkeys(names, spec.head_dim)
    if experts is not None:
        fields |= {
            "expert_count": experts.num_experts,
            "expert_used_count": experts.num_experts_per_tok,
            "expert_feed_forward_length": experts.intermediate_size,
        }
    return fields


def _tables(config: DecoderConfig) -> dict[str, Tensor]:
    spec = next((layer.attention for layer in config.layers if layer.attention.window is None), None)
    if spec is None or spec.rotary is None or spec.head_dim is None:
        return {}
    table = torch.full((spec.head_dim // 2,), _STILL)
    table[: (spec.head_dim if spec.rotary.dims is None else spec.rotary.dims) // 2] = 1.0
    return {TABLE: table}


def _gguf_rules(config: DecoderConfig) -> list[TensorRule]:
    room, experts = "expert_branch.mlp", config.layers[0].experts
    found = [
        # a whole head is rotated there, so that rows stay where they are
        *rename(**{f"self_attn__{part}": f"attn_{part.removesuffix('_proj')}" for part in ("q_proj", "k_proj")}),
        *rename(self_attn__q_norm="attn_q_norm", self_attn__k_norm="attn_k_norm"),
        *rename(
            per_layer__embed="per_layer_token_embd",
            per_layer__proj="per_layer_model_proj",
            per_layer__norm="per_layer_proj_norm",
            layer_input__gate="inp_gate",
            layer_input__proj="proj",
            layer_input__norm="post_norm",
            expert_branch__dense_norm="post_ffw_norm_1",
            expert_branch__input_norm="pre_ffw_norm_2",
            expert_branch__output_norm="post_ffw_norm_2",
            expert_branch__mlp__gate="ffn_gate_inp",
        ),
        TensorRule("layer_output_scale.weight", ("",), leaves=("layer_scalar",), whole=True),
        TensorRule("ffn_gate_inp", (f"{room}.gate",), leaves=("scale",)),
        TensorRule("ffn_down_exps.scale", (f"{room}.gate",), leaves=("per_expert_scale",), whole=True),
    ]
    if experts is None:
        return found
    count = experts.num_experts
    both = gates_and_ups(count, f"{room}.experts")
    fused, down = fused_experts(("ffn_gate_up_exps.weight", "ffn_down_exps.weight"), count, f"{room}.experts")
    found += [fused, down]
    for at, part in enumerate(("gate", "up")):
        found.append(stacked(f"ffn_{part}_exps.weight", both[at::2], lambda tensor, at: tensor[at], torch.stack))
    return found


_GGUF = GGUFLayout(
    "gemma4",
    _from_gguf,
    _to_gguf,
    _gguf_rules,
    _tables,
    windows=True,
    any_head_dim=True,
    own_rotary=True,
    merges=True,
    varied=("attention.head_count_kv", "feed_forward_length"),
)
GEMMA4 = Family("gemma4_text", "Gemma4ForCausalLM", _read, _write, _rules, shares_kv=True, gguf=_GGUF)
