"""Mixtral: Mistral with experts."""

from __future__ import annotations

from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.experts import expert_rules
from pippin.language.families.family import Family, Fields, TensorRule, activation_of, read_decoder
from pippin.language.families.gguf_layout import GGUFHeader, GGUFLayout, rotary_table
from pippin.nn.feedforward.feedforward import FeedForwardSpec


def _read(config: Fields) -> DecoderConfig:
    inner = FeedForwardSpec(
        config["intermediate_size"],
        activation_of(config),
        num_experts=config["num_local_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
    )
    windowed = bool(config.get("sliding_window"))
    return read_decoder("mixtral", config, feedforward=inner, local=lambda index: windowed)


def _write(config: DecoderConfig) -> dict[str, Any]:
    inner = config.layers[0].feedforward
    return {"num_local_experts": inner.num_experts, "num_experts_per_tok": inner.num_experts_per_tok}


# the files of old name an expert's matrices w1 (gate), w2 (down) and w3 (up)
SINGLE = {
    part: f"block_sparse_moe.experts.{{}}.{stored}"
    for part, stored in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
}


def mixtral_rules(config: DecoderConfig, router: str = "mlp.gate") -> list[TensorRule]:
    """Rules of experts in Mixtral's files, and in memory with another name of the router."""
    return [*expert_rules(SINGLE, router="block_sparse_moe.gate")(config), *expert_rules({}, router)(config)]


def _is_mixtral(header: GGUFHeader) -> bool:
    return bool(header.get("expert_count", int, 0))


_GGUF = GGUFLayout("llama", tables=rotary_table, interleaved=True, applies=_is_mixtral, any_head_dim=True)
MIXTRAL = Family("mixtral", "MixtralForCausalLM", _read, _write, mixtral_rules, gguf=_GGUF)
