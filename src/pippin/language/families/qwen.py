"""Qwen 2 (biases on queries, keys and values), Qwen 3 (norms of heads instead) and their mixtures of experts.

Notable here:
- experts lie one by one in older files and as one tensor in newer ones; the matrices of a shared expert, which every
  token of Qwen 2 takes, are named as those of a dense layer
"""

from __future__ import annotations

from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.experts import expert_rules
from pippin.language.families.family import Family, Fields, activation_of, expert_fields, read_decoder
from pippin.language.families.gguf_layout import GGUFHeader, GGUFLayout
from pippin.nn.feedforward.feedforward import FeedForwardSpec


def _local(config: Fields) -> Any:
    if config.get("layer_types") is not None:
        return None
    windowed = bool(config.get("sliding_window")) and bool(config.get("use_sliding_window"))
    return lambda index: windowed and index >= config.get("max_window_layers", 0)


def _qwen2(config: Fields) -> DecoderConfig:
    return read_decoder("qwen2", config, local=_local(config), qkv_bias=True)


def _qwen3(config: Fields) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    return read_decoder("qwen3", config, local=_local(config), qkv_bias=bias, output_bias=bias, qk_norm="head")


def read_mixture(config: Fields, shared: int, normalized: bool) -> Any:
    """The feed-forward layer of each layer; some are dense.

    Args:
        config: the contents of `config.json`.
        shared: inner size of a shared expert.
        normalized: whether weights of experts sum to one, where the file does not say so.
    """

    def feedforward(index: int) -> FeedForwardSpec:
        activation = activation_of(config)
        sparse = (index + 1) % config.get("decoder_sparse_step", 1) == 0
        if index in (config.get("mlp_only_layers") or ()) or not sparse:
            return FeedForwardSpec(config["intermediate_size"], activation)
        return FeedForwardSpec(
            config["moe_intermediate_size"],
            activation,
            num_experts=config.get("num_experts") or config["num_local_experts"],
            num_experts_per_tok=config["num_experts_per_tok"],
            norm_topk_prob=config.get("norm_topk_prob", normalized),
            shared_intermediate_size=shared,
        )

    return feedforward


def _qwen2_moe(config: Fields) -> DecoderConfig:
    shared = config["shared_expert_intermediate_size"]
    feedforward = read_mixture(config, shared, False)
    return read_decoder(
        "qwen2_moe", config, local=_local(config), feedforward=feedforward, qkv_bias=config.get("qkv_bias", True)
    )


def _qwen3_moe(config: Fields) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    feedforward = read_mixture(config, 0, False)
    return read_decoder(
        "qwen3_moe",
        config,
        local=_local(config),
        feedforward=feedforward,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_bias": config.output_bias}


def write_mixture(config: DecoderConfig) -> dict[str, Any]:
    """The fields of experts."""
    specs = [layer.feedforward for layer in config.layers]
    dense = [index for index, spec in enumerate(specs) if not spec.num_experts]
    sparse = next(spec for spec in specs if spec.num_experts)
    fields = {"mlp_only_layers": dense, **expert_fields(sparse), **_write(config)}
    if dense:
        fields["intermediate_size"] = specs[dense[0]].intermediate_size
    if sparse.shared_intermediate_size:
        fields |= {"shared_expert_intermediate_size": sparse.shared_intermediate_size, "qkv_bias": config.qkv_bias}
    return fields


def mixture_from_gguf(normalized: bool) -> Any:
    """What a GGUF header says of experts, as fields of a `config.json`; ``normalized``: their weights sum to one."""

    def read(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
        # older files have no sizes of their own for the experts
        size = header.count("feed_forward_length", 0)
        return {
            "norm_topk_prob": normalized,
            "moe_intermediate_size": fields.get("moe_intermediate_size", size // fields["num_experts_per_tok"]),
            "shared_expert_intermediate_size": fields.get("shared_expert_intermediate_size", size),
        }

    return read


def mixture_to_gguf(config: DecoderConfig) -> dict[str, Any]:
    """The keys of the experts' sizes."""
    inner = config.layers[0].feedforward
    return {
        "expert_feed_forward_length": inner.intermediate_size,
        "expert_shared_feed_forward_length": inner.shared_intermediate_size or None,
    }


_GGUF2_EXPERTS = GGUFLayout("qwen2moe", mixture_from_gguf(False), mixture_to_gguf, own_output=True)
_GGUF3_EXPERTS = GGUFLayout("qwen3moe", mixture_from_gguf(True), mixture_to_gguf, any_head_dim=True)
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _qwen2, gguf=GGUFLayout("qwen2"))
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _qwen3, _write, gguf=GGUFLayout("qwen3", any_head_dim=True))
QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2_moe, write_mixture, expert_rules(), gguf=_GGUF2_EXPERTS)
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe, write_mixture, expert_rules(), gguf=_GGUF3_EXPERTS)
