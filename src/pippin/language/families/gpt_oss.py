"""gpt-oss: attention with sinks, every other layer within a window, and experts with biases and bounded gates.

Notable here:
- all experts lie in one tensor, with inputs as rows, and gate and up outputs in turn
- the scores of a router's choices are normalized among themselves, as a softmax over all experts is once normalized

Source: gpt-oss model card, OpenAI 2025, arXiv:2508.10925.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pippin.core.errors import UnsupportedModel
from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.experts import downs, gates_and_ups, most_experts, stacked
from pippin.language.families.family import Family, Fields, TensorRule, layer_types, read_decoder, rename
from pippin.language.families.gguf_layout import ALL_BIASES, GGUFHeader, GGUFLayout
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.feedforward.routing import RouterSpec

_ALPHA = 1.702


def _read(config: Fields) -> DecoderConfig:
    if config.get("swiglu_alpha", _ALPHA) != _ALPHA:
        raise UnsupportedModel(f"swiglu_alpha={config['swiglu_alpha']!r} is not supported, only {_ALPHA} is")
    kinds = config.get("layer_types")
    inner = FeedForwardSpec(
        config["intermediate_size"],
        "gelu_sigmoid",
        num_experts=config["num_local_experts"],
        num_experts_per_tok=config.get("num_experts_per_tok") or config["experts_per_token"],
        bias=True,
        router=RouterSpec(bias=True),
        limit=float(config.get("swiglu_limit", 7.0)),
    )
    bias = bool(config.get("attention_bias", True))
    return read_decoder(
        "gpt_oss",
        config,
        feedforward=inner,
        attention=AttentionSpec(sinks=True),
        local=None if kinds is not None else (lambda index: index % 2 == 0),
        qkv_bias=bias,
        output_bias=bias,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    inner = config.layers[0].feedforward
    return {
        "hidden_act": "silu",
        "num_local_experts": inner.num_experts,
        "num_experts_per_tok": inner.num_experts_per_tok,
        "swiglu_limit": inner.limit,
        "attention_bias": config.qkv_bias,
        "layer_types": layer_types(config),
    }


def _interleaved(parts: list[Tensor]) -> Tensor:
    """Gate and up of each expert, their outputs in turn as columns (of a bias: in turn)."""
    pairs = [torch.stack(pair, 1).flatten(0, 1) for pair in zip(parts[0::2], parts[1::2], strict=True)]
    return torch.stack(pairs).transpose(1, -1)


def _rules(config: DecoderConfig) -> list[TensorRule]:
    gates, down = gates_and_ups(most_experts(config)), downs(most_experts(config))
    room = "mlp.experts"
    return [
        TensorRule("mlp.router", ("mlp.gate",)),
        stacked(f"{room}.gate_up_proj", gates, lambda all_, at: all_[at // 2][:, at % 2 :: 2].t(), _interleaved),
        stacked(f"{room}.gate_up_proj_bias", gates, lambda all_, at: all_[at // 2][at % 2 :: 2], _interleaved, "bias"),
        stacked(
            f"{room}.down_proj", down, lambda all_, at: all_[at].t(), lambda parts: torch.stack(parts).transpose(1, 2)
        ),
        stacked(f"{room}.down_proj_bias", down, lambda all_, at: all_[at], torch.stack, "bias"),
    ]


def _from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    # the range of dimensions that its yarn interpolates does not begin and end at whole ones
    rope = {**fields["rope_parameters"], "truncate": False}
    return {"intermediate_size": header.count("expert_feed_forward_length"), "rope_parameters": rope}


def _to_gguf(config: DecoderConfig) -> dict[str, Any]:
    return {"expert_feed_forward_length": config.layers[0].feedforward.intermediate_size}


def _gguf_rules(config: DecoderConfig) -> list[TensorRule]:
    sinks = TensorRule("attn_sinks.weight", ("self_attn",), leaves=("sinks",), whole=True)
    return [sinks, *rename(post_attention_layernorm="post_attention_norm")]


_GGUF = GGUFLayout(
    "gpt-oss",
    _from_gguf,
    _to_gguf,
    _gguf_rules,
    pattern=2,
    windows=True,
    any_head_dim=True,
    biases=ALL_BIASES,
    own_output=True,
)
GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", _read, _write, _rules, gguf=_GGUF)
