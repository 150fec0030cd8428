"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention without positions, a feed-forward layer or experts.

Notable here:
- feed-forward layers and experts have a squared rectifier and no gate; experts are chosen as in DeepSeek 3
- llama.cpp has another architecture for models with experts, in which every feed-forward layer is of experts
- time steps are bounded by ``time_step_limit``, as in NVIDIA's own code; transformers bounds them by ``time_step_min``
  in prompts, and not at all in decoding

Source: Nemotron-H, NVIDIA 2025, arXiv:2504.03624.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.language.decoder_config import DecoderConfig, LayerSpec
from pippin.language.families.deepseek import balanced_router, expert_counts
from pippin.language.families.experts import most_experts, stacked
from pippin.language.families.family import Family, Fields, TensorRule, activation_of, read_decoder, refuse, rename
from pippin.language.families.gguf_layout import GGUFHeader, GGUFLayout
from pippin.language.families.gguf_recurrent import (
    has_bias,
    key_heads,
    mamba_fields,
    mamba_metadata,
    mamba_rules,
    mixer_config,
    recurrent_layers,
)
from pippin.language.families.hybrid import recurrence, time_step_fields, time_steps
from pippin.language.families.mamba2 import mixer_rules
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import NO_FEED_FORWARD, FeedForwardSpec
from pippin.nn.recurrent.mamba2 import Mamba2Spec

_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS: Mapping[str, str] = {"linear_attention": "mamba", "full_attention": "attention"}
"""Today's names of what older files call otherwise."""


def _kinds(config: Fields) -> list[str]:
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if kinds is None:
        kinds = [_PATTERN.get(letter, letter) for letter in config["hybrid_override_pattern"]]
    kinds = [_KINDS.get(kind, kind) for kind in kinds]
    if unknown := set(kinds) - set(_PATTERN.values()):
        raise UnsupportedModel(f"layers of the kind {unknown.pop()!r} are not supported for the nemotron_h family")
    return kinds


def _read(config: Fields) -> DecoderConfig:
    low, high = time_steps(config)
    recurrent = Mamba2Spec(
        heads=config["mamba_num_heads"],
        head_dim=config["mamba_head_dim"],
        state=config["ssm_state_size"],
        groups=config.get("n_groups", config.get("mamba_n_groups", 8)),
        conv=config.get("conv_kernel", config.get("mamba_d_conv", 4)),
        conv_bias=config.get("use_conv_bias", config.get("mamba_conv_bias", True)),
        bias=bool(config.get("use_bias")),
        min_step=low,
        max_step=high,
    )
    inner = FeedForwardSpec(
        config["intermediate_size"],
        activation_of(config, "mlp_hidden_act", "relu2"),
        gated=False,
        bias=bool(config.get("mlp_bias")),
    )
    kinds = _kinds(config)
    base = read_decoder(
        "nemotron_h",
        {**config, "num_hidden_layers": len(kinds)},
        eps="layer_norm_epsilon",
        feedforward=inner,
        rotary=lambda index, local: None,
        local=lambda index: False,
    )
    layers = {
        "mamba": LayerSpec.recurring(recurrent, NO_FEED_FORWARD),
        "attention": LayerSpec(AttentionSpec(rotary=None), NO_FEED_FORWARD),
        "mlp": LayerSpec(AttentionSpec(rotary=None), inner, attends=False),
    }
    if "moe" in kinds:
        layers["moe"] = LayerSpec(AttentionSpec(rotary=None), _experts(config, inner), attends=False)
    return replace(base, layers=tuple(layers[kind] for kind in kinds))


