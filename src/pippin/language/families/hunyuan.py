"""Hunyuan, dense and with experts: Llama with norms of heads after the rotation, whose base may be stretched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.experts import expert_rules, shared_expert
from pippin.language.families.family import (
    Family,
    Fields,
    TensorRule,
    activation_of,
    read_decoder,
    read_rotary,
    rename,
)
from pippin.language.families.gguf_layout import GGUFHeader, GGUFLayout
from pippin.nn.attention.rotary import Rotary
from pippin.nn.feedforward.feedforward import FeedForwardSpec


def _dense(config: Fields) -> DecoderConfig:
    return _read("hunyuan_v1_dense", config)


def _mixture(config: Fields) -> DecoderConfig:
    """Files give the number of experts, and of those for a token, once or for each layer."""

    def each(name: str, index: int) -> int:
        value = config[name]
        number: int = value if isinstance(value, int) else value[index]
        return number

    def feedforward(index: int) -> FeedForwardSpec:
        return FeedForwardSpec(
            config["intermediate_size"],
            activation_of(config),
            num_experts=each("num_experts", index),
            num_experts_per_tok=each("moe_topk", index),
            shared_intermediate_size=config["intermediate_size"],
            shared_gate=False,
        )

    return _read("hunyuan_v1_moe", config, feedforward)


def _read(family: str, config: Fields, feedforward: Callable[[int], FeedForwardSpec] | None = None) -> DecoderConfig:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    alpha = scaling.get("alpha") if scaling.get("rope_type", scaling.get("type")) == "dynamic" else None
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]

    def rotary(index: int, local: bool) -> Rotary:
        if not alpha:
            return read_rotary(config)
        theta = scaling.get("rope_theta", config.get("rope_theta", 10_000.0))
        return Rotary(theta * alpha ** (head_dim / (head_dim - 2)))

    bias = bool(config.get("attention_bias"))
    return read_decoder(
        family,
        config,
        feedforward=feedforward,
        rotary=rotary,
        qk_norm="rotated head",
        qkv_bias=bias,
        output_bias=bias,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias}


def _write_mixture(config: DecoderConfig) -> dict[str, Any]:
    specs = [layer.feedforward for layer in config.layers]
    return {
        **_write(config),
        "num_experts": specs[0].num_experts,
        "moe_topk": [spec.num_experts_per_tok for spec in specs],
    }


def _mixture_rules(config: DecoderConfig) -> list[TensorRule]:
    return [*_rules(config), *expert_rules(router="mlp.gate.wg")(config), *shared_expert("mlp.shared_mlp")]


def _rules(config: DecoderConfig) -> list[TensorRule]:
    return rename(self_attn__q_norm="self_attn.query_layernorm", self_attn__k_norm="self_attn.key_layernorm")


def _from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    # usually the base is stored as stretched
    alpha, rope = header.get("rope.scaling.alpha", float, 0.0), fields["rope_parameters"]
    return {"rope_parameters": {**rope, "rope_type": "dynamic", "alpha": alpha}} if alpha > 0 else {}


_GGUF = GGUFLayout("hunyuan-dense", _from_gguf, any_head_dim=True)
HUNYUAN = Family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", _dense, _write, _rules, gguf=_GGUF)


def _mixture_from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    return {**_from_gguf(header, fields), "moe_topk": fields["num_experts_per_tok"]}


def _mixture_to_gguf(config: DecoderConfig) -> dict[str, Any]:
    inner = config.layers[0].feedforward
    return {
        "expert_feed_forward_length": inner.intermediate_size,
        "expert_shared_feed_forward_length": inner.shared_intermediate_size,
        "expert_shared_count": 1,
    }


_GGUF_MOE = GGUFLayout("hunyuan-moe", _mixture_from_gguf, _mixture_to_gguf, any_head_dim=True)
HUNYUAN_MOE = Family(
    "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", _mixture, _write_mixture, _mixture_rules, gguf=_GGUF_MOE
)
