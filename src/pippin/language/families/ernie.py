"""ERNIE 4.5: Llama with interleaved rotation, and its mixture of experts.

Notable here:
- a bias that balances the load of experts moves the choice, not the weights; shared experts are as one dense layer
"""

from __future__ import annotations

from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.experts import expert_rules, shared_expert
from pippin.language.families.family import (
    Family,
    Fields,
    TensorRule,
    activation_of,
    read_decoder,
    refuse,
    rotated_rows,
)
from pippin.language.families.gguf_layout import GGUFHeader, GGUFLayout
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.feedforward.routing import RouterSpec


def _read(config: Fields) -> DecoderConfig:
    bias = bool(config.get("use_bias"))
    inner = FeedForwardSpec(config["intermediate_size"], activation_of(config), bias=bias)
    return read_decoder("ernie4_5", config, feedforward=inner, tied=True, qkv_bias=bias, output_bias=bias)


def _read_moe(config: Fields) -> DecoderConfig:
    refuse("ernie4_5_moe", config, "use_bias")
    activation = activation_of(config)
    end = config.get("moe_layer_end_index", -1)
    routed = range(config.get("moe_layer_start_index", 1), config["num_hidden_layers"] if end == -1 else end + 1)
    interval = config.get("moe_layer_interval", 1)

    def feedforward(index: int) -> FeedForwardSpec:
        if index not in routed or (index + 1) % interval:
            return FeedForwardSpec(config["intermediate_size"], activation)
        size = config["moe_intermediate_size"]
        return FeedForwardSpec(
            size,
            activation,
            num_experts=config["moe_num_experts"],
            num_experts_per_tok=config["moe_k"],
            shared_intermediate_size=size * (config.get("moe_num_shared_experts") or 0),
            shared_gate=False,
            router=RouterSpec(choice_bias=True),
        )

    fields = {"rope_theta": 500_000.0, **config}
    return read_decoder("ernie4_5_moe", fields, feedforward=feedforward, tied=True)


def _write_moe(config: DecoderConfig) -> dict[str, Any]:
    specs = [layer.feedforward for layer in config.layers]
    sparse = [index for index, spec in enumerate(specs) if spec.num_experts]
    one = specs[sparse[0]]
    dense = next((spec for spec in specs if not spec.num_experts), one)
    return {
        "intermediate_size": dense.intermediate_size,
        "moe_intermediate_size": one.intermediate_size,
        "moe_num_experts": one.num_experts,
        "moe_k": one.num_experts_per_tok,
        "moe_num_shared_experts": one.shared_intermediate_size // one.intermediate_size,
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
        "moe_layer_interval": sparse[1] - sparse[0] if len(sparse) > 1 else 1,
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"use_bias": config.qkv_bias}


def _rules(config: DecoderConfig) -> list[TensorRule]:
    return rotated_rows(interleaved=True)


def _choice_bias(stored: str, *, whole: bool = False) -> TensorRule:
    """The bias of the choice of experts, which is stored as a row."""
    return TensorRule(
        stored,
        ("mlp.gate",),
        lambda tensor, config: [tensor.flatten()],
        lambda parts, config: parts[0][None],
        leaves=("e_score_correction_bias",),
        whole=whole,
    )


def _moe_rules(config: DecoderConfig) -> list[TensorRule]:
    bias = [_choice_bias(stored) for stored in ("mlp.moe_statics", "mlp.gate.moe_statics")]
    return [*expert_rules()(config), *shared_expert(), *bias, *rotated_rows(interleaved=True)]


_GGUF = GGUFLayout("ernie4_5", interleaved=True, any_head_dim=True, biases=("attention output",))
ERNIE4_5 = Family("ernie4_5", "Ernie4_5ForCausalLM", _read, _write, _rules, gguf=_GGUF)


def _moe_from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    return {
        "moe_num_experts": fields["num_experts"],
        "moe_k": fields["num_experts_per_tok"],
        "moe_num_shared_experts": header.get("expert_shared_count", int, 0),
        "moe_layer_start_index": header.get("leading_dense_block_count", int, 0),
        "moe_layer_interval": header.get("interleave_moe_layer_step", int, 1),
    }


def _moe_to_gguf(config: DecoderConfig) -> dict[str, Any]:
    fields = _write_moe(config)
    shared = fields["moe_num_shared_experts"]
    return {
        "feed_forward_length": fields["intermediate_size"],
        "expert_feed_forward_length": fields["moe_intermediate_size"],
        "expert_shared_count": shared,
        "expert_shared_feed_forward_length": shared * fields["moe_intermediate_size"] or None,
        "leading_dense_block_count": fields["moe_layer_start_index"],
        "interleave_moe_layer_step": fields["moe_layer_interval"],
    }


def _moe_gguf_rules(config: DecoderConfig) -> list[TensorRule]:
    return [_choice_bias("exp_probs_b.bias", whole=True)]


_GGUF_MOE = GGUFLayout(
    "ernie4_5-moe", _moe_from_gguf, _moe_to_gguf, _moe_gguf_rules, interleaved=True, any_head_dim=True
)
ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    _read_moe,
    _write_moe,
    _moe_rules,
    predicts_more=True,
    gguf=_GGUF_MOE,
)
