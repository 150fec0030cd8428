"""Qwen3-Next and Qwen 3.5: Gated DeltaNet in three of four layers, gated attention in the others.

Notable here:
- the matrix of queries holds the gate of attention, too, head by head; heads are rotated in part
- the projections of Qwen3-Next's recurrence lie in two matrices, group by group; those of Qwen 3.5 in four
- norm weights are stored minus one, but not those behind the recurrence
- layers that predict more than one token ("mtp") are not read

Source: Qwen3-Next, Alibaba 2025; gated attention: Qiu et al. 2025, arXiv:2505.06708.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.experts import expert_rules
from pippin.language.families.family import (
    Family,
    Fields,
    TensorRule,
    from_halves,
    fused,
    one_added,
    read_decoder,
    rename,
    to_halves,
)
from pippin.language.families.gguf_layout import GGUFHeader, GGUFLayout, main_rotary
from pippin.language.families.gguf_recurrent import (
    delta_fields,
    delta_metadata,
    delta_rules,
    has_bias,
    recurrent_layers,
    tiled,
)
from pippin.language.families.hybrid import (
    convolutions,
    kinds_of,
    layer_kinds,
    parameters,
    recurrence,
    rotated_in_part,
    with_recurrence,
)
from pippin.language.families.qwen import mixture_from_gguf, mixture_to_gguf, read_mixture, write_mixture
from pippin.nn.recurrent.gated_delta import GatedDeltaSpec


def _reader(family: str, experts: bool) -> Callable[[Fields], DecoderConfig]:
    def read(config: Fields) -> DecoderConfig:
        every, count = config.get("full_attention_interval", 4), config["num_hidden_layers"]
        kinds = config.get("layer_types")
        if kinds is None:
            kinds = ["linear_attention" if (index + 1) % every else "full_attention" for index in range(count)]
        bias = bool(config.get("attention_bias"))
        base = read_decoder(
            family,
            {"partial_rotary_factor": 0.25, **config},
            feedforward=read_mixture(config, config["shared_expert_intermediate_size"], True) if experts else None,
            local=lambda index: False,
            qk_norm="head",
            attention_gate=True,
            qkv_bias=bias,
            output_bias=bias,
        )
        spec = GatedDeltaSpec(
            key_heads=config["linear_num_key_heads"],
            value_heads=config["linear_num_value_heads"],
            key_dim=config["linear_key_head_dim"],
            value_dim=config["linear_value_head_dim"],
            conv=config.get("linear_conv_kernel_dim", 4),
            tiled=bool(config.get("tiled_value_heads")),
        )
        return with_recurrence(base, spec, layer_kinds(config, kinds))

    return read


def _write(config: DecoderConfig) -> dict[str, Any]:
    spec = recurrence(config)
    fields: dict[str, Any] = {"attention_bias": config.output_bias, "layer_types": kinds_of(config)}
    if any(layer.feedforward.num_experts for layer in config.layers):
        fields |= write_mixture(config)
    if spec is None:
        return fields
    return fields | {
        "linear_num_key_heads": spec.key_heads,
        "linear_num_value_heads": spec.value_heads,
        "linear_key_head_dim": spec.key_dim,
        "linear_value_head_dim": spec.value_dim,
        "linear_conv_kernel_dim": spec.conv,
    }


def _queries_and_gate(stored: str = "self_attn.q_proj") -> TensorRule:
    """Queries and gate, head by head, in one matrix."""

    def split(tensor: Tensor, config: DecoderConfig) -> list[Tensor]:
        q, gate = tensor.unflatten(0, (config.num_attention_heads, 2, -1)).unbind(1)
        return [to_halves(q.flatten(0, 1), config), gate.flatten(0, 1)]

    def join(parts: Sequence[Tensor], config: DecoderConfig) -> Tensor:
        heads = [
            part.unflatten(0, (config.num_attention_heads, -1)) for part in (from_halves(parts[0], config), parts[1])
        ]
        return torch.stack(heads, 1).flatten(0, 2)

    return TensorRule(stored, ("self_attn.q_proj", "self_attn.gate_proj"), split, join)


def _grouped(stored: str, ours: Sequence[str], rows: Sequence[int], groups: int) -> TensorRule:
    """Rows of several projections in one matrix: for each group, ``rows`` of each."""
    return TensorRule(
        stored,
        tuple(ours),
        lambda tensor, config: [part.flatten(0, 1) for part in tensor.unflatten(0, (groups, -1)).split(list(rows), 1)],
        lambda parts, config: torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1),
    )


_QKV = ("recurrent.q_proj", "recurrent.k_proj", "recurrent.v_proj")


def _common(config: DecoderConfig) -> list[TensorRule]:
    found = [
        _queries_and_gate(),
        *rotated_in_part("self_attn.k_proj"),
        *rotated_in_part("self_attn.q_norm", "self_attn.k_norm", added=1.0),
        *one_added("norm", "input_layernorm", "post_attention_layernorm"),
        *rename(recurrent__norm="linear_attn.norm", recurrent__out_proj="linear_attn.out_proj"),
        parameters("linear_attn", "A_log", "dt_bias"),
    ]
    spec = recurrence(config)
    if spec is not None:
        found.append(convolutions("linear_attn.conv1d", spec.sizes))
    if any(layer.feedforward.num_experts for layer in config.layers):
        found += expert_rules()(config)
    return found


def _next_rules(config: DecoderConfig) -> list[TensorRule]:
    spec = recurrence(config)
    if spec is None:
        return _common(config)
    share = spec.value_heads // spec.key_heads
    values = share * spec.value_dim
    rows = (spec.key_dim, spec.key_dim, values, values)
    return [
        *_common(config),
        _grouped("linear_attn.in_proj_qkvz", (*_QKV, "recurrent.gate_proj"), rows, spec.key_heads),
        _grouped("linear_attn.in_proj_ba", ("recurrent.b_proj", "recurrent.a_proj"), (share, share), spec.key_heads),
    ]


def _rules(config: DecoderConfig) -> list[TensorRule]:
    return [
        *_common(config),
        fused("linear_attn.in_proj_qkv", _QKV, lambda config: recurrence(config).sizes),
        *rename(
            recurrent__gate_proj="linear_attn.in_proj_z",
            recurrent__a_proj="linear_attn.in_proj_a",
            recurrent__b_proj="linear_attn.in_proj_b",
        ),
    ]


def _from_gguf(separate: bool) -> Any:
    def read(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
        recurs = recurrent_layers(header, fields["num_hidden_layers"], every=4)
        own = {
            "layer_types": ["linear_attention" if one else "full_attention" for one in recurs],
            "attention_bias": has_bias(header, "attn_q"),
            **delta_fields(header),
        }
        if "expert_count" in header:
            own |= mixture_from_gguf(True)(header, fields)
        shares = own["linear_num_value_heads"] > own["linear_num_key_heads"]
        return {**own, "tiled_value_heads": separate and shares}

    return read


def _to_gguf(config: DecoderConfig) -> dict[str, Any]:
    own = delta_metadata(config)
    if config.family != "qwen3_next":
        own["rope.dimension_sections"] = _sections(config)
    return {**own, **mixture_to_gguf(config)} if config.layers[0].feedforward.num_experts else own


def _sections(config: DecoderConfig) -> list[int]:
    """Rotated pairs of time, height and width, which texts do not tell apart: a third each, 11, 11 and 10 of 32."""
    rotary = main_rotary(config)
    pairs = (config.head_dim if rotary is None or rotary.dims is None else rotary.dims) // 2
    return [(pairs + 2 - axis) // 3 for axis in range(3)] + [0]


def _gguf_rules(separate: bool) -> Any:
    def rules(config: DecoderConfig) -> list[TensorRule]:
        return [
            _queries_and_gate("attn_q"),
            *rename(post_attention_layernorm="post_attention_norm"),
            *delta_rules(config, separate=separate),
        ]

    return rules


_GGUF_NEXT = GGUFLayout("qwen3next", _from_gguf(False), _to_gguf, _gguf_rules(False), any_head_dim=True)
_GGUF = GGUFLayout("qwen35", _from_gguf(True), _to_gguf, _gguf_rules(True), any_head_dim=True, read_as=tiled)
_MLX: Final = "norms as they multiply"
QWEN3_NEXT = Family(
    "qwen3_next", "Qwen3NextForCausalLM", _reader("qwen3_next", True), _write, _next_rules, gguf=_GGUF_NEXT, mlx_lm=_MLX
)
QWEN3_5 = Family(
    "qwen3_5_text", "Qwen3_5ForCausalLM", _reader("qwen3_5_text", False), _write, _rules, gguf=_GGUF, mlx_lm=_MLX
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    _reader("qwen3_5_moe_text", True),
    _write,
    _rules,
    gguf=replace(_GGUF, architecture="qwen35moe"),
    mlx_lm=_MLX,
)