def _experts(config: Fields, dense: FeedForwardSpec) -> FeedForwardSpec:
    refuse("nemotron_h", config, "moe_latent_size")
    if dense.bias:
        raise UnsupportedModel("experts with biases are not supported for the nemotron_h family")
    return replace(
        dense,
        intermediate_size=config["moe_intermediate_size"],
        num_experts=config["n_routed_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        norm_topk_prob=config.get("norm_topk_prob", True),
        shared_intermediate_size=config["moe_shared_expert_intermediate_size"],
        shared_gate=False,
        router=balanced_router(config),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    spec: Mamba2Spec = recurrence(config)
    kinds = [_kind(layer) for layer in config.layers]
    inner = {kind: layer.feedforward for kind, layer in zip(kinds, config.layers, strict=True)}
    dense = inner.get("mlp") or inner.get("moe") or FeedForwardSpec(1, "relu2")
    return {
        "layers_block_type": kinds,
        "intermediate_size": dense.intermediate_size,
        "mlp_hidden_act": dense.activation,
        "mlp_bias": dense.bias,
        **(_expert_fields(inner["moe"]) if "moe" in inner else {}),
        "mamba_num_heads": spec.heads,
        "mamba_head_dim": spec.head_dim,
        "ssm_state_size": spec.state,
        "n_groups": spec.groups,
        "conv_kernel": spec.conv,
        "use_conv_bias": spec.conv_bias,
        "use_bias": spec.bias,
        **time_step_fields(spec),
        # zero has no logarithm, which transformers takes
        "time_step_min": max(spec.min_step, torch.finfo(torch.float32).tiny),
    }


def _kind(layer: LayerSpec) -> str:
    if layer.feedforward == NO_FEED_FORWARD:
        return "full_attention" if layer.recurrent is None else "linear_attention"
    return "moe" if layer.feedforward.num_experts else "mlp"


def _expert_fields(spec: FeedForwardSpec) -> dict[str, Any]:
    return {
        "moe_intermediate_size": spec.intermediate_size,
        "n_routed_experts": spec.num_experts,
        "num_experts_per_tok": spec.num_experts_per_tok,
        "norm_topk_prob": spec.norm_topk_prob,
        "moe_shared_expert_intermediate_size": spec.shared_intermediate_size,
        "routed_scaling_factor": spec.router.scale,
        "n_group": spec.router.num_groups,
        "topk_group": spec.router.num_chosen_groups,
    }


def _expert_rules(config: DecoderConfig) -> list[TensorRule]:
    """Rules of experts without gates: one by one in files, all in one tensor in transformers' memory."""
    count, found = most_experts(config), []
    for part in ("up_proj", "down_proj"):
        names = tuple(f"mlp.experts.{index}.{part}" for index in range(count))
        found += [TensorRule(name.replace("mlp", "mixer", 1), (name,)) for name in names]
        found.append(stacked(f"mixer.experts.{part}", names, lambda tensor, at: tensor[at], torch.stack))
        found.append(TensorRule(f"mixer.shared_experts.{part}", (f"mlp.shared_expert.{part}",)))
    return [*found, TensorRule("mixer.gate", ("mlp.gate",), leaves=("weight", "e_score_correction_bias"))]


def _rules(config: DecoderConfig) -> list[TensorRule]:
    return [
        *rename(embed_tokens="embeddings", norm="norm_f", input_layernorm="norm", post_attention_layernorm="norm"),
        *(TensorRule(f"mixer.{name}", (f"self_attn.{name}",)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        *(TensorRule(f"mixer.{name}", (f"mlp.{name}",)) for name in ("up_proj", "down_proj")),
        *mixer_rules("mixer"),
        *_expert_rules(config),
    ]


def _from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    layers, mamba = fields["num_hidden_layers"], mamba_fields(header)
    experts = _experts_from_gguf(header, fields) if header.get("expert_count", int, 0) else {}
    inner = header.metadata.get(f"{header.architecture}.feed_forward_length")
    feeds = [bool(one) for one in inner] if isinstance(inner, list) else [False] * layers
    recurs = recurrent_layers(header, layers)
    if len(feeds) < layers:
        raise CorruptedFile(f"{header.where}: feed_forward_length has {len(feeds)} entries for {layers} layers")
    feed = "moe" if experts else "mlp"
    return {
        **experts,
        "layers_block_type": [
            feed if feeds[index] else "mamba" if recurs[index] else "attention" for index in range(layers)
        ],
        "mamba_num_heads": mamba["heads"],
        "mamba_head_dim": mamba["head_dim"],
        "ssm_state_size": mamba["state"],
        **mixer_config(header),
        "mlp_bias": has_bias(header, "ffn_up"),
    }


def _experts_from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    return {
        **expert_counts(header, fields),
        "moe_shared_expert_intermediate_size": fields["shared_expert_intermediate_size"],
        "moe_latent_size": header.get("moe_latent_size", int, 0),
    }


def _experts_to_gguf(config: DecoderConfig) -> dict[str, Any]:
    """The metadata of experts; none of models without them.

    Raises:
        UnsupportedModel: dense feed-forward layers beside experts, or no shared expert, which llama.cpp does not have.
    """
    inner = {_kind(layer): layer.feedforward for layer in config.layers}
    if "moe" not in inner:
        return {}
    if "mlp" in inner:
        raise UnsupportedModel("llama.cpp has no nemotron_h models with both experts and dense feed-forward layers")
    experts = inner["moe"]
    if not experts.shared_intermediate_size:
        raise UnsupportedModel("llama.cpp has no nemotron_h models with experts of which none is shared")
    return {
        "expert_feed_forward_length": experts.intermediate_size,
        "expert_shared_feed_forward_length": experts.shared_intermediate_size,
        "expert_shared_count": 1,
        "expert_weights_norm": experts.norm_topk_prob,
        "expert_weights_scale": float(experts.router.scale),
        "expert_group_count": experts.router.num_groups,
        "expert_group_used_count": experts.router.num_chosen_groups,
    }


def _to_gguf(config: DecoderConfig) -> dict[str, Any]:
    return {
        **_experts_to_gguf(config),
        **mamba_metadata(config),
        "feed_forward_length": [layer.feedforward.intermediate_size for layer in config.layers],
        "attention.head_count_kv": key_heads(config),
        "rope.scaling.finetuned": False,
        "attention.layer_norm_epsilon": config.rms_norm_eps,  # llama.cpp asks for both
    }


def _gguf_rules(config: DecoderConfig) -> list[TensorRule]:
    return [*rename(post_attention_layernorm="attn_norm"), *mamba_rules(config)]


_GGUF = GGUFLayout(
    "nemotron_h",
    _from_gguf,
    _to_gguf,
    _gguf_rules,
    any_head_dim=True,
    biases=("feed-forward",),
    with_experts="nemotron_h_moe",
)
NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    _read,
    _write,
    _rules,
    prefix="backbone.",
    eps="layer_norm_epsilon",
    gguf=_GGUF,
)
