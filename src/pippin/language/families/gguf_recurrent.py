"""Recurrent layers in GGUF: the keys that describe them and where their tensors are.

Notable here:
- llama.cpp stores the rate of forgetting itself, where folders have the logarithm of its negative
- in Qwen 3.5 the heads of values that share a head of keys do not follow each other: all first ones, then all second
  ones. A decoder that was read from such a file keeps that order (`GatedDeltaSpec.tiled`), so that no block of a
  quantized matrix is cut

Source: llama.cpp's converter and the tensors that its models read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import TensorRule, rename
from pippin.language.families.gguf_layout import GGUFHeader
from pippin.language.families.hybrid import recurrence
from pippin.nn.recurrent.gated_delta import GatedDeltaSpec
from pippin.nn.recurrent.mamba2 import Mamba2Spec

_BLOCK: Final = 32
"""Weights of a row that are quantized together, at the least; a head of fewer cannot be moved as bytes."""


def recurrent_layers(header: GGUFHeader, layers: int, every: int | None = None) -> list[bool]:
    """Which layers are recurrent: as a list says, those without key heads, or all but each of so many.

    Args:
        header: the file's header.
        layers: number of layers.
        every: of how many layers one attends where the file does not say; None for files that must say it.

    Raises:
        CorruptedFile: nothing says it, or not of all layers.
    """
    given = header.metadata.get(f"{header.architecture}.attention.recurrent_layers")
    if isinstance(given, list):
        found = [bool(one) for one in given[:layers]]
    else:
        heads = header.metadata.get(f"{header.architecture}.attention.head_count_kv")
        if isinstance(heads, list):
            found = [not one for one in heads[:layers]]
        else:
            step = header.get("full_attention_interval", int, every)
            if step < 1:
                raise CorruptedFile(f"{header.where}: full_attention_interval is {step}")
            found = [(index + 1) % step != 0 for index in range(layers)]
    if len(found) < layers:
        raise CorruptedFile(f"{header.where}: {len(found)} layers are described, there are {layers}")
    return found


def key_heads(config: DecoderConfig) -> list[int]:
    """The number of key heads of each layer; 0 where nothing attends."""
    return [config.num_key_value_heads if layer.attends else 0 for layer in config.layers]


# --- Mamba 2 ----------------------------------------------------------------------------------------------------------


def mamba_fields(header: GGUFHeader) -> dict[str, Any]:
    """The sizes of a Mamba-2 layer: ``heads``, ``head_dim``, ``state``, ``groups`` and ``conv``."""
    heads, inner = header.get("ssm.time_step_rank", int), header.get("ssm.inner_size", int)
    if heads < 1 or inner % heads:
        raise CorruptedFile(f"{header.where}: {heads} heads do not divide {inner} channels")
    return {
        "heads": heads,
        "head_dim": inner // heads,
        "state": header.get("ssm.state_size", int),
        "groups": header.get("ssm.group_count", int, 1),
        "conv": header.get("ssm.conv_kernel", int),
    }


def mamba_config(header: GGUFHeader) -> dict[str, Any]:
    """The same as `hybrid.read_mamba` reads it, and whether there are biases."""
    names = {"heads": "n_heads", "head_dim": "d_head", "state": "d_state", "groups": "n_groups", "conv": "d_conv"}
    return {
        **{f"mamba_{names[name]}": value for name, value in mamba_fields(header).items()},
        "mamba_conv_bias": has_bias(header, "ssm_conv1d"),
        "mamba_proj_bias": has_bias(header, "ssm_in"),
    }


def mixer_config(header: GGUFHeader) -> dict[str, Any]:
    """Sizes and biases under the names that Mamba 2 and Nemotron-H share."""
    fields = mamba_fields(header)
    return {
        "n_groups": fields["groups"],
        "conv_kernel": fields["conv"],
        "use_conv_bias": has_bias(header, "ssm_conv1d"),
        "use_bias": has_bias(header, "ssm_in"),
    }


def has_bias(header: GGUFHeader, stem: str) -> bool:
    """Whether any layer has a bias under this name."""
    return any(name.endswith(f".{stem}.bias") for name in header.shapes)


def mamba_metadata(config: DecoderConfig) -> dict[str, Any]:
    """The keys that `mamba_fields` reads."""
    spec: Mamba2Spec = recurrence(config)
    return {
        "ssm.conv_kernel": spec.conv,
        "ssm.inner_size": spec.inner,
        "ssm.state_size": spec.state,
        "ssm.time_step_rank": spec.heads,
        "ssm.group_count": spec.groups,
    }


def mamba_rules(config: DecoderConfig) -> list[TensorRule]:
    """The tensors of Mamba-2 layers."""
    spec: Mamba2Spec | None = recurrence(config)
    if spec is None:
        return []
    groups = spec.groups
    return [
        *rename(recurrent__in_proj="ssm_in", recurrent__out_proj="ssm_out"),
        _convolution("ssm_conv1d", "recurrent.conv"),
        TensorRule("ssm_conv1d", ("recurrent.conv",), leaves=("bias",)),
        _reshaped("ssm_norm.weight", "recurrent.norm", "weight", (groups, spec.inner // groups)),
        _reshaped("ssm_d", "recurrent", "D", (spec.heads, 1)),
        _parameter("ssm_dt.bias", "dt_bias"),
        _rate((spec.heads, 1)),
    ]


# --- delta rule -------------------------------------------------------------------------------------------------------


def delta_fields(header: GGUFHeader) -> dict[str, Any]:
    """The sizes of Gated DeltaNet layers, as Qwen's `config.json` names them."""
    heads, inner = header.get("ssm.time_step_rank", int), header.get("ssm.inner_size", int)
    if heads < 1 or inner % heads:
        raise CorruptedFile(f"{header.where}: {heads} heads do not divide {inner} channels")
    return {
        "linear_conv_kernel_dim": header.get("ssm.conv_kernel", int),
        "linear_key_head_dim": header.get("ssm.state_size", int),
        "linear_num_key_heads": header.get("ssm.group_count", int),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
    }


