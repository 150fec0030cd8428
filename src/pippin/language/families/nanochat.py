"""nanochat: norms without weights, of embeddings and rotated heads too; squared ReLU, and bounded logits.

Notable here:
- heads are rotated in the other direction, which is that of exchanged halves

Source: github.com/karpathy/nanochat.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import Family, Fields, TensorRule, activation_of, read_decoder, rename
from pippin.nn.feedforward.feedforward import FeedForwardSpec


def _read(config: Fields) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    inner = FeedForwardSpec(config["intermediate_size"], activation_of(config, default="relu2"), gated=False)
    return read_decoder(
        "nanochat",
        config,
        feedforward=inner,
        norm_weight=False,
        embedding_norm=True,
        qk_norm="rotated head",
        qkv_bias=bias,
        output_bias=bias,
        logit_softcap=config.get("final_logit_softcapping", 15.0),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "final_logit_softcapping": config.logit_softcap}


def _exchanged(rows: Tensor, config: DecoderConfig) -> Tensor:
    """The halves of each head exchanged; its own inverse."""
    heads: Tensor = rows.unflatten(0, (-1, 2, config.head_dim // 2))
    return heads.flip(1).flatten(0, 2)


def _rules(config: DecoderConfig) -> list[TensorRule]:
    rotated = [
        TensorRule(
            name,
            (name,),
            lambda tensor, config: [_exchanged(tensor, config)],
            lambda parts, config: _exchanged(parts[0], config),
        )
        for name in ("self_attn.q_proj", "self_attn.k_proj")
    ]
    return [*rotated, *rename(mlp__up_proj="mlp.fc1", mlp__down_proj="mlp.fc2")]


NANOCHAT = Family("nanochat", "NanoChatForCausalLM", _read, _write, _rules)
