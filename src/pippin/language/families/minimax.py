"""MiniMax M2: experts scored by sigmoids with a bias for the choice, norms over all heads, heads rotated in part."""

from __future__ import annotations

from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import Family, Fields, TensorRule, activation_of, read_decoder, rotated_rows
from pippin.language.families.gguf_layout import SIGMOID_ROUTER, GGUFLayout
from pippin.language.families.mixtral import mixtral_rules
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.feedforward.routing import RouterSpec


def _read(config: Fields) -> DecoderConfig:
    inner = FeedForwardSpec(
        config["intermediate_size"],
        activation_of(config),
        num_experts=config["num_local_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        router=RouterSpec(scores="sigmoid", choice_bias=True),
    )
    fields = dict(config)
    if "rotary_dim" in config:
        fields.setdefault("partial_rotary_factor", config["rotary_dim"] / config["head_dim"])
    fields.setdefault("rope_theta", 5_000_000.0)
    return read_decoder("minimax_m2", fields, feedforward=inner, qk_norm="full")


def _write(config: DecoderConfig) -> dict[str, Any]:
    inner = config.layers[0].feedforward
    return {"num_local_experts": inner.num_experts, "num_experts_per_tok": inner.num_experts_per_tok}


def _rules(config: DecoderConfig) -> list[TensorRule]:
    bias = [
        TensorRule(stored, ("mlp.gate",), leaves=("e_score_correction_bias",)) for stored in ("block_sparse_moe", "mlp")
    ]
    return [*mixtral_rules(config), *bias, *rotated_rows(interleaved=False, norms=True)]


def _to_gguf(config: DecoderConfig) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config.layers[0].feedforward.intermediate_size,
        "expert_gating_func": SIGMOID_ROUTER,
    }


_GGUF = GGUFLayout("minimax-m2", write=_to_gguf, any_head_dim=True, own_output=True)
MINIMAX_M2 = Family("minimax_m2", "MiniMaxM2ForCausalLM", _read, _write, _rules, predicts_more=True, gguf=_GGUF)