def delta_metadata(config: DecoderConfig) -> dict[str, Any]:
    """The keys that `delta_fields` reads, and which layers are recurrent.

    Raises:
        UnsupportedModel: heads of keys and values that differ in size, which llama.cpp does not have.
    """
    spec: GatedDeltaSpec = recurrence(config)
    if spec.key_dim != spec.value_dim:
        raise UnsupportedModel(f"llama.cpp has heads of values as large as those of keys, not {spec.value_dim}")
    recurs = [layer.recurrent is not None for layer in config.layers]
    return {
        "ssm.conv_kernel": spec.conv,
        "ssm.state_size": spec.key_dim,
        "ssm.group_count": spec.key_heads,
        "ssm.time_step_rank": spec.value_heads,
        "ssm.inner_size": spec.value_heads * spec.value_dim,
        "attention.recurrent_layers": recurs,
        "full_attention_interval": recurs.index(False) + 1 if False in recurs else len(recurs) + 1,
    }


def tiled(config: DecoderConfig) -> DecoderConfig:
    """The decoder as it is read from a file in which the heads that share keys do not follow each other."""

    def changed(spec: Any) -> Any:
        shares = isinstance(spec, GatedDeltaSpec) and spec.value_heads > spec.key_heads
        return replace(spec, tiled=True) if shares else spec

    return replace(config, layers=tuple(replace(layer, recurrent=changed(layer.recurrent)) for layer in config.layers))


