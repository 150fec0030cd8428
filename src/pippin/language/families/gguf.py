"""GGUF files: their headers as a `DecoderConfig`, and the names and layouts of their tensors.

Notable here:
- files of the llama architecture store query and key rows in another order, which is undone here
- Gemma's norm weights are stored as they multiply, unlike in Hugging Face's format
"""

from __future__ import annotations

import math
from typing import TypeVar

from torch import Tensor

from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.core.formats.gguf import GGUFFile
from pippin.language.decoder import DecoderConfig, LayerSpec
from pippin.language.families.sizes import MAX_LAYERS, bounded, check_size, contradictions
from pippin.nn.attention import AttentionSpec
from pippin.nn.feedforward import FeedForwardSpec
from pippin.nn.rotary import Rotary

T = TypeVar("T")

GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text", "smollm3": "smollm3"}
PERMUTED = ("llama", "smollm3")  # GGUF architectures with interleaved query and key rows


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
    with contradictions(str(file.path)):
        return bounded(_from_gguf(file, GGUF_FAMILIES[file.architecture]))


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

    check_size("block_count", count, MAX_LAYERS)
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
        qk_norm="head" if "blk.0.attn_q_norm.weight" in file.tensors else None,
        residual="pre and post" if gemma else "pre",
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
