"""GGUF files: their headers as a `DecoderConfig` and back, and the names and layouts of their tensors.

Notable here:
- a header becomes the fields of a `config.json`, which the family reads as it reads a folder's; what is only a family's
  own is in its `GGUFLayout`
- what is about to be written is read back first: a decoder that GGUF has no words for is refused by what would differ
- in the llama, Cohere, GLM and OLMo architectures the rotated pairs of queries and keys are neighbors, which is undone
  by the order of the rows; norms that multiply by one plus a weight are stored as they multiply
- queries, keys and values may lie in one tensor, and so may gate and up, in any architecture

Source: the GGUF specification and the keys of llama.cpp, whose defaults hold where a file says nothing.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.language.decoder_config import DecoderConfig, LayerSpec
from pippin.language.families.config_json import FAMILIES
from pippin.language.families.experts import gates_and_ups, most_experts, stacked
from pippin.language.families.family import (
    Family,
    TensorRule,
    from_halves,
    fused_rotated_qkv,
    rename,
    to_halves,
)
from pippin.language.families.gguf_layout import (
    LONG_TABLE,
    SHORT_TABLE,
    TABLE,
    GGUFHeader,
    GGUFLayout,
    main_rotary,
)
from pippin.language.families.sizes import MAX_LAYERS, bounded, check_size, contradictions
from pippin.nn.attention.rotary import Rotary

_KV_HEADS = "attention.head_count_kv"
_RMS_EPS, _LAYER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_LISTED = 5  # differences that a message names


# --- reading ----------------------------------------------------------------------------------------------------------


def from_gguf(header: GGUFHeader) -> DecoderConfig:
    """The decoder that a GGUF header describes.

    Raises:
        UnsupportedModel: an architecture or a setting that the decoder does not have.
        CorruptedFile: a key that every decoder needs is missing, or keys and tensors contradict each other.
    """
    family, layout = _family(header)
    with contradictions(header.where):
        _check_counts(header)
        usual = _usual_fields(header, family, layout)
        fields = {**usual, **layout.read(header, usual)}
        return bounded(_as_stored(family.read(fields), fields, header, layout))


def in_gguf(config: DecoderConfig) -> Family:
    """The decoder's family with the names and layouts of GGUF instead of those of a folder.

    Raises:
        UnsupportedModel: llama.cpp does not have the family.
    """
    family = FAMILIES[config.family]
    layout = layout_of(config)
    return replace(
        family, rules=lambda config: [*layout.rules(config), *_usual_rules(config, layout)], prefix="", layers="blk"
    )


def layout_of(config: DecoderConfig) -> GGUFLayout:
    """How llama.cpp stores a decoder's family.

    Raises:
        UnsupportedModel: it does not have it.
    """
    layout = FAMILIES[config.family].gguf
    if layout is None:
        known = ", ".join(sorted(name for name, family in FAMILIES.items() if family.gguf is not None))
        raise UnsupportedModel(f"llama.cpp has no {config.family} models, so GGUF has none; it has {known}")
    return layout


def learned_numbers(config: DecoderConfig, header: GGUFHeader) -> dict[str, float]:
    """The decoder's tensors that are numbers in the metadata, by Pippin's names.

    Raises:
        CorruptedFile: they are missing, or there are not as many as layers.
    """
    found: dict[str, float] = {}
    count = len(config.layers)
    for key, name in layout_of(config).numbers.items():
        given = header.metadata.get(key)
        values: list[Any] = given if isinstance(given, list) else [given] * count
        if len(values) < count or any(type(value) is not float for value in values):
            raise CorruptedFile(f"{header.where}: metadata {key!r} is {given!r:.80}, expected {count} numbers")
        found |= {f"layers.{index}.{name}": values[index] for index in range(count)}
    return found


def is_beside(name: str, header: GGUFHeader) -> bool:
    """Whether a stored tensor is none of the decoder's weights: a table of frequencies, or a layer that only drafts."""
    if name in (TABLE, SHORT_TABLE, LONG_TABLE):
        return True
    count, layer = header.get("block_count", int), name.split(".")[1] if name.startswith("blk.") else ""
    if not layer.isdigit():
        return False
    if name.endswith(_OF_KEYS) and count - header.get("attention.shared_kv_layers", int, 0) <= int(layer) < count:
        return True  # of a layer that reads the keys and values of another
    return count - header.get("nextn_predict_layers", int, 0) <= int(layer) < count


