"""What families with recurrent layers share: which layers are recurrent, and rules for tensors that are no matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pippin.core.errors import UnsupportedModel
from pippin.language.decoder_config import DecoderConfig, LayerSpec, Recurrence
from pippin.language.families.family import Fields, TensorRule, from_halves, to_halves
from pippin.nn.recurrent.gated_norm import Gate
from pippin.nn.recurrent.mamba2 import Mamba2Spec

KINDS: Mapping[str, str] = {
    "linear_attention": "recurrent",
    "conv": "recurrent",
    "mamba": "recurrent",
    "recurrent": "recurrent",
    "full_attention": "attention",
    "attention": "attention",
    "sliding_attention": "attention",
}
"""What the names in a `config.json`, old and new, say that a layer is."""


def layer_kinds(config: Fields, kinds: Sequence[str]) -> list[str]:
    """Whether each layer is "recurrent" or "attention".

    Raises:
        UnsupportedModel: a kind of layer that nobody knows here.
        ValueError: a kind for each of another number of layers.
    """
    count = config["num_hidden_layers"]
    if len(kinds) != count:
        raise ValueError(f"layer_types names {len(kinds)} layers of {count}")
    if unknown := set(kinds) - KINDS.keys():
        raise UnsupportedModel(f"layers of the kind {unknown.pop()!r} are not supported; supported: {', '.join(KINDS)}")
    return [KINDS[kind] for kind in kinds]


def with_recurrence(config: DecoderConfig, spec: Recurrence, kinds: Sequence[str], **fields: Any) -> DecoderConfig:
    """The config with a recurrence in place of attention in some layers.

    Args:
        config: a config whose layers all attend.
        spec: the recurrence.
        kinds: for each layer "recurrent" or "attention".
        fields: further fields of the recurrent layers.
    """
    layers = tuple(
        replace(LayerSpec.recurring(spec, layer.feedforward), **fields) if kind == "recurrent" else layer
        for layer, kind in zip(config.layers, kinds, strict=True)
    )
    return replace(config, layers=layers)


def kinds_of(config: DecoderConfig, recurrent: str = "linear_attention") -> list[str]:
    """The field ``layer_types``: "full_attention", or this name for recurrent layers."""
    return ["full_attention" if layer.recurrent is None else recurrent for layer in config.layers]


def recurrence(config: DecoderConfig) -> Any:
    """The recurrence of the recurrent layers, which is the same in all of them; None if there are none."""
    return next((layer.recurrent for layer in config.layers if layer.recurrent is not None), None)


def parameters(stored: str, *leaves: str) -> TensorRule:
    """A rule for parameters of a recurrent layer that are no matrices, such as "A_log"."""
    return TensorRule(stored, ("recurrent",), leaves=leaves)


def rotated_in_part(*names: str, added: float = 0.0) -> list[TensorRule]:
    """Rules for tensors of a head whose dimensions are rotated in part: see `family.rotated_rows`.

    Args:
        names: their names, such as "self_attn.k_proj".
        added: what is added to the stored numbers, for norms that are stored minus one.
    """

    def split(tensor: Tensor, config: DecoderConfig) -> list[Tensor]:
        rows = to_halves(tensor, config)
        return [rows.float() + added if added else rows]

    def join(parts: Sequence[Tensor], config: DecoderConfig) -> Tensor:
        rows = from_halves(parts[0], config)
        return rows - added if added else rows

    return [TensorRule(name, (name,), split, join) for name in names]


def convolutions(stored: str, sizes: Sequence[int]) -> TensorRule:
    """A rule for the convolutions of queries, keys and values in one tensor."""
    return TensorRule(
        stored,
        ("recurrent.q_conv", "recurrent.k_conv", "recurrent.v_conv"),
        lambda tensor, config: tensor.split(list(sizes)),
        lambda parts, config: torch.cat(list(parts)),
    )


def read_mamba(config: Fields, inner: int, norm: Gate | None) -> Mamba2Spec:
    """A recurrence of Mamba-2 as Falcon-H1 and Granite describe it.

    Args:
        config: the contents of `config.json`.
        inner: channels of all heads.
        norm: the norm of its outputs.
    """
    heads, head_dim = config["mamba_n_heads"], config.get("mamba_d_head", "auto")
    head_dim = inner // heads if head_dim == "auto" else head_dim
    if heads * head_dim != inner:
        raise ValueError(f"{heads} heads of {head_dim} channels are not {inner} channels")
    low, high = time_steps(config)
    return Mamba2Spec(
        heads=heads,
        head_dim=head_dim,
        state=config["mamba_d_state"],
        groups=config.get("mamba_n_groups", 1),
        conv=config.get("mamba_d_conv", 4),
        conv_bias=config.get("mamba_conv_bias", True),
        bias=bool(config.get("mamba_proj_bias")),
        norm=norm,
        min_step=low,
        max_step=high,
    )


def write_mamba(spec: Mamba2Spec) -> dict[str, Any]:
    """The fields that `read_mamba` reads."""
    return {
        "mamba_n_heads": spec.heads,
        "mamba_d_head": spec.head_dim,
        "mamba_d_state": spec.state,
        "mamba_n_groups": spec.groups,
        "mamba_d_conv": spec.conv,
        "mamba_conv_bias": spec.conv_bias,
        "mamba_proj_bias": spec.bias,
        **time_step_fields(spec),
    }


def time_steps(config: Fields) -> tuple[float, float]:
    """The bounds of time steps of Mamba-2; zero and infinity where the file has none."""
    low, high = config.get("time_step_limit") or (0.0, math.inf)
    if isinstance(high, Mapping):  # transformers writes {"__float__": "Infinity"}, as JSON has no infinity
        high = high["__float__"]
    return float(low), float(high)


def time_step_fields(spec: Mamba2Spec) -> dict[str, Any]:
    """The field of bounds of time steps, which is left out where there are none: JSON has no infinity."""
    bounded = (spec.min_step, spec.max_step) != (0.0, math.inf)
    return {"time_step_limit": [spec.min_step, spec.max_step]} if bounded else {}
