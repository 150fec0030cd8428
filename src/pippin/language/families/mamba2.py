"""Mamba 2: layers of nothing but a recurrence, and no attention.

Source: Dao and Gu 2024, arXiv:2405.21060.
"""

from __future__ import annotations

from typing import Any

from pippin.core.errors import UnsupportedModel
from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import Family, Fields, TensorRule, read_decoder, rename
from pippin.language.families.gguf_layout import GGUFHeader, GGUFLayout
from pippin.language.families.gguf_recurrent import mamba_fields, mamba_metadata, mamba_rules, mixer_config
from pippin.language.families.hybrid import parameters, recurrence, time_step_fields, time_steps, with_recurrence
from pippin.nn.feedforward.feedforward import NO_FEED_FORWARD
from pippin.nn.recurrent.mamba2 import Mamba2Spec

_LONGEST = 1 << 20
"""Positions of a model that has none: what an engine plans for."""


def _read(config: Fields) -> DecoderConfig:
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act={config['hidden_act']!r} is not supported for the mamba2 family")
    heads, head_dim = config["num_heads"], config["head_dim"]
    if heads * head_dim != config.get("expand", 2) * config["hidden_size"]:
        raise ValueError(
            f"{heads} heads of {head_dim} channels are not {config.get('expand', 2)} times the hidden size"
        )
    low, high = time_steps(config)
    spec = Mamba2Spec(
        heads=heads,
        head_dim=head_dim,
        state=config["state_size"],
        groups=config.get("n_groups", 8),
        conv=config.get("conv_kernel", 4),
        conv_bias=config.get("use_conv_bias", True),
        bias=bool(config.get("use_bias")),
        min_step=low,
        max_step=high,
    )
    nothing = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "max_position_embeddings": _LONGEST}
    base = read_decoder(
        "mamba2",
        {**config, **nothing},
        eps="layer_norm_epsilon",
        feedforward=NO_FEED_FORWARD,
        rotary=lambda index, local: None,
        local=lambda index: False,
    )
    return with_recurrence(base, spec, ["recurrent"] * len(base.layers))


def _write(config: DecoderConfig) -> dict[str, Any]:
    spec: Mamba2Spec = recurrence(config)
    return {
        "num_heads": spec.heads,
        "head_dim": spec.head_dim,
        "expand": spec.inner / config.hidden_size
        if spec.inner % config.hidden_size
        else spec.inner // config.hidden_size,
        "state_size": spec.state,
        "n_groups": spec.groups,
        "conv_kernel": spec.conv,
        "use_conv_bias": spec.conv_bias,
        "use_bias": spec.bias,
        **time_step_fields(spec),
    }


def _rules(config: DecoderConfig) -> list[TensorRule]:
    return [
        *rename(embed_tokens="embeddings", norm="norm_f", input_layernorm="norm"),
        *mixer_rules("mixer"),
        TensorRule("embedding", ("embed_tokens",)),  # in the oldest files
    ]


def mixer_rules(stored: str) -> list[TensorRule]:
    """Rules of a recurrence under this name."""
    return [
        *(TensorRule(f"{stored}.{name}", (f"recurrent.{name}",)) for name in ("in_proj", "norm", "out_proj")),
        TensorRule(f"{stored}.conv1d", ("recurrent.conv",)),
        parameters(stored, "A_log", "D", "dt_bias"),
    ]


def _from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    mamba = mamba_fields(header)
    return {
        "num_heads": mamba["heads"],
        "head_dim": mamba["head_dim"],
        "expand": mamba["heads"] * mamba["head_dim"] / fields["hidden_size"],
        "state_size": mamba["state"],
        **mixer_config(header),
    }


def _to_gguf(config: DecoderConfig) -> dict[str, Any]:
    nothing = {"feed_forward_length": 0, "attention.head_count": 0, "attention.head_count_kv": None}
    sizes = {"attention.key_length": None, "attention.value_length": None}
    return {**mamba_metadata(config), **nothing, **sizes}


_GGUF = GGUFLayout("mamba2", _from_gguf, _to_gguf, mamba_rules, any_head_dim=True)
MAMBA2 = Family(
    "mamba2",
    "Mamba2ForCausalLM",
    _read,
    _write,
    _rules,
    prefix="backbone.",
    eps="layer_norm_epsilon",
    gguf=_GGUF,
)