_OF_KEYS = (".attn_k.weight", ".attn_v.weight", ".attn_k_norm.weight")


def _family(header: GGUFHeader) -> tuple[Family, GGUFLayout]:
    name = header.architecture
    for family in FAMILIES.values():
        if family.gguf is not None and name in family.gguf.names and family.gguf.applies(header):
            return family, family.gguf
    known = {each for family in FAMILIES.values() if family.gguf is not None for each in family.gguf.names}
    near = difflib.get_close_matches(name, sorted(known), 3, 0.0)
    raise UnsupportedModel(
        f"{header.where}: GGUF architecture {name!r} is not supported; the nearest that are: {', '.join(near)}; all: "
        f"{', '.join(sorted(known))}"
    )


def _check_counts(header: GGUFHeader) -> None:
    """Compare counts with the tensors, before anything of these sizes is built."""
    count = header.get("block_count", int)
    check_size("block_count", count, MAX_LAYERS)
    if count > len(header.shapes):
        raise CorruptedFile(f"{header.where}: {count} layers cannot lie in {len(header.shapes)} tensors")
    embedding, width = header.shapes.get("token_embd.weight"), header.get("embedding_length", int)
    if embedding is None or embedding[-1] != width:
        raise CorruptedFile(
            f"{header.where}: embedding_length is {width}, token_embd.weight "
            + ("is missing" if embedding is None else f"has {embedding[-1]} columns")
        )
    experts = header.get("expert_count", int, 0)
    stacks = {shape[0] for name, shape in header.shapes.items() if name.endswith("ffn_down_exps.weight")}
    if experts and stacks != {experts}:
        found = f"tensors of {', '.join(map(str, sorted(stacks)))}" if stacks else "no tensor ffn_down_exps"
        raise CorruptedFile(f"{header.where}: expert_count is {experts}, but there is {found}")


