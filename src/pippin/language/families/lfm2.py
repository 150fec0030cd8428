"""LFM2, dense and with experts: short convolutions, and attention with norms of heads in some layers.

Source: LFM2 technical report, Liquid AI 2025, arXiv:2511.23404.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.experts import expert_rules
from pippin.language.families.family import Family, Fields, TensorRule, read_decoder, rename
from pippin.language.families.gguf_layout import SIGMOID_ROUTER, GGUFHeader, GGUFLayout
from pippin.language.families.gguf_recurrent import has_bias, key_heads, recurrent_layers, short_convolution_rules
from pippin.language.families.hybrid import kinds_of, layer_kinds, recurrence, with_recurrence
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.feedforward.routing import RouterSpec
from pippin.nn.recurrent.convolution import ShortConvolutionSpec


def _inner_size(config: Fields) -> int:
    """The size of feed-forward layers, which the files say with a rule of rounding."""
    size = config.get("block_ff_dim", config["intermediate_size"])
    if not config.get("block_auto_adjust_ff_dim", True):
        return int(size)
    multiple = config.get("block_multiple_of", 256)
    size = int(config.get("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return int(-(-size // multiple) * multiple)


def _kinds(config: Fields) -> list[str]:
    kinds = config.get("layer_types")
    if kinds is None:
        attending = config.get("full_attn_idxs")
        count = config["num_hidden_layers"]
        attending = range(count) if attending is None else attending
        kinds = ["full_attention" if index in attending else "conv" for index in range(count)]
    return layer_kinds(config, kinds)


def _dense(config: Fields) -> DecoderConfig:
    return _read("lfm2", {**config, "intermediate_size": _inner_size(config)}, None)


def _mixture(config: Fields) -> DecoderConfig:
    router = RouterSpec(
        scores="sigmoid",
        choice_bias=bool(config.get("use_expert_bias", True)),
        scale=config.get("routed_scaling_factor", 1.0),
    )
    experts = FeedForwardSpec(
        config["moe_intermediate_size"],
        num_experts=config["num_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        norm_topk_prob=config.get("norm_topk_prob", True),
        router=router,
    )
    dense = FeedForwardSpec(config["intermediate_size"])
    return _read("lfm2_moe", config, lambda index: dense if index < config["num_dense_layers"] else experts)


def _read(family: str, config: Fields, feedforward: Callable[[int], FeedForwardSpec] | None) -> DecoderConfig:
    base = read_decoder(
        family,
        {"rope_theta": 1_000_000.0, **config},
        eps="norm_eps",
        feedforward=feedforward,
        local=lambda index: False,
        qk_norm="head",
        tied=config.get("tie_embedding", True),
    )
    spec = ShortConvolutionSpec(config.get("conv_L_cache", 3), bool(config.get("conv_bias")))
    return with_recurrence(base, spec, _kinds(config))


def _write(config: DecoderConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"layer_types": kinds_of(config, "conv")}
    if config.family == "lfm2":
        fields["block_auto_adjust_ff_dim"] = False
    else:
        fields |= _expert_fields([layer.feedforward for layer in config.layers])
    spec = recurrence(config)
    return fields if spec is None else fields | {"conv_L_cache": spec.conv, "conv_bias": spec.bias}


def _expert_fields(inner: Sequence[FeedForwardSpec]) -> dict[str, Any]:
    dense, sparse = [x for x in inner if not x.num_experts], next(x for x in inner if x.num_experts)
    return {
        "num_dense_layers": len(dense),
        "intermediate_size": (dense or inner)[0].intermediate_size,
        "moe_intermediate_size": sparse.intermediate_size,
        "num_experts": sparse.num_experts,
        "num_experts_per_tok": sparse.num_experts_per_tok,
        "norm_topk_prob": sparse.norm_topk_prob,
        "use_expert_bias": sparse.router.choice_bias,
        "routed_scaling_factor": sparse.router.scale,
    }


_SINGLE = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _mixture_rules(config: DecoderConfig) -> list[TensorRule]:
    room = "feed_forward"
    single = {part: f"{room}.experts.{{}}.{stored}" for part, stored in _SINGLE.items()}
    fused = (f"{room}.experts.gate_up_proj", f"{room}.experts.down_proj")
    bias = TensorRule(f"{room}.expert_bias", ("mlp.gate",), leaves=("e_score_correction_bias",), whole=True)
    return [*_rules(config), *expert_rules(single, f"{room}.gate", fused)(config), bias]


def _rules(config: DecoderConfig) -> list[TensorRule]:
    found = rename(
        norm="embedding_norm",
        input_layernorm="operator_norm",
        post_attention_layernorm="ffn_norm",
        mlp__gate_proj="feed_forward.w1",
        mlp__up_proj="feed_forward.w3",
        mlp__down_proj="feed_forward.w2",
        self_attn__o_proj="self_attn.out_proj",
        self_attn__q_norm="self_attn.q_layernorm",
        self_attn__k_norm="self_attn.k_layernorm",
        recurrent__in_proj="conv.in_proj",
        recurrent__conv="conv.conv",
        recurrent__out_proj="conv.out_proj",
    )
    parts = ("gate_proj", "up_proj", "down_proj")
    return found + rename(**{f"mlp__{part}": f"feed_forward.{part}" for part in parts})  # of mlx-lm


def _from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    recurs = recurrent_layers(header, fields["num_hidden_layers"])
    own: dict[str, Any] = {
        "layer_types": ["conv" if one else "full_attention" for one in recurs],
        "conv_L_cache": header.get("shortconv.l_cache", int),
        "conv_bias": has_bias(header, "shortconv.conv"),
        "block_auto_adjust_ff_dim": False,
    }
    if "expert_count" in header:
        own |= {
            "num_dense_layers": header.get("leading_dense_block_count", int, 0),
            "routed_scaling_factor": header.get("expert_weights_scale", float, 1.0),
            "use_expert_bias": has_bias(header, "exp_probs_b"),
        }
    return own


def _to_gguf(config: DecoderConfig) -> dict[str, Any]:
    own: dict[str, Any] = {"attention.head_count_kv": key_heads(config), "shortconv.l_cache": recurrence(config).conv}
    sparse = next((layer.feedforward for layer in config.layers if layer.feedforward.num_experts), None)
    if sparse is not None:
        own |= {
            "leading_dense_block_count": sum(not layer.feedforward.num_experts for layer in config.layers),
            "expert_feed_forward_length": sparse.intermediate_size,
            "expert_gating_func": SIGMOID_ROUTER,
        }
    return own


def _gguf_rules(config: DecoderConfig) -> list[TensorRule]:
    return [*rename(norm="token_embd_norm"), *short_convolution_rules()]


_GGUF = GGUFLayout("lfm2", _from_gguf, _to_gguf, _gguf_rules)
LFM2 = Family("lfm2", "Lfm2ForCausalLM", _dense, _write, _rules, eps="norm_eps", gguf=_GGUF)
LFM2_MOE = Family(
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    _mixture,
    _write,
    _mixture_rules,
    eps="norm_eps",
    gguf=replace(_GGUF, architecture="lfm2moe"),
)
