"""Checkpoint families: conversion of `config.json` and GGUF headers to a `DecoderConfig`, and of tensor names.

Notable here:
- Pippin's parameter names are Hugging Face's without the prefix "model.", so most maps are the identity
- a GGUF file of the llama architecture stores query and key rows in another order, which is undone here
- decoders with KV-sharing or recurrent layers are saved under Pippin's own model types, so that other libraries refuse
  them instead of initializing the missing weights
- Gemma's norm weights are stored minus one in Hugging Face's format and unchanged in GGUF; in memory a norm multiplies
  by its weight
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar

from torch import Tensor

from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.core.formats.gguf import GGUFFile
from pippin.core.formats.model_types import MODEL_TYPES
from pippin.language.decoder import DecoderConfig, LayerSpec
from pippin.nn.attention import AttentionSpec
from pippin.nn.feedforward import Activation, FeedForwardSpec
from pippin.nn.recurrent.layer import RecurrentSpec
from pippin.nn.rotary import Rotary

T = TypeVar("T")

# Families whose layers differ only in fields that the functions below read.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "smollm3")
GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text", "smollm3": "smollm3"}
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
KV_SHARED = "pippin_kv_shared"
"""The model type of decoders with KV-sharing layers; ``base_model_type`` is their family."""
RECURRENT = "pippin_recurrent"
"""The model type of decoders with recurrent layers; ``base_model_type`` is their family."""
MAX_LAYERS = 1024
MAX_EXPERTS = 1 << 16
"""Most experts in all layers together."""
# Sizes beyond any model, below what overflows: building the modules takes time and memory before a tensor is compared.
_MAX_SIZES = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "max_position_embeddings": (1 << 31) - 1,
}
_MAX_INTERMEDIATE_SIZE = 1 << 24
PERMUTED = ("llama", "smollm3")  # GGUF architectures with interleaved query and key rows


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    """Read the contents of a `config.json`.

    Raises:
        UnsupportedModel: a family, an activation or a position scheme that the decoder does not have.
        CorruptedFile: a field that every decoder needs is missing, or two contradict each other.
    """
    family = config.get("model_type")
    recurrent = family == RECURRENT
    shared = family == KV_SHARED or (recurrent and "kv_sources" in config)
    if shared or recurrent:
        family = config.get("base_model_type")
    if family == "gemma3":  # the multimodal wrapper; its text part is the decoder
        if not isinstance(config.get("text_config"), dict):
            raise CorruptedFile("config.json has no object 'text_config', which the model needs")
        config = {**config["text_config"], "model_type": "gemma3_text"}
        family = "gemma3_text"
    if isinstance(family, str) and family in MODEL_TYPES:
        name = MODEL_TYPES[family].partition(":")[2]
        raise UnsupportedModel(f"this is a {name} (model type {family!r}); open it with {name}.load")
    if family not in FAMILIES:
        raise UnsupportedModel(f"model_type {family!r} is not supported; supported are {', '.join(FAMILIES)}")
    with _contradictions("config.json"):
        _check_size("num_hidden_layers", config["num_hidden_layers"], MAX_LAYERS)
        base = _bounded(_from_hf(family, config))
        base = base.with_kv_sources(config["kv_sources"]) if shared else base
        return _with_recurrence(base, config["recurrent"]) if recurrent else base


def _from_hf(family: str, config: Mapping[str, Any]) -> DecoderConfig:
    gemma = family == "gemma3_text"
    name = config.get("hidden_activation" if gemma else "hidden_act", "gelu_pytorch_tanh" if gemma else "silu")
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    for flag in ("attention_bias", "mlp_bias"):
        if config.get(flag):
            raise UnsupportedModel(f"{flag}=true is not supported for the {family} family")
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or width // heads
    scale = config.get("query_pre_attn_scalar") if gemma else None
    tied = config.get("tie_word_embeddings", gemma)
    return DecoderConfig(
        family=family,
        vocab_size=config["vocab_size"],
        hidden_size=width,
        layers=tuple(
            _hf_layer(family, config, i, ACTIVATIONS[name], head_dim) for i in range(config["num_hidden_layers"])
        ),
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_position_embeddings=config["max_position_embeddings"],
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        post_norms=gemma,
        embedding_scale=math.sqrt(width) if gemma else 1.0,
        attention_scale=None if scale is None or scale == head_dim else scale**-0.5,
        tie_word_embeddings=tied,
        training_methods=dict(config.get("training_methods", {})),
    )


def _check_size(name: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name} must be an integer from 1 to {most:,}, got {value!r:.40}")


def _bounded(config: DecoderConfig) -> DecoderConfig:
    """The config, if each of its sizes is possible."""
    for name, most in _MAX_SIZES.items():
        _check_size(name, getattr(config, name), most)
    for spec in {layer.feedforward for layer in config.layers}:
        _check_size("intermediate_size", spec.intermediate_size, _MAX_INTERMEDIATE_SIZE)
        if spec.num_experts:
            _check_size("num_experts", spec.num_experts, MAX_EXPERTS)
            _check_size("num_experts_per_tok", spec.num_experts_per_tok, spec.num_experts)
    _check_size(
        "num_experts in all layers", 1 + sum(layer.feedforward.num_experts for layer in config.layers), MAX_EXPERTS
    )
    for attention in {layer.attention for layer in config.layers}:
        if attention.window is not None:
            _check_size("sliding_window", attention.window, _MAX_SIZES["max_position_embeddings"])
        if attention.rotary is not None:
            rotary = attention.rotary
            for name, value in (("rope_theta", rotary.theta), ("factor", rotary.factor)):
                if not isinstance(value, int | float) or not 0 < value < math.inf:
                    raise ValueError(f"{name} must be positive and finite, got {value!r:.40}")
    return config


def _with_recurrence(config: DecoderConfig, specs: Sequence[Mapping[str, Any] | None]) -> DecoderConfig:
    """The config with recurrent layers: for each layer the recurrence that replaces attention (None: attention)."""
    layers = tuple(
        layer if spec is None else LayerSpec.recurring(RecurrentSpec(**spec), layer.feedforward)
        for layer, spec in zip(config.layers, specs, strict=True)
    )
    return replace(config, layers=layers)


def _hf_layer(family: str, config: Mapping[str, Any], index: int, activation: Activation, head_dim: int) -> LayerSpec:
    kinds = config.get("layer_types")
    if kinds is not None:
        local = kinds[index] == "sliding_attention"
    elif family == "gemma3_text":
        local = (index + 1) % config.get("sliding_window_pattern", 6) != 0
    else:
        local = bool(config.get("sliding_window")) and config.get("use_sliding_window", family == "mistral")
    window = config.get("sliding_window") if local else None
    rotary: Rotary | None = _hf_rotary(family, config, local)
    if family == "smollm3":
        rotates = config.get("no_rope_layers")
        if rotates is not None:
            rotary = rotary if rotates[index] else None
        elif (index + 1) % config.get("no_rope_layer_interval", 4) == 0:
            rotary = None
    feedforward = FeedForwardSpec(config["intermediate_size"], activation)
    if family == "qwen3_moe" and index not in config.get("mlp_only_layers", ()):
        feedforward = FeedForwardSpec(
            config["moe_intermediate_size"],
            activation,
            num_experts=config.get("num_experts") or config["num_local_experts"],
            num_experts_per_tok=config["num_experts_per_tok"],
            norm_topk_prob=config.get("norm_topk_prob", False),
        )
    return LayerSpec(AttentionSpec(window=window, rotary=rotary), feedforward)


def _hf_rotary(family: str, config: Mapping[str, Any], local: bool) -> Rotary:
    """Rotary spec, from the older fields (rope_theta, rope_scaling) or the newer one (rope_parameters)."""
    rope = dict(config.get("rope_parameters") or {})
    kind = "sliding_attention" if local else "full_attention"
    if kind in rope:
        rope = dict(rope[kind])
    default = 1_000_000.0 if family == "gemma3_text" and not local else 10_000.0
    theta = rope.get("rope_theta", config.get("rope_theta", default))
    scaling = rope or dict(config.get("rope_scaling") or {})
    if family == "gemma3_text" and local and not rope:
        theta, scaling = config.get("rope_local_base_freq", 10_000.0), {}
    how = scaling.get("rope_type", scaling.get("type", "default"))
    original = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
    if how == "default":
        return Rotary(theta)
    if how == "linear":
        return Rotary(theta, "linear", scaling["factor"])
    if how == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        return Rotary(theta, "llama3", scaling["factor"], original, low, high)
    if how == "yarn":
        slow, fast = scaling.get("beta_slow", 1.0), scaling.get("beta_fast", 32.0)
        return Rotary(theta, "yarn", scaling["factor"], original, slow, fast, scaling.get("attention_factor"))
    raise UnsupportedModel(f"rope type {how!r} is not supported; supported are default, linear, llama3 and yarn")


def from_gguf(file: GGUFFile) -> DecoderConfig:
    """Read a GGUF header.

    Raises:
        UnsupportedModel: an architecture that the decoder does not have.
        CorruptedFile: a key that every decoder needs is missing, or the keys contradict each other.
    """
    if file.architecture not in GGUF_FAMILIES:
        supported = ", ".join(GGUF_FAMILIES)
        raise UnsupportedModel(
            f"{file.path}: GGUF architecture {file.architecture!r} is not supported; supported are {supported}"
        )
    with _contradictions(str(file.path)):
        return _bounded(_from_gguf(file, GGUF_FAMILIES[file.architecture]))


def _from_gguf(file: GGUFFile, family: str) -> DecoderConfig:
    gemma = family == "gemma3_text"

    def get(key: str, kind: type[T], default: T | None = None) -> T:
        return file.get(f"{file.architecture}.{key}", kind, default)

    if experts := get("expert_count", int, 0):
        raise UnsupportedModel(f"{file.path}: GGUF files with experts ({experts} here) are not supported")
    width, heads, count = get("embedding_length", int), get("attention.head_count", int), get("block_count", int)
    head_dim = get("attention.key_length", int, width // heads)
    window = get("attention.sliding_window", int, 0) if gemma else 0
    rotary = _gguf_rotary(file, gemma)
    size = get("feed_forward_length", int)

    def layer(index: int) -> LayerSpec:
        local = gemma and (index + 1) % 6 != 0
        rotary_spec: Rotary | None = Rotary(10_000.0) if local else rotary
        if family == "smollm3" and (index + 1) % 4 == 0:
            rotary_spec = None
        attention = AttentionSpec(window=window if local else None, rotary=rotary_spec)
        return LayerSpec(attention, FeedForwardSpec(size, "gelu_tanh" if gemma else "silu"))

    _check_size("block_count", count, MAX_LAYERS)
    if count > len(file.tensors):
        raise CorruptedFile(f"{file.path}: {count} layers cannot lie in {len(file.tensors)} tensors")
    return DecoderConfig(
        family=family,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=width,
        layers=tuple(layer(i) for i in range(count)),
        num_attention_heads=heads,
        num_key_value_heads=get("attention.head_count_kv", int, heads),
        head_dim=head_dim,
        max_position_embeddings=get("context_length", int),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon", float),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        post_norms=gemma,
        embedding_scale=math.sqrt(width) if gemma else 1.0,
        # the 27B model is the only one of its family that does not scale by the head width
        attention_scale=(width / heads) ** -0.5 if gemma and count == 62 else None,
        tie_word_embeddings="output.weight" not in file.tensors,
    )


def _gguf_rotary(file: GGUFFile, gemma: bool) -> Rotary:
    """Rotary embedding of the global-attention layers."""
    prefix = f"{file.architecture}.rope"
    how = file.get(f"{prefix}.scaling.type", str, "none")
    if how not in ("none", "linear", "yarn"):
        raise UnsupportedModel(
            f"{file.path}: rope scaling {how!r} is not supported; supported are none, linear and yarn"
        )
    slow, fast = (1.0, 32.0) if how == "yarn" else (1.0, 4.0)
    table = file.dequantize("rope_freqs.weight") if "rope_freqs.weight" in file.tensors else None
    return Rotary(
        theta=file.get(f"{prefix}.freq_base", float, 1_000_000.0 if gemma else 10_000.0),
        scaling=how,  # type: ignore[arg-type]
        factor=file.get(f"{prefix}.scaling.factor", float, 1.0),
        original_max_position_embeddings=file.get(
            f"{prefix}.scaling.original_context_length", int, file.get(f"{file.architecture}.context_length", int)
        ),
        low=slow,
        high=fast,
        divisors=None if table is None else tuple(table.tolist()),
    )


@contextmanager
def _contradictions(what: str) -> Iterator[None]:
    """Raise `CorruptedFile` for a field that is missing, of the wrong type or impossible."""
    try:
        yield
    except KeyError as error:
        raise CorruptedFile(f"{what} has no {error.args[0]!r}, which the model needs") from error
    except (TypeError, ValueError, ArithmeticError, IndexError) as error:
        raise CorruptedFile(f"{what} contradicts itself: {error}") from error


GGUF_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
GEMMA_GGUF_NAMES = GGUF_NAMES | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def gguf_name(name: str, config: DecoderConfig) -> str:
    """Pippin's name of a GGUF tensor.

    Raises:
        UnsupportedModel: a tensor that the decoder does not have.
    """
    names = GEMMA_GGUF_NAMES if config.family == "gemma3_text" else GGUF_NAMES
    stem, _, leaf = name.rpartition(".")
    prefix = ""
    if stem.startswith("blk."):
        _, index, stem = stem.split(".", 2)
        prefix = f"layers.{index}."
    if stem not in names:
        raise UnsupportedModel(f"the GGUF file holds a tensor {name!r} that a {config.family} model has no place for")
    return f"{prefix}{names[stem]}.{leaf}"


def gguf_tensor(name: str, tensor: Tensor, config: DecoderConfig, architecture: str) -> Tensor:
    """Undo the GGUF converter's permutation of query and key rows; ``name`` is Pippin's."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if architecture not in PERMUTED or heads is None:
        return tensor
    pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def hf_name(name: str) -> str | None:
    """Pippin's name of a tensor in a Hugging Face checkpoint; None for tensors that a decoder does not use."""
    for prefix in ("language_model.model.", "model.language_model.", "language_model.", "model."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    if name.startswith("lm_head."):
        return name
    return None


def to_hf_name(name: str) -> str:
    """The name in a Hugging Face checkpoint of one of Pippin's tensors."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def norm_offset(name: str, config: DecoderConfig) -> float:
    """The offset of a weight in a Hugging Face checkpoint: 1 for Gemma's norms, 0 for all others."""
    return 1.0 if config.family == "gemma3_text" and name.endswith("norm.weight") else 0.0


def to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` that describes this decoder to Hugging Face's transformers.

    For KV-sharing or recurrent layers, which transformers does not have in these families, the model type is
    `KV_SHARED` or `RECURRENT`.

    Raises:
        UnsupportedModel: feed-forward layers or rotary frequencies that no family of transformers has.
    """
    first = config.layers[0]
    dense = [layer.feedforward for layer in config.layers if not layer.feedforward.num_experts]
    if not all(spec.gated for spec in dense) or len({spec.intermediate_size for spec in dense}) > 1:
        raise UnsupportedModel(
            "feed-forward layers that are not gated, or of different sizes, have no Hugging Face configuration"
        )
    if config.recurrent_layers:
        specs = [None if layer.recurrent is None else asdict(layer.recurrent) for layer in config.layers]
        base = to_hf(replace(config, layers=tuple(replace(layer, recurrent=None) for layer in config.layers)))
        own: dict[str, Any] = {"model_type": RECURRENT, "architectures": [], "base_model_type": config.family}
        return base | own | {"recurrent": specs}
    sources = [layer.attention.kv_source for layer in config.layers]
    if any(source is not None for source in sources):
        base = to_hf(config.with_kv_sources([None] * len(sources)))
        own = {"model_type": KV_SHARED, "architectures": [], "base_model_type": config.family, "kv_sources": sources}
        return base | own
    activation = next(name for name, ours in ACTIVATIONS.items() if ours == first.feedforward.activation)
    windows = {layer.attention.window for layer in config.layers} - {None}
    result: dict[str, Any] = {
        "model_type": config.family,
        "architectures": [ARCHITECTURES[config.family]],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": first.feedforward.intermediate_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_activation" if config.family == "gemma3_text" else "hidden_act": activation,
        "sliding_window": next(iter(windows), None),
        **_hf_rope(config),
    }
    if windows or config.family == "gemma3_text":
        kinds = {True: "full_attention", False: "sliding_attention"}
        result["layer_types"] = [kinds[layer.attention.window is None] for layer in config.layers]
        result["use_sliding_window"] = True
    if config.family == "gemma3_text":
        result["query_pre_attn_scalar"] = (config.attention_scale or config.head_dim**-0.5) ** -2
    if config.family == "smollm3":
        result["no_rope_layers"] = [int(layer.attention.rotary is not None) for layer in config.layers]
    if first.feedforward.num_experts:
        spec = first.feedforward
        result |= {
            "num_experts": spec.num_experts,
            "num_experts_per_tok": spec.num_experts_per_tok,
            "norm_topk_prob": spec.norm_topk_prob,
        }
        result["moe_intermediate_size"] = spec.intermediate_size
    if config.training_methods:
        result["training_methods"] = dict(config.training_methods)
    return result


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def _hf_rope(config: DecoderConfig) -> dict[str, Any]:
    """The rope fields of `to_hf`, in a format that old and new versions of transformers read."""
    rotaries = {
        layer.attention.window is None: layer.attention.rotary for layer in config.layers if layer.attention.rotary
    }
    whole = rotaries.get(True) or rotaries.get(False) or Rotary()
    fields: dict[str, Any] = {"rope_theta": whole.theta}
    scaling: dict[str, Any] = {"rope_type": whole.scaling, "factor": whole.factor}
    if whole.divisors is not None:
        raise UnsupportedModel("rotary frequencies given as a table have no Hugging Face configuration")
    if whole.scaling in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = whole.original_max_position_embeddings
    if whole.scaling == "llama3":
        scaling |= {"low_freq_factor": whole.low, "high_freq_factor": whole.high}
    if whole.scaling == "yarn":
        scaling |= {"beta_slow": whole.low, "beta_fast": whole.high}
        if whole.attention_factor is not None:
            scaling["attention_factor"] = whole.attention_factor
    if whole.scaling != "none":
        fields["rope_scaling"] = scaling
    if config.family == "gemma3_text" and rotaries.get(False) is not None:
        fields["rope_local_base_freq"] = rotaries[False].theta
    return fields