def _usual_fields(header: GGUFHeader, family: Family, layout: GGUFLayout) -> dict[str, Any]:
    """The fields of a `config.json` that most architectures give."""
    width, heads = header.get("embedding_length", int), header.count("attention.head_count") or 1
    keys = [_RMS_EPS, _LAYER_EPS] if family.eps == "rms_norm_eps" else [_LAYER_EPS, _RMS_EPS]
    layers = header.get("block_count", int) - header.get("nextn_predict_layers", int, 0)
    window = header.get("attention.sliding_window", int, layout.window)
    fields: dict[str, Any] = {
        "vocab_size": header.shapes["token_embd.weight"][0],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": header.count(_KV_HEADS, heads, varied=_KV_HEADS in layout.varied) or heads,
        "head_dim": header.get("attention.key_length", int, width // heads),
        "max_position_embeddings": header.get("context_length", int),
        family.eps: header.get(next((key for key in keys if key in header), keys[0]), float),
        "tie_word_embeddings": "output.weight" not in header,
        "sliding_window": window or None,
        "use_sliding_window": bool(window),
        "layer_types": _layer_types(header, layers if window else 0, layout.pattern) + ["full_attention"] * layers,
        "rope_parameters": _rope_fields(header),
    }
    fields["layer_types"] = fields["layer_types"][:layers]
    for key, names in _COUNTS.items():
        if key in header:
            fields |= dict.fromkeys(names, header.count(key, varied=key in layout.varied))
    if not header.get("attention.causal", bool, True):
        raise UnsupportedModel(f"{header.where}: an encoder, which attends to later tokens too, is not a decoder")
    return fields


_COUNTS = {
    "feed_forward_length": ("intermediate_size",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}


def _layer_types(header: GGUFHeader, layers: int, pattern: int) -> list[str]:
    """Which of the layers attend within the window, as in `config.json`."""
    given = header.metadata.get(f"{header.architecture}.attention.sliding_window_pattern")
    if isinstance(given, list):
        if layers and len(given) < layers:
            raise CorruptedFile(f"{header.where}: {len(given)} windows are given for {layers} layers")
        local = [bool(one) for one in given[:layers]]
    else:
        step = header.get("attention.sliding_window_pattern", int, pattern)
        local = [step == 0 or (index + 1) % step != 0 for index in range(layers)]
    return ["sliding_attention" if one else "full_attention" for one in local]


def _rope_fields(header: GGUFHeader) -> dict[str, Any]:
    """The rotary encoding as `rope_parameters` of a `config.json`."""
    stretched = "rope.scaling.factor" in header
    how = header.get("rope.scaling.type", str, "linear" if stretched else "none")
    factor = header.get("rope.scaling.factor", float, header.get("rope.scale_linear", float, 1.0))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": header.get("rope.freq_base", float, 10_000.0)}
    original = header.get("rope.scaling.original_context_length", int, header.get("context_length", int))
    if SHORT_TABLE in header:
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        rope["short_factor"] = _divisors(header, SHORT_TABLE).tolist()
        rope["long_factor"] = _divisors(header, LONG_TABLE).tolist()
        if "rope.scaling.attn_factor" in header:
            rope["attention_factor"] = header.get("rope.scaling.attn_factor", float)
    elif how == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for name in ("beta_fast", "beta_slow"):
            if (key := f"rope.scaling.yarn_{name}") in header:
                rope[name] = header.get(key, float)
        magnitude = header.get("rope.scaling.attn_factor", float, 1.0)
        if magnitude != 1.0:
            rope["attention_factor"] = magnitude * Rotary(scaling="yarn", factor=factor).magnitude
    elif how == "linear" and factor not in (0.0, 1.0):
        rope |= {"rope_type": "linear", "factor": factor}
    elif how not in ("none", "linear"):
        raise UnsupportedModel(
            f"{header.where}: rope scaling {how!r} is not supported; supported are none, linear and yarn"
        )
    return rope


def _as_stored(config: DecoderConfig, fields: dict[str, Any], header: GGUFHeader, layout: GGUFLayout) -> DecoderConfig:
    """The config with what tensors and sizes say and a `config.json` has no or several words for."""
    for index, layer in enumerate(config.layers):
        local = fields["layer_types"][index] == "sliding_attention"
        if (layer.attention.window is not None) != local and not layer.recurrent:
            raise UnsupportedModel(
                f"{header.where}: layer {index} {'has a' if local else 'lacks the'} window, "
                f"unlike those of {config.family} models"
            )

    def has(*stems: str) -> bool:
        return any(f"blk.{index}.{stem}.bias" in header for index in range(len(config.layers)) for stem in stems)

    dims = header.get("rope.dimension_count", int, config.head_dim)
    table = _divisors(header, TABLE) if TABLE in header else None
    inner = has("ffn_up", "ffn_down")

    def stored(spec: LayerSpec) -> LayerSpec:
        if spec.attention.rotary is not None and not layout.own_rotary:
            latent = spec.attention.latent
            whole = config.head_dim if latent is None else latent.rotated_dim
            rotary = replace(spec.attention.rotary, dims=None if dims == whole else dims)
            rotary = rotary if table is None else _with_table(rotary, table, header)
            if rotary.divisors is not None and len(rotary.divisors) != dims // 2:
                raise CorruptedFile(
                    f"{header.where}: {len(rotary.divisors)} divisors of frequencies for {dims} dimensions"
                )
            spec = replace(spec, attention=replace(spec.attention, rotary=rotary))
        if not spec.feedforward.num_experts:
            spec = replace(spec, feedforward=replace(spec.feedforward, bias=inner))
        return spec

    return replace(
        config,
        layers=tuple(stored(spec) for spec in config.layers),
        qkv_bias=has("attn_q", "attn_qkv"),
        output_bias=has("attn_output"),
    )


def _divisors(header: GGUFHeader, name: str) -> Tensor:
    """A tensor of divisors of frequencies."""
    table = header.read(name).float()
    if not bool(((table > 0) & table.isfinite()).all()):
        raise CorruptedFile(f"{header.where}: {name} holds a divisor that is not positive and finite")
    return table


def _with_table(rotary: Rotary, table: Tensor, header: GGUFHeader) -> Rotary:
    """The encoding with the frequencies divided as a tensor of the file says."""
    if rotary.scaling == "yarn" or rotary.divisors is not None:
        raise UnsupportedModel(f"{header.where}: {TABLE} beside other stretched frequencies is not supported")
    return Rotary(rotary.theta, divisors=tuple((table * rotary.factor).tolist()), dims=rotary.dims)


# --- writing ----------------------------------------------------------------------------------------------------------


def to_gguf(config: DecoderConfig) -> dict[str, Any]:
    """The metadata that tell llama.cpp what a decoder is, by key.

    Raises:
        UnsupportedModel: llama.cpp does not have the family.
    """
    layout, first = layout_of(config), config.layers[0].feedforward
    fields: dict[str, Any] = {
        "block_count": len(config.layers),
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": first.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        _RMS_EPS if config.norm == "rms" else _LAYER_EPS: float(config.rms_norm_eps),
        "vocab_size": config.vocab_size,
        **_rotary_fields(config),
    }
    experts = next((layer.feedforward for layer in config.layers if layer.feedforward.num_experts), None)
    if experts is not None:
        fields |= {"expert_count": experts.num_experts, "expert_used_count": experts.num_experts_per_tok}
    windows = [layer.attention.window for layer in config.layers]
    if any(windows):
        fields["attention.sliding_window"] = next(window for window in windows if window)
        fields["attention.sliding_window_pattern"] = [window is not None for window in windows]
    fields |= layout.write(config)
    return {f"{layout.name_of(config)}.{key}": value for key, value in fields.items() if value is not None}


def check_gguf(config: DecoderConfig, header: GGUFHeader) -> None:
    """Compare a decoder with what a header, made by `to_gguf`, would be read as.

    Raises:
        UnsupportedModel: they differ; the message says in what.
    """
    layout = layout_of(config)
    wanted = layout.read_as(config)
    wanted = replace(wanted, tie_word_embeddings=config.tie_word_embeddings and not layout.own_output)
    found = list(_differences(wanted, from_gguf(header)))
    if not layout.any_head_dim and config.num_attention_heads * config.head_dim != config.hidden_size:
        found.append(f"{config.num_attention_heads} heads of {config.head_dim} are not {config.hidden_size} wide")
    for part, there in _biases(config).items():
        if there and part not in layout.biases:
            found.append(f"llama.cpp has no biases of its {part} layers")
    if found:
        more = f"; and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        raise UnsupportedModel(f"GGUF cannot say of a {config.family} model: {'; '.join(found[:_LISTED])}{more}")


def _biases(config: DecoderConfig) -> dict[str, bool]:
    return {
        "attention output": config.output_bias,
        "feed-forward": any(layer.feedforward.bias for layer in config.layers),
    }


def _differences(config: DecoderConfig, again: DecoderConfig) -> Iterator[str]:
    """In what two decoders differ, as text; families and metadata of training apart."""
    for index, pair in enumerate(zip(config.layers, again.layers, strict=True)):
        rotaries = [layer.attention.rotary for layer in pair]
        size = pair[0].attention.head_dim or config.head_dim
        if (rotaries[0] is None) != (rotaries[1] is None) or not _same_rotation(rotaries, size):
            yield f"layer {index} has positions {rotaries[0]}, GGUF would say {rotaries[1]}"
        ours, theirs = (asdict(replace(layer, attention=replace(layer.attention, rotary=None))) for layer in pair)
        for part, values in ours.items():
            yield from _unequal(f"layer {index} {part}", values, theirs[part])
    plain = [asdict(replace(each, family="", layers=each.layers[:1], training_methods={})) for each in (config, again)]
    for field in plain[0].keys() - {"layers"}:
        yield from _unequal(field, plain[0][field], plain[1][field])


def _unequal(name: str, ours: Any, theirs: Any) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in ours:
            yield from _unequal(f"{name}.{key}", ours[key], theirs.get(key))
    elif isinstance(ours, float) and isinstance(theirs, float):
        if not math.isclose(ours, theirs, rel_tol=1e-6):  # a file holds float32
            yield f"{name} is {ours}, GGUF would say {theirs}"
    elif ours != theirs:
        yield f"{name} is {ours}, GGUF would say {theirs}"


def _same_rotation(rotaries: Sequence[Rotary | None], head_dim: int) -> bool:
    """Whether two encodings rotate alike, however they are described."""
    ours, theirs = rotaries
    if ours is None or theirs is None:
        return True
    same = math.isclose(ours.magnitude, theirs.magnitude, rel_tol=1e-5)
    tables = [torch.tensor(each.long_divisors or ()) for each in (ours, theirs)]
    same = same and tables[0].shape == tables[1].shape and torch.allclose(tables[0], tables[1])
    same = same and ours.long_attention_factor == theirs.long_attention_factor
    return same and torch.allclose(ours.frequencies(head_dim), theirs.frequencies(head_dim), rtol=1e-5, atol=0)


def _rotary_fields(config: DecoderConfig) -> dict[str, Any]:
    rotary = main_rotary(config)
    if rotary is None:
        return {}
    fields: dict[str, Any] = {
        "rope.dimension_count": rotary.dims or config.head_dim,
        "rope.freq_base": float(rotary.theta),
    }
    local = next((spec.attention.rotary for spec in config.layers if spec.attention.window is not None), None)
    if local is not None and local.theta != rotary.theta:
        fields["rope.freq_base_swa"] = float(local.theta)
    if rotary.scaling in ("linear", "yarn") and rotary.divisors is None:
        fields["rope.scaling.type"] = rotary.scaling
        fields["rope.scaling.factor"] = float(rotary.factor)
        fields["rope.scaling.original_context_length"] = rotary.original_max_position_embeddings
    if rotary.attention_factor is not None:
        usual = replace(rotary, attention_factor=None).magnitude
        fields["rope.scaling.attn_factor"] = rotary.attention_factor / usual
        fields.setdefault("rope.scaling.original_context_length", config.max_position_embeddings)
    return fields


# --- tensors ----------------------------------------------------------------------------------------------------------


def _usual_rules(config: DecoderConfig, layout: GGUFLayout) -> list[TensorRule]:
    """The rules of a decoder's tensors in most architectures; names of several layouts are alternatives."""
    before = "pre_feedforward_layernorm" if config.residual == "pre and post" else "post_attention_layernorm"
    rules = rename(
        embed_tokens="token_embd",
        embed_positions="position_embd",
        norm="output_norm",
        lm_head="output",
        input_layernorm="attn_norm",
        self_attn__v_proj="attn_v",
        self_attn__o_proj="attn_output",
        mlp__gate_proj="ffn_gate",
        mlp__up_proj="ffn_up",
        mlp__down_proj="ffn_down",
    )
    if config.residual != "post":
        rules += rename(**{before: "ffn_norm"})
    if config.residual in ("post", "pre and post"):
        rules += rename(post_attention_layernorm="post_attention_norm", post_feedforward_layernorm="post_ffw_norm")
    rules += _rotated(config, layout.interleaved)
    rules.append(fused_rotated_qkv("attn_qkv", interleaved=layout.interleaved))
    return rules + _expert_rules(config)


def _rotated(config: DecoderConfig, interleaved: bool) -> list[TensorRule]:
    """Queries and keys, and the norms of their heads, which have the order of the rows."""
    stems = {"q_proj": "attn_q", "k_proj": "attn_k", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
    rotary = main_rotary(config)
    if rotary is None or not (interleaved or rotary.dims is not None):
        return rename(**{f"self_attn__{ours}": stored for ours, stored in stems.items()})
    return [
        TensorRule(
            stored,
            (f"self_attn.{ours}",),
            lambda tensor, config: [to_halves(tensor, config, interleaved=interleaved)],
            lambda parts, config: from_halves(parts[0], config, interleaved=interleaved),
        )
        for ours, stored in stems.items()
    ]


def _expert_rules(config: DecoderConfig) -> list[TensorRule]:
    count = most_experts(config)
    if not count:
        return []
    rules = rename(mlp__gate="ffn_gate_inp")
    for part in ("gate", "up", "down"):
        ours = tuple(f"mlp.experts.{index}.{part}_proj" for index in range(count))
        rules += [
            stacked(f"ffn_{part}_exps.{leaf}", ours, lambda tensor, at: tensor[at], torch.stack, leaf)
            for leaf in ("weight", "bias")
        ]
        rules.append(TensorRule(f"ffn_{part}_shexp", (f"mlp.shared_expert.{part}_proj",)))
    rules.append(
        stacked(
            "ffn_gate_up_exps.weight",
            gates_and_ups(count),
            lambda tensor, at: tensor[at // 2].chunk(2)[at % 2],
            lambda parts: torch.stack([torch.cat(pair) for pair in zip(parts[0::2], parts[1::2], strict=True)]),
        )
    )
    # some files have the gate of the shared expert as a vector
    gate = TensorRule("ffn_gate_inp_shexp", ("mlp.shared_expert_gate",), lambda tensor, config: [tensor.reshape(1, -1)])
    bias = TensorRule("exp_probs_b.bias", ("mlp.gate",), leaves=("e_score_correction_bias",), whole=True)
    return [*rules, gate, bias]
