"""StarCoder 2: layer norms, biases everywhere, and a feed-forward layer without gate."""

from __future__ import annotations

from typing import Any

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import Family, Fields, TensorRule, activation_of, read_decoder, rename
from pippin.language.families.gguf_layout import ALL_BIASES, GGUFLayout
from pippin.nn.feedforward.feedforward import FeedForwardSpec


def _read(config: Fields) -> DecoderConfig:
    bias, windowed = bool(config.get("use_bias", True)), bool(config.get("sliding_window"))
    activation = activation_of(config, default="gelu_pytorch_tanh")
    return read_decoder(
        "starcoder2",
        config,
        eps="norm_epsilon",
        feedforward=FeedForwardSpec(config["intermediate_size"], activation, gated=False, bias=bias),
        local=lambda index: windowed,
        tied=True,
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        output_bias=bias,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"use_bias": config.qkv_bias}


def _rules(config: DecoderConfig) -> list[TensorRule]:
    return rename(mlp__up_proj="mlp.c_fc", mlp__down_proj="mlp.c_proj")


_GGUF = GGUFLayout("starcoder2", biases=ALL_BIASES)
STARCODER2 = Family("starcoder2", "Starcoder2ForCausalLM", _read, _write, _rules, eps="norm_epsilon", gguf=_GGUF)
