"""Kimi Linear: Kimi delta attention in three of four layers, latent attention without positions in the others.

Notable here:
- experts, their router and its bias are those of DeepSeek 3, under other names in the files
- nothing rotates, so "rotated" dimensions lie in a GGUF file as they do in a folder
- files of old describe the recurrence in an object of its own, and count its layers from 1

Source: Kimi Team 2025, arXiv:2510.26692.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from pippin.core.errors import UnsupportedModel
from pippin.language.decoder_config import DecoderConfig, LayerSpec
from pippin.language.families.deepseek import experts_from_gguf
from pippin.language.families.experts import expert_rules, shared_expert
from pippin.language.families.family import Family, Fields, TensorRule, activation_of, read_decoder, refuse, rename
from pippin.language.families.gguf_layout import SIGMOID_ROUTER, GGUFHeader, GGUFLayout
from pippin.language.families.gguf_recurrent import channel_delta_rules, key_heads, recurrent_layers
from pippin.language.families.hybrid import convolutions, kinds_of, layer_kinds, parameters, recurrence
from pippin.language.families.latent import (
    keys_and_values,
    keys_and_values_apart,
    latent_from_gguf,
    latent_gguf_rules,
    latent_of,
    latent_to_gguf,
)
from pippin.nn.attention.attention import AttentionSpec, LatentSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.feedforward.routing import RouterSpec
from pippin.nn.recurrent.gated_delta import GatedDeltaSpec


def _recurrence(config: Fields) -> GatedDeltaSpec:
    old = config.get("linear_attn_config") or {}
    heads, size = (old.get("num_heads") or config["linear_num_heads"], old.get("head_dim") or config["linear_head_dim"])
    conv = old.get("short_conv_kernel_size") or config.get("linear_conv_kernel_dim", 4)
    return GatedDeltaSpec(heads, heads, size, size, conv=conv, channel_rank=size)


def _kinds(config: Fields) -> list[str]:
    old, count = config.get("linear_attn_config") or {}, config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None and "full_attn_layers" in old:
        attending = set(old["full_attn_layers"])
        kinds = ["full_attention" if index + 1 in attending else "linear_attention" for index in range(count)]
    if kinds is None:
        kinds = ["full_attention" if index and index % 4 == 0 else "linear_attention" for index in range(count)]
    return layer_kinds(config, kinds)


def _feedforward(config: Fields, index: int) -> FeedForwardSpec:
    activation = activation_of(config)
    kinds = config.get("mlp_layer_types")
    dense = index < config.get("first_k_dense_replace", 1) if kinds is None else kinds[index] == "dense"
    if dense:
        return FeedForwardSpec(config["intermediate_size"], activation)
    return FeedForwardSpec(
        config["moe_intermediate_size"],
        activation,
        num_experts=config["num_experts"],
        num_experts_per_tok=config["num_experts_per_token"],
        norm_topk_prob=config.get("moe_renormalize", True),
        shared_intermediate_size=config["moe_intermediate_size"] * (config.get("num_shared_experts") or 0),
        shared_gate=False,
        router=RouterSpec(
            scores="sigmoid",
            choice_bias=True,
            num_groups=config.get("num_expert_group") or 1,
            num_chosen_groups=config.get("topk_group") or 1,
            group_score="top two",
            scale=config.get("routed_scaling_factor", 1.0),
        ),
    )


def _read(config: Fields) -> DecoderConfig:
    refuse("kimi_linear", config, "attention_bias")
    if config.get("moe_router_activation_func", "sigmoid") != "sigmoid":
        raise UnsupportedModel("experts of the kimi_linear family are scored by sigmoids only")
    latent = LatentSpec(
        kv_rank=config["kv_lora_rank"],
        rotated_dim=config["qk_rope_head_dim"],
        plain_dim=config["qk_nope_head_dim"],
        value_dim=config["v_head_dim"],
        q_rank=config.get("q_lora_rank"),
    )
    base = read_decoder(
        "kimi_linear",
        {
            **config,
            "num_key_value_heads": 1,
            "head_dim": latent.kv_rank + latent.rotated_dim,
            "max_position_embeddings": config["model_max_length"],
        },
        feedforward=lambda index: _feedforward(config, index),
        rotary=lambda index, local: None,
        local=lambda index: False,
        attention=AttentionSpec(latent=latent),
    )
    spec, kinds = _recurrence(config), _kinds(config)
    if len(set(kinds)) == 1:
        raise UnsupportedModel(f"kimi_linear models have recurrent layers and attention, not {kinds[0]} alone")
    layers = [
        LayerSpec.recurring(spec, layer.feedforward) if kind == "recurrent" else layer
        for layer, kind in zip(base.layers, kinds, strict=True)
    ]
    return replace(base, layers=tuple(layers))


def _write(config: DecoderConfig) -> dict[str, Any]:
    spec: GatedDeltaSpec = recurrence(config)
    latent = latent_of(config)
    inner = [layer.feedforward for layer in config.layers]
    dense = next((x for x in inner if not x.num_experts), inner[0])
    sparse = next((x for x in inner if x.num_experts), inner[0])
    return {
        "layer_types": kinds_of(config),
        "mlp_layer_types": ["sparse" if x.num_experts else "dense" for x in inner],
        "model_max_length": config.max_position_embeddings,
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": latent.rotated_dim,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank,
        "qk_rope_head_dim": latent.rotated_dim,
        "qk_nope_head_dim": latent.plain_dim,
        "v_head_dim": latent.value_dim,
        "linear_num_heads": spec.value_heads,
        "linear_head_dim": spec.value_dim,
        "linear_conv_kernel_dim": spec.conv,
        "intermediate_size": dense.intermediate_size,
        "moe_intermediate_size": sparse.intermediate_size,
        "num_experts": sparse.num_experts,
        "num_experts_per_token": sparse.num_experts_per_tok,
        "num_shared_experts": sparse.shared_intermediate_size // sparse.intermediate_size,
        "moe_renormalize": sparse.norm_topk_prob,
        "routed_scaling_factor": sparse.router.scale,
        "num_expert_group": sparse.router.num_groups,
        "topk_group": sparse.router.num_chosen_groups,
    }


_DENSE = ("gate_proj", "up_proj", "down_proj")
_SINGLE = {
    part: f"block_sparse_moe.experts.{{}}.{stored}"
    for part, stored in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
}


def _rates(stored: str) -> TensorRule:
    """Rates of forgetting, which are stored with dimensions of size 1."""

    def join(parts: Sequence[Tensor], config: DecoderConfig) -> Tensor:
        return parts[0].view(1, 1, -1, 1)

    return TensorRule(stored, ("recurrent",), lambda tensor, config: [tensor.flatten()], join, leaves=("A_log",))


def _rules(config: DecoderConfig) -> list[TensorRule]:
    mixer, forget = "self_attn", "self_attn.forget_gate"
    found = [
        *rename(**{f"recurrent__{name}": f"{mixer}.{name}" for name in ("q_proj", "k_proj", "v_proj", "b_proj")}),
        *rename(**{f"recurrent__{name}_conv": f"{mixer}.{name}_conv1d" for name in ("q", "k", "v")}),
        *rename(recurrent__a_proj__down=f"{mixer}.f_a_proj", recurrent__a_proj__up=f"{mixer}.f_b_proj"),
        *rename(recurrent__a_proj__down=f"{forget}.f_a_proj", recurrent__a_proj__up=f"{forget}.f_b_proj"),
        *rename(recurrent__gate_proj__down=f"{mixer}.g_a_proj", recurrent__gate_proj__up=f"{mixer}.g_b_proj"),
        *rename(recurrent__out_proj=f"{mixer}.o_proj", recurrent__norm=f"{mixer}.o_norm"),
        *rename(**{f"mlp__{name}": f"mlp.{name}" for name in _DENSE}),
        *rename(**{f"mlp__{name}": f"block_sparse_moe.{name}" for name in _DENSE}),  # as transformers writes them
        *rename(**{f"recurrent__{name}_conv": f"{mixer}.{name}_conv.conv" for name in "qkv"}),  # of mlx-lm
        convolutions(f"{mixer}.conv1d", recurrence(config).sizes),
        *(_rates(name) for name in (mixer, forget)),
        *(parameters(name, "dt_bias") for name in (mixer, forget)),
        keys_and_values(config),
        *keys_and_values_apart(config),
    ]
    if any(layer.feedforward.num_experts for layer in config.layers):
        bias = ("e_score_correction_bias",)
        found += [
            *expert_rules(_SINGLE, "block_sparse_moe.gate")(config),
            *expert_rules({}, "mlp.gate")(config),
            *(TensorRule(name, ("mlp.gate",), leaves=bias) for name in ("block_sparse_moe.gate", "mlp.gate", "mlp")),
            *shared_expert("block_sparse_moe.shared_experts"),
            *shared_expert(),
        ]
    return found


# --- GGUF -------------------------------------------------------------------------------------------------------------


def _from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    recurs = recurrent_layers(header, fields["num_hidden_layers"])
    experts = experts_from_gguf(header, fields)
    return {
        **latent_from_gguf(header, fields),
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurs],
        "linear_num_heads": fields["num_attention_heads"],
        "linear_head_dim": header.get("kda.head_dim", int),
        "linear_conv_kernel_dim": header.get("ssm.conv_kernel", int),
        "model_max_length": fields["max_position_embeddings"],
        "first_k_dense_replace": experts["first_k_dense_replace"],
        "num_experts_per_token": fields["num_experts_per_tok"],
        "num_shared_experts": experts["n_shared_experts"],
        "moe_renormalize": True,  # llama.cpp always does
        "routed_scaling_factor": experts["routed_scaling_factor"],
        "num_expert_group": experts["n_group"],
        "topk_group": experts["topk_group"],
    }


def _to_gguf(config: DecoderConfig) -> dict[str, Any]:
    fields = _write(config)
    kinds: list[str] = fields["mlp_layer_types"]
    dense = kinds.count("dense")
    if "sparse" in kinds[:dense] or dense == len(kinds):
        raise UnsupportedModel("llama.cpp has kimi_linear models with dense layers before those with experts only")
    if not fields["num_shared_experts"]:
        raise UnsupportedModel("llama.cpp has kimi_linear models with shared experts only")
    if fields["q_lora_rank"]:
        raise UnsupportedModel("llama.cpp has kimi_linear models without latent vectors of queries only")
    return {
        **latent_to_gguf(config),
        "attention.q_lora_rank": None,
        "attention.head_count_kv": key_heads(config),
        "kda.head_dim": fields["linear_head_dim"],
        "ssm.conv_kernel": fields["linear_conv_kernel_dim"],
        "feed_forward_length": fields["intermediate_size"],
        "expert_feed_forward_length": fields["moe_intermediate_size"],
        "expert_shared_count": fields["num_shared_experts"],
        "leading_dense_block_count": dense,
        "expert_gating_func": SIGMOID_ROUTER,
        "expert_weights_scale": float(fields["routed_scaling_factor"]),
        "expert_group_count": fields["num_expert_group"],
        "expert_group_used_count": fields["topk_group"],
    }


def _gguf_rules(config: DecoderConfig) -> list[TensorRule]:
    return [*channel_delta_rules(recurrence(config)), *latent_gguf_rules(config, rotated=False)]


_GGUF = GGUFLayout("kimi-linear", _from_gguf, _to_gguf, _gguf_rules, any_head_dim=True, own_output=True)
KIMI_LINEAR = Family("kimi_linear", "KimiLinearForCausalLM", _read, _write, _rules, gguf=_GGUF)