def delta_rules(config: DecoderConfig, *, separate: bool) -> list[TensorRule]:
    """The tensors of Gated DeltaNet layers.

    Args:
        config: the decoder.
        separate: whether both gates of the memory have matrices of their own, and heads are tiled (Qwen 3.5); else one
            matrix has them, for each head of keys those of its heads of values (Qwen3-Next).
    """
    spec: GatedDeltaSpec | None = recurrence(config)
    if spec is None:
        return []
    order = _Order(spec if separate else replace(spec, tiled=True))
    sizes = spec.sizes
    found = [
        _parts("attn_qkv", ("recurrent.q_proj", "recurrent.k_proj", "recurrent.v_proj"), sizes, order),
        _values("attn_gate", "recurrent.gate_proj", order),
        _parts("ssm_conv1d", ("recurrent.q_conv", "recurrent.k_conv", "recurrent.v_conv"), sizes, order, taps=True),
        TensorRule("ssm_norm", ("recurrent.norm",)),
        TensorRule(
            "ssm_out",
            ("recurrent.out_proj",),
            lambda tensor, config: [order.read(tensor, 1)],
            lambda parts, config: order.write(parts[0], 1),
            across=not order.same and spec.value_dim % _BLOCK != 0,
        ),
        _ordered("ssm_dt.bias", "dt_bias", order),
        _rate((spec.value_heads,), order),
    ]
    if separate:
        return [*found, _values("ssm_beta", "recurrent.b_proj", order), _values("ssm_alpha", "recurrent.a_proj", order)]
    groups = spec.key_heads
    both = TensorRule(
        "ssm_ba",
        ("recurrent.b_proj", "recurrent.a_proj"),
        lambda tensor, config: [part.flatten(0, 1) for part in tensor.unflatten(0, (groups, 2, -1)).unbind(1)],
        lambda parts, config: torch.stack([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 2),
    )
    return [*found, both]


def channel_delta_rules(spec: GatedDeltaSpec) -> list[TensorRule]:
    """The tensors of Kimi delta attention."""
    low = {"a_proj": "ssm_f", "gate_proj": "ssm_g"}
    return [
        *rename(**{f"recurrent__{part}_proj": f"attn_{part}" for part in "qkv"}),
        *rename(**{f"recurrent__{ours}__down": f"{stored}_a" for ours, stored in low.items()}),
        *rename(**{f"recurrent__{ours}__up": f"{stored}_b" for ours, stored in low.items()}),
        *rename(recurrent__b_proj="ssm_beta", recurrent__norm="ssm_norm", recurrent__out_proj="attn_output"),
        *(_convolution(f"ssm_conv1d_{part}", f"recurrent.{part}_conv", (1, -1, 1, spec.conv)) for part in "qkv"),
        _parameter("ssm_dt.bias", "dt_bias"),
        _rate((1, 1, spec.value_heads, 1)),
    ]


class _Order:
    """The order of heads of values in a file whose heads are tiled, for a decoder whose heads may not be."""

    def __init__(self, spec: GatedDeltaSpec) -> None:
        self.shape = spec.key_heads, spec.value_heads // spec.key_heads
        self.same = spec.tiled or 1 in self.shape

    def write(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """Rows or columns of all heads, in the file's order."""
        return tensor if self.same else self._moved(tensor, axis, self.shape)

    def read(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """Rows or columns of all heads, in the decoder's order."""
        return tensor if self.same else self._moved(tensor, axis, self.shape[::-1])

    def _moved(self, tensor: Tensor, axis: int, shape: tuple[int, int]) -> Tensor:
        moved: Tensor = tensor.unflatten(axis, (*shape, -1)).transpose(axis, axis + 1)
        return moved.flatten(axis, axis + 2)


def _values(stored: str, ours: str, order: _Order) -> TensorRule:
    """Rows of all heads of values."""
    return TensorRule(
        stored,
        (ours,),
        lambda tensor, config: [order.read(tensor)],
        lambda parts, config: order.write(parts[0]),
    )


def _parts(
    stored: str, ours: tuple[str, ...], sizes: Sequence[int], order: _Order, *, taps: bool = False
) -> TensorRule:
    """Rows of queries, keys and values in one tensor; ``taps`` for those of convolutions."""

    def split(tensor: Tensor, config: DecoderConfig) -> list[Tensor]:
        q, k, v = (tensor[:, None] if taps else tensor).split(list(sizes))
        return [q, k, order.read(v)]

    def join(parts: Sequence[Tensor], config: DecoderConfig) -> Tensor:
        rows = torch.cat([parts[0], parts[1], order.write(parts[2])])
        return rows[:, 0] if taps else rows

    return TensorRule(stored, ours, split, join)


def _ordered(stored: str, leaf: str, order: _Order) -> TensorRule:
    return TensorRule(
        stored,
        ("recurrent",),
        lambda tensor, config: [order.read(tensor)],
        lambda parts, config: order.write(parts[0]),
        leaves=(leaf,),
        whole=True,
    )


# --- both -------------------------------------------------------------------------------------------------------------


def _rate(shape: tuple[int, ...], order: _Order | None = None) -> TensorRule:
    """The rate of forgetting of each head."""

    def split(tensor: Tensor, config: DecoderConfig) -> list[Tensor]:
        rate = (-tensor.float()).log().flatten()
        return [rate if order is None else order.read(rate)]

    def join(parts: Sequence[Tensor], config: DecoderConfig) -> Tensor:
        rate = -parts[0].float().exp()
        return (rate if order is None else order.write(rate)).reshape(shape)

    return TensorRule("ssm_a", ("recurrent",), split, join, leaves=("A_log",), whole=True)


def _parameter(stored: str, leaf: str) -> TensorRule:
    return TensorRule(stored, ("recurrent",), leaves=(leaf,), whole=True)


def _reshaped(stored: str, ours: str, leaf: str, shape: tuple[int, ...]) -> TensorRule:
    """A vector that a file has in another shape."""
    return TensorRule(
        stored,
        (ours,),
        lambda tensor, config: [tensor.flatten()],
        lambda parts, config: parts[0].reshape(shape),
        leaves=(leaf,),
        whole=True,
    )


def _convolution(stored: str, ours: str, shape: tuple[int, ...] | None = None) -> TensorRule:
    """Taps of a convolution, (channels, taps) in a file unless it has another shape."""
    return TensorRule(
        stored,
        (ours,),
        lambda tensor, config: [tensor.reshape(-1, 1, tensor.shape[-1])],
        lambda parts, config: parts[0][:, 0] if shape is None else parts[0].reshape(shape),
        leaves=("weight",),
    )


def short_convolution_rules() -> list[TensorRule]:
    """The tensors of LFM2's layers."""
    return [
        *rename(recurrent__in_proj="shortconv.in_proj", recurrent__out_proj="shortconv.out_proj"),
        _convolution("shortconv.conv", "recurrent.conv"),
        TensorRule("shortconv.conv", ("recurrent.conv",), leaves=("bias",)),
    ]
